"""Flat AdamW against PyTorch's own per parameter; schedules by hand; gradients that are not finite."""

import math

import pytest
import torch
from torch import nn

from hone.config.run import OptimizerSection
from hone.errors import CheckpointError
from hone.train.optim import FlatAdamW, FlatWeights, learning_rate


class Small(nn.Module):
    """Matrices, vectors and a tied weight, registered in mixed order."""

    def __init__(self, width=7):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return nn.Parameter(torch.randn(*shape, generator=generator))

        self.scale = normal(width)
        self.first = normal(width, 5)
        self.bias = normal(5)
        self.second = normal(5, 3)
        self.tied = self.first

    def named_weights(self):
        return ((name, parameter.detach()) for name, parameter in self.named_parameters())

    def forward(self, x):
        return ((x * self.scale) @ self.first + self.bias).tanh() @ self.second + (x @ self.tied).sum(-1, keepdim=True)


def loss_of(model, seed):
    x = torch.randn(16, 7, generator=torch.Generator().manual_seed(seed))
    return model(x.to(model.second.dtype)).square().mean()


@pytest.mark.parametrize("grad_clip", [0.0, 0.5])
def test_flat_adamw_equals_pytorch_per_parameter(grad_clip):
    settings = OptimizerSection(lr=0.01, weight_decay=0.1, grad_clip=grad_clip, schedule="linear", warmup_steps=3)
    ours, theirs = Small(), Small()
    optimizer = FlatAdamW(FlatWeights(ours, torch.float32), settings, total_steps=10)
    plain = torch.optim.AdamW(
        [
            {"params": [theirs.first, theirs.second], "weight_decay": 0.1},
            {"params": [theirs.scale, theirs.bias], "weight_decay": 0.0},
        ],
        betas=settings.betas,
        eps=settings.eps,
        foreach=False,
        fused=False,
    )
    for step in range(10):
        loss_of(ours, step).backward()
        loss_of(theirs, step).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), grad_clip or math.inf)
        for group in plain.param_groups:
            group["lr"] = learning_rate(settings, step, 10)
        plain.step()
        plain.zero_grad()
        result = optimizer.step()
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_parameters_are_views_of_one_buffer_decayed_ones_first_and_ties_stay():
    model = Small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = FlatWeights(model, torch.float32)
    assert flat.num_decayed == 7 * 5 + 5 * 3
    assert model.tied is model.first
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    flat.master.copy_(torch.arange(float(len(flat.master))))
    begins = {name: int(p.flatten()[0]) for name, p in model.named_parameters()}
    assert sorted(begins, key=begins.__getitem__) == ["first", "second", "scale", "bias"]


def test_bfloat16_computes_on_a_copy_and_adds_gradients_up_in_float32():
    model = Small()
    flat = FlatWeights(model, torch.bfloat16)
    assert model.first.dtype == torch.bfloat16
    assert flat.master.dtype == flat.grad.dtype == torch.float32
    one, tiny = torch.ones(5, dtype=torch.bfloat16), torch.full((5,), 2.0**-12, dtype=torch.bfloat16)
    (model.bias * one).sum().backward()
    (model.bias * tiny).sum().backward()
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [1 + 2.0**-12] * 5  # lost in bfloat16
    FlatAdamW(flat, OptimizerSection(lr=1.0), total_steps=1).step()
    assert torch.equal(model.bias, flat.master[-5:].bfloat16())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1, 1, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 0.55, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_schedules_by_hand(schedule, expected):
    settings = OptimizerSection(lr=1.0, schedule=schedule, warmup_steps=2, final_lr_frac=0.1)
    assert [learning_rate(settings, step, 6) for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_ends_at_its_final_rate_and_stays_there(schedule):
    settings = OptimizerSection(lr=2.0, schedule=schedule, final_lr_frac=0.25)
    assert learning_rate(settings, 10, 10) == learning_rate(settings, 12, 10) == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(bad):
    model = Small()
    optimizer = FlatAdamW(FlatWeights(model, torch.float32), OptimizerSection(lr=0.1), total_steps=4)
    loss_of(model, 0).backward()
    optimizer.step()
    before = [t.clone() for t in optimizer.state()[0].values()]
    loss_of(model, 1).backward()
    assert model.bias.grad is not None
    model.bias.grad[2] = bad
    result = optimizer.step()
    assert not result.applied
    assert not math.isfinite(result.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.state()[0].values(), strict=True))
    assert (optimizer.step_count, optimizer.skipped_count) == (2, 1)
    assert not model.bias.grad.any(), "the next step must not see it"


def test_the_norm_of_many_numbers_is_that_of_float64():
    weights = FlatWeights(Small(width=800_000), torch.float32)
    optimizer = FlatAdamW(weights, OptimizerSection(grad_clip=0.0), total_steps=1)
    weights.grad.normal_(std=1e-3, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.vector_norm(weights.grad.double()))
    assert optimizer.step().grad_norm == pytest.approx(exact, rel=1e-6)


def test_restoring_into_another_model_names_the_first_difference():
    ours = FlatAdamW(FlatWeights(Small(7), torch.float32), OptimizerSection(), total_steps=1)
    theirs = FlatAdamW(FlatWeights(Small(8), torch.float32), OptimizerSection(), total_steps=1)
    with pytest.raises(CheckpointError, match=r"first.*scale is \[7\] here, \[8\] there"):
        ours.restore(*theirs.state())
