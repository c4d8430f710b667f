"""Data sources: what JSON, CSV and Parquet files and Hugging Face datasets hold, uninterpreted, from first to last.

Rows know their file and line, for errors. A line that is not a JSON object becomes a `BadRow`, which the caller handles
(`data.max_bad_rows`). A file that cannot be read further is a DataError. Rows by number are `rows.py`'s.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from hone.config.rules.data import FILE_KINDS, UNREADABLE, files_of, is_saved_dataset
from hone.config.run import DataSection, SftSection
from hone.config.source import SourceSection
from hone.errors import DataError, first_line

DataPart = Literal["train", "eval"]

BATCH_ROWS = 8192
"""Rows that are read from a Parquet file, or kept in a cache, together."""
_SLICE = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")
_NO_VALUE = (ValueError, OverflowError, NotImplementedError)
"""What Arrow raises for a value that Python cannot hold; its own errors are ValueErrors and NotImplementedErrors."""
_NO_SPACE = re.compile(r"[^ \t\n\r]")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of a source."""

    where: str
    """`train.jsonl:17` for lines (the first of a row's), `train.parquet row 17` elsewhere; both count from 1."""
    values: Mapping[str, Any]
    source: str = ""
    """The source's name in metrics, where there are several."""
    source_number: int = 0
    """Its place among them."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read."""

    where: str
    problem: str


class TextRow(NamedTuple):
    """A row of a .jsonl, .json or .csv file."""

    line: int
    """The first of its lines, from 1."""
    text: bytes
    """JSON as it stands there; of a CSV file, an object made of it."""
    problem: str = ""
    """Why it is not a row; empty for most."""


class DataFile(NamedTuple):
    """One file of a source."""

    name: str
    """In messages."""
    path: Path
    kind: str
    """`.jsonl`, `.json`, `.csv` or `.parquet`, compressed or not."""


class Dataset(NamedTuple):
    """One Hugging Face dataset of a source, rows by number from 0."""

    name: str
    """In messages."""
    rows: Any


class DataSource(NamedTuple):
    """Location of one part of the data."""

    sources: tuple[SourceSection, ...]
    split: str
    """Of Hugging Face datasets that name none."""
    rows: str | None
    """Of all sources together: `start:stop` as in Python, either end optional; blank lines are not rows."""

    def __str__(self) -> str:
        return ", ".join(source.path for source in self.sources)


def source_of(data: DataSection, part: DataPart, *, lacking: str) -> DataSource:
    """Raises DataError, with `lacking` as the consequence, when the run file names no source for this part."""
    if part == "train":
        return DataSource(data.train, data.train_split, data.train_rows)
    if data.eval is None:
        raise DataError(f"data.eval: not set, so {lacking}")
    return DataSource(data.eval, data.eval_split, data.eval_rows)


def sft_source(data: DataSection, sft: SftSection) -> DataSource:
    """What stage sft reads."""
    return DataSource(sft.data or data.train, data.train_split, sft.rows)


def source_labels(sources: Sequence[SourceSection]) -> tuple[str, ...]:
    """Names of sources in metrics: their own, else the last part of the path, unless others end alike. Without
    slashes."""
    last = {one.path: Path(one.path).name for one in sources}
    is_unique = len(set(last.values())) == len(last)
    labels = (one.name or (last[one.path] if is_unique else one.path) for one in sources)
    return tuple(label.replace("/", "_") for label in labels)


def read_rows(source: str, folder: Path, *, split: str = "train") -> Iterator[SourceRow | BadRow]:
    """Rows of a source in their own order, lazily.

    Args:
        source: a file of FILE_KINDS or a pattern of such files, relative to `folder`; a folder that `save_to_disk`
            made; or a Hugging Face dataset, `owner/name` or `owner/name:configuration`.
        split: of a Hugging Face dataset or a folder with splits; files have none.
    Raises:
        DataError: the source is missing, of an unknown kind or unreadable as a whole.
    """
    for part in parts_of(source, folder, split):
        if isinstance(part, Dataset):
            for number, values in enumerate(part.rows, start=1):
                yield SourceRow(f"{part.name} row {number}", values)
        elif part.kind == ".parquet":
            first = 1
            for batch in parquet_batches(part.path):
                yield from rows_of_batch(batch, part.name, first)
                first += batch.num_rows
        else:
            for row in text_rows(part):
                yield row_of(part.name, row)


