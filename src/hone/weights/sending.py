"""How a trainer's rank reaches the engines of a run: an outlet for each version, over groups that come and go.

A group is of the engines that live. It is kept from version to version, and made anew when one of them failed or was
started again. Whether an engine's process lives, Ray knows first: the calls that wait in it fail at once. Here is what
the sender does; an engine's side is in `receiving.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import ray
import torch
from ray.exceptions import RayError

from hone.errors import EngineError
from hone.weights.meeting import Meeting, MeetingOutlet
from hone.weights.publish import Outlet, Published
from hone.weights.publish_group import GroupOutlet
from hone.weights.publish_ipc import IpcOutlet
from hone.weights.publish_ray import RayOutlet, reason

Way = Literal["ray", "gloo", "nccl", "ipc"]
"""What bytes go through: a transport of `config/transport.py`, on the devices that there are."""


@dataclass(frozen=True, slots=True)
class Target:
    """An engine that is to get weights."""

    actor: Any
    """Handle of its `EngineActor`."""
    rank: int = 0
    """Of the trainer, from where it gets them."""
    members: int = 1
    """Processes of the engine that take weights by themselves; 1: the actor's does."""

    def names(self, engine: str) -> list[str]:
        """Of the members."""
        return [engine] if self.members == 1 else [member_name(engine, number) for number in range(self.members)]


def member_name(engine: str, number: int) -> str:
    """Of one of the processes of an engine."""
    return f"{engine}.{number}"


class Sender(Protocol):
    """What a rank keeps from version to version."""

    def outlet(self, engines: Mapping[str, Target], version: int) -> Outlet:
        """To engines, for one version. Those that cannot be reached have failed in it."""
        ...


def make_sender(way: Way, *, host: str, timeout_s: float) -> Sender:
    """A rank's sender.

    Args:
        host: address of this machine, for engines to come to.
        timeout_s: an engine that does not join, take a bucket or load what it took for so long is stuck.
    """
    return RaySender(timeout_s) if way == "ray" else MeetingSender(way, host, timeout_s)


class RaySender:
    """Through the object store."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def outlet(self, engines: Mapping[str, Target], version: int) -> Outlet:
        actors = {name: engine.actor for name, engine in engines.items()}
        return RayOutlet(actors, version=version, timeout_s=self._timeout_s)


class MeetingSender:
    """By broadcast, or through the memory of a GPU."""

    def __init__(self, way: Literal["gloo", "nccl", "ipc"], host: str, timeout_s: float) -> None:
        self._way: Literal["gloo", "nccl", "ipc"] = way
        self._timeout_s = timeout_s
        self._meeting = Meeting(host)
        self._outlet: MeetingOutlet | None = None
        self._engines: dict[str, Target] = {}

    def outlet(self, engines: Mapping[str, Target], version: int) -> Outlet:
        outlet = self._outlet
        if outlet is None or outlet.failed or dict(engines) != self._engines:
            outlet = self._outlet = self._new_group(engines)
        if not outlet.failed:
            calls = {name: engine.actor.take_weights.remote(version) for name, engine in engines.items()}
            outlet.gone = self._failures(calls)
        return outlet

    def _new_group(self, engines: Mapping[str, Target]) -> MeetingOutlet:
        if self._outlet is not None:
            self._outlet.close()
        self._engines = dict(engines)
        outlet = self._new_outlet()
        way, link = self._way, outlet.link
        calls = {name: engine.actor.join_weights.remote(way, link, name) for name, engine in engines.items()}
        outlet.gone = self._failures(calls)
        outlet.connect()
        return outlet

    def _new_outlet(self) -> MeetingOutlet:
        meeting, timeout_s = self._meeting, self._timeout_s
        engines = [name for engine, target in self._engines.items() for name in target.names(engine)]
        device = device_of(self._way)
        if self._way == "ipc":
            return IpcOutlet(meeting, engines, device=device, timeout_s=timeout_s)
        return GroupOutlet(meeting, engines, backend=self._way, device=device, timeout_s=timeout_s)

    def _failures(self, calls: Mapping[str, ray.ObjectRef]) -> Callable[[], dict[str, str]]:
        """Asks which members' engines have failed in these calls so far, and why."""
        engines = dict(self._engines)

        def failed() -> dict[str, str]:
            refs = list(calls.values())
            done = set(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0])
            why = {name: _failure(name, call) for name, call in calls.items() if call in done}
            return {member: said for name, said in why.items() if said for member in engines[name].names(name)}

        return failed


def device_of(way: Way) -> torch.device:
    """Where buckets are, in the sender's process and in an engine's; Ray shows each process its own GPU alone."""
    return torch.device("cuda", 0) if way in ("nccl", "ipc") else torch.device("cpu")


def _failure(name: str, call: ray.ObjectRef) -> str | None:
    try:
        ray.get(call)
    except (RayError, EngineError) as error:
        return f"{name}: {reason(error)}"
    return None


def by_engine(found: Published, engines: Mapping[str, Target]) -> Published:
    """What became of engines, from what became of their members."""
    members = {engine: target.names(engine) for engine, target in engines.items()}
    held = tuple(engine for engine, names in members.items() if set(names) <= set(found.held_by))
    failed, bystanders = dict[str, str](), []
    for engine in engines:
        lost = [name for name in members[engine] if name in found.failed]
        guilty = [name for name in lost if name not in found.bystanders]
        if lost:
            failed[engine] = found.failed[(guilty or lost)[0]]
        if lost and not guilty:
            bystanders.append(engine)
    return replace(found, held_by=held, failed=failed, bystanders=tuple(bystanders))
