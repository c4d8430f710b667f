"""The two processes of the part on publishing: a sender of weights, and an engine that waits for them. Needs Ray."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hone.cluster.ray import end_with_ray
from hone.config.cluster import ClusterSection
from hone.errors import ClusterError
from hone.model.fingerprint import weights_fingerprint
from hone.rollout.local import LocalEngine
from hone.tools.acceptance.setting import random_model, timed
from hone.weights.buckets import bucket_bytes
from hone.weights.publish import Update, publish
from hone.weights.routes import Routes
from hone.weights.transports import RayPeer, TransportName, make_transport

ENGINE, TIMEOUT_S, VERSIONS = "engine", 120.0, 3


@dataclass(frozen=True, slots=True)
class SentVersions:
    """What became of the versions that went by one transport."""

    seconds: float
    """Median of a version, from the first byte until its fingerprint came back."""
    fingerprint_s: float
    """Of a fingerprint alone."""
    held_frac: float
    """Versions of which the engine holds what the sender has, to the last bit."""
    over_least: float
    """Bytes moved over those of the weights."""
    num_bytes: int
    """Of the weights."""


class WeightsSender:
    """A trainer's rank in an actor, as far as weights go."""

    def __init__(self, shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        end_with_ray()
        self._model = random_model(shape, device, dtype=dtype)
        self._version = 0

    def send(self, name: TransportName, actor: Any) -> SentVersions:
        """Publish versions to an engine's actor, each with other weights than the one before."""
        transport, size = make_transport(name, host="127.0.0.1"), bucket_bytes(ClusterSection().bucket_mib)
        seconds, held, over_least = list[float](), list[bool](), list[float]()
        sizes = list[int]()
        for _ in range(1 + VERSIONS):
            started = time.perf_counter()
            self._version += 1
            found = publish(
                self._model.named_weights(),
                {ENGINE: RayPeer(actor)},
                transport,
                updates={ENGINE: Update(f"{name} {self._version}", self._version)},
                bucket_size=size,
                timeout_s=TIMEOUT_S,
            )
            seconds.append(time.perf_counter() - started)
            if found.failed:
                raise ClusterError(f"publishing by {name}: {found.failed[ENGINE]}")
            held.append(found.held_by == (ENGINE,) and found.manifest.fingerprint == self._fingerprint())
            over_least.append(Routes(name, {ENGINE: (0,)}).moved_over_least([found], [ENGINE]))
            sizes.append(found.manifest.num_bytes)
            with torch.no_grad():  # as an update would: every weight
                for parameter in self._model.parameters():
                    parameter.mul_(1.25)
        transport.drop(ENGINE)
        fingerprint_s, _ = timed(self._fingerprint)
        median_s = statistics.median(seconds[1:])  # the first joins a group
        return SentVersions(median_s, fingerprint_s, sum(held) / len(held), max(over_least), max(sizes))

    def _fingerprint(self) -> str:
        return weights_fingerprint(self._model.named_weights())


async def waiting_engine(shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> LocalEngine:
    """Hone's engine with weights of its own."""
    model = random_model(shape, device, dtype=dtype, seed=1)
    return LocalEngine(model, decode=str, eos_ids=(), max_concurrent=1, timeout_s=TIMEOUT_S)
