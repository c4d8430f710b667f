"""Order of the data: which row stands at each position of an endless stream (`data.order`, weights in `data.train`).

With weights, each position belongs to one source, so that every prefix of the stream has the shares of the weights to
within a few rows, and each source runs through its own rows before it starts again. Both are functions of the seed and
the position, on every machine: a run resumes from one integer. Only pass rates have a state, which checkpoints keep.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.errors import DataError
from hone.types import read_only

RowNumbers = NDArray[np.int64]
WEIGHT_UNITS = 1 << 30
"""The sum of the weights as integers: products with a position fit into 64 bits."""
REVISIT = 4
"""A row whose pass rate is out of bounds is in one of this number of rounds."""
UNKNOWN, WITHIN, OUTSIDE = 0, 1, 2
"""What is known of a row's pass rate."""


class SourceRange(NamedTuple):
    """The kept rows of one source: `start` up to `stop`."""

    name: str
    """In metrics and messages."""
    start: int
    stop: int


class RowOrder:
    """Places of rows in an endless stream; of several sources with weights, or of all rows as one.

    Attributes:
        is_measured: it depends on what `measure` is given, so positions are to be asked for one by one, when needed.
        shares: of the sources in the stream, in their order; without weights by their numbers of rows.
    """

    def __init__(
        self,
        sources: Sequence[SourceRange],
        *,
        seed: int,
        order: str = "shuffled",
        weights: Sequence[float] | None = None,
        values: NDArray[np.float64] | None = None,
        bounds: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        """
        Args:
            sources: in the order of their rows, which they divide.
            values: (n,) of the rows, for `ascending` and `descending`, which have no weights.
        Raises:
            DataError: no row is left of a source that has a weight.
        """
        self.is_measured = order == "pass_rate"
        self._seed, self._bounds = seed, bounds
        sizes = np.array([source.stop - source.start for source in sources], np.float64)
        given = sizes if weights is None else np.asarray(weights, np.float64)
        self.shares: tuple[float, ...] = tuple((given / given.sum()).tolist())
        if weights is None:
            parts, self._units = [SourceRange("", 0, sources[-1].stop)], (WEIGHT_UNITS,)
        else:
            parts = [source for source, share in zip(sources, self.shares, strict=True) if share > 0]
            self._units = tuple(max(1, round(share * WEIGHT_UNITS)) for share in self.shares if share > 0)
            for source in parts:
                if source.stop == source.start:
                    raise DataError(f"data.train: no row of {source.name} is left. Give it weight 0, or fix it")
        self._starts = [part.start for part in parts]
        self._streams: list[_Epochs | _PassRateRounds] = []
        for number, part in enumerate(parts):
            key = str(seed) if weights is None else f"{seed}/{number}"
            size = part.stop - part.start
            if self.is_measured:
                self._streams.append(_PassRateRounds(size, key))
            else:
                self._streams.append(_Epochs(size, key, order, values))

    def __len__(self) -> int:
        """Positions of an epoch: as many as rows that are used."""
        return sum(map(len, self._streams))

    def at(self, start: int, stop: int) -> RowNumbers:
        """(stop - start,) places of the rows at these positions."""
        if len(self._streams) == 1:
            return self._starts[0] + self._streams[0].at(start, stop)
        source, position = self._divided(np.arange(start, stop, dtype=np.int64))
        places = np.empty(stop - start, np.int64)
        for number, (stream, first) in enumerate(zip(self._streams, self._starts, strict=True)):
            is_own = source == number
            if is_own.any():
                own = position[is_own]  # they follow each other
                places[is_own] = first + stream.at(int(own[0]), int(own[-1]) + 1)
        return places

    def measure(self, rates: Iterable[tuple[int, float]]) -> None:
        """Record measured pass rates: position in the stream, and the share of its samples that were right."""
        if not self.is_measured:
            return
        low, high = self._bounds
        for index, rate in rates:
            source, position = self._divided(np.array([index], np.int64))
            stream = self._streams[source[0]]
            assert isinstance(stream, _PassRateRounds)
            stream.known[stream.at(int(position[0]), int(position[0]) + 1)] = WITHIN if low < rate < high else OUTSIDE

    def state(self, next_index: int) -> dict[str, Any]:
        """What a checkpoint keeps, to continue at this position; JSON. Earlier positions cannot be asked for again."""
        if not self.is_measured:
            return {}
        return {"sources": [s.state(self._reached(n, next_index)) for n, s in self._rounds()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave. Raises DataError where the rows are not those of the checkpoint."""
        if self.is_measured and state:
            for (_, stream), saved in zip(self._rounds(), state["sources"], strict=True):
                stream.restore(saved)

    def _rounds(self) -> Iterable[tuple[int, _PassRateRounds]]:
        return [(number, stream) for number, stream in enumerate(self._streams) if isinstance(stream, _PassRateRounds)]

    def _reached(self, source: int, index: int) -> int:
        """How many of the positions before `index` are a source's."""
        first, stop, reached = 0, len(self._units), index
        while stop - first > 1:
            middle = (first + stop) // 2
            before = int(self._before(np.array([reached], np.int64), first, middle, stop)[0])
            first, stop, reached = (first, middle, before) if source < middle else (middle, stop, reached - before)
        return reached

    def _divided(self, positions: RowNumbers) -> tuple[RowNumbers, RowNumbers]:
        """The source of each position, and the position in that source's own stream."""
        source, own = np.zeros(len(positions), np.int64), positions.copy()

        def divide(chosen: NDArray[Any], first: int, stop: int) -> None:
            if stop - first == 1:
                source[chosen] = first
                return
            middle = (first + stop) // 2
            before = self._before(own[chosen], first, middle, stop)
            is_left = self._before(own[chosen] + 1, first, middle, stop) > before
            own[chosen] = np.where(is_left, before, own[chosen] - before)
            divide(chosen[is_left], first, middle)
            divide(chosen[~is_left], middle, stop)

        divide(np.arange(len(positions)), 0, len(self._units))
        return source, own

    def _before(self, positions: RowNumbers, first: int, middle: int, stop: int) -> RowNumbers:
        """Of the positions of sources first..stop, how many before each belong to sources first..middle: their share,
        rounded, from an offset that the seed decides."""
        left, both = sum(self._units[first:middle]), sum(self._units[first:stop])
        return (positions * left + _hash(f"{self._seed}/{first}:{stop}") % both) // both


class _Epochs:
    """Every row once in each epoch."""

    def __init__(self, size: int, key: str, order: str, values: NDArray[np.float64] | None) -> None:
        self._size, self._key, self._order = size, key, order
        self._values = -values if values is not None and order == "descending" else values
        self._epoch: tuple[int, NDArray[np.uint32]] | None = None

    def __len__(self) -> int:
        return self._size

    def at(self, start: int, stop: int) -> RowNumbers:
        pieces: list[NDArray[Any]] = []
        while start < stop:
            epoch, first = divmod(start, self._size)
            if self._epoch is None or self._epoch[0] != epoch:
                self._epoch = None  # frees it first
                if self._order == "source":
                    rows = np.arange(self._size, dtype=np.uint32)
                else:
                    rows = epoch_order(self._size, seed=self._key, epoch=epoch)
                    rows = rows if self._values is None else rows[np.argsort(self._values[rows], kind="stable")]
                self._epoch = epoch, rows
            pieces.append(self._epoch[1][first : first + stop - start])
            start += len(pieces[-1])
        return np.concatenate(pieces).astype(np.int64)


class _Round(NamedTuple):
    number: int
    start: int
    """Position of its first row."""
    outside: NDArray[np.bool_]
    """(n,) rows whose pass rate was out of bounds when it began."""
    rows: NDArray[np.uint32]

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)


class _PassRateRounds:
    """Rows by pass rate: in each round first those that are unknown or within bounds, shuffled, then of the others
    every fourth, a different quarter each time. What is measured during a round counts from the next one on.

    Attributes:
        known: (n,) UNKNOWN, WITHIN or OUTSIDE.
    """

    def __init__(self, size: int, key: str) -> None:
        self._key, self.known = key, np.full(size, UNKNOWN, np.uint8)
        self._open: list[_Round] = []

    def __len__(self) -> int:
        return len(self.known)

    def at(self, start: int, stop: int) -> RowNumbers:
        pieces: list[NDArray[Any]] = []
        while start < stop:
            while not self._open or self._open[-1].stop <= start:
                number, begin = (self._open[-1].number + 1, self._open[-1].stop) if self._open else (0, 0)
                self._open.append(self._made(number, begin, self.known == OUTSIDE))
            assert start >= self._open[0].start, "a position before those of the checkpoint"
            current = next(one for one in self._open if start < one.stop)
            pieces.append(current.rows[start - current.start : stop - current.start])
            start += len(pieces[-1])
        return np.concatenate(pieces).astype(np.int64)

    def state(self, reached: int) -> dict[str, Any]:
        self._open = [one for one in self._open if one.stop > reached] or self._open[-1:]
        rounds = [[one.number, one.start, _packed(np.packbits(one.outside))] for one in self._open]
        return {"rows": len(self), "known": _packed(self.known), "rounds": rounds}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["rows"] != len(self):
            raise DataError(
                f"data.order: pass rates of {state['rows']:,} rows are in the checkpoint, and the source has "
                f"{len(self):,}. Restore the data, or start a new run."
            )
        self.known = _unpacked(state["known"])
        bits = [(number, start, _unpacked(outside)) for number, start, outside in state["rounds"]]
        self._open = [
            self._made(number, start, np.unpackbits(outside, count=len(self)).astype(np.bool_))
            for number, start, outside in bits
        ]

    def _made(self, number: int, start: int, outside: NDArray[np.bool_]) -> _Round:
        rows = epoch_order(len(self), seed=self._key, epoch=number)
        if not outside.all():  # else no row is left but those
            others = rows[outside[rows]]
            rows = np.concatenate([rows[~outside[rows]], others[(others + np.uint32(number)) % REVISIT == 0]])
        return _Round(number, start, outside, rows)


def epoch_order(num_rows: int, *, seed: int | str, epoch: int) -> NDArray[np.uint32]:
    """A permutation of range(num_rows) that is a function of (seed, epoch), on every machine and library version.

    Rows are sorted by a hash of their number (splitmix64, Steele et al., 2014), keyed by seed and epoch. Each step of
    the hash is a bijection of 64-bit integers, so there are no ties, and every way to sort gives the same order.
    """
    x = np.arange(1, num_rows + 1, dtype=np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(_hash(f"{seed}:{epoch}"))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return read_only(np.argsort(x), np.uint32)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _packed(values: NDArray[np.uint8]) -> str:
    return base64.b85encode(zlib.compress(values.tobytes(), 1)).decode()


def _unpacked(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8).copy()
