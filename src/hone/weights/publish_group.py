"""Weights by broadcast from a trainer to engines in other processes: gloo on CPUs, NCCL on GPUs.

The group is of the sender and its engines alone, apart from the world in which the trainer's ranks train, so engines
come and go without disturbing it. The bytes leave the sender once, however many engines there are; what one of them
interrupts continues in a group of the others.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from hone.runtime.processes import environment_restored
from hone.weights.buckets import Bucket
from hone.weights.meeting import GRACE_S, Link, Meeting, MeetingInlet, MeetingOutlet, begun

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

    def _join(self) -> None:
        size = 1 + len(self.engines)
        self._group = _make_group(self._backend, self.store, 0, size, self._host, self.device, self.timeout_s)

    def _send_data(self, number: int, bucket: Bucket) -> Callable[[], bool]:
        assert self._group is not None, "connect comes first"
        work = self._group.broadcast([bucket.data], dist.BroadcastOptions())

        def arrived() -> bool:
            return work.is_completed() and work.wait()  # waiting raises what went wrong

        return arrived

    def _end(self) -> None:
        held, self._group = [self._group], None
        _let_go(held)


class GroupInlet(MeetingInlet):
    """The receiving end; see `MeetingInlet`. Returns from being made when all of the group have come.

    Raises:
        RuntimeError: they have not, in time.
    """

    def __init__(self, link: Link, engine: str, *, backend: Backend, device: torch.device, timeout_s: float) -> None:
        super().__init__(link, engine, device=device, timeout_s=timeout_s)
        self._group: Any = None
        rank, size = 1 + link.engines.index(engine), 1 + len(link.engines)

        def join() -> None:
            host = _own_address(link.address)
            self._group = _make_group(backend, self.store, rank, size, host, device, timeout_s)

        self._wait_until(begun(join), "the others of the group did not join")
        self.store.set(f"{engine}/ready", "")

    def close(self) -> None:
        held, self._group = [self._group], None
        _let_go(held)

    def _receive(self, number: int, header: str) -> Tensor:
        data = torch.empty(json.loads(header)["bytes"], dtype=torch.uint8, device=self.device)
        work = self._group.broadcast([data], dist.BroadcastOptions())
        self._wait_until(work.is_completed, "a bucket was announced and did not arrive")
        work.wait()
        return data


def _make_group(
    backend: Backend, store: Store, rank: int, size: int, host: str, device: torch.device, timeout_s: float
) -> Any:
    """A group that knows nothing of `torch.distributed`'s default one. Its own deadline comes after ours."""
    timeout = timedelta(seconds=timeout_s + 2 * GRACE_S)
    if backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=host)]
        return gloo(store, rank, size, options)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    with _settings_of_ours():
        group = nccl(store, rank, size, options)
        # Now, not with the first broadcast: that one blocks until all have called it, which they do later.
        group.eager_connect_single_device(device)
    return group


def _let_go(held: list[Any]) -> None:
    """End a group that only this list still refers to, without waiting: with gloo its end waits for what is under way
    in it, until the others have left too or were killed."""
    if held[0] is not None:
        held[0].abort()
    begun(held.clear)


@contextmanager
def _settings_of_ours() -> Iterator[None]:
    """A group that is made inside has no thread of PyTorch's that would end the whole process, ranks and all, when an
    engine dies: ours looks at each broadcast itself, until a deadline. Nor has it what vLLM, if it is in this process,
    has set for groups of its own: members with different settings wait for each other indefinitely."""
    vllm, name = sys.modules.get("vllm.utils.nccl"), "TORCH_NCCL_BLOCKING_WAIT"
    with environment_restored(name):
        os.environ[name] = "1"
        with vllm.unpinned_nccl_env() if vllm else nullcontext():
            yield


def _own_address(address: str) -> str:
    """Of this machine, as the machine at `address` sees it."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return probe.getsockname()[0]
