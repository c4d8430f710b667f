"""Mixtures of experts on two ranks: sharded, published by expert, replayed and balanced as in one process."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from moe_cases import TOKENS, Case, batch_of, of_transformers, trained, trainer_of

from hone.data.pack import Shape, divide_over_ranks

pytestmark = pytest.mark.slow("two ranks")


@pytest.mark.parametrize(
    ("checkpointing", "experts", "held"),
    [
        pytest.param("none", 4, {(2, 64, 64), (2, 64, 32)}, id="two of four experts"),
        pytest.param("full", 4, {(2, 64, 64), (2, 64, 32)}, id="two of four experts, checkpointed"),
        pytest.param("none", 3, {(3, 32, 64), (3, 32, 32)}, id="half of the rows of each of three"),
    ],
)
def test_replayed_routing_and_weights_of_experts_are_those_of_one_process(pair, checkpointing, experts, held):
    case = Case(checkpointing=checkpointing, experts=experts)
    expected = trained(case, alone=True)
    anew = trained(replace(case, replays=False), alone=True)
    assert not torch.allclose(expected.logprobs_T, anew.logprobs_T, atol=1e-2), "replay must matter here"
    for found in pair(trained, case):
        torch.testing.assert_close(found.logprobs_T, expected.logprobs_T)
        for kind in ("gradients", "weights"):
            ours, theirs = getattr(found, kind), getattr(expected, kind)
            assert ours.keys() == theirs.keys()
            for name, tensor in theirs.items():
                torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-9, msg=name)
        assert {*found.held.values()} == held
        assert f"model.layers.1.mlp.experts.{experts - 1}.up_proj.weight" in found.weights


def test_the_load_is_balanced_over_the_microbatches_of_all_ranks(pair):
    """They count by their tokens; each is that of Transformers' class over the rows of its samples."""
    coef, batch = 0.3, batch_of(replays=False)
    shape = Shape.of(batch)
    tokens_S = shape.prompt_tokens_N[shape.prompt_S] + shape.length_S - 1
    parts = [part for share in divide_over_ranks(shape, np.arange(len(tokens_S)), 2, TOKENS) for part in share]
    learner = trainer_of(Case(), alone=True)
    loss, gradient = 0.0, torch.zeros_like(learner.held.grad)
    for part in parts:
        share = tokens_S[part].sum() / tokens_S.sum()
        of_part, gradient_of_part = of_transformers(learner, batch, part.tolist())
        loss, gradient = loss + share * of_part, gradient + share * gradient_of_part
    expected = learner.held.split(gradient)
    plain, balanced = (pair(trained, Case(replays=False, coef=coef)) for coef in (0.0, coef))
    for off, on in zip(plain, balanced, strict=True):
        assert on.metrics["train/load_balancing_loss"] == pytest.approx(loss, rel=1e-5)
        for name, tensor in expected.items():
            added = on.gradients[name] - off.gradients[name]
            torch.testing.assert_close(added, coef * tensor, rtol=1e-5, atol=1e-7, msg=name)
