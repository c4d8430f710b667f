"""Weights by broadcast, between real processes with gloo; and through GPUs, where there are any."""

import signal

import pytest
import torch
from group_member import Member, members
from publishing import BUCKET_BYTES, tiny_model, tiny_model_with_adapter

from hone.model.fingerprint import weights_fingerprint
from hone.weights.meeting import Meeting, MeetingOutlet
from hone.weights.publish import Published, publish
from hone.weights.publish_group import Backend, GroupOutlet
from hone.weights.publish_ipc import IpcOutlet

CPU = torch.device("cpu")
TWO = {"engine-0": "good", "engine-1": "good"}


def group(meeting: Meeting, engines: dict[str, Member], *, timeout_s: float = 60.0, backend: Backend = "gloo", **also):
    """A group of these engines, joined."""
    device = CPU if backend == "gloo" else torch.device("cuda:0")
    outlet = GroupOutlet(meeting, list(engines), backend=backend, device=device, timeout_s=timeout_s)
    return joined(outlet, engines | also)


def joined(outlet: MeetingOutlet, engines: dict[str, Member]) -> MeetingOutlet:
    for engine in engines.values():
        engine.join(outlet.link)
    outlet.connect()
    return outlet


def send(outlet: MeetingOutlet, engines: dict[str, Member], version: int, model=None) -> Published:
    for engine in engines.values():
        engine.take(version)
    weights = (model or tiny_model(seed=version)).named_weights()
    return publish(weights, outlet, version=version, bucket_size=BUCKET_BYTES)


def test_every_engine_holds_each_version_to_the_last_bit():
    with members(TWO) as engines:
        outlet = group(Meeting(), engines)
        for version, model in [(1, tiny_model(seed=1)), (2, tiny_model_with_adapter(seed=2))]:
            found = send(outlet, engines, version, model)
            assert found.held_by == ("engine-0", "engine-1") and not found.failed
            assert found.manifest.fingerprint == weights_fingerprint(model.named_weights())
            assert [engine.said() for engine in engines.values()] == [found.manifest.fingerprint] * 2
            assert found.manifest.num_bytes <= found.sent_bytes < 1.05 * found.manifest.num_bytes


def test_an_engine_that_cannot_load_them_says_why_and_the_other_gets_the_rest_in_a_group_without_it():
    meeting = Meeting()
    with members({"engine-0": "picky", "engine-1": "good"}) as engines:
        found = send(group(meeting, engines), engines, 1)
        assert found.failed["engine-0"] == "engine-0: DataError: not these weights"
        assert found.bystanders == ("engine-1",)
        assert engines["engine-0"].said() == "failed: weights of version 1 could not be loaded: not these weights"
        left = {"engine-1": engines["engine-1"]}
        again = send(group(meeting, left), left, 1)
        assert again.held_by == ("engine-1",) and not again.failed
        assert left["engine-1"].said() == again.manifest.fingerprint


def test_an_engine_that_holds_something_else_is_found_out():
    with members({"engine-0": "forgetful", "engine-1": "good"}) as engines:
        found = send(group(Meeting(), engines), engines, 1)
        assert "engine-0 holds weights that hash to" in found.failed["engine-0"]
        assert found.held_by == ("engine-1",) and not found.bystanders


def test_a_killed_engine_ends_the_broadcast_and_what_the_other_took_so_far_goes_on_in_the_next_group():
    meeting = Meeting()
    with members(TWO) as engines:
        outlet = group(meeting, engines)
        assert send(outlet, engines, 1).held_by == ("engine-0", "engine-1")
        assert engines["engine-1"].kill() == -signal.SIGKILL
        found = send(outlet, engines, 2)
        assert found.held_by == () and found.bystanders == ("engine-0",)
        assert found.failed["engine-1"].startswith("engine-1 is stuck or dead")
        left = {"engine-0": engines["engine-0"]}
        assert send(group(meeting, left), left, 2).held_by == ("engine-0",)
        with members({"engine-1": "good"}) as back:  # it was started again
            both = left | back
            assert send(group(meeting, both), both, 3).held_by == ("engine-0", "engine-1")


def test_who_watches_its_process_tells_of_a_dead_engine_before_the_deadline():
    with members(TWO) as engines:
        outlet = group(Meeting(), engines)
        assert engines["engine-1"].kill() == -signal.SIGKILL
        outlet.gone = lambda: {"engine-1": "engine-1: it was killed"}
        found = send(outlet, {"engine-0": engines["engine-0"]}, 1)
        assert found.failed["engine-1"] == "engine-1: it was killed" and found.bystanders == ("engine-0",)


