"""What an engine may do to the pictures of prompts is named by the first-step gate."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from model_zoo import OTHERS
from pictures import MARK, forward, picture, prompt_with, save_picture, seeing_model

from hone.config.run import OptimizerSection
from hone.data.pack import collate
from hone.data.picture_processors import QwenProcessor
from hone.loop.gate import likely_cause, mean_gap
from hone.rollout.engine import Request, Sampling
from hone.rollout.local import LocalEngine
from hone.train.learner import Passes
from hone.train.policy import PolicyTrainer
from hone.types import Group, Picture, Prompt


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> list[Prompt]:
    """Two pictures of one size in each, and a third of another size in the second."""
    folder = tmp_path_factory.mktemp("pictures")
    processor = QwenProcessor(
        28, (0.5,) * 3, (0.25,) * 3, "bicubic", least_pixels=28 * 28 * 4, most_pixels=28 * 28 * 16
    )

    def picture(seed: int, width: int, height: int) -> Picture:
        save_picture(folder / f"{seed}.png", seed, width, height)
        return processor.picture(folder / f"{seed}.png")

    first = prompt_with([picture(0, 40, 40), picture(1, 40, 40)])
    return [first, prompt_with([picture(2, 40, 40), picture(3, 40, 40), picture(4, 30, 100)], index=1)]


def reordered(prompts):
    return [
        replace(p, pictures=tuple(moved(a, b) for a, b in zip(p.pictures, swapped(p), strict=True))) for p in prompts
    ]


def swapped(prompt):
    return (prompt.pictures[1], prompt.pictures[0], *prompt.pictures[2:])


def moved(place, other):
    return replace(other, start=place.start)


def dropped(prompts):
    return [replace(prompt, pictures=prompt.pictures[:-1]) for prompt in prompts]


def of_another_prompt(prompts):
    first, second = prompts
    own = tuple(moved(a, b) for a, b in zip(second.pictures[:2], first.pictures, strict=True))
    others = tuple(moved(a, b) for a, b in zip(first.pictures, second.pictures[:2], strict=True))
    return [replace(first, pictures=others), replace(second, pictures=(*own, second.pictures[2]))]


def resized(prompts):
    """By another filter."""
    return [
        replace(p, pictures=tuple(replace(a, digest=f"{a.digest}!", read=Nearest(a.read)) for a in p.pictures))
        for p in prompts
    ]


class Nearest:
    def __init__(self, read):
        self.read = read

    def __call__(self, **named):
        return self.read(resample="nearest")


FAULTS = {
    "in another order": reordered,
    "leaves out the last picture": dropped,
    "another prompt's pictures": of_another_prompt,
    "resizes pictures otherwise, about as nearest": resized,
}


@pytest.mark.parametrize("name", [None, *FAULTS])
def test_a_planted_fault_is_named(prompts, name):
    model = seeing_model("qwen2_5_vl")
    passes = Passes("float32", tokens_per_microbatch=4096, logprob_chunk_tokens=512, temperature=1.0)
    trainer = PolicyTrainer(model, passes, optimizer=OptimizerSection(), total_optimizer_steps=1)
    shown = FAULTS[name](prompts) if name else prompts
    samples = asyncio.run(drawn(model, shown))
    rewards = (1.0, 0.0, 0.0, 1.0)
    batch = collate([Group(p, own).scored({}, rewards) for p, own in zip(prompts, samples, strict=True)])
    trainer_T = trainer.logprobs(batch)
    gap = mean_gap(trainer_T, batch.sampler_logprobs_T, batch.loss_mask_T)
    if name is None:
        assert gap < 1e-5
        return
    assert gap > 1e-2
    cause = likely_cause(trainer, batch, trainer_T, gap, temperature=1.0)
    assert cause is not None and name in cause


async def drawn(model, prompts, group=4):
    engine = LocalEngine(model, decode=str, eos_ids=(), max_concurrent=16, timeout_s=240.0)
    sampling = Sampling(6, 1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=())
    requests = [Request(prompt, group, sampling, seed=0, stream="train") for prompt in prompts]
    try:
        with torch.no_grad():
            return await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()


@pytest.mark.slow("three passes over 32,768 tokens")
def test_engine_trainer_and_transformers_agree_on_32k_tokens_with_pictures():
    """Three pictures of 1,600 tokens: near the start, in the middle, and near the end."""
    sizes = OTHERS["qwen2_5_vl"]
    text = {**sizes["text_config"], "num_attention_heads": 1, "num_key_value_heads": 1}
    text |= {"head_dim": 32, "num_hidden_layers": 1}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [4, 6, 6]}
    model = seeing_model("qwen2_5_vl", sizes={**sizes, "text_config": {**text, "max_position_embeddings": 33000}})
    ids, pictures = np.random.default_rng(0).integers(3, 30, 32768), []
    for seed, start in enumerate((100, 16000, 31000)):
        own = replace(picture(model, seed, 40, 40), start=start)
        ids[start : start + own.num_tokens] = MARK
        pictures.append(own)
    prompt = Prompt("0", 0, "", ids, pictures=tuple(pictures))
    passes = Passes("float32", tokens_per_microbatch=40000, logprob_chunk_tokens=512, temperature=1.0)
    trainer = PolicyTrainer(model, passes, optimizer=OptimizerSection(), total_optimizer_steps=1)
    (samples,) = asyncio.run(drawn(model, [prompt], group=2))
    batch = collate([Group(prompt, samples).scored({}, (1.0, 0.0))])
    trainer_T = trainer.logprobs(batch)
    torch.testing.assert_close(trainer_T, batch.sampler_logprobs_T, atol=1e-4, rtol=0)
    with torch.no_grad():
        expected_T = forward(model, prompt, samples[0].token_ids)
    torch.testing.assert_close(trainer_T[: len(expected_T)], expected_T, atol=1e-4, rtol=0)
    assert model.vision is not None and model.vision.num_computed == 3
