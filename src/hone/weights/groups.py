"""Process groups for broadcasts of weights: one sending rank, and the processes of one engine that load weights.

They are apart from the group in which the trainer's ranks train, so that an engine may come and go without disturbing
it or another engine. `torch.distributed` brings the members together (a TCPStore of the sender) and moves the bytes:
gloo on CPUs, NCCL on GPUs. A group whose sender or engine failed is ended, and the next version makes another one.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hone.errors import EngineError, first_line
from hone.runtime.processes import environment_restored

GroupBackend = Literal["gloo", "nccl"]
_GRACE_S = 4.0
"""By which a group's own deadline is later than ours."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_MAKING = threading.Lock()


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """How a process joins a group."""

    backend: GroupBackend
    store: str
    """host:port of the sender's TCPStore."""
    name: str
    """The group's part of the store."""
    size: int
    """Processes: the sender, rank 0, and those of the engine."""
    timeout_s: float
    """Of the sender: the longest wait for all to join, and for one broadcast. The others wait twice as long, for it is
    the sender that finds out who is stuck."""


class BroadcastGroup:
    """This process's membership of a group.

    Args:
        rank: 0 is the sender.
        device: where the bytes are; a GPU with NCCL.

    Raises:
        EngineError: the others did not join in time.
    """

    def __init__(self, address: GroupAddress, rank: int, *, device: torch.device) -> None:
        self.device = device
        self._timeout_s = timeout_s = address.timeout_s * (1 if rank == 0 else 2)
        self._ended = False
        try:
            host, _, port = address.store.rpartition(":")
            # A connection of its own, the sender's too: one that waits for a member blocks all that share it.
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
            self._group = _make(address, PrefixStore(f"{address.name}/", store), rank, device, timeout_s)
        except RuntimeError as error:  # what torch.distributed raises
            raise EngineError(f"the process group for new weights could not be formed: {first_line(error)}") from error

    def broadcast(self, data: Tensor) -> Any:
        """Start to send (rank 0) or receive (n,) uint8 on the group's device. What is returned is for `finish`."""
        return self._group.broadcast([data], dist.BroadcastOptions())

    def finish(self, work: Any, deadline: float | None = None) -> None:
        """Wait for a broadcast. Raises EngineError when it fails, when the group is ended, or at the deadline."""
        deadline = time.monotonic() + self._timeout_s if deadline is None else deadline
        pause_s = _SHORTEST_PAUSE_S
        try:
            while not work.is_completed():
                if self._ended:
                    raise EngineError("the broadcast of weights was aborted")
                if time.monotonic() > deadline:
                    raise EngineError(f"a broadcast of weights did not end within {self._timeout_s:g} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            work.wait()  # raises what went wrong
        except RuntimeError as error:
            raise EngineError(f"a broadcast of weights failed: {first_line(error)}") from error

    def end(self) -> None:
        """Leave the group, without waiting for what is under way in it."""
        if not self._ended:
            self._ended = True
            self._group.abort()
            held = [self._group]
            del self._group
            on_a_thread(held.clear)  # with gloo the end of the object waits for the other members


def _make(address: GroupAddress, store: Store, rank: int, device: torch.device, timeout_s: float) -> Any:
    """A group that knows nothing of `torch.distributed`'s default one."""
    timeout = timedelta(seconds=timeout_s + _GRACE_S)
    if address.backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        host, _, port = address.store.rpartition(":")
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # sends nothing; it has this machine's address as the store's sees it
            options._devices = [gloo.create_device(hostname=probe.getsockname()[0])]
        return gloo(store, rank, address.size, options)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    # Members with different settings wait for each other indefinitely, so without what vLLM, if it is in this process,
    # has set for groups of its own.
    vllm = sys.modules.get("vllm.utils.nccl")
    with vllm.unpinned_nccl_env() if vllm else nullcontext():
        with _MAKING, environment_restored("TORCH_NCCL_BLOCKING_WAIT"):
            # No thread of PyTorch's may end the whole process when an engine dies: `finish` has a deadline.
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
            group = nccl(store, rank, address.size, options)
        # Now, not with the first broadcast: that one blocks until all have called it, which they do later.
        group.eager_connect_single_device(device)
    return group


def on_a_thread(work: Callable[[], Any]) -> Future[Any]:
    """Start what may block for long, on a thread that does not keep the process alive."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # the boundary of the thread: raised to the caller
            done.set_exception(error)

    threading.Thread(target=run, name="weights group", daemon=True).start()
    return done
