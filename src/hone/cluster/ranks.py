"""Groups of ranks: the same call on every rank, and waiting for all of them.

A trainer has one group with the policy, and others where critic or reference have devices of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray

from hone.cluster.actors import MakeTrainer, Seat
from hone.cluster.calls import CALL_KEY, START_KEY, wait_for_all
from hone.errors import ClusterError
from hone.runtime.scratch import Scratch


class RankGroup:
    """The ranks of one process group.

    Args:
        name: for errors: `critic` has `critic rank 0`.
        ranks: handles of `TrainerRank`.
        make: makes a rank's learner.
        takes_turns: see `Seat`.
    """

    def __init__(self, name: str, ranks: Sequence[Any], make: MakeTrainer, *, takes_turns: bool = False) -> None:
        self.name = name
        self.ranks = {f"{name} rank {number}": rank for number, rank in enumerate(ranks)}
        self.is_broken = False
        """A rank died or is stuck, and the others may wait for it."""
        self._make, self._takes_turns = make, takes_turns
        self._open = ExitStack()
        self._asking = threading.Lock()

    def begin(self, *, is_one_machine: bool, timeout_s: float) -> PendingCalls:
        """Have every rank make its part. On one machine the rendezvous is a file, so no port is opened."""
        if is_one_machine:
            folder = Scratch("hone-ranks-")
            self._open.callback(folder.remove)
            address = f"file://{folder.path}/meeting"
        else:
            name, first = next(iter(self.ranks.items()))
            asked = {name: first.open_rendezvous.remote()}
            address = wait_for_all(asked, f"starting the {self.name}", timeout_s, START_KEY)[0]
        size = len(self.ranks)
        calls = {
            name: rank.build.remote(self._make, Seat(number, size, address, self.name, self._takes_turns))
            for number, (name, rank) in enumerate(self.ranks.items())
        }
        return PendingCalls(self, calls)

    def ask(self, method: str, *args: Any, **named: Any) -> PendingCalls:
        """Call every rank. Calls of several threads reach all ranks in one order; else collectives would deadlock."""
        with self._asking:
            calls = {name: getattr(rank, method).remote(*args, **named) for name, rank in self.ranks.items()}
        return PendingCalls(self, calls)

    def end(self) -> None:
        """Kill all ranks; calls in progress are lost."""
        for rank in self.ranks.values():
            ray.kill(rank)
        self._open.close()


@dataclass(frozen=True)
class PendingCalls:
    """A call on all ranks of a group."""

    group: RankGroup
    calls: Mapping[str, ray.ObjectRef]
    """By the names of the ranks."""


def gather(asked: Sequence[PendingCalls], what: str, timeout_s: float, key: str = CALL_KEY) -> list[list[Any]]:
    """The results of calls on several groups, rank by rank, which run at the same time.

    Args:
        what, timeout_s, key: see `wait_for_all`.
    Raises:
        HoneError: of any rank of any of them; after a ClusterError none of these groups can be asked again.
    """
    every = {name: call for one in asked for name, call in one.calls.items()}
    try:
        found = iter(wait_for_all(every, what, timeout_s, key))
    except ClusterError:
        for one in asked:
            one.group.is_broken = True
        raise
    return [[next(found) for _ in one.calls] for one in asked]
