"""How a trainer's rank reaches the engines of a run: an outlet for each version, over groups that come and go.

A group is of the engines that live. It is kept from version to version, and made anew when one of them failed or was
started again. Whether an engine's process lives, Ray knows first: the calls that wait in it fail at once. Here is what
the sender does; an engine's side is in `receiving.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import ray
import torch
from ray.exceptions import RayError

from hone.cluster.meeting import Meeting, MeetingOutlet
from hone.cluster.publish import Outlet
from hone.cluster.publish_group import GroupOutlet
from hone.cluster.publish_ipc import IpcOutlet
from hone.cluster.publish_ray import RayOutlet, reason
from hone.errors import EngineError

Way = Literal["ray", "gloo", "nccl", "ipc"]
"""What bytes go through: a transport of `config/transport.py`, on the devices that there are."""


@dataclass(frozen=True, slots=True)
class Target:
    """An engine that is to get weights."""

    actor: Any
    """Handle of its `EngineActor`."""
    rank: int = 0
    """Of the trainer, from where it gets them."""


class Sender(Protocol):
    """What a rank keeps from version to version."""

    def outlet(self, engines: Mapping[str, Any], version: int) -> Outlet:
        """To the actors of engines, for one version. Those that cannot be reached have failed in it."""
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

    def outlet(self, engines: Mapping[str, Any], version: int) -> Outlet:
        return RayOutlet(engines, version=version, timeout_s=self._timeout_s)


class MeetingSender:
    """By broadcast, or through the memory of a GPU."""

    def __init__(self, way: Literal["gloo", "nccl", "ipc"], host: str, timeout_s: float) -> None:
        self._way: Literal["gloo", "nccl", "ipc"] = way
        self._timeout_s = timeout_s
        self._meeting = Meeting(host)
        self._outlet: MeetingOutlet | None = None
        self._members: dict[str, Any] = {}

    def outlet(self, engines: Mapping[str, Any], version: int) -> Outlet:
        outlet = self._outlet
        if outlet is None or outlet.failed or dict(engines) != self._members:
            outlet = self._outlet = self._new_group(engines)
        if not outlet.failed:
            outlet.gone = _failures({name: actor.take_weights.remote(version) for name, actor in engines.items()})
        return outlet

    def _new_group(self, engines: Mapping[str, Any]) -> MeetingOutlet:
        if self._outlet is not None:
            self._outlet.close()
        self._members = dict(engines)
        outlet = self._new_outlet()
        joins = {name: actor.join_weights.remote(self._way, outlet.link, name) for name, actor in engines.items()}
        outlet.gone = _failures(joins)
        outlet.connect()
        return outlet

    def _new_outlet(self) -> MeetingOutlet:
        meeting, engines, timeout_s = self._meeting, list(self._members), self._timeout_s
        device = device_of(self._way)
        if self._way == "ipc":
            return IpcOutlet(meeting, engines, device=device, timeout_s=timeout_s)
        return GroupOutlet(meeting, engines, backend=self._way, device=device, timeout_s=timeout_s)


def device_of(way: Way) -> torch.device:
    """Where buckets are, in the sender's process and in an engine's; Ray shows each process its own GPU alone."""
    return torch.device("cuda", 0) if way in ("nccl", "ipc") else torch.device("cpu")


def _failures(calls: Mapping[str, ray.ObjectRef]) -> Callable[[], dict[str, str]]:
    """Asks which of the engines' calls have failed so far, and why."""

    def failed() -> dict[str, str]:
        refs = list(calls.values())
        done = set(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0])
        return {name: why for name, call in calls.items() if call in done and (why := _failure(name, call))}

    return failed


def _failure(name: str, call: ray.ObjectRef) -> str | None:
    try:
        ray.get(call)
    except (RayError, EngineError) as error:
        return f"{name}: {reason(error)}"
    return None