def parts_of(source: str, folder: Path, split: str) -> list[DataFile | Dataset]:
    """The files and datasets of a source, as `read_rows` describes it. Raises DataError."""
    if (files := files_of(source, folder)) is None:
        path = folder / Path(source).expanduser()
        return [_saved_dataset(source, path, split) if is_saved_dataset(path) else _hub_dataset(source, path, split)]
    if not files:
        raise DataError(f"data {source}: no file matches this pattern in {folder}")
    found: list[DataFile | Dataset] = []
    for name, path in files.items():
        if not name.endswith(FILE_KINDS):
            raise DataError(f"data file {name}: unknown kind. Use one of {', '.join(FILE_KINDS)}.")
        if not path.is_file():
            others = sorted(p.name for p in path.parent.glob("*") if p.name.endswith(FILE_KINDS))
            beside = f" Data files there: {', '.join(others[:8])}." if others else ""
            raise DataError(f"data file {source}: not found at {path}.{beside}")
        found.append(DataFile(name, path, Path(name.removesuffix(".gz")).suffix))
    return found


def parse_slice(rows: str) -> slice:
    """`start:stop` as a slice. Raises DataError for anything else."""
    match = _SLICE.fullmatch(rows)
    if match is None:
        raise DataError(f"rows: got {rows!r}; write start:stop as in Python, for example 0:1000, 1000: or :-100")
    return slice(*(int(end) if end else None for end in match.groups()))


def text_rows(file: DataFile) -> Iterator[TextRow]:
    """Rows of a .jsonl, .json or .csv file. Raises DataError where it cannot be read further."""
    return {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows}[file.kind](file.path, file.name)


