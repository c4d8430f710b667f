"""Records of routing in Ray's object store: put there by an engine's process, fetched by the ranks that need them.

The records of the samples that an engine's process reports together are one object, the second result of its `take`.
The process that called it, the run's own, owns the object, and never fetches it. So an engine's death loses no record.
The loss of the machine that holds it does, and then the trainer's routers choose (`without_lost`). Ray frees the object
when the last sample that refers to it is gone, here and on the ranks. Records of less than 100 KiB together are no
object: Ray sends them with the results of the call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental import get_local_object_locations

from hone.errors import HoneError
from hone.experts import ExpertIds, ExpertSpan, Read, RoutingRecord, StoredExperts
from hone.types import Batch, Sample

SampleNews = tuple[int, Sample | HoneError | None]
"""A request's number, and a finished sample, its error, or None when it is done."""


@dataclass(frozen=True, slots=True)
class RecordInStore:
    """Fetches one of an object's records."""

    place: int
    object: ray.ObjectRef | None = None
    """None on the way to its owner, which calls `arrived`."""

    def __call__(self) -> ExpertIds:
        """On a rank. Raises a RayError if the object is lost: to the run that is the loss of the rank."""
        assert self.object is not None, "`arrived` comes first"
        return ray.get(self.object)[self.place]


def without_known(sample: Sample, num_routed: int) -> Sample:
    """Without the records of the prompt's first tokens; see `Request.num_routed`."""
    if not num_routed or not isinstance(sample.prompt_routing, np.ndarray):
        return sample
    new = sample.prompt_routing[num_routed:]
    return replace(
        sample, prompt_routing=StoredExperts((ExpertSpan(None, 0, num_routed), ExpertSpan(new, 0, len(new))))
    )


def parted(news: Sequence[SampleNews]) -> tuple[list[SampleNews], list[ExpertIds]]:
    """News without the records of its samples, and these."""
    records: list[ExpertIds] = []

    def moved(source: Read | ExpertIds) -> Read:
        if callable(source):
            return source
        records.append(source)
        return RecordInStore(len(records) - 1)

    def left(experts: RoutingRecord | None) -> StoredExperts | None:
        if isinstance(experts, np.ndarray):
            experts = StoredExperts((ExpertSpan(experts, 0, len(experts)),))
        return None if experts is None else experts.with_sources(moved)

    light: list[SampleNews] = []
    for number, what in news:
        if isinstance(what, Sample) and what.routing is not None:
            what = replace(what, routing=left(what.routing), prompt_routing=left(what.prompt_routing))
        light.append((number, what))
    return light, records


def arrived(sample: Sample, records: ray.ObjectRef) -> Sample:
    """A sample of `parted` in the process that owns the records."""
    if sample.routing is None:
        return sample

    def owned(source: Read | ExpertIds) -> Read | ExpertIds:
        if isinstance(source, RecordInStore) and source.object is None:
            return replace(source, object=records)
        return source

    found = {
        name: experts.with_sources(owned)
        for name in ("routing", "prompt_routing")
        if isinstance(experts := getattr(sample, name), StoredExperts)
    }
    return replace(sample, **found)


def without_lost(batch: Batch) -> tuple[Batch, int]:
    """A batch without the records that are lost, and of how many tokens those were. In the process that owns them."""
    stored = [experts for experts in (batch.routing_T, *batch.prompt_routing) if isinstance(experts, StoredExperts)]
    sources = [source for one in stored for source in one.sources() if isinstance(source, RecordInStore)]
    lost = _lost({source.object for source in sources if source.object is not None})
    if not lost:
        return batch, 0

    def is_lost(source: Read | ExpertIds | None) -> bool:
        return isinstance(source, RecordInStore) and source.object in lost

    def kept(experts: RoutingRecord) -> RoutingRecord:
        if not isinstance(experts, StoredExperts):
            return experts
        return experts.with_sources(lambda source: None if is_lost(source) else source)

    tokens = sum(stop - start for one in stored for source, start, stop in one.spans if is_lost(source))
    assert batch.routing_T is not None, "prompts have none then either"
    return replace(
        batch, routing_T=kept(batch.routing_T), prompt_routing=tuple(map(kept, batch.prompt_routing))
    ), tokens


def _lost(objects: Collection[ray.ObjectRef]) -> set[ray.ObjectRef]:
    """Those that no machine holds any more, as far as this process, which owns them, has heard."""
    places = get_local_object_locations(list(objects)) if objects else {}
    return {one for one in objects if not (place := places.get(one, {})).get("node_ids") and _fails(one, place)}


def _fails(one: ray.ObjectRef, place: Mapping[str, Any]) -> bool:
    """Whether an object that is in no machine's memory is lost; others came with the call, or were moved to a disk."""
    try:
        ray.get(one, timeout=0)
    except GetTimeoutError:
        return not place.get("did_spill")
    except RayError:
        return True
    return False
