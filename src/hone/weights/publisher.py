"""Publishing as the run sees it: which rank sends to which engine, until every engine that lives has the version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.errors import ClusterError
from hone.weights.publish import Published
from hone.weights.sending import Target, Way

Ask = Callable[[Mapping[str, Target], Way], Sequence[Published | None]]
"""Has every rank of a trainer send to the targets that are its own; what came of it on each."""


@dataclass(frozen=True)
class Routes:
    """How weights get to the engines of a run."""

    way: Way = "ray"
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of the trainer, by the names of the engines that get their weights from them; 0 for none."""
    members: int = 1
    """Of each engine; see `Target`."""
    machines: Mapping[str, int] = field(default_factory=dict)
    """Of the engines, by their names."""
    sender_machine: int = 0
    """Of the trainer's rank 0."""

    def targets(self, actors: Mapping[str, Any]) -> dict[str, Target]:
        """Engines by name, from the handles of their actors."""
        return {name: Target(actor, self.ranks.get(name, 0), self.members) for name, actor in actors.items()}

    def moved_over_least(self, parts: Sequence[Published], engines: Sequence[str]) -> float:
        """Bytes that were moved so that all of these engines get a version, over the least possible.

        The least is the weights once for each engine; in the object store, which engines of one machine read in place,
        once for each of their machines. What is more: padding, buckets sent again, a copy on a machine without engines.
        """
        moved = sum(part.sent_bytes * len(self._places(_engines_of(part)) | self._own_place) for part in parts)
        least = parts[-1].manifest.num_bytes * len(self._places(engines))
        return moved / least if least else 0.0

    def _places(self, engines: Sequence[str]) -> set[str | int]:
        """Where a copy of the weights must get."""
        if self.way != "ray":
            return set(engines)
        return {self.machines.get(name, self.sender_machine) for name in engines}

    @property
    def _own_place(self) -> set[str | int]:
        """Where there is a copy in any case."""
        return {self.sender_machine} if self.way == "ray" else set()


class Publisher:
    """Publishes over the routes of a run, and measures it."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._measured: dict[str, float] = {}

    def publish(self, actors: Mapping[str, Any], ask: Ask) -> Published:
        """Send a version to engines, by name. Those that another one's failure has interrupted are sent it again, in a
        group without that one.

        Raises:
            ClusterError: ranks sent different weights.
        """
        waiting = self._routes.targets(actors)
        parts: list[Published] = []
        while waiting:
            found = [part for part in ask(waiting, self._routes.way) if part is not None]
            parts += found
            interrupted = {name for part in found for name in part.bystanders}
            if interrupted == set(waiting):  # and it is unknown by which
                break
            waiting = {name: target for name, target in waiting.items() if name in interrupted}
        published = _joined(parts)
        self._measured = {
            "engine/published_mib": published.manifest.num_bytes / 2**20,
            "engine/published_over_least": self._routes.moved_over_least(parts, list(actors)),
        }
        return published

    def metrics(self) -> dict[str, float]:
        """Of the last publish; see `observe/metrics.py`."""
        return self._measured


def _engines_of(part: Published) -> list[str]:
    return [*part.held_by, *part.failed]


def _joined(parts: Sequence[Published]) -> Published:
    """What became of a version that was sent by several ranks, or again."""
    held_by = tuple(name for part in parts for name in part.held_by)
    failed = {name: why for part in parts for name, why in part.failed.items() if name not in held_by}
    whole = [part.manifest for part in parts if part.held_by] or [parts[-1].manifest]
    if len({manifest.fingerprint for manifest in whole}) > 1:
        raise ClusterError(
            f"publishing version {whole[0].version}: ranks of the trainer sent different weights. Their shares have "
            "come apart; go on from the last checkpoint with --resume."
        )
    return Published(whole[0], held_by, failed, (), sum(part.sent_bytes for part in parts))
