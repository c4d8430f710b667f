"""Trainer interface, and the microbatch routine of every trainer and stage.

A microbatch is some samples of a batch: laid out with each prompt once, run through the model, expanded back to the
samples' own tokens. With a gradient it is training, in RL and supervised alike; without, it is measuring logprobs.
Not here: which samples (`data.pack`), what is optimised (`algo`), how weights move (`optim.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.algo.algorithm import Algorithm
from hone.algo.loss import LossTokens
from hone.data.pack import Shape
from hone.experts import ExpertIds, RoutingRecord, StoredExperts, split_experts, unrecorded
from hone.model.base import CausalModel
from hone.model.layout import Layout
from hone.model.logprobs import token_logprobs
from hone.model.routing import LoadBalance
from hone.ragged import Ints
from hone.train.tensor_files import Snapshot
from hone.types import Batch, Picture, TokenIds, Totals


class Checkpointable(Protocol):
    """What a stage saves of its model, and leaves at its end."""

    @property
    def hf_config(self) -> PreTrainedConfig:
        """What describes the policy on disk."""
        ...

    def write_weights(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the weights at full precision, rounded to `dtype`, under their Hugging Face names; see `shards`.

        Args:
            folder: exists, and is seen under this path by every process of the trainer.
        """
        ...

    def snapshot(self) -> Snapshot:
        """Everything needed to continue bit for bit, to be written to the disk."""
        ...

    def restore(self, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        """Continue where a snapshot was taken, on as many ranks or on others.

        Args:
            tensors: whole ones, or what is on the disk.
        """
        ...


class Trainer(Checkpointable, Protocol):
    """Holds the policy and learns. One process or many look the same to the loop."""

    @property
    def device(self) -> torch.device:
        """Where batches are best put."""
        ...

    def logprobs(self, batch: Batch, *, reference: bool = False, temperature: float | None = None) -> Tensor:
        """(T,) float32 logprobs of the batch's tokens under the policy, or under the frozen reference.

        `temperature` other than the run's own is for diagnosis.
        """
        ...

    def logprobs_and_entropies(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`logprobs` of the policy, and (T,) float32 its entropies at these tokens in nats, by the same pass."""
        ...

    def values(self, batch: Batch) -> Tensor:
        """(T,) float32 value of the state before each of the batch's tokens; only with a critic."""
        ...

    def measure(self, batch: Batch, needs: Collection[str]) -> dict[str, Tensor]:
        """Columns that an algorithm needs of models before an update; see `measured`."""
        ...

    def update(self, batch: Batch, algorithm: Algorithm) -> dict[str, float]:
        """One policy update on a batch that has `advantages_T` and what the algorithm needs. Returns metrics."""
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The policy's weights under their Hugging Face names, to be gone through as often as need be; views, valid
        until the next update."""
        ...

    def fingerprint(self) -> str:
        """Content hash of `weights`, equal to an engine's when every byte is."""
        ...


def measured(trainer: Trainer, batch: Batch, needs: Collection[str]) -> dict[str, Tensor]:
    """Columns under the names that a batch has for them, for what is in `needs` (see `Algorithm.needs`) of
    `ref_logprobs`, `policy_logprobs` and `values`."""
    found: dict[str, Tensor] = {}
    if "ref_logprobs" in needs:
        found["ref_logprobs_T"] = trainer.logprobs(batch, reference=True)
    if "policy_logprobs" in needs:
        found["old_logprobs_T"] = trainer.logprobs(batch)
    if "values" in needs:
        found["value_T"] = trainer.values(batch)
    return found


@dataclass(frozen=True)
class PreparedBatch:
    """A batch as the microbatch routine reads it: indices in numpy on the host, columns in one tensor on the device."""

    prompts: Sequence[TokenIds]
    pictures: Sequence[Sequence[Picture]]
    """Like `Batch.pictures`."""
    shape: Shape
    token_ids_T: Ints
    names: tuple[str, ...]
    """Names of the per-token columns, in the order of the rows of `columns_CT`."""
    columns_CT: Tensor
    num_engines: int = 0
    """Engines with names, which a column `engine_T` counts."""
    routing: tuple[Sequence[RoutingRecord], Sequence[RoutingRecord]] | None = None
    """Of each sample and of each prompt, to be replayed; see `Batch.routing_T`."""

    @classmethod
    def of(cls, batch: Batch, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> PreparedBatch:
        """Keeps the named per-token columns, which are fields of `Batch` or added to it (KeyError if neither)."""
        own = {"loss_mask_T": batch.loss_mask_T, "sampler_logprobs_T": batch.sampler_logprobs_T}
        columns = [(own[name] if name in own else batch.columns[name]).to(device, dtype) for name in names]
        columns_CT = torch.stack(columns) if columns else torch.empty((0, len(batch.token_ids_T)), device=device)
        token_ids_T = batch.token_ids_T.cpu().numpy()
        shape = Shape.of(batch)
        routing = None
        if batch.routing_T is not None:
            routing = split_experts(batch.routing_T, shape.length_S.tolist()), batch.prompt_routing
        return cls(
            batch.prompts, batch.pictures, shape, token_ids_T, tuple(names), columns_CT, len(batch.engines), routing
        )

    def columns_at(self, index_T: Tensor) -> dict[str, Tensor]:
        """The per-token columns, by name, at some tokens."""
        return dict(zip(self.names, self.columns_CT.index_select(1, index_T).unbind(), strict=True))


def lay_out(batch: PreparedBatch, samples: Ints) -> tuple[Layout, Tensor]:
    """The microbatch of `samples`, and (t,) index of their tokens, sample by sample, into the batch's columns.

    Without any sample it is `Layout.idle`.
    """
    index, device = batch.shape.tokens_of(samples), batch.columns_CT.device
    if not len(samples):
        return Layout.idle(device), torch.from_numpy(index).to(device, non_blocking=True)
    layout = Layout.from_flat(
        batch.prompts,
        batch.shape.prompt_S[samples],
        batch.shape.length_S[samples],
        batch.token_ids_T[index],
        device,
        pictures=batch.pictures,
        routing=fetched_routing(batch, samples),
    )
    return layout, torch.from_numpy(index).to(device, non_blocking=True)


def fetched_routing(batch: PreparedBatch, samples: Ints) -> tuple[ExpertIds, Mapping[int, ExpertIds]] | None:
    """Where an engine sent the tokens of `samples`, in order, and of their prompts; None: no record is left."""
    if batch.routing is None:
        return None
    of_samples, of_prompts = batch.routing
    prompts = np.unique(batch.shape.prompt_S[samples]).tolist()
    stored = [*(of_samples[sample] for sample in samples), *(of_prompts[prompt] for prompt in prompts)]
    found = [experts.get() if isinstance(experts, StoredExperts) else experts for experts in stored]
    like = next((experts for experts in found if experts is not None), None)
    if like is None:
        return None
    each = [unrecorded(len(s), like) if e is None else e for s, e in zip(stored, found, strict=True)]
    return np.concatenate(each[: len(samples)]), dict(zip(prompts, each[len(samples) :], strict=True))


def expanded(value_U: Tensor, layout: Layout) -> Tensor:
    """(t,) values of every token of every sample, from those of the unique ones."""
    return value_U if layout.expand_T is None else value_U[layout.expand_T]


def samples_of_tokens(batch: PreparedBatch, samples: Ints) -> Tensor:
    """(t,) which of `samples` each of their tokens belongs to, counted from 0."""
    sample_T = np.repeat(np.arange(len(samples)), batch.shape.length_S[samples])
    return torch.from_numpy(sample_T).to(batch.columns_CT.device, non_blocking=True)


def forward_samples(
    model: CausalModel,
    batch: PreparedBatch,
    samples: Ints,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_has_gradient: bool = False,
    balance: LoadBalance | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs and entropies of every token of `samples`, sample by sample.

    Returns:
        (t,) float32 logprobs, (t,) float32 entropies, and (t,) index of these tokens into the batch's columns.
    """
    layout, index = lay_out(batch, samples)
    found = token_logprobs(
        model.hidden(layout, balance),
        model.output_weight,
        model.sequences.share(layout.target_U),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy_grad=entropy_has_gradient,
        logit_map=model.logit_map,
    )
    logprobs_U, entropy_U = (model.sequences.whole(value_U, len(layout.target_U)) for value_U in found)
    return expanded(logprobs_U, layout), expanded(entropy_U, layout), index


def train_microbatch(
    model: CausalModel,
    batch: PreparedBatch,
    samples: Ints,
    algorithm: Algorithm,
    totals: Totals,
    *,
    temperature: float,
    chunk_tokens: int,
    balance: LoadBalance | None = None,
    balance_weight: float = 0.0,
) -> Tensor:
    """Forward, loss and backward of some samples; gradients add up in the parameters.

    Without a column `old_logprobs_T` the policy has not moved since the update began, and old is now.

    Args:
        balance: is given the loss that balances experts, which is added with this weight.

    Returns:
        What the algorithm measured (see `algo.measures.MEASURES`), on the device.
    """
    logprobs_T, entropy_T, index_T = forward_samples(
        model,
        batch,
        samples,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy_has_gradient=algorithm.entropy_has_gradient,
        balance=balance,
    )
    columns = batch.columns_at(index_T)
    tokens = LossTokens(
        logprobs_T=logprobs_T,
        entropy_T=entropy_T,
        old_logprobs_T=columns.get("old_logprobs_T", logprobs_T.detach()),
        sampler_logprobs_T=columns["sampler_logprobs_T"],
        advantages_T=columns["advantages_T"],
        loss_mask_T=columns["loss_mask_T"],
        sample_T=samples_of_tokens(batch, samples),
        num_samples=len(samples),
        ref_logprobs_T=columns.get("ref_logprobs_T"),
        outlier_T=columns.get("outlier_T"),
        engine_T=columns.get("engine_T"),
        num_engines=batch.num_engines,
    )
    loss, measured = algorithm.loss(tokens, totals)
    if balance is not None and balance.loss is not None:
        loss = loss + balance_weight * balance.loss
    loss.backward()
    return measured
