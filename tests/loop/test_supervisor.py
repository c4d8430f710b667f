"""A trainer whose processes die: the run goes on from its newest checkpoint by itself, and ends as if nothing had
happened."""

import asyncio
import pickle
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tiny import metrics_of, weights_of, write_run

import hone.assemble.workers as build_workers
from hone.assemble.stages import lost_process, run_with_restarts
from hone.assemble.workers import local_workers
from hone.cli.main import main
from hone.errors import ClusterError, PlacementError
from hone.memory.rungs import TOKENS, Change, RestartWithLess
from hone.run.audit import audit_file
from hone.runtime.backoff import Restarts


class Dying:
    """A trainer that is lost at some of its calls."""

    def __init__(self, trainer, faults):
        self._trainer, self._faults = trainer, faults

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    def update(self, batch, algorithm):
        self.may_die("update")
        return self._trainer.update(batch, algorithm)

    def logprobs(self, batch, **options):
        self.may_die("logprobs")
        return self._trainer.logprobs(batch, **options)

    def logprobs_and_entropies(self, batch):
        self.may_die("logprobs")
        return self._trainer.logprobs_and_entropies(batch)

    def measure(self, batch, needs):
        self.may_die("logprobs")
        return self._trainer.measure(batch, needs)

    def may_die(self, call):
        self._faults[call] -= 1
        if self._faults[call] == 0:
            raise ClusterError(f"{call}: trainer rank 1 died.")


@pytest.fixture
def dying(monkeypatch):
    """Let the run's trainer be lost at its n-th call of a method; n counts on over its lives."""
    faults = {"update": 0, "logprobs": 0}

    @asynccontextmanager
    async def workers(job, needs, saved):
        async with local_workers(job, needs, saved) as found:
            yield replace(found, trainer=Dying(found.trainer, faults))

    monkeypatch.setattr(build_workers, "local_workers", workers)
    return faults


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert main(["train", str(write_run(folder, steps=6, save_every=2))]) == 0
    return folder


@pytest.mark.parametrize(
    "faults", [pytest.param({"update": 1}, marks=pytest.mark.slow("a run more")), {"update": 4, "logprobs": 9}], ids=str
)
def test_a_run_whose_trainer_dies_ends_as_one_whose_trainer_lives(dying, uninterrupted, tmp_path, faults):
    dying.update(faults)
    assert main(["train", str(write_run(tmp_path, steps=6, save_every=2))]) == 0
    found = audit_file(tmp_path / "run" / "events.jsonl")
    assert found.counts["trainer_down"] == len(faults), "the fault really happened"
    assert found.violations == () and found.updates == 6
    assert weights_of(tmp_path) == weights_of(uninterrupted)
    assert metrics_of(tmp_path) == metrics_of(uninterrupted)
    log = (tmp_path / "run" / "logs" / "training.log").read_text()
    assert "trainer rank 1 died. Started again in" in log


@pytest.mark.slow("a run more")
def test_one_death_too_many_ends_the_run_and_leaves_its_checkpoint(dying, uninterrupted, tmp_path, capsys):
    dying["update"] = 4
    run_file = str(write_run(tmp_path, steps=6, save_every=2))
    assert main(["train", run_file, "cluster.backend=local", "cluster.restarts=0"]) == 1
    assert "update: trainer rank 1 died. Started again 0 times within an hour" in capsys.readouterr().err
    assert main(["train", run_file, "--resume"]) == 0
    assert weights_of(tmp_path) == weights_of(uninterrupted)
    assert audit_file(tmp_path / "run" / "events.jsonl").counts["stopped"] == 2


class SpyObserver:
    def __init__(self):
        self.said = []

    def position(self):
        return 17

    def event(self, kind, **fields):
        self.said.append(kind)

    def warn(self, message):
        self.said.append(message)

    def rewind(self, num_bytes):
        self.said.append(num_bytes)


def supervise(attempt, *, bound=3, stop=None, newest=lambda: None):
    observer = SpyObserver()
    run = run_with_restarts(
        attempt,
        None,
        newest=newest,
        adopt=observer.said.extend,
        observer=observer,
        restarts=Restarts(bound),
        stop=stop or asyncio.Event(),
    )
    asyncio.run(run)
    return observer.said


def test_processes_that_never_were_ready_are_not_started_again():
    attempts = []

    async def attempt(saved, ready):
        attempts.append(saved)
        raise ClusterError("no GPU became free within 300 s")

    with pytest.raises(ClusterError, match="no GPU became free"):
        supervise(attempt)
    assert len(attempts) == 1


def test_a_mistake_of_hone_is_no_loss():
    async def attempt(saved, ready):
        ready()
        raise ExceptionGroup("together", [ValueError("a bug"), PlacementError("too many GPUs")])

    with pytest.raises(ExceptionGroup):
        supervise(attempt)


def test_a_trainer_whose_memory_ran_out_starts_again_with_less():
    change = Change(
        stage="rl",
        step=3,
        key=TOKENS,
        old=4096,
        new=2048,
        reason="out of memory on one rank",
        phase="update",
        moment="",
        detail="CUDA out of memory",
        seen_bytes=80 * 2**30,
        predicted_bytes=None,
        limit_bytes=80 * 2**30,
    )
    begun = []

    async def attempt(saved, ready):
        ready()
        begun.append(saved)
        if len(begun) == 1:
            raise pickle.loads(pickle.dumps(RestartWithLess("rank 1 of 2 ran out of memory.", change)))

    said = supervise(attempt)
    assert len(begun) == 2
    assert said[:2] == ["trainer_down", change] and "rank 1 of 2 ran out of memory. Started again" in said[2]


def test_the_loss_is_found_among_what_happened_together():
    lost = ClusterError("rank 0 died")
    assert lost_process(ExceptionGroup("a", [OSError("gone"), ExceptionGroup("b", [lost])])) is lost
    assert lost_process(ExceptionGroup("a", [OSError("gone")])) is None


@pytest.mark.parametrize("wait_s", [600.0, 0.0])  # with 0, the stop comes as the wait ends
def test_a_stop_while_it_waits_ends_it(wait_s):
    async def run():
        stop, attempts = asyncio.Event(), []

        async def attempt(saved, ready):
            ready()
            attempts.append(1)
            asyncio.get_running_loop().call_soon(stop.set)
            raise ClusterError("rank 0 died.")

        restarts = Restarts(3, first_wait_s=wait_s)
        options = {"newest": lambda: None, "adopt": None, "observer": SpyObserver(), "restarts": restarts, "stop": stop}
        await asyncio.wait_for(run_with_restarts(attempt, None, **options), 30)
        return attempts

    assert asyncio.run(run()) == [1]
