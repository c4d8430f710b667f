"""The one change of a setting that would free most memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hone.config.engine import POLICY_GPU_FRAC
from hone.config.render import inline
from hone.plan.inputs import Inputs
from hone.plan.ledger import Ledger, gib
from hone.plan.settings import changed
from hone.plan.verdict import tightest

LEAST_FRAC = 0.05
"""Of the peak: a change that frees less is not suggested."""


def best_cure(inputs: Inputs, ledgers: Sequence[Ledger], relisted: Callable[[Inputs], Sequence[Ledger]]) -> str | None:
    """`train.logprob_chunk_tokens=256 would free 25.6 GiB` of the fullest device's peak; None if no change helps much.

    Args:
        relisted: the ledgers of other inputs.
    """
    device = tightest(ledgers)
    number, peak = list(ledgers).index(device), device.peak.bytes
    best, most = None, LEAST_FRAC * peak
    for key, value in _candidates(inputs):
        freed = peak - relisted(changed(inputs, {key: value}))[number].peak.bytes
        if freed > most:
            best, most = f"{key}={inline(value)} would free {gib(freed)}", freed
    return best


def _candidates(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    """Single changes that leave the algorithm as it is."""
    config, longest = inputs.config, inputs.workload.lengths.longest
    train, rollout, cluster = config.train, config.rollout, config.cluster
    if train.tokens_per_microbatch > longest:
        yield "train.tokens_per_microbatch", max(longest, train.tokens_per_microbatch // 2)
    if train.logprob_chunk_tokens > 256:
        yield "train.logprob_chunk_tokens", 256
    if train.activation_checkpointing != "full":
        yield "train.activation_checkpointing", "full"
    if inputs.is_local or not cluster.engines.kind.takes_share:
        if rollout.max_concurrent_samples > 1:
            yield "rollout.max_concurrent_samples", rollout.max_concurrent_samples // 2
        if rollout.prefill_tokens > longest:
            yield "rollout.prefill_tokens", max(longest, rollout.prefill_tokens // 4)
    elif (share := cluster.engines.gpu_memory_utilization or POLICY_GPU_FRAC) > 0.3:
        yield "cluster.engines.gpu_memory_utilization", round(share - 0.1, 2)
    for part in ("parameters", "optimizer", "reference"):
        if not inputs.is_local and part not in cluster.trainer.offload:
            yield "cluster.trainer.offload", (*cluster.trainer.offload, part)
