"""Ray actors of a run: a trainer's rank, and an engine.

Both compute on one thread and answer `ping` on another during any computation, so one that does not is stopped, or
deadlocked holding Python's lock. Their handles in the run are in `trainer.py` and `engine.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from hone.cluster.calls import BEAT_S
from hone.cluster.ray import HEARTBEAT, end_with_ray, own_address
from hone.cluster.stored import SampleNews, parted, without_known
from hone.devices import give_back_memory, peak_bytes, synchronize, used_and_total_bytes
from hone.errors import CheckpointError, EngineError, HoneError
from hone.experts import ExpertIds
from hone.memory.ladder import Ladder
from hone.memory.rungs import Change
from hone.rollout.engine import CacheUse, Caching, Engine, Request
from hone.train.pairs import PairTrainer
from hone.train.roles import Roles
from hone.train.tensor_files import FileFacts, HostCopies
from hone.types import Sample
from hone.weights.buckets import Header, Manifest
from hone.weights.groups import GroupAddress
from hone.weights.parts import BucketPart
from hone.weights.publish import Published, Transport, Update, publish
from hone.weights.receive import Arriving, Receiver
from hone.weights.transports import RayPeer, TransportName, make_transport

GATHER_S = 0.02
"""Batching window for finished samples; sending one costs more CPU than decoding a token."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """Host, process and memory of an actor."""

    pid: int
    host: str
    rss_bytes: int
    cuda_peak_bytes: int
    """Most that tensors held on its GPU; 0 without one."""
    device_bytes: tuple[int, int] | None = None
    """Memory of its accelerator that all processes use, vLLM's among them, and all of it; None without one."""
    cache: CacheUse | None = None
    """An engine's peak cache use since the last `ping`."""

    @classmethod
    def here(cls, *, asks_device: bool = True) -> Vitals:
        """Those of this process. `asks_device`: false while CUDA graphs may be recorded, beside which that may fail."""
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            rss_bytes=psutil.Process().memory_info().rss,
            cuda_peak_bytes=peak_bytes(),
            device_bytes=used_and_total_bytes() if asks_device else None,
        )


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place among those that train together."""

    rank: int
    world_size: int
    address: str
    """Rendezvous of the process group; see `train.mesh.process_group`."""
    group: str = "trainer"
    """Their name: `trainer`, or their roles where the policy is in another pool."""
    takes_turns: bool = False
    """Others work on its device while it does not, and want the memory."""


MakeTrainer = Callable[[Seat], AbstractContextManager[Roles | PairTrainer]]
MakeEngine = Callable[[], Awaitable[Engine]]


class TakesWeights:
    """An actor that senders bring new weights to; see `weights.receive`."""

    _receiver: Receiver | None = None

    @property
    def receiver(self) -> Receiver:
        assert self._receiver is not None, "build comes first"
        return self._receiver

    async def begin_weights(self, update: Update) -> None:
        await self.receiver.begin(update)

    async def load_weights(self, update_id: str, sender: int, header: Header, part: BucketPart) -> None:
        await self.receiver.load(update_id, sender, header, part)

    async def commit_weights(self, update_id: str, sender: int, manifest: Manifest) -> str:
        return await self.receiver.commit(update_id, sender, manifest)


class TrainerRank(TakesWeights):
    """One rank of a trainer, with some of its roles. Every rank gets the same calls, and only rank 0 returns results.

    Args:
        timeout_s: longest wait for weights of which some have arrived, where it has the reference.
    """

    def __init__(self, timeout_s: float) -> None:
        end_with_ray()
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._open = ExitStack()
        self._trainer: Roles | PairTrainer | None = None
        self._copies = HostCopies()
        self._seat: Seat | None = None
        self._rendezvous: TCPStore | None = None
        self._transports: dict[TransportName, Transport] = {}
        self._receiver = Receiver(_Refreshed(self), timeout_s=timeout_s)

    @property
    def _number(self) -> int:
        return 0 if self._seat is None else self._seat.rank

    @property
    def _is_first(self) -> bool:
        return self._number == 0

    @ray.method(concurrency_group=HEARTBEAT)
    async def ping(self) -> Vitals:
        return Vitals.here()

    async def open_rendezvous(self) -> str:
        """The address at which ranks on several machines meet; open from now on, while this process lives."""
        host = own_address()
        self._rendezvous = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"tcp://{host}:{self._rendezvous.port}"

    async def build(self, make: MakeTrainer, seat: Seat) -> int:
        """Make what this rank holds. Returns the process id."""

        def build() -> None:
            self._trainer = self._open.enter_context(make(seat))

        self._seat = seat
        await self.computed(build)
        return os.getpid()

    async def hf_config(self) -> Any:
        """What describes the model."""
        return self.held.hf_config

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        """Call a method of the learner; its result on rank 0."""

        def call() -> Any:
            result = getattr(self.held, method)(*args, **named)
            self._make_room()
            return result if self._is_first else None

        return await self.computed(call)

    async def take_changes(self) -> list[Change]:
        """What this rank's ladder changed since the last call; the same on all ranks."""
        guard = self.held.passes.guard
        return guard.take_changes() if isinstance(guard, Ladder) else []

    async def weights(self) -> list[tuple[str, Tensor]] | None:
        """All weights at once, in host memory: a tensor on a device would be unpickled onto the caller's device."""

        def gather() -> list[tuple[str, Tensor]] | None:
            weights = self.held.weights()
            return [(name, weight.cpu()) for name, weight in weights] if self._is_first else _drained(weights)

        return await self.computed(gather)

    async def write_weights(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the master weights, one at a time (`Checkpointable.write_weights`). Raises CheckpointError."""

        def write() -> None:
            if self._is_first:
                self.held.write_weights(folder, dtype)
            else:
                _drained(self.held.master_weights())
            self._make_room()

        with self._writing(folder):
            await self.computed(write)

    async def copy_state(self) -> tuple[int, dict[str, Any]]:
        """Copy this rank's part of a checkpoint for `write_copy`. Returns its size, and the state that ranks share."""

        def copy() -> tuple[int, dict[str, Any]]:
            tensors, rest = self.held.state()
            return self._copies.take(tensors), rest

        return await self.computed(copy)

    async def write_copy(self, folder: Path) -> dict[str, FileFacts]:
        """Write and sync the copy into a folder while the rank computes. Raises CheckpointError."""
        seat = self._seat
        assert seat is not None, "build comes first"
        stem = "tensors" if seat.group == "trainer" else seat.group.replace(" ", "-")
        with self._writing(folder):
            return await asyncio.to_thread(self._copies.write, folder, seat.rank, seat.world_size, stem)

    @contextlib.contextmanager
    def _writing(self, folder: Path) -> Iterator[None]:
        seat = self._seat
        assert seat is not None, "build comes first"
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{folder}: {seat.group} rank {seat.rank} on {socket.gethostname()} cannot write there: "
                f"{error.strerror or error}. The run's folder must be on a disk that all machines see, with room."
            ) from error

    async def publish(
        self,
        engines: Mapping[str, RayPeer],
        name: TransportName,
        update_id: str,
        *,
        version: int,
        bucket_size: int,
        timeout_s: float,
    ) -> Published | None:
        """Send the weights to the engines that this rank serves; see `weights.publish`. Where roles take turns, the
        memory of buckets and gathered weights is given back."""

        def send() -> Published | None:
            weights = self.held.weights()
            ours = {name: engine for name, engine in engines.items() if self._number in engine.ranks}
            if not ours:
                return _drained(weights)
            if name not in self._transports:
                is_one_machine = self._seat is None or self._seat.address.startswith("file:")
                host = "127.0.0.1" if is_one_machine else own_address()  # at which engines reach this rank
                self._transports[name] = make_transport(name, host=host)
            return publish(
                weights,
                ours,
                self._transports[name],
                updates={name: Update(update_id, version, len(engine.ranks)) for name, engine in ours.items()},
                sender=self._number,
                bucket_size=bucket_size,
                timeout_s=timeout_s,
            )

        def send_and_make_room() -> Published | None:
            published = send()
            self._make_room()
            return published

        return await self.computed(send_and_make_room)

    async def close(self) -> None:
        """Leave the others."""
        await self.computed(self._open.close)

    @property
    def held(self) -> Roles | PairTrainer:
        assert self._trainer is not None, "build comes first"
        return self._trainer

    async def computed(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)

    def _make_room(self) -> None:
        """Leave memory that is only cached to those who take turns with this rank, if there are any."""
        if self._seat is not None and self._seat.takes_turns:
            give_back_memory()


