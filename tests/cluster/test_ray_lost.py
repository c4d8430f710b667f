"""The loss of Ray itself, as the controller sees it: sockets stand in for the raylet and the GCS. No Ray is started."""

import asyncio
import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import ray
from ray._private import worker

from hone.assemble import cluster
from hone.assemble.cluster import RayBackend
from hone.cluster.ray import RayCluster, lost, raylet_lost
from hone.config.cluster import ClusterSection
from hone.errors import ClusterError, ClusterLost, Stopped

WHY = "Ray is lost: the GCS at 10.0.0.1:6379 does not answer (Connection refused)."


@pytest.fixture
def doors(tmp_path, monkeypatch):
    """The sockets of a raylet and a GCS, each to be closed; and what the GCS says of this machine."""
    with ExitStack() as opened:
        raylet = opened.enter_context(socket.socket(socket.AF_UNIX))
        raylet.bind(str(tmp_path / "raylet"))
        raylet.listen()
        gcs = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        node = SimpleNamespace(raylet_socket_name=str(tmp_path / "raylet"), gcs_address=address)
        machine = {"NodeID": "a", "Alive": True}
        monkeypatch.setattr(worker, "_global_node", node)
        monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "b", "Alive": True}, machine])
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
        yield SimpleNamespace(raylet=raylet, gcs=gcs, machine=machine, address=address)


def test_a_ray_that_takes_connections_is_there_and_so_is_none_at_all(doors, monkeypatch):
    assert lost() is None and raylet_lost() is None
    monkeypatch.setattr(worker, "_global_node", None)
    assert lost() is None and raylet_lost() is None


def test_who_is_lost_is_named(doors):
    doors.machine["Alive"] = False
    assert lost() == "Ray is lost: the raylet of this machine has ended, or is about to."
    doors.gcs.close()
    assert lost() == f"Ray is lost: the GCS at {doors.address} does not answer (Connection refused)."
    assert raylet_lost() is None, "calls to actors still succeed"
    doors.raylet.close()
    assert lost() == raylet_lost() == "Ray is lost: the raylet of this machine does not answer (Connection refused)."


def test_a_ray_that_is_not_there_in_time_is_an_error_that_says_so(monkeypatch):
    def starts_too_slowly(**_):
        raise Exception("The current node timed out during startup.\nThe GCS may be overloaded.")  # as Ray does

    monkeypatch.setattr(ray, "init", starts_too_slowly)
    settings = ClusterSection(backend="ray")
    with (
        RayCluster(settings, name="run", resource="CPU", num_devices=1, say=print) as mine,
        pytest.raises(ClusterError) as told,
    ):
        mine.start()
    assert str(told.value) == "Ray could not be started on this machine: The current node timed out during startup."


class Job:
    """Of a run that would go on for ever."""

    def __init__(self):
        self.stop, self.warned, self.observer = asyncio.Event(), [], self
        self.loaded, self.folder = SimpleNamespace(run_file="run.yaml"), SimpleNamespace(checkpoints="run/checkpoints")

    def warn(self, message):
        self.warned.append(message)


def watched(looks, work, backend=RayBackend, stop_s=60.0):
    """Run `work` with a job while Ray is looked at, and is found as `looks` say; what the last one says holds on."""

    def look():
        return looks.pop(0) if len(looks) > 1 else looks[0]

    async def run():
        job = Job()
        async with backend(job, find_loss=look, look_s=0.001, stop_s=stop_s) as opened:
            opened._watching = asyncio.create_task(opened._watch())
            await work(job)
        return job

    return asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("end", [Stopped("stopped"), ExceptionGroup("e", [ClusterError("rank 0 died")])], ids=repr)
def test_the_run_is_asked_to_stop_and_however_it_ends_that_was_the_loss_of_ray(end):
    async def work(job):
        await job.stop.wait()
        assert job.warned == [f"{WHY} Stopping within 60 s, with a checkpoint if the trainer still answers."]
        raise end

    with pytest.raises(ClusterLost, match=r"`hone train run.yaml --resume` continues.* in run/checkpoints") as raised:
        watched([WHY], work)
    assert raised.value.exit_code == 3 and str(raised.value).startswith(WHY)


def test_a_gcs_that_comes_back_is_not_lost_and_other_ends_stay_what_they_are():
    looks = [WHY] * (cluster.LOST_LOOKS - 1) + [None] + [WHY] * (cluster.LOST_LOOKS - 1) + [None]

    async def work(job):
        while len(looks) > 1:
            await asyncio.sleep(0.001)
        raise Stopped("stopped")

    with pytest.raises(Stopped):
        watched(looks, work)


def test_a_loss_that_a_call_met_first_says_how_to_resume():
    async def work(job):
        raise ExceptionGroup("e", [ClusterLost(f"update: {WHY}")])

    with pytest.raises(ClusterLost, match=r"update: Ray is lost: .* --resume` continues"):
        watched([None], work)


def test_a_run_that_does_not_stop_in_time_is_ended():
    ended = []

    class Survivor(RayBackend):
        def _end_process(self):
            ended.append(self._loss_message())

    async def work(job):
        while not ended:
            await asyncio.sleep(0.001)

    watched([WHY], work, Survivor, stop_s=0.01)
    assert len(ended) == 1 and ended[0].startswith(WHY)