def row_of(name: str, row: TextRow) -> SourceRow | BadRow:
    """What a row of a text file holds; `name` is the file's."""
    where = f"{name}:{row.line}"
    if row.problem:
        return BadRow(where, row.problem)
    try:
        values = _DECODER.decode(row.text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRow(where, f"not UTF-8: byte {row.text[error.start]:#04x} at byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return BadRow(where, f"malformed JSON at character {error.pos + 1}: {error.msg}")
    except (ValueError, RecursionError) as error:
        return BadRow(where, f"malformed JSON: {error}")
    problem = _no_object(values, "line")
    return BadRow(where, problem) if problem else SourceRow(where, values)


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _jsonl_rows(path: Path, name: str) -> Iterator[TextRow]:
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield TextRow(number, line.rstrip())
    except UNREADABLE as error:
        raise DataError(f"data file {path}: cannot be read to its end: {error}") from error


def _json_rows(path: Path, name: str) -> Iterator[TextRow]:
    """Rows of an array, each with the line that it begins on."""
    try:
        with _opened(path) as file:
            text = file.read().decode("utf-8-sig")
    except UNREADABLE as error:
        raise DataError(f"data file {path}: cannot be read to its end: {error}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}:{line}: not UTF-8: byte {error.object[error.start]:#04x}") from error
    place, line, counted = _after_space(text, 0), 1, 0

    def wrong(problem: str) -> DataError:
        where = f"{name}:{text.count(chr(10), 0, place) + 1}"
        return DataError(
            f"{where}: {problem}. A .json file is one array of objects; with an object a line, name it .jsonl"
        )

    if text[place : place + 1] != "[":
        raise wrong("the file does not begin with [")
    place = _after_space(text, place + 1)
    while text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        start = place
        try:
            values, place = _DECODER.raw_decode(text, place)
        except json.JSONDecodeError as error:
            problem = f"malformed JSON at line {error.lineno}, character {error.colno}: {error.msg}"
            raise DataError(f"{name}:{line}: {problem}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}:{line}: malformed JSON: {error}") from error
        yield TextRow(line, text[start:place].encode(), _no_object(values, "entry"))
        place = _after_space(text, place)
        if text[place : place + 1] == ",":
            place = _after_space(text, place + 1)
        elif text[place : place + 1] != "]":
            raise wrong("got something else than , or ] after an entry")
    place = _after_space(text, place + 1)
    if place < len(text):
        raise wrong("there is more behind the array")


def _after_space(text: str, place: int) -> int:
    found = _NO_SPACE.search(text, place)
    return found.start() if found else len(text)


def _csv_rows(path: Path, name: str) -> Iterator[TextRow]:
    """Rows under a header line; every value is text. Each is named by its first line: quoted text may span lines."""
    csv.field_size_limit(1 << 30)  # code and its tests are longer than csv's own limit
    line = 1
    try:
        with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
            rows = csv.reader(lines, strict=True)
            header = next(rows, [])
            if "" in header or len(set(header)) < len(header) or not header:
                raise DataError(f"{name}:1: the header must name every column, and each once; got {', '.join(header)}")
            line = rows.line_num + 1
            for values in rows:
                first, line = line, rows.line_num + 1
                if len(values) == len(header):
                    yield TextRow(first, json.dumps(dict(zip(header, values, strict=True))).encode())
                elif values:
                    yield TextRow(first, b"", f"has {len(values)} values; the header names {len(header)} columns")
    except csv.Error as error:
        raise DataError(f"{name}:{line}: malformed CSV: {error}") from error
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise DataError(f"data file {path}: cannot be read to its end: {error}") from error


def _no_object(values: Any, what: str) -> str:
    """What is wrong with a value that must be an object; empty for one."""
    if isinstance(values, dict):
        return ""
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    kind = kinds.get(type(values), "a number")
    return f'got {kind}; each {what} must be an object such as {{"prompt": "..."}}'


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def rows_of_batch(batch: Any, name: str, first: int) -> list[SourceRow | BadRow]:
    """Rows of a Parquet file from its row `first` on (counted from 1), given their record batch. A row with a value
    that Python cannot hold, such as text that is not UTF-8 or a date after the year 9999, is a bad one."""
    try:
        values = batch.to_pylist()
    except _NO_VALUE:
        return [_row_of_batch(batch.slice(row, 1), f"{name} row {first + row}") for row in range(batch.num_rows)]
    return [SourceRow(f"{name} row {number}", one) for number, one in enumerate(values, start=first)]


def _row_of_batch(batch: Any, where: str) -> SourceRow | BadRow:
    values: dict[str, Any] = {}
    for column in batch.schema.names:
        try:
            (values[column],) = batch.column(column).to_pylist()
        except _NO_VALUE as error:
            return BadRow(where, f"column {column} cannot be read: {error}")
    return SourceRow(where, values)


def parquet_batches(path: Path) -> Iterator[Any]:
    """Record batches of a Parquet file. Raises DataError where it cannot be read further."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"data file {path}: names columns twice: {', '.join(twice)}. Rename or remove one")
            yield from file.iter_batches(batch_size=BATCH_ROWS)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data file {path}: not readable as Parquet: {error}") from error


def _saved_dataset(source: str, path: Path, split: str) -> Dataset:
    """A folder that `save_to_disk` made, of one dataset or of several splits."""
    datasets = _datasets(source)
    try:
        dataset: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"data {source}: not readable as a folder of `save_to_disk`: {error}") from error
    if not isinstance(dataset, datasets.DatasetDict):
        return Dataset(source, dataset)
    if split not in dataset:
        raise DataError(f"data {source}: has no split {split!r}; it has {', '.join(dataset)}")
    return Dataset(f"{source} {split}", dataset[split])


def _datasets(source: str) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"data {source}: no such file, and Hugging Face datasets need the extra `hub`: pip install 'hone-rl[hub]'"
        )
    import datasets

    return datasets


def _hub_dataset(source: str, path: Path, split: str) -> Dataset:
    """A dataset of the hub, or of a local directory that holds one."""
    datasets = _datasets(source)
    from datasets.exceptions import DatasetsError

    name, _, configuration = source.partition(":")
    try:
        dataset: Any = datasets.load_dataset(str(path) if path.is_dir() else name, configuration or None, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        what = "neither a file nor a Hugging Face dataset that can be loaded"
        raise DataError(f"data {source}: {what}, split {split!r}: {first_line(error)}") from error
    return Dataset(f"{source} {split}", dataset)
