"""What fails in Ray's processes, in the words and classes that the run acts on. No Ray is started."""

import asyncio
import traceback
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError

from hone.assemble.stages import lost_process
from hone.cluster import calls
from hone.cluster.calls import as_hone_error
from hone.cluster.engine import RemoteEngine
from hone.errors import ClusterError, ClusterLost, DataError, EngineError, MemoryExhausted
from hone.rollout.engine import Request, Sampling
from hone.types import Prompt


class OwnError(Exception):
    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code, self.detail = code, detail


def raised(cause):
    """As Ray gives it to those who wait for the call."""
    try:
        raise cause
    except Exception:
        trace = traceback.format_exc()
    return RayTaskError("update", trace, cause, proctitle="ray::TrainerRank.call", pid=7, ip="10.0.0.7")


CAUSES = [RuntimeError("peer is gone"), ValueError("shape [3]"), OSError(5, "I/O error"), OwnError(7, "no such rank")]


@pytest.mark.parametrize("is_dual", [False, True], ids=["plain", "of the cause's class too"])
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: type(cause).__name__)
def test_an_error_of_any_class_is_the_loss_of_a_process_and_shows_its_traceback(cause, is_dual):
    error = raised(cause)
    if is_dual:
        error = error.as_instanceof_cause()
        assert isinstance(error, type(cause)) and not hasattr(error, "traceback_str")
    said = as_hone_error("trainer rank 1", error, "update")
    assert type(said) is ClusterError and lost_process(said) is said, "so the stage starts again from its checkpoint"
    assert str(said).startswith(f"update: trainer rank 1 failed: {type(cause).__name__}: {cause}\n")
    assert "raise cause" in str(said) and "pid=7, ip=10.0.0.7" in str(said) and "\x1b" not in str(said)


def test_what_is_our_own_or_memory_is_no_lost_process():
    for error in (raised(DataError("row 3")), raised(DataError("row 3")).as_instanceof_cause()):
        assert isinstance(as_hone_error("trainer rank 0", error, "update"), DataError)
    error = raised(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")).as_instanceof_cause()
    assert isinstance(as_hone_error("trainer rank 0", error, "update"), MemoryExhausted)


def test_a_dead_actor_is_named_with_why_it_was_killed_if_it_was_killed_here(monkeypatch):
    unavailable = ActorUnavailableError("connection reset", b"7" * 16)
    assert str(as_hone_error("engine-1", unavailable, "sampling")).startswith("sampling: engine-1 died. The actor 3737")
    assert str(as_hone_error("engine-1", ActorDiedError(), "sampling")).startswith(
        "sampling: engine-1 died. The actor died"
    )
    monkeypatch.setitem(calls._killed, unavailable.actor_id, "It answered no heartbeat.")
    said = as_hone_error("engine-1", unavailable, "sampling")
    assert type(said) is ClusterError and str(said) == "sampling: engine-1 died. It answered no heartbeat."
    assert type(as_hone_error("engine-1", OutOfMemoryError("killed by Ray"), "sampling")) is ClusterError


def test_with_ray_itself_lost_nothing_is_started_again(monkeypatch):
    monkeypatch.setattr(calls, "lost", lambda: "Ray is lost: the raylet of this machine does not answer.")
    said = as_hone_error("trainer rank 1", ActorDiedError(), "update")
    assert isinstance(said, ClusterLost) and said.exit_code == 3 and lost_process(said) is None
    monkeypatch.setattr(calls, "raylet_lost", calls.lost)
    with pytest.raises(ClusterLost, match="the raylet of this machine"):
        calls.shared([1])


def test_only_large_arguments_go_through_the_object_store(monkeypatch):
    """Ray ends the controller when the store ends during a put; a call that sends its argument directly only fails."""
    monkeypatch.setattr(calls, "raylet_lost", lambda: None)
    monkeypatch.setattr(calls.ray, "put", lambda value: ("put", len(value)))
    assert calls.shared(small := b"x" * (calls.DIRECT_BYTES // 2)) is small
    assert calls.shared(b"x" * calls.DIRECT_BYTES) == ("put", calls.DIRECT_BYTES)


class Sending:
    """An actor of which every call is accepted, but `take` is what it is given."""

    def __init__(self, take):
        self.take, self.close, self.submit = SimpleNamespace(remote=take), self._call(), self._call()

    def _call(self):
        return SimpleNamespace(remote=lambda *_: SimpleNamespace(future=lambda: done_with(None)))


def done_with(value):
    future = Future()
    future.set_result(value)
    return future


def asked_of(engine):
    prompt = Prompt("p", 0, "", (1,))
    sampling = Sampling(1, 1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=())
    return asyncio.create_task(engine.generate(Request(prompt, 1, sampling, seed=0, stream="train")))


def test_a_call_that_ray_cannot_send_fails_the_requests_that_wait_for_it():
    """After `ray.shutdown` a call on an actor raises a plain Exception: it was never retrieved, and requests hung."""

    def take():
        raise Exception("Failed to submit task to actor")

    async def main():
        request = asked_of(RemoteEngine("engine-0", Sending(take), timeout_s=9.0))
        async with asyncio.timeout(9):
            with pytest.raises(EngineError, match=r"sampling: engine-0: Exception: Failed to submit task to actor"):
                await request

    asyncio.run(main())


def test_a_closed_engine_is_asked_for_nothing_more(monkeypatch):
    """A call on an actor after Ray's end would start another Ray."""
    takes = []

    def take():
        takes.append(Future())
        return SimpleNamespace(future=lambda: takes[-1]), None

    async def main():
        engine = RemoteEngine("engine-0", Sending(take), timeout_s=9.0)
        request = asked_of(engine)
        while not takes:
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="engine-0 was closed"):
            await request
        await asyncio.sleep(0.01)
        assert len(takes) == 1 and takes[0].cancelled() and engine._listener is None

    monkeypatch.setattr("hone.cluster.engine.ray.kill", lambda actor: None)
    asyncio.run(main())
