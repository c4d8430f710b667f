"""AdamW, gradient clipping and learning-rate schedules: whatever holds the weights, and over one flat buffer.

`FlatWeights` owns every trainable number of a model as three flat buffers: float32 master weights, gradients in
float32, and, where arithmetic is bfloat16, the compute copy that the model's parameters are views of. So an optimizer
step is a handful of operations whatever the number of parameters. Weights that are divided over many processes are in
`fsdp.py`; in a checkpoint both are the same, under the names of `trained_weights`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hone.config.run import OptimizerSection
from hone.errors import CheckpointError
from hone.model.base import CausalModel
from hone.train.tensor_files import Share

T = TypeVar("T")
Segments = Sequence[tuple[str, Sequence[int]]]
"""Name and shape of each trained weight."""

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
"""What is kept of each trained number: itself, and what AdamW keeps, as torch names it."""
FRESH = "fresh_moments"
"""In the values that `AdamW.restore` is given: its moments and the count of its bias correction start anew, while the
learning rate's schedule continues."""
NORM_NUMBERS = 1 << 16
"""Of one part of `accurate_norm`."""


class Weights(Protocol):
    """The trained weights of a model, on one device or divided over ranks."""

    @property
    def device(self) -> torch.device:
        """Device that it computes on."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of master weights and gradients, at least float32."""
        ...

    @property
    def num_trained(self) -> int:
        """Trained numbers, over all processes."""
        ...

    def passes(self, microbatches: Iterable[T]) -> Iterator[T]:
        """The microbatches whose gradients make one optimizer step, one after another."""
        ...

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The model's weights as they compute, under their Hugging Face names; valid until the next update."""
        ...

    def named_trained(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, as it computes, under the names of `trained_weights`: an adapter alone; as `named`."""
        ...

    def named_master(self) -> Iterator[tuple[str, Tensor]]:
        """The master weights under their Hugging Face names, merged where there is an adapter; as `named`."""
        ...

    def refresh(self) -> None:
        """The master weights have changed: compute with what they are now."""
        ...


class FlatWeights:
    """The trainable parameters of `model`, made views into flat buffers; parameters with weight decay come first.

    Args:
        model: its parameters are replaced in place; names, shapes and tying stay as they were.
        compute_dtype: arithmetic of forward and backward. Master weights and gradients are at least float32.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        self._model: Any = model
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        named.sort(key=lambda item: item[1].dim() < 2)  # stable: matrices first, then norms, biases and vectors
        self.num_decayed = sum(p.numel() for _, p in named if p.dim() >= 2)
        dtype = torch.promote_types(compute_dtype, torch.float32)
        self.master = torch.cat([p.detach().reshape(-1).to(dtype) for _, p in named])
        self.grad = torch.zeros_like(self.master)
        self.compute = self.master if compute_dtype == dtype else self.master.to(compute_dtype)
        self._parameters = [p for _, p in named]
        self._point_at(self.compute)
        flat = self.compute.untyped_storage()._cdata
        self._places = {
            name: (weight.size(), weight.stride(), weight.storage_offset())
            for name, weight in trained_weights(model)
            if weight.untyped_storage()._cdata == flat  # and no buffer of Transformers' own
        }
        offset = 0
        for p in self._parameters:
            end = offset + p.numel()
            p.grad_dtype = dtype
            p.grad = self.grad[offset:end].view(p.shape)  # autograd adds into it, microbatch by microbatch
            offset = end

    @property
    def device(self) -> torch.device:
        return self.master.device

    @property
    def dtype(self) -> torch.dtype:
        return self.master.dtype

    @property
    def num_trained(self) -> int:
        return self.master.numel()

    def passes(self, microbatches: Iterable[T]) -> Iterator[T]:
        """See `Weights.passes`: every one adds into the same buffer."""
        return iter(microbatches)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """See `Weights.named`; views."""
        return self._model.named_weights()

    def named_trained(self) -> Iterator[tuple[str, Tensor]]:
        """See `Weights.named_trained`; views."""
        return trained_weights(self._model)

    def named_master(self) -> Iterator[tuple[str, Tensor]]:
        """See `Weights.named_master`; views of what no adapter changes."""
        weights = self._model.named_weights()
        is_merged = isinstance(self._model, CausalModel) and self._model.adapter is not None
        while True:
            # The factors of an adapter are read as the weight is made; between two weights others may compute.
            with self._showing_master() if is_merged else nullcontext():
                name, weight = next(weights, ("", None))
            if weight is None:
                return
            place = self._places.get(name)
            yield name, weight.to(self.dtype) if place is None else self.master.as_strided(*place)

    @contextmanager
    def _showing_master(self) -> Iterator[None]:
        """Inside, the model's parameters are the master weights themselves."""
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

    def split(self, buffer: Tensor) -> dict[str, Tensor]:
        """A buffer's numbers by weight, under the names of `trained_weights`; views."""
        return {name: buffer.as_strided(*place) for name, place in self._places.items()}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what a checkpoint has of the master weights."""
        for name, own in self.split(self.master).items():
            own.copy_(tensors[f"{MASTER}/{name}"])

    def refresh(self) -> None:
        """See `Weights.refresh`; in place."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)


def trained_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """What is trained of a model, by the name that checkpoints have for it: Hugging Face's, or of an adapter peft's."""
    adapter = model.adapter if isinstance(model, CausalModel) else None
    yield from model.named_weights() if adapter is None else adapter.weights()


def learning_rate(settings: OptimizerSection, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total_steps`.

    Rises linearly over `warmup_steps`, or `warmup_frac` of the steps, whose last step has the full rate; then constant,
    or falls to `final_lr_frac * lr` at `total_steps` on a line or a half cosine.
    """
    warmup_steps = settings.warmup_steps or math.ceil(settings.warmup_frac * total_steps)
    if step < warmup_steps:
        return settings.lr * (step + 1) / warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.final_lr_frac + (1 - settings.final_lr_frac) * left)


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    grad_norm: float
    """Global norm before clipping."""
    lr: float
    applied: bool
    """False: the gradient was not finite."""


class AdamW(ABC):
    """AdamW (arXiv:1711.05101) with clipping by the global gradient norm, whatever holds the weights.

    A gradient that is not finite is not applied: the step is counted as skipped, weights and moments stay as they
    are, and the schedule continues.
    """

    def __init__(self, settings: OptimizerSection, *, total_steps: int) -> None:
        self.settings, self.total_steps = settings, total_steps
        self.step_count = 0
        """Optimizer steps taken or skipped: the position in the schedule."""
        self.skipped_count = 0

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """What it moves."""

    def step(self, agree: Callable[[], object] = lambda: None) -> StepResult:
        """Apply the accumulated gradient and clear it.

        Args:
            agree: raises where the step is not to be applied, on all ranks alike; see `Guard.agree`.
        """
        lr = learning_rate(self.settings, self.step_count, self.total_steps)
        norm = self._gradient_norm()
        agree()
        applied = math.isfinite(norm)
        if applied:
            if 0 < self.settings.grad_clip < norm:
                self._scale_gradient(self.settings.grad_clip / norm)
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._apply()
            self.weights.refresh()
        self.step_count += 1
        self.skipped_count += not applied
        self._clear_gradient()
        return StepResult(norm, lr, applied)

    def begin_again(self) -> None:
        """Forget the gradient of an optimizer step that ran out of memory before it was applied.

        Applying allocates nothing, so weights and moments are as they were; Adam's own count may be one ahead.
        """
        self._clear_gradient()
        self._count_applied()

    def state(self) -> tuple[dict[str, Tensor | Share], dict[str, Any]]:
        """Tensors, or this rank's shares of them (live, not copies), and plain values that `restore` needs.

        They are named `master/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME`, with the names of `trained_weights`, and
        do not depend on whether weights were divided, or over how many ranks.
        """
        rest = {
            "optimizer_step": self.step_count,
            "skipped_steps": self.skipped_count,
            "weights": [[name, list(size)] for name, size in self._sizes()],
        }
        return dict(self._tensors()), rest

    def restore(self, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        """Continue bit for bit where `state` was taken, on whatever ranks.

        Args:
            tensors: whole ones, or what is on the disk.

        Raises:
            CheckpointError: the state is of a model with other parameters.
        """
        refuse_other_weights(self._sizes(), rest["weights"])
        for name, tensor in self._tensors():
            share = Share.of(tensor)
            if name.startswith(f"{MASTER}/") or FRESH not in rest:
                share.take(tensors, name)
            else:
                share.tensor.zero_()
        self.step_count, self.skipped_count = int(rest["optimizer_step"]), int(rest["skipped_steps"])
        if FRESH in rest:  # no step so far has moved these moments
            self.skipped_count = self.step_count
        self._count_applied()
        self._clear_gradient()
        self.weights.refresh()

    @abstractmethod
    def _sizes(self) -> Segments:
        """The trained weights, under the names of `trained_weights`."""

    @abstractmethod
    def _tensors(self) -> Iterator[tuple[str, Tensor | Share]]:
        """Those of `state`."""

    @abstractmethod
    def _gradient_norm(self) -> float:
        """Of all trained numbers together."""

    def partial_gradient_norm(self) -> float | None:
        """Norm of what has been accumulated so far; None where no process has all of it before the step."""
        return None

    @abstractmethod
    def _scale_gradient(self, factor: float) -> None: ...

    @abstractmethod
    def _apply(self) -> None:
        """Move weights and moments by the gradient."""

    @abstractmethod
    def _clear_gradient(self) -> None: ...

    def _begin_adam(self, groups: Sequence[dict[str, Any]], moments: Mapping[nn.Parameter, dict[str, Tensor]]) -> None:
        """Torch's Adam of these groups of parameters, on these moments."""
        lr, betas, eps = self.settings.lr, self.settings.betas, self.settings.eps
        self._adam = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        for parameter, own in moments.items():
            applied = torch.zeros((), dtype=torch.float32, device=parameter.device)  # for the bias correction
            self._adam.state[parameter] = {"step": applied, **own}

    def _count_applied(self) -> None:
        """Of the steps that moved the weights Adam's bias correction is a function."""
        for state in self._adam.state.values():
            state["step"].fill_(self.step_count - self.skipped_count)


class FlatAdamW(AdamW):
    """On a `FlatWeights`."""

    def __init__(self, weights: FlatWeights, settings: OptimizerSection, *, total_steps: int) -> None:
        super().__init__(settings, total_steps=total_steps)
        self._weights = weights
        self.moments = {name: torch.zeros_like(weights.master) for name in MOMENTS}
        decayed, rest = slice(0, weights.num_decayed), slice(weights.num_decayed, None)
        groups = []
        moments_of: dict[nn.Parameter, dict[str, Tensor]] = {}
        for segment, weight_decay in ((decayed, settings.weight_decay), (rest, 0.0)):
            parameter = nn.Parameter(weights.master[segment])
            parameter.grad = weights.grad[segment]
            moments_of[parameter] = {name: moment[segment] for name, moment in self.moments.items()}
            groups.append({"params": [parameter], "weight_decay": weight_decay})
        self._begin_adam(groups, moments_of)

    @property
    def weights(self) -> FlatWeights:
        return self._weights

    def _gradient_norm(self) -> float:
        return float(accurate_norm(self.weights.grad))

    def partial_gradient_norm(self) -> float | None:
        return self._gradient_norm()

    def _scale_gradient(self, factor: float) -> None:
        self.weights.grad.mul_(factor)

    def _apply(self) -> None:
        self._adam.step()

    def _clear_gradient(self) -> None:
        self.weights.grad.zero_()

    def _sizes(self) -> Segments:
        return [(name, tensor.shape) for name, tensor in self.weights.split(self.weights.master).items()]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the flat buffers."""
        for kind, buffer in {MASTER: self.weights.master, **self.moments}.items():
            for name, tensor in self.weights.split(buffer).items():
                yield f"{kind}/{name}", tensor


def accurate_norm(x: Tensor) -> Tensor:
    """Euclidean norm of a flat tensor, from norms of parts: on a CPU, torch's own of 30 million float32 numbers is
    wrong by 0.16 %, as it adds small squares to a large sum."""
    cut = len(x) - len(x) % NORM_NUMBERS
    rest = torch.linalg.vector_norm(x[cut:])
    if not cut:
        return rest
    rows = torch.linalg.vector_norm(x[:cut].view(-1, NORM_NUMBERS), dim=1)
    return torch.linalg.vector_norm(torch.cat((rows, rest[None])))


def refuse_other_weights(ours: Segments, theirs: Segments) -> None:
    """Raises CheckpointError unless a checkpoint holds the trained weights of this model."""
    here, there = ({name: list(shape) for name, shape in segments} for segments in (ours, theirs))
    if here != there:
        name = next(name for name in (*here, *there) if here.get(name) != there.get(name))
        raise CheckpointError(
            f"the checkpoint holds {len(there)} trained weights, this model has {len(here)}; first difference: "
            f"{name} is {here.get(name, 'none')} here, {there.get(name, 'none')} there. "
            "Resume with the model section that the run was started with, or start with --fresh."
        )
