"""Proxies for a trainer (`train.trainer.Trainer`, `train.pairs.PairLearner`) whose ranks are Ray actors.

Critic and reference are on the policy's ranks, or on devices of their own, where a critic learns while the policy does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.algo.algorithm import Algorithm
from hone.cluster.calls import START_KEY, shared, why_killed
from hone.cluster.ranks import PendingCalls, RankGroup, gather
from hone.cluster.stored import without_lost
from hone.data.pairs import PreferencePair
from hone.errors import ClusterError, EngineError
from hone.memory.rungs import Change
from hone.train.pairs import Measured
from hone.train.tensor_files import FileFacts
from hone.types import Batch
from hone.weights.publish import Published
from hone.weights.routes import Publisher, Routes
from hone.weights.transports import RayPeer, TransportName

CLOSE_S = 10.0
"""Longest wait for ranks to leave their process groups."""


class RemoteLearner:
    """Base of the proxies. Call `start` first.

    Args:
        groups: the first one has the trained model, others what belongs to it.
        timeout_s: a rank without an answer for so long is lost.
        adopt: gets settings that ranks lowered because memory ran out.
    """

    def __init__(
        self,
        groups: Sequence[RankGroup],
        *,
        timeout_s: float,
        adopt: Callable[[Sequence[Change]], object] = lambda changes: None,
    ) -> None:
        self._groups, self._timeout_s, self._adopt = groups, timeout_s, adopt
        self._config: PreTrainedConfig | None = None

    def start(self, *, is_one_machine: bool, timeout_s: float) -> dict[str, int]:
        """Have all ranks make what they hold. Returns their process ids by name; raises what `gather` does."""
        begun = [group.begin(is_one_machine=is_one_machine, timeout_s=timeout_s) for group in self._groups]
        built = gather(begun, "starting the trainer", timeout_s, START_KEY)
        self._config = self._answer(self._groups[0].ask("hf_config"), "starting the trainer", self._timeout_s)
        return {
            name: pid
            for group, pids in zip(self._groups, built, strict=True)
            for name, pid in zip(group.ranks, pids, strict=True)
        }

    @property
    def device(self) -> torch.device:
        """Batches are made here, on the host."""
        return torch.device("cpu")

    @property
    def hf_config(self) -> PreTrainedConfig:
        """See `Checkpointable.hf_config`."""
        assert self._config is not None, "start comes first"
        return self._config

    def write_weights(self, folder: Path, dtype: torch.dtype) -> None:
        """See `Checkpointable.write_weights`; rank 0 writes, and no weight comes here."""
        asked = self._groups[0].ask("write_weights", folder.absolute(), dtype)
        self._answer(asked, f"writing {folder}", self._timeout_s)

    def snapshot(self) -> RemoteSnapshot:
        """See `Checkpointable.snapshot`; copied on each rank. The one before must have been written."""
        asked = [group.ask("copy_state") for group in self._groups]
        copied = gather(asked, "copying the trainer's state", self._timeout_s)
        num_bytes = [sum(size for size, _ in found) for found in copied]
        rest = {key: value for found in copied for key, value in found[0][1].items()}
        writing = [group for group, size in zip(self._groups, num_bytes, strict=True) if size]
        return RemoteSnapshot(writing, sum(num_bytes), rest, self._timeout_s)

    def restore(self, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        """See `Checkpointable.restore`; each rank reads what it needs from the disk."""
        saved = shared(tensors)
        asked = [group.ask("call", "restore", saved, rest) for group in self._groups]
        gather(asked, "restore", self._timeout_s)

    def close(self) -> None:
        """Let the ranks leave their process groups, where they can, and kill them; calls in progress are lost."""
        asked = [group.ask("close") for group in self._groups if not group.is_broken]
        leaving = [call for one in asked for call in one.calls.values()]
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=CLOSE_S)
        for group in self._groups:
            group.end()

    def _adopt_changes(self) -> None:
        """Pass on what the ladders of the groups changed; every call of an update ends with it."""
        asked = [group.ask("take_changes") for group in self._groups]
        for of_ranks in gather(asked, "update", self._timeout_s):
            if of_ranks[0]:
                self._adopt(of_ranks[0])

    def _call(self, group: RankGroup, method: str, *args: Any, **named: Any) -> Any:
        return self._answer(group.ask("call", method, *args, **named), method, self._timeout_s)

    def _answer(self, asked: PendingCalls, what: str, timeout_s: float) -> Any:
        """Rank 0's result, once all ranks are done."""
        return gather([asked], what, timeout_s)[0][0]


