"""Prompts with pictures in the trainer's layout and in the engine, against Transformers' own forward pass."""

import asyncio
from dataclasses import replace

import pytest
import torch
from pictures import MARK, SEEING, forward, picture, prompt_with, seeing_model

from hone.errors import DataError
from hone.model.layout import Layout
from hone.model.logprobs import token_logprobs
from hone.rollout.engine import Request, Sampling
from hone.rollout.local import LocalEngine
from hone.types import Prompt

RESPONSES = [[1, 2, 3], [7, 8, 9, 10], [1, 2], [11, 12], [7, 8, 9, 10], [6]]
PROMPT_S = [0, 0, 1, 1, 2, 2]


def prompts_of(model) -> list[Prompt]:
    """Without a picture, with one, and with three, of which one is the second prompt's."""
    few, many = picture(model, 0, 2, 3), [picture(model, 1, 1, 4), picture(model, 0, 2, 3), picture(model, 2, 3, 2)]
    return [prompt_with([]), prompt_with([few], index=1), prompt_with(many, index=2)]


def layout_of(prompts) -> Layout:
    lengths, tokens = [len(response) for response in RESPONSES], [token for response in RESPONSES for token in response]
    pictures = [prompt.pictures for prompt in prompts]
    ids = [prompt.token_ids for prompt in prompts]
    return Layout.from_flat(ids, *map(torch.tensor, (PROMPT_S, lengths, tokens)), pictures=pictures)


def logprobs_of(model, layout):
    found, _ = token_logprobs(
        model.hidden(layout), model.output_weight, layout.target_U, temperature=1.0, chunk_tokens=8
    )
    return found if layout.expand_T is None else found[layout.expand_T]


@pytest.mark.parametrize("tower", ["frozen", "learning"])
@pytest.mark.parametrize("model_type", SEEING)
def test_the_layout_equals_transformers_forward_pass(model_type, tower):
    """Logprobs and gradients, with 0, 1 and 3 pictures of different sizes."""
    model = seeing_model(model_type)
    if tower == "learning":
        model.hf.requires_grad_(True)
    prompts = prompts_of(model)
    expected = torch.cat([forward(model, prompts[p], r) for p, r in zip(PROMPT_S, RESPONSES, strict=True)])
    found = logprobs_of(model, layout_of(prompts))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    learning = [weight for weight in model.hf.parameters() if weight.requires_grad]
    scale = torch.linspace(-1, 1, len(found))
    wanted = torch.autograd.grad(expected @ scale, learning)
    for own, theirs in zip(torch.autograd.grad(found @ scale, learning), wanted, strict=True):
        assert (own - theirs).norm() <= 1e-5 * theirs.norm().clamp_min(1e-2)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_recomputed_activations_have_the_same_gradients(checkpointing):
    model = seeing_model("qwen3_vl")
    learning = [weight for weight in model.hf.parameters() if weight.requires_grad]
    layout = layout_of(prompts_of(model))
    wanted = torch.autograd.grad(logprobs_of(model, layout).sum(), learning)
    model.checkpointing = checkpointing
    for own, theirs in zip(torch.autograd.grad(logprobs_of(model, layout).sum(), learning), wanted, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-6)


def test_each_distinct_picture_goes_through_the_tower_once():
    model = seeing_model("qwen2_5_vl")
    layout = layout_of(prompts_of(model))
    assert model.vision is not None
    model.hidden(layout)
    assert model.vision.num_computed == 3  # of four places
    model.hidden(layout)
    assert model.vision.num_computed == 3  # the tower is frozen
    model.load_weights(list(model.named_weights()))
    model.hidden(layout)
    assert model.vision.num_computed == 6
    model.hf.requires_grad_(True)
    model.hidden(layout)
    assert model.vision.num_computed == 9


@pytest.mark.parametrize("model_type", SEEING)
def test_sampled_logprobs_equal_the_trainers(model_type):
    """Prompts with and without pictures together, forks, and rows that end early."""
    model = seeing_model(model_type)
    prompts = prompts_of(model)
    samples = asyncio.run(sampled(model, prompts))
    for prompt, group in zip(prompts, samples, strict=True):
        for sample in group:
            if MARK in sample.token_ids:  # Transformers refuses a sequence that spells the mark
                continue
            expected = forward(model, prompt, sample.token_ids)
            torch.testing.assert_close(torch.tensor(sample.sampler_logprobs.tolist()), expected, atol=1e-5, rtol=0)
    assert len({len(sample.token_ids) for group in samples for sample in group}) > 1


async def sampled(model, prompts, count: int = 4):
    engine = LocalEngine(model, decode=str, eos_ids=tuple(range(16)), max_concurrent=16, timeout_s=120.0)
    sampling = Sampling(5, 1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=())
    try:
        requests = [Request(prompt, count, sampling, seed=0, stream="train") for prompt in prompts]
        return await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()


FAULTS = {
    "order": lambda own: (replace(own[0], read=own[2].read, digest="c"), own[1], replace(own[2], read=own[0].read)),
    "dropped": lambda own: own[:2],
    "other pixels": lambda own: (*own[:2], replace(own[2], read=own[0].read, digest="d")),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("model_type", SEEING)
def test_a_faulty_picture_changes_logprobs(model_type, fault):
    model = seeing_model(model_type)
    pictures = [picture(model, seed, 2, 2) for seed in range(3)]
    prompt = prompt_with(pictures)
    wrong = replace(prompt, pictures=FAULTS[fault](prompt.pictures))
    found = [
        logprobs_of(
            model, Layout.from_flat([p.token_ids], *map(torch.tensor, ([0], [3], [1, 2, 3])), pictures=[p.pictures])
        )
        for p in (prompt, wrong)
    ]
    assert (found[0] - found[1]).abs().max() > 1e-2


def test_a_class_that_cannot_read_pictures_says_so():
    model = seeing_model("qwen2_5_vl")
    prompt = prompt_with([picture(model, 0, 2, 2)])
    blind = seeing_model("qwen2_5_vl")
    blind.vision = None
    with pytest.raises(DataError, match="cannot have pictures"):
        blind.hidden(layout_of([prompt] * 3))


def test_pictures_are_patched_as_the_processor_does():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = seeing_model("qwen2_5_vl")
    own = picture(model, 0, 2, 3)
    processor = Qwen2VLImageProcessorPil(image_mean=list(own.mean), image_std=list(own.std))
    theirs = processor(images=[own.read()], do_resize=False, return_tensors="pt")
    assert model.vision is not None
    ours = model.vision.tower.inputs([own])
    torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"])
    assert theirs["image_grid_thw"].tolist() == [[1, 4, 6]]
