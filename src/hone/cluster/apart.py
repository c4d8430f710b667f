"""Ranks of a critic or a reference on devices of their own: as the trainer's, and a reference can become the policy.

The policy's weights come as they come to an engine, in buckets through Ray's object store, so that no process has to
hold all of them at once; each rank keeps its share.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hone.cluster.actors import TrainerRank
from hone.train.apart import Apart
from hone.weights.publish import Incoming
from hone.weights.publish_ray import Intake


class ReferenceRank(TrainerRank):
    """One rank of a reference.

    Args:
        timeout_s: longest wait for weights that began to come.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._intake: Intake | None = None

    async def begin_weights(self, version: int) -> None:
        """See `publish_ray`, which calls this and the next two."""
        if self._intake is None:
            self._intake = Intake(_Refreshed(self.apart, self._computed), timeout_s=self._timeout_s)
        await self._intake.begin(version)

    async def take_bucket(self, header: str, data: NDArray[np.uint8]) -> None:
        await self.intake.bucket(header, data)

    async def finish_weights(self, manifest: str) -> str:
        return await self.intake.manifest(manifest)

    @property
    def intake(self) -> Intake:
        assert self._intake is not None, "begin_weights comes first"
        return self._intake

    @property
    def apart(self) -> Apart:
        assert isinstance(self._held, Apart)
        return self._held


class CriticRank(ReferenceRank):
    """One rank of a critic, and of the reference where that has the same devices."""


class _Refreshed:
    """A reference as `publish.take` sees it."""

    def __init__(self, apart: Apart, computed: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._apart, self._computed = apart, computed
        self._fingerprint = ""

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        assert isinstance(weights, Incoming)
        await self._computed(lambda: self._apart.refresh(weights))
        self._fingerprint = weights.fingerprint or ""

    def fingerprint(self) -> str:
        """Of what came, and was checked on its way: of a sharded reference no rank has more than a part."""
        return self._fingerprint
