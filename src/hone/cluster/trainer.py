"""The trainer as the loop sees it when its ranks are processes of Ray's: `train.trainer.Trainer` from a distance."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor
from transformers import PreTrainedConfig

from hone.algo.algorithm import Algorithm
from hone.cluster.actors import MakeTrainer, Seat, Vitals
from hone.cluster.calls import wait_for_all
from hone.cluster.parcel import Parcel
from hone.types import Batch

CLOSE_S = 10.0


class RemoteTrainer:
    """`Trainer` over the ranks of a cluster. Made with `start`.

    Args:
        ranks: handles of `TrainerRank`.
        timeout_s: a rank without an answer for so long is stuck.
        bucket_bytes: weights are sent in pieces of this size.
    """

    def __init__(self, ranks: Sequence[Any], *, timeout_s: float, bucket_bytes: int) -> None:
        self._ranks = {f"trainer rank {number}": rank for number, rank in enumerate(ranks)}
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes
        self._config: PreTrainedConfig | None = None
        self._versions = 0

    def start(self, make: MakeTrainer, address: str, *, timeout_s: float) -> None:
        """Build the trainer on every rank.

        Args:
            address: where several ranks meet; see `train.mesh.process_group`.
        """
        size = len(self._ranks)
        builds = {
            name: rank.build.remote(make, Seat(number, size, address))
            for number, (name, rank) in enumerate(self._ranks.items())
        }
        self._config, *_ = wait_for_all(builds, "starting the trainer", timeout_s)

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
        self._versions += 1
        calls = {name: rank.weights.remote(self._versions, self._bucket_bytes) for name, rank in self._ranks.items()}
        return RemoteWeights(calls, self._timeout_s)

    def fingerprint(self) -> str:
        """See `Trainer.fingerprint`; no weight moves."""
        return self._call("fingerprint")

    def master_weights(self) -> list[tuple[str, Tensor]]:
        """See `Trainer.master_weights`."""
        return self._call("master_weights")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `Trainer.state`; copies."""
        return self._call("state")

    def restore(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """See `Trainer.restore`."""
        self._call("restore", ray.put(tensors), rest)

    def vitals(self) -> list[Vitals]:
        """Of every rank, also while it computes."""
        return wait_for_all({name: rank.ping.remote() for name, rank in self._ranks.items()}, "ping", self._timeout_s)

    def close(self) -> None:
        """End all ranks; what they have not told is lost."""
        with contextlib.suppress(RayError):
            ray.wait(
                [rank.close.remote() for rank in self._ranks.values()], num_returns=len(self._ranks), timeout=CLOSE_S
            )
        for rank in self._ranks.values():
            ray.kill(rank)

    def _call(self, method: str, *args: Any, **named: Any) -> Any:
        calls = {name: rank.call.remote(method, *args, **named) for name, rank in self._ranks.items()}
        return wait_for_all(calls, method, self._timeout_s)[0]


class RemoteWeights:
    """A version's weights where the ranks put them. To go through them here is to fetch them."""

    def __init__(self, calls: dict[str, Any], timeout_s: float) -> None:
        self._calls, self._timeout_s = calls, timeout_s

    @property
    def parcel(self) -> Any:
        """A reference to the `Parcel`, to be passed on."""
        return next(iter(self._calls.values()))

    def wait(self) -> None:
        """Until all ranks have done their part. Raises ClusterError naming one that has not."""
        wait_for_all(self._calls, "publishing weights", self._timeout_s)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        parcel: Parcel = wait_for_all(self._calls, "fetching weights", self._timeout_s)[0]
        return iter(parcel)
