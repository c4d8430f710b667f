"""Learner: a model in training with its optimizer and its state; Passes: how the models of a process compute batches.

Not here: what is learnt (`policy.py` a policy, `critic.py` values, `pairs.py` a reward model), or what differs between
one process and many (`ranks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.config.run import OptimizerSection
from hone.data.pack import Shape, computed_tokens
from hone.memory.guard import UNGUARDED, Guard
from hone.model.base import CausalModel
from hone.model.fingerprint import weights_fingerprint
from hone.model.heads import ScalarModel
from hone.model.shards import write_weights
from hone.ragged import Ints
from hone.train.fixed_sums import fixed_sums
from hone.train.optim import StepResult, Weights
from hone.train.ranks import ALONE, Ranks
from hone.train.tensor_files import LiveSnapshot, Share
from hone.train.trainer import PreparedBatch, forward_samples
from hone.types import Batch

M = TypeVar("M", bound=CausalModel | ScalarModel)
T = TypeVar("T")


class WeightsOf:
    """A re-iterable view of a model's current weights: loading them may have to begin again."""

    def __init__(self, named: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self._named = named

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._named()


@dataclass
class Passes:
    """How the models of a process compute batches. Policy, critic and reference in one process share one."""

    precision: Literal["float32", "bfloat16", "float64"]
    """Arithmetic of forward and backward; the rest is float32 at least."""
    tokens_per_microbatch: int
    """Tokens of a microbatch of one rank; affects memory, never the result. So does `logprob_chunk_tokens`."""
    logprob_chunk_tokens: int
    temperature: float
    """Temperature of the sampler; logprobs are of the same distribution."""
    guard: Guard = UNGUARDED
    """Handles running out of memory, among ranks on all of them together (`agreement.py`)."""
    ranks: Ranks = ALONE
    """Ranks that compute together."""
    deterministic: bool = False
    """Whether sums on GPUs are in a fixed order."""
    largest_microbatch: int = field(default=0, init=False)
    """Tokens of the largest microbatch of the last pass, with or without gradient."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.precision)

    def microbatches(self, shape: Shape, samples: Ints, *, whole_groups: bool = False) -> list[Ints]:
        """This rank's share of `samples`; see `Ranks.microbatches`."""
        plan = self.ranks.microbatches(shape, samples, self.tokens_per_microbatch, whole_groups=whole_groups)
        self.largest_microbatch = max((computed_tokens(shape, part) for part in plan), default=0)
        return plan

    def without_gradient(self, model: CausalModel | ScalarModel, work: Callable[[], T]) -> T:
        """What passes of `model` without gradients compute; repeated if they run out of memory."""

        def guarded() -> T:
            summing = fixed_sums(self.deterministic)
            with self.guard.phase("logprobs"), torch.no_grad(), self.ranks.computing(model), summing:
                found = work()
            self.guard.agree()
            return found

        return self.guard.attempt(guarded)

    def logprobs(self, model: CausalModel, batch: Batch, temperature: float | None = None) -> Tensor:
        """(T,) float32 logprobs of the batch's tokens under `model`; see `Trainer.logprobs`."""
        return self._columns(model, batch, temperature, 1)[0]

    def logprobs_and_entropies(self, model: CausalModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Like `logprobs`, and (T,) float32 entropies of `model` at these tokens, nats."""
        logprobs_T, entropy_T = self._columns(model, batch, None, 2)
        return logprobs_T, entropy_T

    def _columns(self, model: CausalModel, batch: Batch, temperature: float | None, count: int) -> Tensor:
        """(count, T) of: logprobs, entropies."""
        device, dtype = self.ranks.device(model), torch.promote_types(self.compute_dtype, torch.float32)
        every = np.arange(len(batch.length_S))

        def measure() -> Tensor:
            prepared = PreparedBatch.of(batch, (), dtype, device)
            found_CT = torch.zeros(count, len(batch.token_ids_T), dtype=dtype, device=device)
            for samples in self.microbatches(prepared.shape, every):
                *values, index = forward_samples(
                    model,
                    prepared,
                    samples,
                    temperature=temperature or self.temperature,
                    chunk_tokens=self.logprob_chunk_tokens,
                )
                found_CT[:, index] = torch.stack(values[:count])
                self.guard.check()
            return self.ranks.column(found_CT).to(batch.loss_mask_T.device)

        return self.without_gradient(model, measure)


class Learner(Generic[M]):
    """Owns `model` and trains it in place.

    Args:
        model: its parameters are taken over, by `passes.ranks`.
        optimizer: learning rate, schedule, clipping.
        total_optimizer_steps: of the whole stage; where the schedule ends.
    """

    def __init__(self, model: M, passes: Passes, *, optimizer: OptimizerSection, total_optimizer_steps: int) -> None:
        self.model, self.passes = model, passes
        self.optimizer = passes.ranks.optimizer(
            model, passes.compute_dtype, settings=optimizer, total_steps=total_optimizer_steps
        )

    def optimizer_step(self, accumulate: Callable[[], T]) -> tuple[T, StepResult]:
        """One optimizer step: `accumulate` adds up its gradient, which is then applied, once.

        Whatever runs out of memory, it is repeated from a gradient of zero. Returns what `accumulate` did.
        """
        guard = self.passes.guard

        def work() -> tuple[T, StepResult]:
            with guard.phase("update"), fixed_sums(self.passes.deterministic):
                measured = accumulate()
            with guard.phase("optimizer", final=True), fixed_sums(self.passes.deterministic):
                return measured, self.optimizer.step(guard.agree)

        return guard.attempt(work, self.optimizer.begin_again)

    @property
    def held(self) -> Weights:
        """The trained part of the model."""
        return self.optimizer.weights

    @property
    def device(self) -> torch.device:
        return self.held.device

    @property
    def hf_config(self) -> PreTrainedConfig:
        """What describes the model on disk."""
        return self.model.hf_config

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """What engines are sent: the model's weights under their Hugging Face names, or with `lora.publish: adapter`
        the adapter under peft's; see `Trainer.weights`."""
        adapter = self.model.adapter if isinstance(self.model, CausalModel) else None
        alone = adapter is not None and adapter.settings.publish == "adapter"
        return WeightsOf(self.held.named_trained if alone else self.held.named)

    def fingerprint(self) -> str:
        """Content hash of the weights; see `Trainer.fingerprint`."""
        return weights_fingerprint(self.weights())

    def master_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The float32 master weights under their Hugging Face names, valid until the next update."""
        return self.held.named_master()

    def write_weights(self, folder: Path, dtype: torch.dtype) -> None:
        """See `Checkpointable.write_weights`; for one process."""
        write_weights(folder, self.master_weights(), dtype=dtype)

    def state(self) -> tuple[dict[str, Tensor | Share], dict[str, Any]]:
        """Everything needed to continue bit for bit: tensors or this rank's shares of them (live, not copies), and the
        rest, fit for JSON."""
        return self.optimizer.state()

    def snapshot(self) -> LiveSnapshot:
        """See `Trainer.snapshot`; for one process."""
        return LiveSnapshot(*self.state())

    def restore(self, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        """Continue where `state` was taken; CheckpointError if that was another model."""
        self.optimizer.restore(tensors, rest)