class _Refreshed:
    """The reference of a rank, as what takes weights; see `weights.receive.Loads`."""

    def __init__(self, rank: TrainerRank) -> None:
        self._rank = rank
        self._fingerprint = ""

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        roles = self._rank.held
        assert isinstance(roles, Roles) and isinstance(weights, Arriving)
        await self._rank.computed(lambda: roles.refresh(weights))
        assert weights.manifest is not None
        self._fingerprint = weights.manifest.fingerprint

    def fingerprint(self) -> str:
        """Of the weights received, verified on arrival: no rank holds more than a shard of a sharded reference."""
        return self._fingerprint


def _drained(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Iterate the weights: gathering a sharded one is collective, also for ranks that do not need it.

    One by one: what is far ahead of the rank that needs them would wait in NCCL, whose timeout runs meanwhile.
    """
    for _ in weights:
        synchronize()


class EngineActor(TakesWeights):
    """One engine: requests come in by `submit`, finished samples are polled with `take`."""

    def __init__(self) -> None:
        end_with_ray()
        self._engine: Engine | None = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._news: list[SampleNews] = []
        self._is_news, self._is_idle = asyncio.Event(), asyncio.Event()

    @ray.method(concurrency_group=HEARTBEAT)
    async def ping(self) -> Vitals:
        vitals = Vitals.here(asks_device=self._engine is not None)
        return replace(vitals, cache=self._engine.cache_use()) if isinstance(self._engine, Caching) else vitals

    async def build(self, make: MakeEngine, *, timeout_s: float) -> None:
        """Make the engine. `timeout_s`: longest wait of a sender for one bucket to be loaded."""
        self._engine = await make()
        self._receiver = Receiver(self._engine, timeout_s=timeout_s)

    async def submit(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Start these requests, together and in order."""
        for number, request in requests:
            task = self._running[number] = asyncio.create_task(self._generate(number, request))
            task.add_done_callback(partial(self._end, number))
        self._is_idle.clear()

    @ray.method(num_returns=2)
    async def take(self) -> tuple[Sequence[SampleNews], list[ExpertIds]]:
        """News since the last call, and separately what only ranks read; see `stored.py`. Waits up to `BEAT_S` for
        some, then `GATHER_S` for more while requests run."""
        try:
            async with asyncio.timeout(BEAT_S):
                await self._is_news.wait()
        except TimeoutError:
            return (), []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHER_S):
                await self._is_idle.wait()
        self._is_news.clear()
        news, self._news = self._news, []
        return parted(news)

    async def cancel(self, number: int) -> None:
        """Cancel a request."""
        if (task := self._running.get(number)) is not None:
            task.cancel()

    async def connect_weights(self, address: GroupAddress) -> None:
        """See `weights.receive`."""
        await self.receiver.connect(address)

    async def sleep(self) -> None:
        await self.engine.sleep()
        give_back_memory()

    async def wake(self) -> None:
        await self.engine.wake()

    async def close(self) -> None:
        if self._receiver is not None:
            await self._receiver.close()
        if self._engine is not None:
            await self._engine.close()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "build comes first"
        return self._engine

    async def _generate(self, number: int, request: Request) -> None:
        try:
            await self.engine.generate(
                request, lambda sample: self._report(number, without_known(sample, request.num_routed))
            )
            self._report(number, None)
        except HoneError as error:
            self._report(number, error)
        except Exception as error:  # boundary: the caller must get it, whatever it is
            self._report(number, EngineError(f"prompt {request.prompt.id}: {type(error).__name__}: {error}"))

    def _end(self, number: int, _: asyncio.Task[None]) -> None:
        del self._running[number]
        if not self._running:
            self._is_idle.set()

    def _report(self, number: int, what: Sample | HoneError | None) -> None:
        self._news.append((number, what))
        self._is_news.set()
