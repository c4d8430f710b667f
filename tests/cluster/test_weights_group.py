"""Weights by broadcast, between real processes with gloo; and through the memory of a GPU, where there is one."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from group_member import members
from publishing import BUCKET_BYTES, tiny_model, tiny_model_with_adapter

from hone.cluster.meeting import Meeting
from hone.cluster.publish import FanOut, Published, publish
from hone.cluster.publish_group import GroupOutlet
from hone.cluster.publish_ipc import IpcOutlet
from hone.errors import ClusterError
from hone.model.fingerprint import weights_fingerprint


@contextmanager
def outlets(meeting: Meeting, groups: dict[str, str], *, timeout_s: float = 60.0) -> Iterator[FanOut]:
    made = [
        GroupOutlet(meeting, names.split("+"), backend="gloo", device=torch.device("cpu"), timeout_s=timeout_s)
        for names in dict.fromkeys(groups.values())
    ]
    for outlet in made:
        outlet.connect()
    yield FanOut(made)


def send(outlet: FanOut, version: int, model=None) -> Published:
    weights = (model or tiny_model(seed=version)).named_weights()
    return publish(weights, outlet, version=version, bucket_size=BUCKET_BYTES)


TOGETHER = {"engine-0": "engine-0+engine-1", "engine-1": "engine-0+engine-1"}
APART = {"engine-0": "engine-0", "engine-1": "engine-1"}


@pytest.mark.parametrize("groups", [TOGETHER, APART])
def test_every_engine_holds_each_version_to_the_last_bit(groups):
    meeting = Meeting()
    with members(meeting, groups) as engines, outlets(meeting, groups) as outlet:
        for version, model in [(1, tiny_model(seed=1)), (2, tiny_model_with_adapter(seed=2))]:
            found = send(outlet, version, model)
            assert found.held_by == ("engine-0", "engine-1") and not found.failed
            assert found.manifest.fingerprint == weights_fingerprint(model.named_weights())
            assert [engine.said() for engine in engines.values()] == [found.manifest.fingerprint] * 2


def test_an_engine_that_cannot_load_them_says_why_and_one_apart_is_served():
    meeting = Meeting()
    with members(meeting, APART, {"engine-0": "picky"}) as engines, outlets(meeting, APART) as outlet:
        found = send(outlet, 1)
        assert found.failed == {"engine-0": "engine-0: DataError: not these weights"}
        assert engines["engine-0"].said() == "failed: weights of version 1 could not be loaded: not these weights"
        assert found.held_by == ("engine-1",)
        assert send(outlet, 2).held_by == ("engine-1",)


def test_an_engine_that_holds_something_else_is_found_out():
    meeting = Meeting()
    with members(meeting, TOGETHER, {"engine-0": "forgetful"}), outlets(meeting, TOGETHER) as outlet:
        found = send(outlet, 1)
        assert "engine-0 holds weights that hash to" in found.failed["engine-0"]
        assert found.held_by == ("engine-1",)


def test_a_killed_engine_is_named_and_one_in_a_group_of_its_own_is_served():
    meeting = Meeting()
    with members(meeting, APART) as engines, outlets(meeting, APART) as outlet:
        engines["engine-0"].process.kill()
        engines["engine-0"].process.join()
        assert engines["engine-0"].process.exitcode == -signal.SIGKILL
        found = send(outlet, 1)
        assert list(found.failed) == ["engine-0"] and found.failed["engine-0"].startswith("engine-0 is stuck or dead")
        assert found.held_by == ("engine-1",)
        assert send(outlet, 2).held_by == ("engine-1",), "and goes on being served"


def test_a_killed_engine_ends_the_broadcast_for_its_group_and_is_told_from_the_bystander():
    meeting = Meeting()
    with members(meeting, TOGETHER) as engines, outlets(meeting, TOGETHER) as outlet:
        engines["engine-1"].process.kill()
        engines["engine-1"].process.join()
        found = send(outlet, 1)
        assert found.held_by == () and list(found.failed) == ["engine-0", "engine-1"]
        assert found.failed["engine-1"].startswith("engine-1 is stuck or dead")
        assert "stuck or dead" not in found.failed["engine-0"]
        assert engines["engine-0"].said().startswith("failed: ")


def test_a_stuck_engine_is_named_at_the_deadline():
    meeting, kinds = Meeting(), {"engine-0": "hanging"}
    with members(meeting, APART, kinds) as engines, outlets(meeting, APART) as outlet:
        for one in outlet.outlets:
            one.timeout_s = 2.0
        found = send(outlet, 1)
        assert list(found.failed) == ["engine-0"]
        assert found.failed["engine-0"].startswith("engine-0 is stuck or dead: it did not ")
        assert found.failed["engine-0"].endswith("within 2 s")
        assert found.held_by == ("engine-1",)
        assert engines["engine-0"].process.is_alive(), "it hangs"


def test_one_that_never_finishes_loading_is_told_from_the_one_beside_it():
    meeting = Meeting()
    with members(meeting, TOGETHER, {"engine-0": "late"}), outlets(meeting, TOGETHER) as outlet:
        for one in outlet.outlets:
            one.timeout_s = 2.0
        found = send(outlet, 1)
        assert found.failed["engine-0"] == ("engine-0 is stuck or dead: it did not finish loading version 1 within 2 s")
        assert "engine-1 is stuck" not in found.failed["engine-1"]


def test_an_engine_that_never_joins_is_named():
    meeting = Meeting()
    with (
        members(meeting, {"engine-0": "engine-0+engine-1"}),
        pytest.raises(ClusterError, match=r"weights: engine-1: not there within 1 s"),
        outlets(meeting, TOGETHER, timeout_s=1.0),
    ):
        pass


def test_an_engine_whose_sender_sends_nothing_says_so():
    meeting, group = Meeting(), {"engine-0": "engine-0"}
    with members(meeting, group, timeout_s=1.0) as engines, outlets(meeting, group):
        assert "no more weights came within 1 s" in engines["engine-0"].said()


@pytest.mark.gpu
def test_engines_on_the_trainers_gpu_take_each_version_from_its_memory():
    meeting, engines = Meeting(), ["engine-0", "engine-1"]
    with members(meeting, TOGETHER, transport="ipc") as processes:
        outlet = IpcOutlet(meeting, engines, device=torch.device("cuda:0"), timeout_s=60.0)
        outlet.connect()
        for version in (1, 2):
            weights = tiny_model(seed=version).named_weights()
            found = publish(weights, outlet, version=version, bucket_size=BUCKET_BYTES)
            assert found.held_by == ("engine-0", "engine-1") and not found.failed
            assert [process.said() for process in processes.values()] == [found.manifest.fingerprint] * 2
