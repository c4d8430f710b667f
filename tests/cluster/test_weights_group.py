"""Weights by broadcast, between real processes with gloo; and through GPUs, where there are any."""

import re
import signal

import pytest
import torch
from group_member import members
from publishing import ThreadPeer, make_engine, peers, send, tiny_model, tiny_model_with_adapter

from hone.model.fingerprint import weights_fingerprint
from hone.weights.transports import Broadcast, SharedGpu

TWO = {"engine-0": "good", "engine-1": "good"}


@pytest.fixture
def gloo():
    transport = Broadcast("gloo", "127.0.0.1")
    yield transport
    for name in list(transport._groups):
        transport.drop(name)


def test_every_engine_holds_each_version_to_the_last_bit_in_one_group_for_all_of_them(gloo):
    with peers(TWO) as engines:
        for version, model in [(1, tiny_model(seed=1)), (2, tiny_model_with_adapter(seed=2))]:
            found = send(model, engines, gloo, version)
            assert found.held_by == ("engine-0", "engine-1") and not found.failed
            assert found.manifest.fingerprint == weights_fingerprint(model.named_weights())
            assert [peer.engine.fingerprint() for peer in engines.values()] == [found.manifest.fingerprint] * 2
            assert found.manifest.num_bytes <= found.sent_bytes < 1.05 * found.manifest.num_bytes
        assert [peer.calls.count("connect_weights") for peer in engines.values()] == [1, 1]


@pytest.mark.slow("starts processes with models, and kills one")
def test_an_engine_killed_in_a_broadcast_does_not_hold_up_the_other_and_is_served_again_when_it_is_back(gloo):
    with members(TWO) as engines:
        assert send(tiny_model(1), engines, gloo, 1).held_by == ("engine-0", "engine-1")

        def weights():
            for number, named in enumerate(tiny_model(2).named_weights()):
                if number == 12:
                    assert engines["engine-1"].kill() == -signal.SIGKILL
                yield named

        found = send(weights(), engines, gloo, 2)
        assert found.held_by == ("engine-0",) and list(found.failed) == ["engine-1"]
        with members({"engine-1": "good"}) as back:  # it was started again
            assert send(tiny_model(3), engines | back, gloo, 3).held_by == ("engine-0", "engine-1")


def test_an_engine_that_refuses_a_version_takes_it_when_it_is_sent_again(gloo):
    with peers({"engine-0": "picky", "engine-1": "good"}) as engines:
        found = send(tiny_model(1), engines, gloo, 1)
        assert found.failed == {"engine-0": "engine-0: DataError: not these weights"}
        assert found.refused == ("engine-0",) and found.held_by == ("engine-1",)
        again = send(tiny_model(1), {"engine-0": engines["engine-0"]}, gloo, 1, attempt="again")
        assert again.held_by == ("engine-0",)


def test_a_stuck_engine_is_named_at_the_deadline(gloo):
    with peers({"engine-0": "hanging", "engine-1": "good"}) as engines:
        found = send(tiny_model(1), engines, gloo, 1, timeout_s=2.0)
        assert re.fullmatch(r"engine-0: stuck: it did not take bucket \d within 2 s", found.failed["engine-0"])
        assert found.held_by == ("engine-1",) and not found.refused


@pytest.mark.slow("waits for the time-out of a group of processes")
def test_an_engine_that_never_joins_is_named_and_the_other_is_served(gloo):
    absent = ThreadPeer(make_engine("good"))
    absent.receiver.connect = lambda address: absent.receiver._lock.acquire()  # says that it has joined, and has not
    with peers({"engine-0": "good"}) as engines:
        found = send(tiny_model(1), engines | {"engine-1": absent}, gloo, 1, timeout_s=5.0)
        assert found.held_by == ("engine-0",)
        assert found.failed["engine-1"] == "engine-1: stuck: it did not join the group for new weights within 5 s"
    absent.close()


@pytest.mark.gpu
def test_engines_on_the_trainers_gpu_take_each_version_from_its_memory():
    with members(TWO, gpus=dict.fromkeys(TWO, 0)) as engines:
        for version in (1, 2):
            found = send(tiny_model(version), engines, SharedGpu(torch.device("cuda:0")), version)
            assert found.held_by == ("engine-0", "engine-1") and not found.failed


@pytest.mark.gpu
def test_engines_on_gpus_of_their_own_take_each_version_by_broadcast_and_a_killed_one_is_no_end():
    if torch.cuda.device_count() < 3:
        pytest.skip("a trainer and two engines need 3 GPUs: NCCL has no two processes on one")
    nccl = Broadcast("nccl", "127.0.0.1")
    with members(TWO, gpus={"engine-0": 1, "engine-1": 2}) as engines:
        for version in (1, 2):
            found = send(tiny_model(version), engines, nccl, version)
            assert found.held_by == ("engine-0", "engine-1") and not found.failed
        assert engines["engine-1"].kill() == -signal.SIGKILL
        found = send(tiny_model(3), engines, nccl, 3, timeout_s=5.0)
        assert found.held_by == ("engine-0",) and "engine-1" in found.failed