def test_a_stuck_engine_is_named_at_the_deadline():
    with members({"engine-0": "hanging", "engine-1": "good"}) as engines:
        outlet = group(Meeting(), engines)
        outlet.timeout_s = 2.0
        found = send(outlet, engines, 1)
        assert found.failed["engine-0"].startswith("engine-0 is stuck or dead: it did not take bucket ")
        assert found.failed["engine-0"].endswith("within 2 s")
        assert found.bystanders == ("engine-1",)
        assert engines["engine-0"].process.is_alive(), "it hangs"


@pytest.mark.slow("waits for the time-out of a group of processes")
def test_one_that_never_finishes_loading_is_told_from_the_one_beside_it():
    with members({"engine-0": "late", "engine-1": "good"}) as engines:
        outlet = group(Meeting(), engines)
        outlet.timeout_s = 2.0
        found = send(outlet, engines, 1)
        assert found.failed == {"engine-0": "engine-0 is stuck or dead: it did not finish loading version 1 within 2 s"}
        assert found.held_by == ("engine-1",)


@pytest.mark.slow("waits for the time-out of a group of processes")
def test_an_engine_that_never_joins_is_named_and_nothing_is_sent():
    with members({"engine-0": "good"}) as engines:
        outlet = GroupOutlet(Meeting(), ["engine-0", "engine-1"], backend="gloo", device=CPU, timeout_s=2.0)
        joined(outlet, engines)
        assert outlet.failed["engine-1"] == "engine-1 is stuck or dead: it did not join within 2 s"
        assert outlet.bystanders == ["engine-0"]
        assert send(outlet, {}, 1).sent_bytes == 0


@pytest.mark.slow("waits for the time-out of a group of processes")
def test_an_engine_whose_sender_sends_nothing_says_so():
    with members({"engine-0": "good"}, timeout_s=1.0) as engines:
        outlet = group(Meeting(), engines)
        engines["engine-0"].take(1)
        assert "no more weights came within 2 s" in engines["engine-0"].said(), "longer than the sender would wait"
        assert not outlet.failed


@pytest.mark.gpu
def test_engines_on_the_trainers_gpu_take_each_version_from_its_memory():
    with members(TWO, way="ipc") as engines:
        outlet = IpcOutlet(Meeting(), list(engines), device=torch.device("cuda:0"), timeout_s=60.0)
        joined(outlet, engines)
        for version in (1, 2):
            found = send(outlet, engines, version)
            assert found.held_by == ("engine-0", "engine-1") and not found.failed
            assert [engine.said() for engine in engines.values()] == [found.manifest.fingerprint] * 2


@pytest.mark.gpu
def test_engines_on_gpus_of_their_own_take_each_version_by_broadcast_and_a_killed_one_is_no_end():
    if torch.cuda.device_count() < 3:
        pytest.skip("a trainer and two engines need 3 GPUs: NCCL has no two processes on one")
    meeting = Meeting()
    with members(TWO, way="nccl") as engines:
        outlet = group(meeting, engines, backend="nccl")
        for version in (1, 2):
            found = send(outlet, engines, version)
            assert found.held_by == ("engine-0", "engine-1") and not found.failed
            assert [engine.said() for engine in engines.values()] == [found.manifest.fingerprint] * 2
        outlet.timeout_s = 5.0
        assert engines["engine-1"].kill() == -signal.SIGKILL
        found = send(outlet, {"engine-0": engines["engine-0"]}, 3)
        assert "engine-1" in found.failed and found.bystanders == ("engine-0",)
        left = {"engine-0": engines["engine-0"]}
        assert send(group(meeting, left, backend="nccl"), left, 3).held_by == ("engine-0",)


@pytest.mark.gpu
def test_one_engine_beside_the_trainer_takes_each_version_by_broadcast():
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL has no two processes on one GPU, and there is only one")
    with members({"engine-0": "good"}, way="nccl") as engines:
        outlet = group(Meeting(), engines, backend="nccl")
        for version in (1, 2):
            found = send(outlet, engines, version)
            assert found.held_by == ("engine-0",) and engines["engine-0"].said() == found.manifest.fingerprint
