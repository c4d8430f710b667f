"""Out-of-memory ladder of ranks: when one of them runs out of memory, all try again with the same lower setting.

The rank that failed is in the middle of a pass, and the others wait for it in a collective. So it stands in: it does
the same work once more with empty microbatches, which make the same collectives as full ones and need next to no
memory, and leaves out the collectives that it had made. That leads all ranks to the end of the work, where `agree` asks
with one all-reduce whether any has failed; what they computed is then discarded, and nothing was applied. The rank that
failed chooses the setting to lower, and all ranks lower it.

It cannot stand in where the collectives inside a pass depend on a microbatch's tokens (tensor and sequence parallel),
where a collective itself failed, once gradients are summed over replicas, or once a step is being applied. Then it
raises `RestartWithLess`: all ranks are started again from the newest checkpoint, with the lower setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hone.errors import MemoryExhausted
from hone.memory.gauges import Meter
from hone.memory.ladder import Ladder, OutOfMemory
from hone.memory.rungs import Change, RestartWithLess

T = TypeVar("T")

APPLIED = "the other ranks have applied their part of the optimizer step"
INSIDE = "it failed inside of a collective, and cannot know whether the others have its part"
DIVIDED = "tensor_parallel or sequence_parallel divide each microbatch, whose collectives empty ones do not make"
REPLICAS = "gradients were being summed over replicas"


class Collectives:
    """Counts the collectives of one attempt at some work, so that a rank that failed can join the others again."""

    def __init__(self) -> None:
        self.apart: str | None = None
        """Why this rank cannot join the others again in this attempt."""
        self.never: str | None = None
        """Like `apart`, in every attempt."""
        self.is_standing_in = False
        """Whether this rank's microbatches are empty because its attempt has failed."""
        self._made = self._to_skip = 0

    def begin(self) -> None:
        """A new attempt."""
        self.apart, self.is_standing_in = self.never, False
        self._made = self._to_skip = 0

    def stand_in(self) -> None:
        """Repeat the work without the collectives that this attempt has made."""
        self.is_standing_in, self._to_skip = True, self._made

    def run(self, collective: Callable[[], T]) -> T | None:
        """Make a collective, unless this rank has made it before."""
        if self._to_skip:
            self._to_skip -= 1
            return None
        before, self.apart = self.apart, self.apart or INSIDE
        found = collective()
        self.apart = before
        self._made += 1
        return found


class CountedComm:
    """What FSDP2's all-gathers and reduce-scatters call: its own default, counted.

    Args:
        call: `all_gather_into_tensor` or `reduce_scatter_tensor` of torch.distributed.
    """

    def __init__(self, call: Callable[..., Any], collectives: Collectives) -> None:
        self._call, self._collectives = call, collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **named: Any) -> Any:
        return self._collectives.run(lambda: self._call(output_tensor, input_tensor, **named))


@dataclass(frozen=True)
class Decision:
    """What all ranks do after one of them ran out of memory: the same change, or the end of the run."""

    rank: int
    change: Change | None
    exhausted: str = ""
    """Why there is no change."""


class Agreed(Exception):
    """All ranks know that one of them ran out of memory. Raised by `SharedLadder.agree`, caught by `attempt`."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(f"rank {decision.rank} ran out of memory")
        self.decision = decision


class SharedLadder(Ladder):
    """The ladder of one rank, whose settings are the same on all. Every rank attempts the same work in the same order.

    Args:
        collectives: of this rank's work, all that are made in an attempt.
        reset: brings this rank's models back to before a pass that failed.
        timeout_s: longest wait for the slowest rank's agreement.
        settings: as `Ladder`; the same on all ranks.
    """

    def __init__(
        self,
        meter: Meter,
        collectives: Collectives,
        reset: Callable[[], object],
        *,
        timeout_s: float,
        settings: Mapping[str, Any],
        **options: Any,
    ) -> None:
        super().__init__(meter, settings=settings, **options)
        self._collectives, self._reset = collectives, reset
        # On the host: it waits for no kernel, and needs no memory of the device that has run out of it.
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._failure: OutOfMemory | None = None

    def attempt(self, work: Callable[[], T], undo: Callable[[], object] | None = None) -> T:
        """See `Guard.attempt`; `work` ends with `agree` on every rank."""
        while True:
            self._collectives.begin()
            decision = failure = None
            try:
                return work()
            except Agreed as agreed:
                decision = agreed.decision
            except OutOfMemory as error:
                failure = OutOfMemory(error.phase, error.moment, error.seen_bytes, error.detail)
            # Out here the failed work's frames are gone, and with them its tensors.
            decision = decision or self._stand_in(work, failure)
            if decision.change is None:
                raise MemoryExhausted(f"rank {decision.rank}: {decision.exhausted}")
            with self._lock:
                self._ceilings[decision.change.key] = decision.change.old
                self._make(decision.change)
            self._prepare_retry(undo)

    def agree(self) -> None:
        """See `Guard.agree`. Raises Agreed where a rank has failed."""
        self._collectives.apart = INSIDE
        failed = torch.tensor(0 if self._failure is None else dist.get_rank() + 1)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if int(failed) == 0:
            self._collectives.apart = APPLIED
            return
        first = int(failed) - 1
        decision: list[Decision | None] = [None]
        if self._failure is not None and dist.get_rank() == first:
            with self._lock:
                if (found := self._next_rung(self._failure)) is None:
                    decision = [Decision(first, None, self._exhausted(self._failure))]
                else:
                    knob, new = found
                    decision = [Decision(first, self._change(knob.key, new, "out of memory", self._failure))]
        dist.broadcast_object_list(decision, src=first, group=self._group)
        assert decision[0] is not None
        raise Agreed(decision[0])

    def _stand_in(self, work: Callable[[], object], failure: OutOfMemory | None) -> Decision:
        """Lead the others to their agreement, where all hear of the failure."""
        assert failure is not None
        if (why := self._collectives.apart) is not None:
            raise self._restart(failure, why)
        self._reset()
        self.meter.gauge.give_back()
        self._collectives.stand_in()
        self._failure = failure
        try:
            work()
        except Agreed as agreed:
            return agreed.decision
        except OutOfMemory as error:
            raise MemoryExhausted(
                f"{self._where(failure)}. Empty microbatches ran out of memory too ({error.detail}): weights and their "
                "gradients do not fit."
            ) from None
        finally:
            self._failure = None
            self._collectives.is_standing_in = False
        raise AssertionError("work ends with an agreement")

    def _restart(self, failure: OutOfMemory, why: str) -> RestartWithLess:
        """Raises MemoryExhausted where no setting is left."""
        where = f"{self._where(failure)}, at a point where the ranks cannot try again together: {why}."
        with self._lock:
            if (found := self._next_rung(failure)) is None:
                raise MemoryExhausted(f"{where} {self._exhausted(failure)}")
            knob, new = found
            change = self._change(knob.key, new, "out of memory on one rank", failure)
        return RestartWithLess(where, change)

    def _where(self, failure: OutOfMemory) -> str:
        rank = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        return f"{rank} ran out of memory in {failure.phase} ({failure.detail})"
