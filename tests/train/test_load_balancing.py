"""The auxiliary loss that balances the load of experts, against Transformers' own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import caught_gradient, make_batch, make_groups, make_model, make_trainer
from moe_cases import of_transformers
from moe_models import moe_model

from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.errors import DataError
from hone.types import Batch

COEF = 0.3
OFF, ON = (Algorithm(AlgorithmSection(load_balancing_coef=coef)) for coef in (0.0, COEF))


def trainer_of(architecture: str, **changes: Any) -> Any:
    model = moe_model(architecture)
    model.hf.set_experts_implementation("eager")  # PyTorch's grouped product knows no float64
    return make_trainer(model, **changes)


def batch_of() -> Batch:
    """Samples that all have a gradient; some are copies of others."""
    groups = make_groups(num_groups=2, group_size=3)
    batch = make_batch(groups, OFF)
    batch = replace(batch, loss_mask_T=torch.ones_like(batch.loss_mask_T))
    return batch.with_column("advantages_T", torch.linspace(-1, 1, len(batch.token_ids_T)).double() + 0.03)


def gradient(trainer: Any, batch: Batch, algorithm: Algorithm) -> tuple[dict[str, float], torch.Tensor]:
    return caught_gradient(trainer.policy, lambda: trainer.update(batch, algorithm))


@pytest.mark.parametrize(
    "architecture", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow("one is enough"))]
)
def test_one_microbatch_adds_the_loss_of_the_class_over_real_tokens(architecture):
    batch, trainer = batch_of(), trainer_of(architecture)
    loss, expected = of_transformers(trainer.policy, batch, list(range(6)))
    metrics, plain = gradient(trainer_of(architecture), batch, OFF)
    assert "train/load_balancing_loss" not in metrics
    metrics, found = gradient(trainer, batch, ON)
    assert metrics["train/load_balancing_loss"] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(found - plain, COEF * expected, rtol=1e-5, atol=1e-7)
    assert expected.abs().max() > 1e-3


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_microbatches_count_by_their_tokens(checkpointing):
    """A product of two means over tokens is no sum over them: a step has the mean of its microbatches."""
    batch, trainer = batch_of(), trainer_of("qwen3_moe", tokens_per_microbatch=22)
    trainer.policy.model.checkpointing = checkpointing
    shape = trainer.policy._prepare(batch, OFF).shape
    parts = trainer.policy.passes.microbatches(shape, torch.arange(6).numpy())
    assert len(parts) > 1
    tokens_S = shape.prompt_tokens_N[shape.prompt_S] + shape.length_S - 1
    gradients = [of_transformers(trainer.policy, batch, part.tolist())[1] for part in parts]
    expected = sum(tokens_S[part].sum() / tokens_S.sum() * one for part, one in zip(parts, gradients, strict=True))
    plain = gradient(trainer_of("qwen3_moe", tokens_per_microbatch=22), batch, OFF)[1]
    found = gradient(trainer, batch, ON)[1]
    torch.testing.assert_close(found - plain, COEF * expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "hone"])
def test_an_architecture_without_such_a_loss_is_refused(architecture):
    trainer = make_trainer(make_model()) if architecture == "hone" else trainer_of(architecture)
    with pytest.raises(
        DataError, match=r"load_balancing_coef > 0: Transformers' class of .* has no load-balancing loss"
    ):
        trainer.update(batch_of(), ON)
