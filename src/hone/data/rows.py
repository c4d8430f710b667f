"""Rows of a source by number, memory-mapped: what stays in memory does not grow with the source.

Files become Arrow files, once: .parquet with its own columns, lines of text as they stand. They are cached by content
(`cache.py`). Small sources stay in memory. Hugging Face datasets are memory-mapped already.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import resource
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache as once
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hone.data.cache import CacheEntry, DataCache, in_memory, key_of
from hone.data.order import SourceRange
from hone.data.report import LoadProgress
from hone.data.sources import (
    BATCH_ROWS,
    BadRow,
    DataFile,
    Dataset,
    DataSource,
    SourceRow,
    TextRow,
    parquet_batches,
    parse_slice,
    parts_of,
    read_rows,
    row_of,
    rows_of_batch,
    source_labels,
    text_rows,
)
from hone.errors import DataError

if TYPE_CHECKING:
    import pyarrow

FORMAT = 1
"""Of cache entries: another number makes them all again."""
OTHER_FILES = 512
"""Open files of a process besides those of its data, at most."""
BATCH_BYTES = 16 << 20


class _NumberedRows(Protocol):
    """Rows of one file or dataset, from number 0."""

    def __len__(self) -> int: ...

    def where(self, number: int) -> str: ...

    def read(self, start: int, stop: int) -> list[SourceRow | BadRow]: ...


class SourceRows:
    """The rows of one source: those of its parts, one after the other, cut to a range.

    Attributes:
        key: equal for equal content; None where nothing is to be cached: the source is small, or not in files.
        sources: the ranges of rows that the sources of a list have.
    """

    def __init__(
        self,
        parts: Sequence[_NumberedRows],
        labels: Sequence[str],
        owners: Sequence[int],
        chosen: range,
        key: str | None,
    ) -> None:
        """
        Args:
            labels: of the sources.
            owners: of each part, the number of its source.
        """
        self._parts, self._chosen, self.key = parts, chosen, key
        self._starts = list(itertools.accumulate(map(len, parts), initial=0))
        sizes = [0] * len(labels)
        for part, owner in zip(parts, owners, strict=True):
            sizes[owner] += len(part)
        ends = [min(max(end - chosen.start, 0), len(chosen)) for end in itertools.accumulate(sizes, initial=0)]
        self.sources = [SourceRange(*one) for one in zip(labels, ends, ends[1:], strict=False)]
        self._labels, self._owners = labels, owners

    def __len__(self) -> int:
        return len(self._chosen)

    def where(self, number: int) -> str:
        """File and line of a row."""
        part, own = self._place(self._chosen[number])
        return self._parts[part].where(own)

    def read(self, numbers: Sequence[int]) -> list[SourceRow | BadRow]:
        """Rows of these numbers, in this order. Those that follow each other are read together."""
        found: list[SourceRow | BadRow] = []
        for start, stop in _runs(self._chosen[number] for number in numbers):
            while start < stop:
                part, own = self._place(start)
                end = min(stop, self._starts[part + 1])
                rows = self._parts[part].read(own, own + end - start)
                if len(self._labels) > 1:
                    number = self._owners[part]
                    owned = partial(replace, source=self._labels[number], source_number=number)
                    rows = [owned(row) if isinstance(row, SourceRow) else row for row in rows]
                found += rows
                start = end
        return found

    def _place(self, number: int) -> tuple[int, int]:
        """The part that a row is in, and its number there."""
        part = bisect_right(self._starts, number) - 1
        return part, number - self._starts[part]


def open_rows(source: DataSource, folder: Path, cache: DataCache) -> SourceRows:
    """The rows of one part of the data, one source after the other.

    Args:
        folder: the run file's, for relative paths.
    Raises:
        DataError: as `sources.read_rows`.
    """
    found = [
        (number, part)
        for number, one in enumerate(source.sources)
        for part in parts_of(one.path, folder, one.split or source.split)
    ]
    parts = [part for _, part in found]
    part = parse_slice(source.rows) if source.rows is not None else slice(None)
    from_the_end = min(part.start or 0, part.stop or 0) < 0
    limit = None if from_the_end else part.stop
    is_large = _is_large(parts, cache)
    if is_large:
        _allow_open_files(len(parts))
    opened: list[_NumberedRows] = []
    keys: list[str | None] = []
    for one in parts:
        left = None if limit is None else limit - sum(map(len, opened))
        if left is not None and left <= 0:
            break
        if isinstance(one, Dataset):
            opened.append(_DatasetRows(one))
            keys.append(_content_key(one, cache) if is_large else None)
        elif not is_large and one.kind != ".parquet":
            opened.append(_HeldRows(one, left))
            keys.append(None)
        else:
            key = key_of("rows", FORMAT, _content_key(one, cache), left) if is_large else None
            entry = cache.find(key) if key is not None else None
            if entry is None:
                write = partial(_write, one, left, LoadProgress(f"reading {one.name}", cache.say))
                entry = in_memory(write) if key is None else cache.save(key, write)
            opened.append(_FileRows(entry, one))
            keys.append(key)
    chosen = range(*part.indices(sum(map(len, opened))))
    names = [one.name for one in parts]
    whole = key_of(keys, names, chosen.start, chosen.stop) if is_large and None not in keys else None
    owners = [number for number, _ in found[: len(opened)]]
    return SourceRows(opened, source_labels(source.sources), owners, chosen, whole)


def rows_digest(source: str, folder: Path, *, split: str, cache: DataCache) -> str:
    """SHA-256 of the rows of a source, of a large one found once for each content. Raises DataError as `open_rows`."""
    parts = parts_of(source, folder, split)
    keys = [_content_key(part, cache) for part in parts] if _is_large(parts, cache) else [None]
    key = key_of("digest", FORMAT, keys, [part.name for part in parts]) if None not in keys else None
    if key is not None and (found := cache.find(key)) is not None:
        return found.notes["sha256"]
    hashed, progress = hashlib.sha256(), LoadProgress(f"hashing {source}", cache.say)
    for number, row in enumerate(read_rows(source, folder, split=split)):
        hashed.update(json.dumps(getattr(row, "values", str(row)), sort_keys=True, default=str).encode())
        progress.at(number)
    if key is not None:
        cache.save(key, partial(_write_notes, {"sha256": hashed.hexdigest()}))
    return hashed.hexdigest()


def _write_notes(notes: Mapping[str, Any], sink: Any) -> Mapping[str, Any]:
    import pyarrow

    pyarrow.ipc.new_file(sink, pyarrow.schema([])).close()
    return notes


class _HeldRows:
    """Rows of a file of lines, in memory; at most `limit` of them."""

    def __init__(self, file: DataFile, limit: int | None) -> None:
        self._name, self._rows = file.name, [*itertools.islice(text_rows(file), limit)]

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, number: int) -> str:
        return f"{self._name}:{self._rows[number].line}"

    def read(self, start: int, stop: int) -> list[SourceRow | BadRow]:
        return [row_of(self._name, row) for row in self._rows[start:stop]]


class _FileRows:
    """Rows of a file that has become an Arrow file."""

    def __init__(self, entry: CacheEntry, file: DataFile) -> None:
        self._batches, self._file = entry.batches, file
        sizes = (self._batches.get_batch(i).num_rows for i in range(self._batches.num_record_batches))
        self._starts = list(itertools.accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, number: int) -> str:
        if self._file.kind == ".parquet":
            return f"{self._file.name} row {number + 1}"
        (row,) = self._slices(number, number + 1)
        return f"{self._file.name}:{row.column('line')[0].as_py()}"

    def read(self, start: int, stop: int) -> list[SourceRow | BadRow]:
        name, found = self._file.name, list[SourceRow | BadRow]()
        for rows in self._slices(start, stop):
            if self._file.kind == ".parquet":
                found += rows_of_batch(rows, name, start + len(found) + 1)
            else:
                found += [row_of(name, TextRow(**one)) for one in rows.to_pylist()]
        return found

    def _slices(self, start: int, stop: int) -> Iterator[pyarrow.RecordBatch]:
        while start < stop:
            batch = bisect_right(self._starts, start) - 1
            end, own = min(stop, self._starts[batch + 1]), start - self._starts[batch]
            yield self._batches.get_batch(batch).slice(own, end - start)
            start = end


class _DatasetRows:
    """Rows of a Hugging Face dataset."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset.rows)

    def where(self, number: int) -> str:
        return f"{self._dataset.name} row {number + 1}"

    def read(self, start: int, stop: int) -> list[SourceRow | BadRow]:
        found = self._dataset.rows.__getitems__(list(range(start, stop)))
        return [SourceRow(self.where(number), values) for number, values in enumerate(found, start=start)]


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Stretches [start, stop) of numbers that follow each other."""
    start = stop = -1
    for number in numbers:
        if number != stop:
            if stop > start:
                yield start, stop
            start = number
        stop = number + 1
    if stop > start:
        yield start, stop


def _is_large(parts: Sequence[DataFile | Dataset], cache: DataCache) -> bool:
    """Whether a source is memory-mapped and cached."""
    num_bytes = 0
    for part in parts:
        try:
            paths = [part.path] if isinstance(part, DataFile) else _dataset_files(part)
            num_bytes += sum(path.stat().st_size for path in paths)
        except OSError as error:
            raise DataError(f"data {part.name}: cannot be read: {error}") from error
    is_large = num_bytes >= cache.small_bytes
    if is_large and find_spec("pyarrow") is None:
        lacking = "pyarrow is not installed, so the rows are read at every start and held in memory"
        cache.say(f"data {parts[0].name}: {lacking}")
        return False
    return is_large


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, if it is too low: each memory-mapped file is one. Raises DataError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise DataError(
            f"data: a source of {count:,} files, and a process may open {hard:,} (ulimit -Hn). Join files, or raise it."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _dataset_files(dataset: Dataset) -> list[Path]:
    return [Path(one["filename"]) for one in dataset.rows.cache_files]


def _content_key(part: DataFile | Dataset, cache: DataCache) -> str | None:
    """By the bytes of its files; None for a dataset that is in memory."""
    try:
        if isinstance(part, DataFile):
            return key_of("file", part.path.suffix, part.kind, cache.digest(part.path))
        digests = [cache.digest(path) for path in _dataset_files(part)]
    except OSError as error:
        raise DataError(f"data {part.name}: cannot be read to its end: {error}") from error
    return key_of("dataset", digests, str(part.rows.features), len(part.rows)) if digests else None


def _write(file: DataFile, limit: int | None, progress: LoadProgress, sink: Any) -> Mapping[str, Any]:
    """Write at most `limit` rows of a file to an Arrow file."""
    import pyarrow

    batches = _as_they_are(file.path, limit) if file.kind == ".parquet" else _of_text(text_rows(file), limit)
    first = next(batches, None)
    schema = first.schema if first is not None else _text_schema()
    done = 0
    with pyarrow.ipc.new_file(sink, schema) as writer:
        for batch in itertools.chain([first] if first is not None else [], batches):
            writer.write_batch(batch)
            done += batch.num_rows
            progress.at(done)
    return {}


def _as_they_are(path: Path, limit: int | None) -> Iterator[pyarrow.RecordBatch]:
    for batch in parquet_batches(path):
        yield batch if limit is None else batch.slice(0, limit)
        if limit is not None and (limit := limit - batch.num_rows) <= 0:
            return


def _of_text(rows: Iterator[TextRow], limit: int | None) -> Iterator[pyarrow.RecordBatch]:
    waiting: list[TextRow] = []
    num_bytes = 0
    for row in itertools.islice(rows, limit):
        waiting.append(row)
        num_bytes += len(row.text)
        if len(waiting) == BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield _batch(waiting)
            waiting, num_bytes = [], 0
    if waiting:
        yield _batch(waiting)


@once
def _text_schema() -> pyarrow.Schema:
    """Columns that `TextRow`s are kept in."""
    import pyarrow

    return pyarrow.schema(
        [("line", pyarrow.int64()), ("text", pyarrow.large_binary()), ("problem", pyarrow.large_string())]
    )


def _batch(rows: Sequence[TextRow]) -> pyarrow.RecordBatch:
    import pyarrow

    schema = _text_schema()
    arrays = [pyarrow.array(values, kind) for values, kind in zip(zip(*rows, strict=True), schema.types, strict=True)]
    return pyarrow.record_batch(arrays, schema=schema)