class RemotePairTrainer(RemoteLearner):
    """`PairLearner` over the ranks of a cluster."""

    def update(self, pairs: Sequence[PreferencePair]) -> dict[str, float]:
        """See `PairLearner.update`."""
        metrics = self._call(self._groups[0], "update", shared(pairs))
        self._adopt_changes()
        return metrics

    def measure(self, pairs: Sequence[PreferencePair]) -> Measured:
        """See `PairLearner.measure`."""
        return self._call(self._groups[0], "measure", shared(pairs))


class RemoteTrainer(RemoteLearner):
    """`Trainer` over the ranks of a cluster.

    Args:
        policy: trains the policy, and has the roles that have no pool of their own.
        critic, reference: have these roles instead, on devices of their own; may be the same group.
        reference_refresh_every: see `Roles`; only of a reference in a pool of its own.
        routes: how weights get to the engines.
        timeout_s: a rank without an answer for so long is stuck.
        bucket_size: bytes of weights that are sent at once.
        adopt: see `RemoteLearner`.
        warn: gets a message about records of routing that were lost.
    """

    def __init__(
        self,
        policy: RankGroup,
        *,
        critic: RankGroup | None = None,
        reference: RankGroup | None = None,
        reference_refresh_every: int = 0,
        routes: Routes | None = None,
        timeout_s: float,
        bucket_size: int,
        adopt: Callable[[Sequence[Change]], object] = lambda changes: None,
        warn: Callable[[str], object] = lambda message: None,
    ) -> None:
        self._policy, self._critic, self._reference = policy, critic or policy, reference or policy
        super().__init__(list(dict.fromkeys((policy, self._critic, self._reference))), timeout_s=timeout_s, adopt=adopt)
        self._refresh_every = reference_refresh_every if self._reference is not policy else 0
        self._update_count, self._warn = 0, warn
        self._bucket_size = bucket_size
        self._publisher = Publisher(routes or Routes())

    def logprobs(self, batch: Batch, *, reference: bool = False, temperature: float | None = None) -> Tensor:
        """See `Trainer.logprobs`."""
        group = self._reference if reference else self._policy
        return self._call(group, "logprobs", _sent(batch), reference=reference, temperature=temperature)

    def logprobs_and_entropies(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Trainer.logprobs_and_entropies`."""
        return self._call(self._policy, "logprobs_and_entropies", _sent(batch))

    def values(self, batch: Batch) -> Tensor:
        """See `Trainer.values`."""
        return self._call(self._critic, "values", _sent(batch))

    def measure(self, batch: Batch, needs: Collection[str]) -> dict[str, Tensor]:
        """See `Trainer.measure`. What is apart measures at the same time."""
        at = {"ref_logprobs": self._reference, "policy_logprobs": self._policy, "values": self._critic}
        wanted = {group: [need for need, who in at.items() if need in needs and who is group] for group in self._groups}
        if not any(wanted.values()):
            return {}
        sent = _sent(batch)
        asked = [group.ask("call", "measure", sent, some) for group, some in wanted.items() if some]
        found = gather(asked, "measuring", self._timeout_s)
        return {name: column for of_ranks in found for name, column in of_ranks[0].items()}

    def update(self, batch: Batch, algorithm: Algorithm) -> dict[str, float]:
        """See `Trainer.update`. A critic apart learns at the same time: they share nothing but the batch."""
        batch, lost_tokens = without_lost(batch)
        if lost_tokens:
            self._warn(
                f"update: where the engine sent {lost_tokens:,} tokens is lost with the machine that held the records. "
                "For these the trainer chooses experts itself, as without algorithm.replay_routing."
            )
        sent = shared(batch)
        learning = dict.fromkeys((self._critic, self._policy))
        asked = [group.ask("call", "update", sent, algorithm) for group in learning]
        metrics: dict[str, float] = {}
        for of_ranks in gather(asked, "update", self._timeout_s):
            metrics |= of_ranks[0]
        self._adopt_changes()
        self._update_count += 1
        if self._refresh_every and self._update_count % self._refresh_every == 0:
            # Let the reference become the policy.
            send = partial(self._send, self._update_count, "refreshing the reference")
            published = Publisher(Routes()).publish(self._reference.ranks, send)
            if published.failed:
                self._reference.is_broken = True
                raise ClusterError(f"refreshing the reference: {'; '.join(published.failed.values())}")
        return metrics

    def weights(self) -> RemoteWeights:
        """See `Trainer.weights`. An engine in another process takes them without their coming here."""
        return RemoteWeights(self)

    def publish(self, engines: Mapping[str, Any], version: int) -> Published:
        """Send the weights to engines, from the ranks themselves. Blocks.

        Args:
            engines: handles of `EngineActor`s, by name.
        Raises:
            ClusterError: a rank has failed. An engine that did is in `Published.failed`.
        """
        return self._publisher.publish(engines, partial(self._send, version, f"publishing version {version}"))

    def metrics(self) -> dict[str, float]:
        """Of the last publish; see `observe/metrics.py`."""
        return self._publisher.metrics()

    def fingerprint(self) -> str:
        """See `Trainer.fingerprint`; no weight moves."""
        return self._call(self._policy, "fingerprint")

    def restore(self, tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        super().restore(tensors, rest)
        self._update_count = int(rest["updates"])

    def fetch_weights(self) -> list[tuple[str, Tensor]]:
        """All weights, here. For what is not a process of the cluster."""
        return self._answer(self._policy.ask("weights"), "gathering weights", self._timeout_s)

    def _send(
        self, version: int, what: str, engines: Mapping[str, RayPeer], transport: TransportName, update_id: str
    ) -> list[Published | None]:
        """Have every rank send to the engines that are its own; see `Publisher`."""
        settings = {"version": version, "bucket_size": self._bucket_size, "timeout_s": self._timeout_s}
        asked = self._policy.ask("publish", dict(engines), transport, update_id, **settings)
        # Each engine may use up its time; only then is it the rank that is stuck.
        return gather([asked], what, 2 * self._timeout_s)[0]


def _sent(batch: Batch) -> Any:
    return shared(without_lost(batch)[0])


@dataclass(frozen=True)
class RemoteSnapshot:
    """A `Snapshot` whose tensors are copies in the ranks' memory."""

    groups: Sequence[RankGroup]
    """Those that have something to write."""
    num_bytes: int
    rest: Mapping[str, Any]
    timeout_s: float
    is_live = False

    def write(self, folder: Path) -> dict[str, FileFacts]:
        """Have each rank write what it copied, while it computes. Raises CheckpointError."""
        asked = [group.ask("write_copy", folder.absolute()) for group in self.groups]
        written = gather(asked, f"writing {folder}", self.timeout_s)
        return {name: facts for ranks in written for files in ranks for name, facts in files.items()}


class RemoteWeights:
    """The weights on the ranks. Engines in other processes get them from there; those that ask in one pass of the event
    loop get the same buckets. Iterating fetches all of them here."""

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
            why = why_killed(actor)
            raise EngineError(published.failed[name] if why is None else f"{name} died. {why}")
        return published.manifest.fingerprint

    async def _send(self, version: int) -> Published:
        await asyncio.sleep(0)  # so that all engines have asked
        engines, self._asking, self._sending = self._asking, {}, None
        return await asyncio.to_thread(self._trainer.publish, engines, version)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._trainer.fetch_weights())
