"""Publishing as the run sees it: which ranks send to which engine, until every engine that lives has the version."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.errors import ClusterError
from hone.weights.publish import Published
from hone.weights.transports import RayPeer, TransportName

ATTEMPTS = 2
"""Times that a version is sent to an engine that refused it."""


Ask = Callable[[Mapping[str, RayPeer], TransportName, str], Sequence[Published | None]]
"""Has every rank of a trainer send to the engines that are its own, as the update of this id; what came of it on
each."""


@dataclass(frozen=True)
class Routes:
    """How weights get to the engines of a run."""

    transport: TransportName = "ray"
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """See `RayPeer.ranks`, by the names of the engines; rank 0 for none."""
    num_workers: int = 1
    """Of each engine."""
    machines: Mapping[str, int] = field(default_factory=dict)
    """Of the engines, by their names."""
    sender_machine: int = 0
    """Of the trainer's rank 0."""

    def moved_over_least(self, parts: Sequence[Published], engines: Sequence[str]) -> float:
        """Bytes that were moved so that all of these engines get a version, over the least possible.

        The least is the weights once for each rank that sends to an engine; in the object store, which engines of one
        machine read in place, once for each of their machines. What is more: padding, buckets sent again, a copy on a
        machine without engines.
        """
        always = {self.sender_machine} if self.transport == "ray" else set[str | int]()
        moved = sum(part.sent_bytes * len(self._places([*part.held_by, *part.failed]) | always) for part in parts)
        copies = [copy for name in engines for copy in self.ranks.get(name, (0,))]
        least = parts[-1].manifest.num_bytes * (len(self._places(engines)) if self.transport == "ray" else len(copies))
        return moved / least if least else 0.0

    def _places(self, engines: Sequence[str]) -> set[str | int]:
        """Destinations of a copy of the weights."""
        if self.transport != "ray":
            return set(engines)
        return {self.machines.get(name, self.sender_machine) for name in engines}


class Publisher:
    """Publishes over the routes of a run, and measures it."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._measured: dict[str, float] = {}

    def publish(self, actors: Mapping[str, Any], ask: Ask) -> Published:
        """Send a version to engines, by name: to those that refuse it once more.

        Raises:
            ClusterError: ranks sent different weights.
        """
        routes = self._routes
        waiting = {
            name: RayPeer(actor, routes.ranks.get(name, (0,)), routes.num_workers) for name, actor in actors.items()
        }
        parts: list[Published] = []
        held_by, failed = list[str](), dict[str, str]()
        for _ in range(ATTEMPTS):
            found = [part for part in ask(waiting, routes.transport, uuid.uuid4().hex) if part is not None]
            parts += found
            lost = {name: why for part in found for name, why in part.failed.items()}
            held_by += [name for name in waiting if name not in lost]
            failed |= lost
            dropped = {name for part in found for name in part.failed if name not in part.refused}
            waiting = {name: peer for name, peer in waiting.items() if name in lost.keys() - dropped}
            if not waiting:
                break
        failed = {name: why for name, why in failed.items() if name not in held_by}
        whole = [part.manifest for part in parts if part.held_by] or [parts[-1].manifest]
        if len({manifest.fingerprint for manifest in whole}) > 1:
            raise ClusterError(
                f"publishing version {whole[0].version}: ranks of the trainer sent different weights: they have "
                "diverged. Continue from the last checkpoint with --resume."
            )
        self._measured = {
            "engine/published_mib": whole[0].num_bytes / 2**20,
            "engine/published_over_least": routes.moved_over_least(parts, list(actors)),
        }
        return Published(whole[0], tuple(held_by), failed, (), sum(part.sent_bytes for part in parts))

    def metrics(self) -> dict[str, float]:
        """Of the last publish; see `observe/metrics.py`."""
        return self._measured
