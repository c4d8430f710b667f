"""Each planted fault between sampler and trainer is caught before the first update, and named."""

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import fake_run

from hone.config.run import OptimizerSection, RunConfig
from hone.data.pack import collate
from hone.errors import GateError
from hone.loop.gate import check_first_step
from hone.model.load import init_model
from hone.rollout.engine import Request
from hone.rollout.local import LocalEngine
from hone.train.learner import Passes
from hone.train.policy import PolicyTrainer
from hone.train.roles import Reference, Roles
from hone.types import Group, Prompt, Score, version_spans

ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.4,
}
EOS = 1


@pytest.fixture(scope="module")
def model():
    """Large initial weights, so that different prompts and positions really predict different tokens."""
    return init_model(ARCHITECTURE, vocab_size=12, seed=0, dtype=torch.float32, device="cpu")


def a_run(model, *, temperature=1.0, engine_model=None, sampled_at=None):
    """A run at step 0 with real engine and trainer, and the groups it sampled."""
    run: Any = fake_run()
    run.config = RunConfig.model_validate(
        run.config.model_dump() | {"gate": {"enabled": True}, "rollout": {"temperature": temperature}}
    )
    passes = Passes("float32", tokens_per_microbatch=4096, logprob_chunk_tokens=512, temperature=temperature)
    policy = PolicyTrainer(copy.deepcopy(model), passes, optimizer=OptimizerSection(), total_optimizer_steps=1)
    run.trainer = Roles(policy=policy)
    run.sampling = replace(run.sampling, max_tokens=8, temperature=temperature)
    run.eos_ids = frozenset({EOS})
    run.engine = LocalEngine(
        engine_model or run.trainer.policy.model, decode=str, eos_ids=(EOS,), max_concurrent=64, timeout_s=60
    )
    prompts = [
        Prompt(f"p{i}", i, "", tuple(torch.arange(3 + i % 4).add(i).remainder(10).add(2).tolist())) for i in range(8)
    ]

    async def sample():
        await run.engine.load(None, 0)
        sampling = replace(run.sampling, temperature=sampled_at or temperature)
        try:
            return [await run.engine.generate(Request(prompt, 4, sampling, 0, "train")) for prompt in prompts]
        finally:
            await run.engine.close()

    rewards = (1.0, 0.0, 0.0, 1.0)
    groups = [
        Group(prompt, samples).scored({"fake": tuple(map(Score, rewards))}, rewards)
        for prompt, samples in zip(prompts, asyncio.run(sample()), strict=True)
    ]
    return run, groups


def check(run, groups, batch=None, warn=lambda message: pytest.fail(message)):
    return check_first_step(
        run.config,
        run.trainer,
        run.engine,
        groups,
        batch or collate(groups),
        step=run.progress.step,
        sampling=run.sampling,
        eos_ids=run.eos_ids,
        needs=run.algorithm.needs,
        warn=warn,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_sound_run_passes(model, temperature):
    metrics = check(*a_run(model, temperature=temperature))
    assert metrics["gate/logprob_gap"] < 1e-5
    assert metrics["gate/ratio_mean"] == pytest.approx(1, abs=1e-4)


def test_wrong_temperature_is_named(model):
    with pytest.raises(GateError, match=r"wrong temperature: the engine sampled at about 0\.7, the trainer uses 1"):
        check(*a_run(model, sampled_at=0.7))


def test_stale_weights_are_named(model):
    stale = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(stale.parameters()))[3] += 1e-3
    with pytest.raises(GateError, match=r"hash .* stale weights"):
        check(*a_run(model, engine_model=stale))


def test_a_stale_version_is_named(model):
    run, groups = a_run(model)
    run.progress.step = 1
    with pytest.raises(GateError, match=r"version 0, the trainer is at 1\. Likely cause: stale weights"):
        check(run, groups)


def test_a_mask_that_is_off_by_one_is_named(model):
    run, groups = a_run(model)
    masked = replace(groups[0].samples[0], loss_mask=(True,) * (len(groups[0].samples[0].token_ids) - 1) + (False,))
    groups[0] = replace(groups[0], samples=(masked, *groups[0].samples[1:]))
    batch = collate(groups)
    with pytest.raises(GateError, match=r"loss mask .* 2 of .* off by one"):
        check(run, groups, replace(batch, loss_mask_T=batch.loss_mask_T.roll(1)))


