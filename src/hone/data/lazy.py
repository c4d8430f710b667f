"""Sequence of what the rows of a source become (prompts, for one), each made when it is asked for.

A first pass over all rows decides which are kept. It leaves some numbers for each, an index that is cached by content:
of the rows, of the tokenizer, and of the settings that matter. With an index, a start reads no row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

import hone
from hone.config.derived import section_of, source_weights
from hone.config.run import DataSection
from hone.data.cache import DataCache, key_of
from hone.data.order import RowOrder, SourceRange
from hone.data.render import Malformed, as_text, column
from hone.data.report import LoadProgress, LoadReport, Tally
from hone.data.rows import FORMAT, SourceRows, open_rows
from hone.data.sources import BadRow, DataSource, SourceRow
from hone.errors import DataError

ItemT = TypeVar("ItemT")
READ_TOGETHER = 1024
"""Rows that the first pass tokenises together."""
MADE_TOGETHER = 64
"""Rows that a loop over all of them makes together."""
LIBRARIES = ("tokenizers", "transformers", "jinja2")
"""Libraries that decide what a row becomes."""


class SampleSize(NamedTuple):
    """How much is read of data of which a sample is enough."""

    rows: int
    of_each: int = 64
    """Rows of each source, at least."""


class Facts(NamedTuple):
    """What an index keeps of an item."""

    tokens: int
    """That are compared with the limit."""
    id: int
    """Unsigned 64-bit hash; equal for rows that ask and answer the same."""
    content: int
    """Unsigned 64-bit hash; equal for what is the same to the model."""


class RowReading(ABC, Generic[ItemT]):
    """What rows become."""

    def id_column(self, row: SourceRow) -> str | None:
        """Column with ids that must be unique; None: none."""

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """What decides it, tokenizer included; of kinds that JSON can hold."""

    @abstractmethod
    def read(self, rows: Sequence[SourceRow]) -> list[ItemT | Malformed]:
        """An item for each row, or what is wrong with it."""

    @abstractmethod
    def facts(self, item: ItemT, row: SourceRow) -> Facts:
        """What the index keeps of an item that `read` made of a row."""

    @abstractmethod
    def is_repeatable(self) -> bool:
        """Whether the rows read so far would become the same in another process and at another time."""

    def finished(self, item: ItemT, row: SourceRow, place: int, repeat: int) -> ItemT:
        """The item of a row as it is in the sequence: at `place`, and the `repeat`-th (from 1) with the same id."""
        return item


def reading_of(
    source: DataSource, data: DataSection, make: Callable[[DataSection], RowReading[ItemT]]
) -> RowReading[ItemT]:
    """What the rows of all sources become.

    Args:
        make: of the rows of sources that share a section.
    """
    sections = [section_of(data, one) for one in source.sources]
    distinct = [section for number, section in enumerate(sections) if section not in sections[:number]]
    if len(distinct) == 1:
        return make(distinct[0])
    return _ReadingBySource([*map(make, distinct)], [distinct.index(section) for section in sections])


class _ReadingBySource(RowReading[ItemT]):
    """Rows of sources with columns or templates of their own."""

    def __init__(self, readings: Sequence[RowReading[ItemT]], of_source: Sequence[int]) -> None:
        """`of_source`: for each source the number of its reading."""
        self._readings, self._of_source = readings, of_source

    def _of(self, row: SourceRow) -> RowReading[ItemT]:
        return self._readings[self._of_source[row.source_number]]

    def id_column(self, row: SourceRow) -> str | None:
        return self._of(row).id_column(row)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"readings": [dict(one.settings) for one in self._readings], "of_source": self._of_source}

    def read(self, rows: Sequence[SourceRow]) -> list[ItemT | Malformed]:
        found: dict[int, ItemT | Malformed] = {}
        for reading in self._readings:
            own = [number for number, row in enumerate(rows) if self._of(row) is reading]
            found |= zip(own, reading.read([rows[number] for number in own]), strict=True)
        return [found[number] for number in range(len(rows))]

    def facts(self, item: ItemT, row: SourceRow) -> Facts:
        return self._of(row).facts(item, row)

    def finished(self, item: ItemT, row: SourceRow, place: int, repeat: int) -> ItemT:
        return self._of(row).finished(item, row, place, repeat)

    def is_repeatable(self) -> bool:
        return all(reading.is_repeatable() for reading in self._readings)


class LazyRows(Sequence[ItemT], Generic[ItemT]):
    """The kept rows of a source, in its order.

    Attributes:
        report: what was read, dropped and skipped.
        tokens: (n,) int32, length of each.
        content: (n,) uint64, equal for rows that are the same to the model.
        values: (n,) float64, in the column that rows are sorted by; None where there is none.
        sources: the ranges of rows that the sources of a list have.
        source_rows: how many rows each of them has, dropped ones and those outside of a sample included.
    """

    def __init__(
        self, rows: SourceRows, reading: RowReading[ItemT], columns: Mapping[str, NDArray[Any]], report: LoadReport
    ) -> None:
        self._rows, self._reading, self.report = rows, reading, report
        self._row, self._id, self._repeat = columns["row"], columns["id"], columns["repeat"]
        self.tokens, self.content, self.values = columns["tokens"], columns["content"], columns.get("value")
        self.sources = [SourceRange(name, *np.searchsorted(self._row, ends).tolist()) for name, *ends in rows.sources]

        self.source_rows = [source.stop - source.start for source in rows.sources]

    def __len__(self) -> int:
        return len(self._row)

    @overload
    def __getitem__(self, place: int) -> ItemT: ...

    @overload
    def __getitem__(self, place: slice) -> list[ItemT]: ...

    def __getitem__(self, place: int | slice) -> ItemT | list[ItemT]:
        if isinstance(place, slice):
            return self.at(range(*place.indices(len(self))))
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return self.at([place % len(self)])[0]

    def __iter__(self) -> Iterator[ItemT]:
        for start in range(0, len(self), MADE_TOGETHER):
            yield from self.at(range(start, min(start + MADE_TOGETHER, len(self))))

    def order(self, data: DataSection, *, seed: int, in_rl: bool) -> RowOrder:
        """As the run file orders training rows. Pass rates are measured in stage rl; other stages shuffle then.

        Raises DataError as `RowOrder`.
        """
        order = "shuffled" if data.order == "pass_rate" and not in_rl else data.order
        weights, bounds = source_weights(data), data.pass_rate_bounds
        return RowOrder(self.sources, seed=seed, order=order, weights=weights, values=self.values, bounds=bounds)

    def where(self, place: int) -> str:
        """File and line of the row at a place."""
        return self._rows.where(int(self._row[place]))

    def at(self, places: Sequence[int]) -> list[ItemT]:
        """The items at these places.

        Raises:
            DataError: one is not what it was when the index was made, because its picture has changed.
        """
        chosen = np.asarray(places, np.int64)
        found = self._rows.read(self._row[chosen].tolist())
        rows = [row for row in found if isinstance(row, SourceRow)]
        assert len(rows) == len(found), "rows of an index could be read"
        items: list[ItemT] = []
        for place, row, item in zip(places, rows, self._reading.read(rows), strict=True):
            if isinstance(item, Malformed):
                raise changed(row, f"{item.field}: {item}")
            facts = self._reading.facts(item, row)
            if facts.id != self._id[place] or facts.tokens != self.tokens[place]:
                raise changed(row, "is read differently than before")
            items.append(self._reading.finished(item, row, place, int(self._repeat[place])))
        return items


def changed(row: SourceRow, now: str) -> DataError:
    """The error for a row that has become another one during a run."""
    return DataError(
        f"{row.where}: could be read when the data were loaded, and now {now}. Leave the files of a run as they are."
    )


def load_lazily(
    source: DataSource,
    data: DataSection,
    folder: Path,
    reading: RowReading[ItemT],
    *,
    max_tokens: int,
    cache: DataCache,
    order_column: str | None = None,
    sample: SampleSize | None = None,
) -> LazyRows[ItemT]:
    """Read a source once, unless that has been done before.

    Args:
        folder: the run file's, for relative paths.
        max_tokens: longer rows are dropped and reported.
        order_column: with the number that rows are sorted by; None: none.
        sample: what to read of a source that has more rows and was never read whole; the others are passed over.
    Raises:
        DataError: no source, nothing usable in it, or a malformed row that may not be skipped.
    """
    rows = open_rows(source, folder, cache)
    tally = Tally(data, str(source), max_tokens=max_tokens)
    key: str | None = None
    if rows.key is not None and reading.is_repeatable():
        libraries = [hone.__version__, *map(version, LIBRARIES)]
        limits = [max_tokens, data.max_bad_rows, order_column]
        key = key_of("index", FORMAT, rows.key, dict(reading.settings), limits, libraries)
    entry = cache.find(key) if key is not None else None
    if entry is None:
        numbers = range(len(rows)) if sample is None else _sample_of(rows, sample)
        tally.of = len(rows) if len(numbers) < len(rows) else None
        columns = _index(rows, numbers, reading, tally, order_column, cache.say)
        if not tally.read:
            raise DataError(f"{source}: holds no rows (or `rows` selects none of them)")
        if not tally.kept:
            raise DataError(f"{tally.report()}. No row is left: raise data.max_prompt_tokens, or fix the rows.")
        if key is None or tally.of is not None or not reading.is_repeatable():
            return LazyRows(rows, reading, columns, tally.report())
        entry = cache.save(key, partial(_write, columns, tally.report()))
    batch = entry.batches.get_batch(0)
    columns = {name: batch.column(name).to_numpy(zero_copy_only=True) for name in batch.schema.names}
    notes = entry.notes["report"]
    report = LoadReport(**{**notes, "first_bad": tuple(notes["first_bad"]), "source": tally.source})
    return LazyRows(rows, reading, columns, report)


def spread(count: int, most: int) -> range | list[int]:
    """At most `most` of range(count), at even distances."""
    return range(count) if count <= most else [number * count // most for number in range(most)]


def _sample_of(rows: SourceRows, sample: SampleSize) -> Sequence[int]:
    """The numbers of `sample.rows` rows or a few more: some of each source, at even distances."""
    if len(rows) <= sample.rows:
        return range(len(rows))
    numbers: list[int] = []
    for source in rows.sources:
        size = source.stop - source.start
        own = spread(size, max(sample.of_each, sample.rows * size // len(rows)))
        numbers += [source.start + number for number in own]
    return numbers


def _index(
    rows: SourceRows,
    chosen: Sequence[int],
    reading: RowReading[ItemT],
    tally: Tally,
    order_column: str | None,
    say: Callable[[str], None],
) -> dict[str, NDArray[Any]]:
    """The columns of an index, from a pass over the chosen rows. Raises DataError for one that may not be skipped."""
    kept, tokens, ids, contents, values = array("q"), array("i"), array("Q"), array("Q"), array("d")
    seen: dict[str, int] = {}
    progress = LoadProgress(f"tokenising {tally.source}", say, total=len(chosen))
    for start in range(0, len(chosen), READ_TOGETHER):
        numbers = chosen[start : start + READ_TOGETHER]
        found = rows.read(numbers)
        items = iter(reading.read([row for row in found if isinstance(row, SourceRow)]))
        for number, row in zip(numbers, found, strict=True):
            tally.read += 1
            if isinstance(row, BadRow):
                tally.reject(f"{row.where}: {row.problem}")
                continue
            item = next(items)
            value = or_problem(number_in, row.values, order_column) if order_column is not None else 0.0
            if isinstance(value, Malformed) and not isinstance(item, Malformed):
                item = value
            id_column = reading.id_column(row)
            if not isinstance(item, Malformed) and id_column is not None:
                row_id = as_text(column(row.values, id_column), id_column)
                if (first := seen.setdefault(row_id, number)) != number:
                    problem = f"{row_id!r} is also the id of {rows.where(first)}; ids must be unique"
                    item = Malformed(id_column, problem)
            if isinstance(item, Malformed):
                tally.reject(f"{row.where} {item.field}: {item}")
                continue
            assert not isinstance(value, Malformed)
            facts = reading.facts(item, row)
            if tally.fits(facts.tokens):
                kept.append(number)
                tokens.append(facts.tokens)
                ids.append(facts.id)
                contents.append(facts.content)
                values.append(value)
        progress.at(start + len(numbers))
    tally.kept = len(kept)
    columns = {"row": np.asarray(kept), "tokens": np.asarray(tokens), "id": np.asarray(ids)}
    columns |= {"content": np.asarray(contents), "repeat": repeats(columns["id"])}
    return columns if order_column is None else columns | {"value": np.asarray(values)}


def or_problem(make: Callable[..., ItemT], *args: Any) -> ItemT | Malformed:
    """What a function makes of a row, or what is wrong with the row."""
    try:
        return make(*args)
    except Malformed as error:
        return error


def number_in(values: Mapping[str, Any], name: str) -> float:
    """The finite number in a column; text that spells one counts, as a CSV file has only text. Raises Malformed."""
    value = column(values, name)
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise Malformed(name, f"got {value!r:.40}; rows are sorted by it (data.order), so it must be a finite number")
    return number


def repeats(ids: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """For each of (n,) ids how many there are up to it that equal it, itself included."""
    order = np.argsort(ids, kind="stable")
    sorted_ids = ids[order]
    is_first = np.ones(len(ids), np.bool_)
    is_first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    places = np.arange(len(ids))
    firsts = np.maximum.accumulate(np.where(is_first, places, 0))
    found = np.empty(len(ids), np.uint32)
    found[order] = places - firsts + 1
    return found


def _write(columns: Mapping[str, NDArray[Any]], report: LoadReport, sink: Any) -> Mapping[str, Any]:
    import pyarrow

    batch = pyarrow.record_batch({name: pyarrow.array(values) for name, values in columns.items()})
    with pyarrow.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return {"report": asdict(report)}
