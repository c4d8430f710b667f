"""Which experts tokens were sent to: an array, or a reference to records that stay where they were made.

A record has a byte or two for each layer and expert of a token: hundreds of bytes a token of a large model, where all
else that a sample has is about twelve. Only a rank that trains on the token reads it. So samples of engines in other
processes carry `StoredExperts`, and `get` is called where tokens are laid out for the model. Not here: the store itself
(`cluster/stored.py`), and what models do with a record (`model/routing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

ExpertIds = NDArray[np.int8 | np.int16]
"""(n, layers, k): the k experts that each token was sent to by each layer that has experts; or `UNRECORDED`."""
UNRECORDED = -1
"""In place of an expert: an engine has not computed the token, so the trainer routes it."""
Read = Callable[[], ExpertIds]
"""Fetches a record. It can be pickled."""


class ExpertSpan(NamedTuple):
    """Consecutive tokens of one record."""

    source: Read | ExpertIds | None
    """None: they have no record."""
    start: int
    stop: int
    """`source[start:stop]` are the tokens'."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredExperts:
    """Stands for `ExpertIds` of which some are elsewhere: spans, one behind the other."""

    spans: tuple[ExpertSpan, ...]

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.spans)

    def __getitem__(self, part: slice) -> StoredExperts:
        first, end, _ = part.indices(len(self))
        found, before = [], 0
        for source, start, stop in self.spans:
            offset = start - before
            low, high = max(start, first + offset), min(stop, end + offset)
            if low < high:
                found.append(ExpertSpan(source, low, high))
            before += stop - start
        return StoredExperts(tuple(found))

    def sources(self) -> Iterator[Read | ExpertIds]:
        """Of its records."""
        return (source for source, _, _ in self.spans if source is not None)

    def with_sources(self, change: Callable[[Read | ExpertIds], Read | ExpertIds | None]) -> StoredExperts:
        """The same tokens with other sources of their records; with None they have no record then."""
        changed = [None if span.source is None else change(span.source) for span in self.spans]
        return StoredExperts(
            tuple(ExpertSpan(source, *span[1:]) for source, span in zip(changed, self.spans, strict=True))
        )

    def split(self, lengths: Sequence[int]) -> list[StoredExperts]:
        """One after another, of so many tokens each."""
        spans, found = iter(self.spans), []
        source, start, stop = None, 0, 0
        for length in lengths:
            taken = []
            while length:
                if start == stop:
                    source, start, stop = next(spans)
                end = min(stop, start + length)
                if end > start:
                    taken.append(ExpertSpan(source, start, end))
                length, start = length - (end - start), end
            found.append(StoredExperts(tuple(taken)))
        return found

    def get(self) -> ExpertIds | None:
        """Fetches them. None: no token has a record."""
        found = [source() if callable(source) else source for source, _, _ in self.spans]
        like = next((record for record in found if record is not None), None)
        if like is None:
            return None
        places = zip(found, self.spans, strict=True)
        return np.concatenate(
            [
                unrecorded(stop - start, like) if record is None else record[start:stop]
                for record, (_, start, stop) in places
            ]
        )


RoutingRecord = ExpertIds | StoredExperts


def joined_experts(parts: Sequence[RoutingRecord]) -> RoutingRecord:
    """Records one behind the other: an array if all are here."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts):
        return np.concatenate(arrays)
    return StoredExperts(tuple(span for part in parts for span in _spans(part)))


def split_experts(experts: RoutingRecord, lengths: Sequence[int]) -> Sequence[RoutingRecord]:
    """Records of one after another, of so many tokens each."""
    if isinstance(experts, StoredExperts):
        return experts.split(lengths)
    return np.split(experts, np.cumsum(lengths)[:-1])


@overload
def unrecorded(num_tokens: int, like: ExpertIds) -> ExpertIds: ...
@overload
def unrecorded(num_tokens: int, like: RoutingRecord) -> RoutingRecord: ...
def unrecorded(num_tokens: int, like: RoutingRecord) -> RoutingRecord:
    """Routing of `num_tokens` tokens that no engine has computed."""
    if isinstance(like, StoredExperts):
        return StoredExperts((ExpertSpan(None, 0, num_tokens),))
    return np.full((num_tokens, *like.shape[1:]), UNRECORDED, like.dtype)


def _spans(part: RoutingRecord) -> tuple[ExpertSpan, ...]:
    return part.spans if isinstance(part, StoredExperts) else (ExpertSpan(part, 0, len(part)),)
