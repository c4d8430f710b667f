"""AdamW over one flat buffer, gradient clipping, and learning-rate schedules.

`FlatWeights` owns every trainable number of a model as three flat buffers: float32 master weights, gradients in
float32, and, where arithmetic is bfloat16, the compute copy that the model's parameters are views of. So an optimizer
step is a handful of operations whatever the number of parameters, and a checkpoint is three tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hone.config.run import OptimizerSection
from hone.errors import CheckpointError


class FlatWeights:
    """The trainable parameters of `model`, made views into flat buffers; parameters with weight decay come first.

    Args:
        model: its parameters are replaced in place; names, shapes and tying stay as they were.
        compute_dtype: arithmetic of forward and backward. Master weights and gradients are at least float32.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        named.sort(key=lambda item: item[1].dim() < 2)  # stable: matrices first, then norms, biases and vectors
        self.segments: list[tuple[str, list[int]]] = [(name, list(p.shape)) for name, p in named]
        """Name and shape of each parameter, in the order of the buffers."""
        self.num_decayed = sum(p.numel() for _, p in named if p.dim() >= 2)
        dtype = torch.promote_types(compute_dtype, torch.float32)
        self.master = torch.cat([p.detach().reshape(-1).to(dtype) for _, p in named])
        self.grad = torch.zeros_like(self.master)
        self.compute = self.master if compute_dtype == dtype else self.master.to(compute_dtype)
        self._parameters = [p for _, p in named]
        self._point_at(self.compute)
        offset = 0
        for p in self._parameters:
            end = offset + p.numel()
            p.grad_dtype = dtype
            p.grad = self.grad[offset:end].view(p.shape)  # autograd adds into it, microbatch by microbatch
            offset = end

    @contextmanager
    def showing_master(self) -> Iterator[None]:
        """Inside, the model's parameters are the master weights themselves: for exporting them at full precision."""
        self._point_at(self.master)
        try:
            yield
        finally:
            self._point_at(self.compute)

    def _point_at(self, buffer: Tensor) -> None:
        offset = 0
        for p in self._parameters:
            p.data = buffer[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()

    def refresh_compute(self) -> None:
        """Bring the compute copy up to date with the master weights, in place."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)


def learning_rate(settings: OptimizerSection, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total_steps`.

    Rises linearly over `warmup_steps`, whose last step has the full rate; then constant, or falls to
    `final_lr_frac * lr` at `total_steps` on a line or a half cosine.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = min((step - settings.warmup_steps) / max(total_steps - settings.warmup_steps, 1), 1.0)
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.final_lr_frac + (1 - settings.final_lr_frac) * left)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Global norm before clipping."""
    lr: float
    applied: bool
    """False: the gradient was not finite."""


class FlatAdamW:
    """AdamW (arXiv:1711.05101) on a `FlatWeights`, with clipping by the global gradient norm.

    A gradient that is not finite is not applied: the step is counted as skipped, weights and moments stay as they
    are, and the schedule goes on.
    """

    def __init__(self, weights: FlatWeights, settings: OptimizerSection, *, total_steps: int) -> None:
        self.weights, self.settings, self.total_steps = weights, settings, total_steps
        self.step_count = 0
        """Optimizer steps taken or skipped: the position in the schedule."""
        self.skipped_count = 0
        self.moments = {name: torch.zeros_like(weights.master) for name in ("exp_avg", "exp_avg_sq")}
        decayed, rest = slice(0, weights.num_decayed), slice(weights.num_decayed, None)
        groups = []
        moments_of: dict[nn.Parameter, dict[str, Tensor]] = {}
        for segment, weight_decay in ((decayed, settings.weight_decay), (rest, 0.0)):
            parameter = nn.Parameter(weights.master[segment])
            parameter.grad = weights.grad[segment]
            moments_of[parameter] = {name: moment[segment] for name, moment in self.moments.items()}
            groups.append({"params": [parameter], "weight_decay": weight_decay})
        self._adam = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
        for parameter, moments in moments_of.items():
            applied = torch.zeros((), dtype=torch.float32, device=parameter.device)  # for the bias correction
            self._adam.state[parameter] = {"step": applied, **moments}

    def step(self) -> StepResult:
        """Apply the accumulated gradient and clear it."""
        grad, lr = self.weights.grad, learning_rate(self.settings, self.step_count, self.total_steps)
        norm = float(torch.linalg.vector_norm(grad))
        applied = math.isfinite(norm)
        if applied:
            if 0 < self.settings.grad_clip < norm:
                grad.mul_(self.settings.grad_clip / norm)
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            self.weights.refresh_compute()
        self.step_count += 1
        self.skipped_count += not applied
        grad.zero_()
        return StepResult(norm, lr, applied)

    def begin_again(self) -> None:
        """Forget the gradient of an optimizer step that ran out of memory before it was applied.

        Applying allocates nothing, so weights and moments are as they were; Adam's own count may be one ahead.
        """
        self.weights.grad.zero_()
        self._count_applied()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors (the live buffers, not copies) and plain values that `restore` needs."""
        rest = {
            "optimizer_step": self.step_count,
            "skipped_steps": self.skipped_count,
            "segments": self.weights.segments,
        }
        return {"master": self.weights.master, **self.moments}, rest

    def restore(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Continue bit for bit where `state` was taken.

        Raises:
            CheckpointError: the state is of a model with other parameters.
        """
        ours = [[name, shape] for name, shape in self.weights.segments]
        theirs = [[name, list(shape)] for name, shape in rest["segments"]]
        if ours != theirs:
            difference = next((pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), None)
            where = f"first difference: {difference[0]} here, {difference[1]} there" if difference else "one has more"
            raise CheckpointError(
                f"the checkpoint holds {len(theirs)} parameters, this model has {len(ours)} ({where}). "
                "Resume with the model section that the run was started with, or start with --fresh."
            )
        self.weights.master.copy_(tensors["master"])
        for name, moment in self.moments.items():
            moment.copy_(tensors[name])
        self.step_count, self.skipped_count = int(rest["optimizer_step"]), int(rest["skipped_steps"])
        self._count_applied()
        self.weights.grad.zero_()
        self.weights.refresh_compute()

    def _count_applied(self) -> None:
        for state in self._adam.state.values():
            state["step"].fill_(self.step_count - self.skipped_count)
