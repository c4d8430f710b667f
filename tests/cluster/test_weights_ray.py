"""Weights through Ray's object store, between real processes."""

import asyncio
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from publishing import BUCKET_BYTES, make_engine, tiny_model, tiny_model_with_adapter

from hone.cluster.ray import environment_for_ray
from hone.errors import EngineError
from hone.model.fingerprint import weights_fingerprint
from hone.weights.buckets import Manifest
from hone.weights.publish import publish
from hone.weights.publish_ray import Intake, RayOutlet

pytestmark = pytest.mark.slow("starts Ray and several processes in it")


@ray.remote(num_cpus=0)
class EngineActor:
    async def become(self, kind: str = "good", dtype: torch.dtype = torch.float32) -> int:
        torch.set_num_threads(1)
        self.engine = make_engine(kind, dtype)
        self.intake = Intake(self.engine, timeout_s=60.0)
        return os.getpid()

    async def begin_weights(self, version: int) -> None:
        await self.intake.begin(version)

    async def take_bucket(self, header: str, data: np.ndarray) -> None:
        await self.intake.bucket(header, data)

    async def finish_weights(self, manifest: str) -> str:
        return await self.intake.manifest(manifest)

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


def send(model, engines, version, *, timeout_s=60.0, dtype=None):
    outlet = RayOutlet(engines, version=version, timeout_s=timeout_s)
    return publish(model.named_weights(), outlet, version=version, bucket_size=BUCKET_BYTES, dtype=dtype)


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
    assert re.fullmatch(r"engine-0 is stuck at version 7: it did not take bucket \d within 2 s", *found.failed.values())
    assert found.held_by == ("engine-1",)


def test_an_engine_that_holds_something_else_is_found_out(engines):
    ray.get(engines["engine-1"].become.remote("forgetful"))
    found = send(tiny_model(seed=8), engines, 8)
    assert found.held_by == ("engine-0",) and "engine-1 holds weights that hash to" in found.failed["engine-1"]


def test_weights_of_another_model_are_refused_with_the_reason(engines):
    outlet = RayOutlet(engines, version=1, timeout_s=60.0)
    found = publish([("model.norm.weight", torch.ones(31))], outlet, version=1, bucket_size=BUCKET_BYTES)
    assert "model.norm.weight has shape (31,)" in found.failed["engine-0"] and len(found.failed) == 2


def test_a_trainer_that_stops_sending_is_noticed():
    async def run():
        intake = Intake(make_engine("good"), timeout_s=0.2)
        await intake.begin(1)
        await asyncio.sleep(1.0)
        await intake.manifest(Manifest(1, 0, 0, 0, "").as_json())

    with pytest.raises(EngineError, match=r"no more weights came within 0.2 s; is the trainer stuck"):
        asyncio.run(run())


def test_a_version_that_comes_before_the_last_one_is_loaded_is_refused():
    async def run():
        intake = Intake(make_engine("good"), timeout_s=1.0)
        await intake.begin(1)
        await intake.begin(2)

    with pytest.raises(EngineError, match="version 2 of the weights came while the one before was being taken"):
        asyncio.run(run())
