"""Weights by broadcast from a trainer to engines in other processes: gloo on CPUs, NCCL on GPUs.

The group is of the sender and its engines alone, apart from the world in which the trainer's ranks train, so engines
come and go without disturbing it. A broadcast that one engine leaves is over for all of its group: give each engine a
group of its own (`publish.FanOut`) where that matters more than that the bytes leave the sender only once.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from hone.cluster.meeting import GRACE_S, Meeting, MeetingInlet, MeetingOutlet
from hone.cluster.weights import Bucket

Backend = Literal["gloo", "nccl"]


class GroupOutlet(MeetingOutlet):
    """The sending end; see `MeetingOutlet`. With NCCL, `device` is a GPU."""

    def __init__(
        self, meeting: Meeting, engines: Sequence[str], *, backend: Backend, device: torch.device, timeout_s: float
    ) -> None:
        super().__init__(meeting, engines, device=device, timeout_s=timeout_s)
        self._backend: Backend = backend
        self._host = meeting.host
        self._group: Any = None

    def connect(self) -> None:
        """Wait until every engine has made its inlet. Raises ClusterError naming those that have not."""
        self.await_all("there")
        size = 1 + len(self.engines)
        self._group = _make_group(self._backend, self.store, 0, size, self._host, self.timeout_s)
        self.await_all("ready")

    def _send_data(self, number: int, bucket: Bucket) -> Callable[[], bool]:
        assert self._group is not None, "connect comes first"
        work = self._group.broadcast([bucket.data], dist.BroadcastOptions())

        def arrived() -> bool:
            return work.is_completed() and work.wait()  # waiting raises what went wrong

        return arrived

    def _end(self) -> None:
        assert self._group is not None
        self._group.abort()


class GroupInlet(MeetingInlet):
    """The receiving end; see `MeetingInlet`. Returns from being made when all of the group have come."""

    def __init__(
        self,
        address: str,
        engine: str,
        engines: Sequence[str],
        *,
        backend: Backend,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        super().__init__(address, engine, engines, device=device, timeout_s=timeout_s)
        rank = 1 + list(engines).index(engine)
        self._group = _make_group(backend, self.store, rank, 1 + len(engines), _own_address(address), timeout_s)
        self.store.set(f"{engine}/ready", "")

    def _receive(self, number: int, header: str) -> Tensor:
        data = torch.empty(json.loads(header)["bytes"], dtype=torch.uint8, device=self.device)
        work = self._group.broadcast([data], dist.BroadcastOptions())
        self._wait_until(work.is_completed, "a bucket was announced and did not arrive")
        work.wait()
        return data


def _make_group(backend: Backend, store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    """A group that knows nothing of `torch.distributed`'s default one. Its own deadline comes after ours."""
    kind: Any = dist.ProcessGroupGloo if backend == "gloo" else dist.ProcessGroupNCCL
    options = kind._Options() if backend == "gloo" else kind.Options()
    options._timeout = timedelta(seconds=timeout_s + 2 * GRACE_S)
    if backend == "gloo":
        options._devices = [kind.create_device(hostname=host)]
    return kind(store, rank, size, options)


def _own_address(address: str) -> str:
    """Of this machine, as the machine at `address` sees it."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return probe.getsockname()[0]
