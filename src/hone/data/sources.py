"""Rows from where people keep them: a .jsonl or .parquet file, or a Hugging Face dataset. Nothing is interpreted here.

A row knows where it came from, so that any later complaint can name file and line. A line that is no JSON object
comes out as a `BadRow` in its place: what to do about it is the caller's decision (`data.on_bad_row`).
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hone.config.run import DataSection
from hone.errors import DataError

Part = Literal["train", "eval"]

FILE_KINDS = (".jsonl", ".jsonl.gz", ".parquet")
_SLICE = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")
_LOOKS_LIKE_A_FILE = re.compile(r"^[./~]|\.(json|jsonl|gz|csv|tsv|txt|parquet|arrow|zst)$")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source."""

    where: str
    """`train.jsonl:17` for lines, `train.parquet row 17` elsewhere; both count from 1."""
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read."""

    where: str
    problem: str


class Source(NamedTuple):
    """Where the rows of one part of the data are; fields as `read_rows` takes them."""

    place: str
    split: str
    rows: str | None


def source_of(data: DataSection, part: Part, *, lacking: str) -> Source:
    """Raises DataError, with `lacking` as the consequence, when the run file names no source for this part."""
    if part == "train":
        return Source(data.train, data.train_split, data.train_rows)
    if data.eval is None:
        raise DataError(f"data.eval: not set, so {lacking}")
    return Source(data.eval, data.eval_split, data.eval_rows)


def read_rows(source: str, folder: Path, *, split: str = "train", rows: str | None = None) -> Iterator[Row | BadRow]:
    """Rows of a source in their own order, lazily.

    Args:
        source: a .jsonl, .jsonl.gz or .parquet file, relative to `folder`; or a Hugging Face dataset,
            `owner/name` or `owner/name:configuration`.
        split: of a Hugging Face dataset; files have none.
        rows: `start:stop` as in Python, either end optional; blank lines are no rows.
    Raises:
        DataError: the source is missing, of an unknown kind or unreadable as a whole.
    """
    path = folder / Path(source).expanduser()
    if path.is_file() or _LOOKS_LIKE_A_FILE.search(source):
        found = _file_rows(path, source)
    else:
        found = _hub_rows(source, path, split)
    return _cut(found, rows)


def parse_slice(rows: str) -> slice:
    """`start:stop` as a slice. Raises DataError for anything else."""
    match = _SLICE.fullmatch(rows)
    if match is None:
        raise DataError(f"rows: got {rows!r}; write start:stop as in Python, for example 0:1000, 1000: or :-100")
    return slice(*(int(end) if end else None for end in match.groups()))


def _cut(found: Iterator[Row | BadRow], rows: str | None) -> Iterator[Row | BadRow]:
    if rows is None:
        return found
    part = parse_slice(rows)
    if min(part.start or 0, part.stop or 0) < 0:  # counted from the end, so the end must be known
        return iter(list(found)[part])
    return itertools.islice(found, part.start, part.stop)


def _file_rows(path: Path, source: str) -> Iterator[Row | BadRow]:
    readers: dict[str, Callable[[Path], Iterator[Row | BadRow]]] = {
        ".jsonl": _jsonl_rows,
        ".jsonl.gz": _jsonl_rows,
        ".parquet": _parquet_rows,
    }
    reader = next((reader for kind, reader in readers.items() if path.name.endswith(kind)), None)
    if reader is None:
        raise DataError(f"data file {source}: unknown kind. Use one of {', '.join(FILE_KINDS)}.")
    if not path.is_file():
        others = sorted(p.name for p in path.parent.glob("*") if p.name.endswith(FILE_KINDS))
        beside = f" Data files there: {', '.join(others[:8])}." if others else ""
        raise DataError(f"data file {source}: not found at {path}.{beside}")
    return reader(path)


def _jsonl_rows(path: Path) -> Iterator[Row | BadRow]:
    open_file = gzip.open if path.suffix == ".gz" else open
    try:
        with open_file(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _json_row(f"{path.name}:{number}", line.rstrip())
    except (OSError, EOFError) as error:
        raise DataError(f"data file {path}: cannot be read to its end: {error}") from error


def _json_row(where: str, line: bytes) -> Row | BadRow:
    try:
        values = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return BadRow(where, f"not UTF-8: byte {line[error.start]:#04x} at byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return BadRow(where, f"malformed JSON at character {error.pos + 1}: {error.msg}")
    except (ValueError, RecursionError) as error:
        return BadRow(where, f"malformed JSON: {error}")
    if not isinstance(values, dict):
        return BadRow(where, f'got {_json_kind(values)}; each line must be an object such as {{"prompt": "..."}}')
    return Row(where, values)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _json_kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _parquet_rows(path: Path) -> Iterator[Row | BadRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path.name} row {number}", values)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data file {path}: not readable as Parquet: {error}") from error


def _hub_rows(source: str, path: Path, split: str) -> Iterator[Row | BadRow]:
    """Rows of a dataset of the hub, or of a local directory that holds one."""
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"data {source}: no such file, and Hugging Face datasets need the extra `hub`: pip install 'hone-rl[hub]'"
        )
    import datasets
    from datasets.exceptions import DatasetsError

    name, _, configuration = source.partition(":")
    try:
        dataset: Any = datasets.load_dataset(str(path) if path.is_dir() else name, configuration or None, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"data {source}: neither a file nor a Hugging Face dataset that can be loaded, split {split!r}: {reason}"
        ) from error
    return (Row(f"{source} {split} row {number}", values) for number, values in enumerate(dataset, start=1))