def test_logprobs_shifted_by_one_are_named(model):
    run, groups = a_run(model)
    batch = collate(groups)
    with pytest.raises(GateError, match=r"shifted against each other by one"):
        check(run, groups, replace(batch, sampler_logprobs_T=batch.sampler_logprobs_T.roll(1)))


def test_a_dropped_final_token_is_named(model):
    run, groups = a_run(model)

    def cut(sample):
        if sample.finish_reason != "stop":
            return sample
        return replace(
            sample,
            token_ids=sample.token_ids[:-1],
            sampler_logprobs=sample.sampler_logprobs[:-1],
            versions=version_spans(sample.token_versions()[:-1]),
        )

    groups = [replace(group, samples=tuple(map(cut, group.samples))) for group in groups]
    with pytest.raises(GateError, match=r"do not end with a stop token.* final token"):
        check(run, groups)


def test_swapped_prompts_are_named(model):
    run, groups = a_run(model)
    batch = collate(groups)
    with pytest.raises(GateError, match=r"prompts are swapped"):
        check(run, groups, replace(batch, prompts=batch.prompts[1:] + batch.prompts[:1]))


def test_another_model_is_not_explained_away(model):
    """A gap that no hypothesis closes is reported as such, not blamed on the nearest one."""
    run, groups = a_run(model)
    batch = collate(groups)
    noise = torch.randn(batch.sampler_logprobs_T.shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(GateError, match=r"Likely cause: unknown"):
        check(run, groups, replace(batch, sampler_logprobs_T=batch.sampler_logprobs_T - noise.abs()))


def noisy(batch, mean):
    """Sampled by a program that differs in its rounding: gaps of this mean with heavy tails."""
    noise = torch.randn(batch.sampler_logprobs_T.shape, generator=torch.Generator().manual_seed(0)).mul(1.5).exp()
    signs = torch.arange(len(noise)) % 2 * 2 - 1
    return replace(batch, sampler_logprobs_T=batch.sampler_logprobs_T + signs * noise * (mean / noise.mean()))


def test_a_gap_without_a_cause_is_a_warning_with_its_distribution(model):
    run, groups = a_run(model)
    warnings = []
    metrics = check(run, groups, noisy(collate(groups), 0.1), warnings.append)
    [warning] = warnings
    assert "differ by 0.1 nats" in warning and "median 0.0" in warning and "The run continues" in warning
    assert metrics["gate/logprob_gap"] == pytest.approx(0.1, rel=1e-3)
    assert metrics["gate/logprob_gap"] < metrics["gate/logprob_gap_p99"] <= metrics["gate/logprob_gap_max"]


@pytest.mark.parametrize(("mean", "bound"), [(0.25, None), (0.1, 0.05)])
def test_a_large_gap_stops_the_run_without_a_cause(model, mean, bound):
    run, groups = a_run(model)
    run.config = run.config.model_copy(update={"gate": run.config.gate.model_copy(update={"max_logprob_gap": bound})})
    with pytest.raises(GateError, match=rf"bound {bound or 0.2} without a cause\. Likely cause: unknown"):
        check(run, groups, noisy(collate(groups), mean))


def test_a_small_gap_with_a_cause_stops_the_run(model):
    """0.95 instead of 1: far below 0.2 nats, and no rounding."""
    run, groups = a_run(model, sampled_at=0.9)
    with pytest.raises(GateError, match=r"differ by 0\.0\d+ nats.* wrong temperature"):
        check(run, groups)


def test_a_reference_from_other_weights_is_named(model):
    run, groups = a_run(model)
    run.algorithm.needs = frozenset({"ref_logprobs"})
    other = init_model(ARCHITECTURE, vocab_size=12, seed=1, dtype=torch.float32, device="cpu")
    run.trainer.reference = Reference(other, run.trainer.policy.passes)
    with pytest.raises(GateError, match="the reference was loaded from other weights"):
        check(run, groups)
