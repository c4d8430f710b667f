"""How a bucket gets from a trainer's rank to engines: the sending side (`publish.Transport`) of each way.

`ray` puts it into Ray's object store once, `ipc` shares the GPU's memory that it was packed in, `gloo` and `nccl`
broadcast it to one engine's processes at a time. The receiving side is `parts.PartOpener`.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from torch._C._distributed_c10d import TCPStore

from hone.errors import EngineError, first_line
from hone.weights.buckets import Bucket
from hone.weights.groups import BroadcastGroup, GroupAddress, GroupBackend, on_a_thread
from hone.weights.parts import CUDA, CudaMemory
from hone.weights.publish import AwaitAnswer, NoAnswer, Peer, Transport

TransportName = Literal["ray", "gloo", "nccl", "ipc"]
"""A transport of `config/topology.py`, on the devices that there are."""


@dataclass(frozen=True)
class RayPeer:
    """An engine in a Ray actor."""

    actor: Any
    """Handle of its `EngineActor`."""
    ranks: tuple[int, ...] = (0,)
    """Of the trainer, from where it gets weights: one, or with CUDA IPC that of each worker's GPU."""
    num_workers: int = 1
    """Its processes that load weights."""

    def call(self, method: str, *args: Any) -> AwaitAnswer:
        """See `Peer`."""
        started = getattr(self.actor, method).remote(*args)

        def answer(deadline: float) -> Any:
            try:
                return ray.get(started, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                raise TimeoutError from None
            except EngineError as error:  # Ray raises what the actor did
                raise EngineError(_reason(error)) from error
            except RayError as error:
                raise NoAnswer(_reason(error)) from error

        return answer


def _reason(error: Exception) -> str:
    """Why a call of an actor failed, in a line."""
    cause = getattr(error, "cause", None) or error
    return first_line(cause) if isinstance(cause, EngineError) else f"{type(cause).__name__}: {first_line(cause)}"


def make_transport(name: TransportName, *, host: str) -> Transport:
    """A rank's transport, for all versions. `host`: address of this machine, for groups to meet at."""
    if name == "ray":
        return ObjectStore()
    return SharedGpu(torch.device("cuda", 0)) if name == "ipc" else Broadcast(name, host)


class ObjectStore(Transport):
    """Through Ray's object store: engines on one machine share one copy; Ray brings it to other machines once each."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def send(self, bucket: Bucket, engines: Sequence[str]) -> Mapping[str, Any]:
        return dict.fromkeys(engines, ray.put(bucket.data.numpy()))


class SharedGpu(Transport):
    """Through the memory of one GPU that both processes see (CUDA IPC), whatever number each has for it. Once an engine
    took a bucket, it has a copy."""

    def __init__(self, device: torch.device, memory: CudaMemory = CUDA) -> None:
        super().__init__(device)
        self._memory = memory

    def send(self, bucket: Bucket, engines: Sequence[str]) -> Mapping[str, Any]:
        self._memory.synchronize(self.device)  # the bucket is packed
        return {engine: self._memory.share(bucket.data) for engine in engines}


class Broadcast(Transport):
    """By broadcast, in a group of this rank and one engine's processes. It is kept from version to version, and made
    anew when the engine failed or was started again."""

    def __init__(self, backend: GroupBackend, host: str) -> None:
        super().__init__(torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu"))
        self._backend: GroupBackend = backend
        self._host = host
        self._store: TCPStore | None = None
        self._numbers = itertools.count()
        self._groups: dict[str, tuple[Peer, BroadcastGroup]] = {}
        self._works: dict[str, list[Any]] = {}

    def connect(self, peers: Mapping[str, Peer], timeout_s: float) -> dict[str, EngineError]:
        for name in self._groups.keys() - peers.keys():
            self.drop(name)
        new = {name: peer for name, peer in peers.items() if name not in self._groups or self._groups[name][0] != peer}
        deadline, joining, failed = time.monotonic() + timeout_s, {}, dict[str, EngineError]()
        for name, peer in new.items():
            self.drop(name)
            joining[name] = self._join(peer, timeout_s)
        for name, (answer, group) in joining.items():
            try:
                answer(deadline)
                self._groups[name] = new[name], group.result(max(0.0, deadline - time.monotonic()))
                continue
            except TimeoutError:
                failed[name] = NoAnswer(f"stuck: it did not join the group for new weights within {timeout_s:g} s")
            except EngineError as error:
                failed[name] = error
            group.add_done_callback(_end_late)
        return failed

    def _join(self, peer: Peer, timeout_s: float) -> tuple[AwaitAnswer, Future[BroadcastGroup]]:
        """Start to make a group with an engine: its answer, and our side of the group."""
        if self._store is None:
            # It listens on this address alone, and its traffic is not authenticated: keep it on loopback, or on
            # a network whose machines are all trusted.
            with socket.create_server((self._host, 0)) as listener:
                port, descriptor = listener.getsockname()[1], os.dup(listener.fileno())
                self._store = TCPStore(
                    self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
                )
        where = f"{self._host}:{self._store.port}"
        address = GroupAddress(self._backend, where, f"group-{next(self._numbers)}", 1 + peer.num_workers, timeout_s)
        answer = peer.call("connect_weights", address)
        return answer, on_a_thread(partial(BroadcastGroup, address, 0, device=self.device))

    def send(self, bucket: Bucket, engines: Sequence[str]) -> Mapping[str, Any]:
        for engine in engines:
            self._works.setdefault(engine, []).append(self._groups[engine][1].broadcast(bucket.data))
        return dict.fromkeys(engines)

    def wait(self, engine: str, deadline: float) -> None:
        """Its oldest broadcast."""
        self._groups[engine][1].finish(self._works[engine].pop(0), deadline)

    def drop(self, engine: str) -> None:
        self._works.pop(engine, None)
        if engine in self._groups:
            self._groups.pop(engine)[1].end()


def _end_late(joined: Future[BroadcastGroup]) -> None:
    """End a group that came together when the wait for it was over."""
    if joined.exception() is None:
        joined.result().end()
