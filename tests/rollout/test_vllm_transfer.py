"""vLLM's ranks as members of a group, through vLLM's own protocol for new weights. Real vLLM, two ranks, gloo."""

import asyncio

import pytest
import tiny_engines
import torch
from tiny_engines import random_prompts, request
from vllm_engines import Vllm, model_for_vllm, save

from hone.model.fingerprint import weights_fingerprint
from hone.weights.meeting import Meeting
from hone.weights.publish import publish
from hone.weights.publish_group import GroupOutlet
from hone.weights.receiving import GroupIntake
from hone.weights.sending import Target, by_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

TRANSFER = {"worker_extension": "hone.weights.vllm_transfer.TransferExtension", "weight_transfer": "hone"}
ENGINE = {"engine-0": Target(None, members=2)}


def test_two_ranks_take_versions_by_themselves_and_sample_from_them(tmp_path):
    first, second = (model_for_vllm(seed=seed, num_key_value_heads=2) for seed in (0, 1))
    vllm = Vllm(save(first, tmp_path / "hf"), {"tensor_parallel_size": 2}, **TRANSFER)
    intake = GroupIntake(vllm.engine, timeout_s=60.0)
    outlet = GroupOutlet(
        Meeting(), ["engine-0.0", "engine-0.1"], backend="gloo", device=torch.device("cpu"), timeout_s=60.0
    )
    requests = [request(p, index=i, temperature=0.0, max_tokens=16) for i, p in enumerate(random_prompts(6))]

    async def join():
        await asyncio.gather(intake.join("gloo", outlet.link, "engine-0"), asyncio.to_thread(outlet.connect))

    async def send(model, version):
        def sending():
            return publish(model.named_weights(), outlet, version=version, bucket_size=16 * 1024)

        return await asyncio.gather(intake.take(version), asyncio.to_thread(sending))

    try:
        vllm.run(join())
        assert not outlet.failed
        for version, model in [(1, second), (2, first)]:
            held, found = vllm.run(send(model, version))
            found = by_engine(found, ENGINE)
            assert found.held_by == ("engine-0",) and not found.failed
            assert held == found.manifest.fingerprint == weights_fingerprint(model.named_weights())
            assert vllm.engine.version == version
            for (mine,), (theirs,) in zip(vllm.generate(requests), tiny_engines.generate(model, requests), strict=True):
                assert mine.token_ids.tolist() == theirs.token_ids.tolist()
                assert mine.sampler_logprobs == pytest.approx(theirs.sampler_logprobs, abs=1e-4)
                assert [span.version for span in mine.versions] == [version]
    finally:
        vllm.close()
