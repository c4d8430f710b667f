"""New weights into vLLM's workers through vLLM's own protocol: by file and by broadcast, again after a failure. Real
vLLM, two ranks."""

import asyncio

import pytest
import tiny_engines
from tiny_engines import random_prompts, request
from vllm_engines import Vllm, model_for_vllm, save

from hone.model.fingerprint import weights_fingerprint
from hone.weights.publish import Update, publish
from hone.weights.receive import Receiver
from hone.weights.transports import Broadcast

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

REQUESTS = [request(p, index=i, temperature=0.0, max_tokens=16) for i, p in enumerate(random_prompts(6))]


class Peer:
    """The engine's receiver, on its event loop."""

    num_workers = 2

    def __init__(self, receiver, loop):
        self._receiver, self._loop = receiver, loop

    def call(self, method, *args):
        work = getattr(self._receiver, method.removesuffix("_weights"))(*args)
        started = asyncio.run_coroutine_threadsafe(work, self._loop)
        return lambda deadline: started.result(120)


@pytest.fixture(scope="module")
def models():
    return [model_for_vllm(seed=seed, num_key_value_heads=2) for seed in (0, 1)]


@pytest.fixture(scope="module")
def vllm(models, tmp_path_factory):
    vllm = Vllm(save(models[0], tmp_path_factory.mktemp("model") / "hf"), {"tensor_parallel_size": 2})
    yield vllm
    vllm.close()


def samples_as(vllm, model, version):
    for (mine,), (theirs,) in zip(vllm.generate(REQUESTS), tiny_engines.generate(model, REQUESTS), strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.sampler_logprobs == pytest.approx(theirs.sampler_logprobs, abs=1e-4)
        assert [span.version for span in mine.versions] == [version]


def test_two_ranks_take_versions_by_broadcast_and_sample_from_them(vllm, models):
    transport = Broadcast("gloo", "127.0.0.1")

    async def send(weights, version):
        peers = {"engine-0": Peer(receiver, asyncio.get_running_loop())}
        updates = {"engine-0": Update(f"{version}", version)}
        arguments = (weights, peers, transport)
        settings = {"updates": updates, "bucket_size": 16 * 1024, "timeout_s": 60.0}
        return await asyncio.to_thread(publish, *arguments, **settings)

    async def make():
        return Receiver(vllm.engine, timeout_s=60.0)

    receiver = vllm.run(make())
    for version, model in [(1, models[1]), (2, models[0])]:
        found = vllm.run(send(list(model.named_weights()), version))
        assert found.held_by == ("engine-0",) and not found.failed
        assert vllm.engine.fingerprint() == weights_fingerprint(model.named_weights())
        samples_as(vllm, model, version)
    found = vllm.run(send(list(models[1].named_weights())[:9], 3))
    assert found.refused == ("engine-0",) and "did not come" in found.failed["engine-0"]
    assert vllm.run(send(list(models[1].named_weights()), 4)).held_by == ("engine-0",)
    samples_as(vllm, models[1], 4)
    transport.drop("engine-0")


def test_two_ranks_take_versions_from_a_file_in_memory(vllm, models):
    vllm.load(models[0], 5)
    samples_as(vllm, models[0], 5)
    vllm.load(models[1], 6)
    samples_as(vllm, models[1], 6)
