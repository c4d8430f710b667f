"""The one change that would free most: what a colleague says after naming what is too large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hone.plan.inputs import Inputs, key_in
from hone.plan.ledger import Ledger, gib
from hone.plan.placement import OFFLOADS
from hone.plan.settings import changed, setting
from hone.plan.verdict import tightest

LEAST_FRAC = 0.05
"""Of the peak: a change that frees less is not worth a word."""


def best_cure(inputs: Inputs, ledgers: Sequence[Ledger], relisted: Callable[[Inputs], Sequence[Ledger]]) -> str | None:
    """`placement.loss=chunked would free 25.6 GiB`, of the fullest device's peak; None where no one change helps much.

    Args:
        relisted: the ledgers of other inputs.
    """
    device = tightest(ledgers)
    number, peak = list(ledgers).index(device), device.peak.bytes
    best, most = None, LEAST_FRAC * peak
    for key, value in _candidates(inputs):
        freed = peak - relisted(changed(inputs, {key: value}))[number].peak.bytes
        if freed > most:
            best, most = f"{_said(inputs, key, value)} would free {gib(freed)}", freed
    return best


def _said(inputs: Inputs, key: str, value: Any) -> str:
    if inputs.topology is not None and key in OFFLOADS:
        return f"{OFFLOADS[key]} in cluster.trainer.offload"
    return f"{key_in(inputs, key)}={_yaml(value)}"


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _candidates(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    """Single changes that leave the algorithm as it is."""
    train, longest = inputs.config.train, inputs.workload.lengths.longest
    if train.tokens_per_microbatch > longest:
        yield "train.tokens_per_microbatch", max(longest, train.tokens_per_microbatch // 2)
    if train.logprob_chunk_tokens > 256:
        yield "train.logprob_chunk_tokens", 256
    if inputs.placement.mode == "local":
        if train.activation_checkpointing != "full":
            yield "train.activation_checkpointing", "full"
        if inputs.config.rollout.max_concurrent_samples > 1:
            yield "rollout.max_concurrent_samples", inputs.config.rollout.max_concurrent_samples // 2
        if inputs.config.rollout.prefill_tokens > longest:
            yield "rollout.prefill_tokens", max(longest, inputs.config.rollout.prefill_tokens // 4)
        return
    if setting(inputs, "placement.checkpointing") != "full":
        yield "placement.checkpointing", "full"
    if inputs.placement.loss == "naive":
        yield "placement.loss", "chunked"
    for key in OFFLOADS:
        if not setting(inputs, key):
            yield key, True
    if inputs.topology is None and not inputs.placement.splits_root:
        yield "placement.splits_root", True
    if inputs.topology is None and inputs.placement.mode == "colocated" and not inputs.placement.offload_trainer:
        yield "placement.offload_trainer", True
    if inputs.placement.engine.memory_frac > 0.3:
        yield "placement.engine.memory_frac", round(inputs.placement.engine.memory_frac - 0.1, 2)
