"""Settings that the out-of-memory ladder changes during a run: which may help in each phase, their next values, and a
record of each change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hone.errors import ClusterError
from hone.plan.ledger import gib

TOKENS, CHUNK, RECOMPUTE = (
    "train.tokens_per_microbatch",
    "train.logprob_chunk_tokens",
    "train.activation_checkpointing",
)
MADE_AGAIN = ("none", "selective", "full")
"""Values of `RECOMPUTE`, each taking less memory than the one before."""
ROWS, PREFILL = "rollout.max_concurrent_samples", "rollout.prefill_tokens"

RUNGS: Mapping[str, tuple[str, ...]] = {
    "rollout": (PREFILL, ROWS),
    "logprobs": (CHUNK, TOKENS, ROWS),
    "update": (CHUNK, TOKENS, RECOMPUTE, ROWS),
    "optimizer": (ROWS, TOKENS),
    "publish": (ROWS,),
    "checkpoint": (ROWS,),
}
"""What may help in each phase, cheapest in time first. The engine's cache stays between rollouts, so fewer sequences
help everywhere; smaller microbatches leave an allocator with fewer large pieces that cannot be reused. What is in no
list (starting up) has no rung."""

Reason = Literal["out of memory", "out of memory on one rank", "room", "near the limit"]


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting that can be changed during a run."""

    key: str
    apply: Callable[[Any], object]
    lowest: int = 1
    highest: int | None = None
    """More than this changes nothing; None: not to be raised."""
    in_use: Callable[[], int] | None = None
    """How much of it the last work really took: where halving begins."""

    def lower(self, value: Any) -> Any:
        """The next value that takes less memory; None at the end."""
        if self.key == RECOMPUTE:
            less = MADE_AGAIN[MADE_AGAIN.index(value) + 1 :] if isinstance(value, str) else MADE_AGAIN[-1:]
            return less[0] if less else None
        lowered = max(self.lowest, self.used(value) // 2)
        return lowered if lowered < value else None

    def used(self, value: int) -> int:
        """How much of a value made a difference."""
        return min(value, self.in_use() or value) if self.in_use else value

    def higher(self, value: int) -> int | None:
        """The next of 1, 2, 3, 4, 6, 8, 12, ... that changes anything; None at the end."""
        if self.highest is None or value >= self.highest:
            return None
        power = 1 << (value.bit_length() - 1)
        return min(next(step for step in (power * 3 // 2, power * 2) if step > value), self.highest)


@dataclass(frozen=True, slots=True)
class Change:
    """One setting changed while the run went on, and why."""

    stage: str
    step: int
    key: str
    old: Any
    new: Any
    reason: Reason
    phase: str
    moment: str
    detail: str
    """What the failed allocation said, or how full the device was."""
    seen_bytes: int
    predicted_bytes: int | None
    """Planned peak of the phase at that time."""
    limit_bytes: int

    @property
    def is_down(self) -> bool:
        return self.reason != "room"

    @property
    def origin(self) -> str:
        """Origin of the value, as shown in run.yaml."""
        return f"{'autotune' if self.reason == 'room' else 'ladder'}, {self.stage} step {self.step}"

    @property
    def sentence(self) -> str:
        """Message for people."""
        changed = f"{self.key} {shown(self.old)} -> {shown(self.new)}"
        if self.reason == "room":
            return f"{self.detail}: {changed}"
        planned = "" if self.predicted_bytes is None else f", {gib(self.predicted_bytes)} planned"
        figures = f"{gib(self.seen_bytes)} of {gib(self.limit_bytes)} seen{planned}"
        where = f"{self.phase} ({self.moment})" if self.moment else self.phase
        if self.reason == "near the limit":
            return f"{self.detail} in {where}, {figures}: {changed}"
        again = "It is done again; nothing is lost"
        if self.reason == "out of memory on one rank":
            again = "The trainer starts again with it"
        return f"out of memory in {where} at step {self.step}, {figures}: {changed}. {again}"


class RestartWithLess(ClusterError):
    """A rank ran out of memory where the ranks cannot try again together: their trainer starts again with `change`."""

    exit_code = 4

    def __init__(self, message: str, change: Change) -> None:
        super().__init__(message)
        self.change = change

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.change)


def shown(value: Any) -> str:
    """A setting's value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
