"""The trainer as the loop sees it when its ranks are processes of Ray's: `train.trainer.Trainer` from a distance."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.algo.algorithm import Algorithm
from hone.cluster.actors import MakeTrainer, Seat
from hone.cluster.calls import START_KEY, wait_for_all
from hone.cluster.publish import Published
from hone.errors import ClusterError, EngineError
from hone.train.shards import FileFacts
from hone.types import Batch

CLOSE_S = 10.0


class RemoteTrainer:
    """`Trainer` over the ranks of a cluster. Made with `start`.

    Args:
        ranks: handles of `TrainerRank`.
        timeout_s: a rank without an answer for so long is stuck.
        bucket_size: bytes of weights that are sent at once.
    """

    def __init__(self, ranks: Sequence[Any], *, timeout_s: float, bucket_size: int) -> None:
        self._ranks = {f"trainer rank {number}": rank for number, rank in enumerate(ranks)}
        self._timeout_s, self._bucket_size = timeout_s, bucket_size
        self._config: PreTrainedConfig | None = None
        self._open = ExitStack()
        self._is_broken = False
        """A rank died or is stuck, and the others may wait for it."""
        self._asking = threading.Lock()
        self._published_bytes = 0

    def start(self, make: MakeTrainer, *, is_one_machine: bool, timeout_s: float) -> None:
        """Build the trainer on every rank. On one machine they meet in a file, and no port is opened for it."""
        size, what = len(self._ranks), "starting the trainer"
        if is_one_machine:
            folder = tempfile.mkdtemp(prefix="hone-ranks-")
            self._open.callback(shutil.rmtree, folder, ignore_errors=True)
            address = f"file://{folder}/meeting"
        else:
            name, first = next(iter(self._ranks.items()))
            address = wait_for_all({name: first.free_address.remote()}, what, timeout_s, START_KEY)[0]
        builds = {
            name: rank.build.remote(make, Seat(number, size, address))
            for number, (name, rank) in enumerate(self._ranks.items())
        }
        self._config, *_ = wait_for_all(builds, what, timeout_s, START_KEY)

    @property
    def device(self) -> torch.device:
        """Batches are made here, on the host."""
        return torch.device("cpu")

    @property
    def hf_config(self) -> PreTrainedConfig:
        """See `Trainer.hf_config`."""
        assert self._config is not None, "start comes first"
        return self._config

    def logprobs(self, batch: Batch, *, reference: bool = False, temperature: float | None = None) -> Tensor:
        """See `Trainer.logprobs`."""
        return self._call("logprobs", ray.put(batch), reference=reference, temperature=temperature)

    def values(self, batch: Batch) -> Tensor:
        """See `Trainer.values`."""
        return self._call("values", ray.put(batch))

    def update(self, batch: Batch, algorithm: Algorithm) -> dict[str, float]:
        """See `Trainer.update`."""
        return self._call("update", ray.put(batch), algorithm)

    def weights(self) -> RemoteWeights:
        """See `Trainer.weights`. An engine in another process takes them without their coming here."""
        return RemoteWeights(self)

    def publish(self, engines: Mapping[str, Any], version: int) -> Published:
        """Send the weights to engines, from rank 0. Blocks.

        Args:
            engines: handles of `EngineActor`s, by name.
        Raises:
            ClusterError: a rank has failed. An engine that did is in `Published.failed`.
        """
        settings = {"version": version, "bucket_size": self._bucket_size, "timeout_s": self._timeout_s}
        calls = self._ask("publish", dict(engines), **settings)
        # Each engine may use up its time; only then is it the rank that is stuck.
        published: Published = self._answer(calls, f"publishing version {version}", 2 * self._timeout_s)
        self._published_bytes = published.manifest.num_bytes
        return published

    def metrics(self) -> dict[str, float]:
        """Of the last publish; see `observe/metrics.py`."""
        return {"engine/published_mib": self._published_bytes / 2**20}

    def fingerprint(self) -> str:
        """See `Trainer.fingerprint`; no weight moves."""
        return self._call("fingerprint")

    def master_weights(self) -> list[tuple[str, Tensor]]:
        """See `Trainer.master_weights`."""
        return self._gather(master=True)

    def snapshot(self) -> RemoteSnapshot:
        """See `Trainer.snapshot`; copied on each rank. The one before must have been written."""
        copied = self._answers(self._ask("copy_state"), "copying the trainer's state", self._timeout_s)
        return RemoteSnapshot(self, num_bytes=sum(size for size, _ in copied), rest=copied[0][1])

    def write_copies(self, folder: Path) -> dict[str, FileFacts]:
        """Have each rank write what it copied, while it computes. Raises CheckpointError."""
        written = self._answers(self._ask("write_copy", folder.absolute()), f"writing {folder}", self._timeout_s)
        return {name: facts for files in written for name, facts in files.items()}

    def restore(self, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        """See `Trainer.restore`; each rank reads what it needs from the disk."""
        self._call("restore", ray.put(tensors), rest)

    def close(self) -> None:
        """End all ranks; what they have not told is lost."""
        if not self._is_broken:
            ray.wait(list(self._ask("close").values()), num_returns=len(self._ranks), timeout=CLOSE_S)
        for rank in self._ranks.values():
            ray.kill(rank)
        self._open.close()

    def fetch_weights(self) -> list[tuple[str, Tensor]]:
        """All weights, here. For what is no process of the cluster."""
        return self._gather(master=False)

    def _gather(self, *, master: bool) -> list[tuple[str, Tensor]]:
        return self._answer(self._ask("weights", master=master), "gathering weights", self._timeout_s)

    def _call(self, method: str, *args: Any, **named: Any) -> Any:
        return self._answer(self._ask("call", method, *args, **named), method, self._timeout_s)

    def _answer(self, calls: Mapping[str, ray.ObjectRef], what: str, timeout_s: float) -> Any:
        """What rank 0 says, once all ranks are done."""
        return self._answers(calls, what, timeout_s)[0]

    def _answers(self, calls: Mapping[str, ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
        try:
            return wait_for_all(calls, what, timeout_s)
        except ClusterError:
            self._is_broken = True
            raise

    def _ask(self, method: str, *args: Any, **named: Any) -> dict[str, Any]:
        """Call every rank. Calls of several threads reach all in one order; else ranks that work together would wait
        for each other for ever."""
        with self._asking:
            return {name: getattr(rank, method).remote(*args, **named) for name, rank in self._ranks.items()}


@dataclass(frozen=True)
class RemoteSnapshot:
    """A `Snapshot` whose tensors are copies in the ranks' memory."""

    trainer: RemoteTrainer
    num_bytes: int
    rest: Mapping[str, Any]
    is_live = False

    def write(self, folder: Path) -> dict[str, FileFacts]:
        return self.trainer.write_copies(folder)


class RemoteWeights:
    """The weights as they are on the ranks. An engine that is a process too gets them from there, and whoever asks in
    one pass of the event loop is sent the same buckets; to go through them here is to fetch them all."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer = trainer
        self._asking: dict[str, Any] = {}
        self._sending: asyncio.Future[Published] | None = None

    async def send_to(self, name: str, actor: Any, version: int) -> str:
        """Have them loaded by an engine; returns the fingerprint of what it holds then.

        Raises:
            EngineError: it does not hold the version, and may hold half of it.
            ClusterError: a rank has failed.
        """
        if self._sending is None:
            self._sending = asyncio.ensure_future(self._send(version))
        self._asking[name] = actor
        published = await asyncio.shield(self._sending)
        if name in published.failed:
            raise EngineError(published.failed[name])
        return published.manifest.fingerprint

    async def _send(self, version: int) -> Published:
        await asyncio.sleep(0)  # so that all engines have asked
        engines, self._asking, self._sending = self._asking, {}, None
        return await asyncio.to_thread(self._trainer.publish, engines, version)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._trainer.fetch_weights())
