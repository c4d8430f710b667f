"""Verdict of a plan: fits, tight or does not fit, with one sentence why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hone.config.engine import POLICY_GPU_FRAC
from hone.config.render import inline
from hone.plan.inputs import Inputs, changed, room_of
from hone.plan.ledger import Ledger, Moment, gib, percent

FitLevel = Literal["fits", "tight", "does not fit"]

TIGHT_FRAC = 0.06
"""Head-room below this share of a device is tight: fragmentation and what a plan cannot see need about as much."""
SMALL_FRAC = 0.03
"""Terms below this share of a moment go unnamed in a sentence."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a plan can run, and why not."""

    level: FitLevel
    sentence: str
    problems: tuple[str, ...] = ()
    """What is impossible whatever the peak: an engine without room for its cache, a division that leaves a rest."""

    def as_dict(self) -> dict[str, Any]:
        return {"level": self.level, "sentence": self.sentence, "problems": list(self.problems)}


def judge(ledgers: Sequence[Ledger], problems: Sequence[str]) -> Verdict:
    """The verdict on all ledgers together; the tightest one is the one to talk about."""
    device = tightest(ledgers)
    return Verdict("does not fit" if problems else level_of(device), describe(device), tuple(problems))


def tightest(ledgers: Sequence[Ledger]) -> Ledger:
    """The kind of device with the least head-room, as a share of it."""
    return min(ledgers, key=lambda ledger: ledger.headroom_bytes / ledger.capacity_bytes)


def level_of(ledger: Ledger) -> FitLevel:
    if ledger.headroom_bytes < 0:
        return "does not fit"
    return "tight" if ledger.headroom_bytes < TIGHT_FRAC * ledger.capacity_bytes else "fits"


def describe(ledger: Ledger) -> str:
    """`H100-80G: peak 46.9 GiB of 79.1 GiB in update, loss backward: logits 27.8 GiB (59 %), ...; 32.2 GiB free`."""
    peak = ledger.peak
    room = ledger.headroom_bytes
    rest = f"{gib(room)} free" if room >= 0 else f"{gib(-room)} too much"
    return (
        f"{ledger.device}: peak {gib(peak.bytes)} of {gib(ledger.capacity_bytes)} in {peak.phase}, {peak.name}: "
        f"{shares(peak)}; {rest}"
    )


def shares(moment: Moment, most: int = 5) -> str:
    """The largest terms of a moment, the largest with its share: `logits 27.8 GiB (59 %), AdamW moments 7.6 GiB`."""
    named = [term for term in moment.by_size() if term.bytes >= SMALL_FRAC * moment.bytes][:most] or [moment.largest]
    first, *others = named
    words = [f"{first.name} {gib(first.bytes)} ({percent(first.bytes / moment.bytes)})"]
    return ", ".join(words + [f"{term.name} {gib(term.bytes)}" for term in others])


LEAST_FRAC = 0.05
"""Share of the peak; a change that frees less is not suggested."""


def best_suggestion(
    inputs: Inputs, ledgers: Sequence[Ledger], relisted: Callable[[Inputs], Sequence[Ledger]]
) -> str | None:
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
    if inputs.is_local or cluster.engines.kind.memory != "share":
        if rollout.max_concurrent_samples > 1:
            yield "rollout.max_concurrent_samples", rollout.max_concurrent_samples // 2
        if (held := room_of(inputs).tokens(rollout.max_concurrent_samples)) // 2 >= longest:
            yield "rollout.kv_cache_tokens", held // 2
        if rollout.prefill_tokens > longest:
            yield "rollout.prefill_tokens", max(longest, rollout.prefill_tokens // 4)
    elif (share := cluster.engines.gpu_memory_utilization or POLICY_GPU_FRAC) > 0.3:
        yield "cluster.engines.gpu_memory_utilization", round(share - 0.1, 2)
    for part in ("parameters", "optimizer", "reference"):
        if not inputs.is_local and part not in cluster.trainer.offload:
            yield "cluster.trainer.offload", (*cluster.trainer.offload, part)
