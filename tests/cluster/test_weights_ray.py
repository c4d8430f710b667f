"""Weights through Ray's object store, between real processes."""

import os
import re
import signal
from pathlib import Path

import pytest
import ray
import torch
from publishing import make_engine, tiny_model, tiny_model_with_adapter
from publishing import send as send_to

from hone.cluster.ray import environment_for_ray
from hone.model.fingerprint import weights_fingerprint
from hone.weights.receive import Receiver
from hone.weights.transports import ObjectStore, RayPeer

pytestmark = pytest.mark.slow("starts Ray and several processes in it")


@ray.remote(num_cpus=0)
class EngineActor:
    async def become(self, kind: str = "good", dtype: torch.dtype = torch.float32) -> int:
        torch.set_num_threads(1)
        self.engine = make_engine(kind, dtype)
        self.receiver = Receiver(self.engine, timeout_s=60.0)
        return os.getpid()

    async def begin_weights(self, update):
        await self.receiver.begin(update)

    async def load_weights(self, update_id, sender, header, part):
        await self.receiver.load(update_id, sender, header, part)

    async def commit_weights(self, update_id, sender, manifest):
        return await self.receiver.commit(update_id, sender, manifest)

    async def held(self) -> tuple[int, str]:
        return self.engine.version, self.engine.fingerprint()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    here = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}  # for the actors to import `publishing`
    store = 80 << 20  # the least that Ray takes
    handler = signal.getsignal(signal.SIGTERM)  # `ray.init` replaces it
    with environment_for_ray():
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=store,
            runtime_env=here,
        )
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def actors(cluster):
    """The last one is for killing. Starting one takes seconds, so the tests share them."""
    actors = [EngineActor.remote() for _ in range(3)]
    ray.get([actor.become.remote() for actor in actors])
    return actors


@pytest.fixture
def engines(actors):
    ray.get([actor.become.remote() for actor in actors[:2]])
    return {"engine-0": actors[0], "engine-1": actors[1]}


def send(model, engines, version, **also):
    peers = {name: RayPeer(actor) for name, actor in engines.items()}
    return send_to(model, peers, ObjectStore(), version, **also)


@pytest.mark.parametrize(("version", "make"), [(1, tiny_model), (2, tiny_model_with_adapter), (3, tiny_model)])
def test_every_engine_holds_each_version_to_the_last_bit(engines, version, make):
    model = make(seed=version)
    found = send(model, engines, version)
    assert found.held_by == ("engine-0", "engine-1") and not found.failed
    assert found.manifest.fingerprint == weights_fingerprint(model.named_weights())
    assert found.manifest.buckets >= 3
    assert ray.get([engine.held.remote() for engine in engines.values()]) == [(version, found.manifest.fingerprint)] * 2


def test_float32_masters_become_the_engines_bfloat16_on_the_way(engines):
    ray.get(engines["engine-0"].become.remote(dtype=torch.bfloat16))
    model = tiny_model(seed=5)
    found = send(model, {"half": engines["engine-0"]}, 1, dtype=torch.bfloat16)
    assert found.held_by == ("half",)
    rounded = [(name, weight.bfloat16()) for name, weight in model.named_weights()]
    assert ray.get(engines["engine-0"].held.remote()) == (1, weights_fingerprint(rounded))


def test_a_killed_engine_is_named_and_the_others_are_served(actors, engines):
    os.kill(ray.get(actors[2].become.remote()), signal.SIGKILL)
    found = send(tiny_model(seed=6), {"dead": actors[2]} | engines, 6)
    assert list(found.failed) == ["dead"] and "ActorDied" in found.failed["dead"]
    assert found.held_by == ("engine-0", "engine-1")


def test_a_stuck_engine_is_named_at_the_deadline_and_the_other_is_served(engines):
    ray.get(engines["engine-0"].become.remote("hanging"))
    found = send(tiny_model(seed=7), engines, 7, timeout_s=2.0)
    assert list(found.failed) == ["engine-0"]
    assert re.fullmatch(r"engine-0: stuck: it did not take bucket \d within 2 s", *found.failed.values())
    assert found.held_by == ("engine-1",)


def test_an_engine_that_holds_something_else_is_found_out(engines):
    ray.get(engines["engine-1"].become.remote("forgetful"))
    found = send(tiny_model(seed=8), engines, 8)
    assert found.held_by == ("engine-0",) and "engine-1: it holds weights that hash to" in found.failed["engine-1"]


def test_weights_of_another_model_are_refused_with_the_reason_and_the_right_ones_are_taken_then(engines):
    found = send([("model.norm.weight", torch.ones(31))], engines, 1)
    assert "model.norm.weight has shape (31,)" in found.failed["engine-0"]
    assert set(found.refused) == set(found.failed) == set(engines)
    assert send(tiny_model(seed=1), engines, 1, attempt="again").held_by == ("engine-0", "engine-1")
