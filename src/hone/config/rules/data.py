"""Rules of data files: they exist and have the columns that the run file names. Only their first row is read."""

from __future__ import annotations

import csv
import glob
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from os.path import isdir, isfile  # unlike Path's, False for text that cannot be a path
from pathlib import Path
from typing import Any

from hone.config.derived import section_of
from hone.config.rules import Breach
from hone.config.run import DataSection, RunConfig
from hone.config.source import SourceSection
from hone.errors import nearest

FILE_KINDS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")

UNREADABLE = (OSError, EOFError, zlib.error)
"""Raised where a file, compressed or not, cannot be read further."""
_LOOKS_LIKE_A_FILE = re.compile(r"^[./~]|\.(json|jsonl|gz|csv|tsv|txt|parquet|arrow|zst)$")

_PLACEHOLDER = re.compile(r"\{\{\w+(?:\.\w+)*\}\}|\{(\w+(?:\.\w+)*)\}")

_FIRST_ROW_BYTES = 4 << 20

Columns = list[tuple[str, str]]
"""The key that names a column, and the column."""


def data_files_exist(config: RunConfig, folder: Path) -> Iterator[Breach]:
    """Data that looks like a file has a format that is read, and has the columns that the run file names."""
    several = {"data.train": len(config.data.train) > 1, "data.eval": len(config.data.eval or ()) > 1}
    for place, section in sources_of(config):
        part, source = place.rpartition(".")[0], section.path
        columns = _needed(config, part, _columns(section_of(config.data, section), key_of(place, section)))
        if not columns:
            continue
        key = place if several.get(part) else part
        if prefix := _indexed(folder / Path(source).expanduser()):
            yield Breach(
                (key,),
                f"{source!r} is Megatron's preprocessed data ({prefix.name}.bin and .idx): token ids without prompts "
                "and answers. Name the JSONL or Parquet file that it was made from",
            )
            continue
        files = files_of(source, folder)
        if files is None:
            path = folder / Path(source).expanduser()
            if is_saved_dataset(path):
                yield from _columns_exist(key, source, path, columns)
        elif not files:
            yield Breach((key,), f"no file matches {source!r}, looked for in {folder}")
        elif others := [name for name in files if not name.endswith(FILE_KINDS)]:
            yield Breach((key,), f"must end in {', '.join(FILE_KINDS)} (got {others[0]!r})")
        else:
            name, path = next(iter(files.items()))
            if isfile(path):
                yield from _columns_exist(key, name, path, columns)
            else:
                yield Breach((key,), f"{source!r} does not exist, looked for at {path}{_beside(path)}")


def _indexed(path: Path) -> Path | None:
    """The prefix of Megatron's pair of files, if the path is it, one of the two, or a prefix of prefixes."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if not isdir(prefix.parent):
        return None
    pairs = (
        index.with_suffix("") for index in sorted(prefix.parent.glob("*.idx")) if index.with_suffix(".bin").is_file()
    )
    return next((pair for pair in pairs if pair.name == prefix.name or pair.name.startswith(f"{prefix.name}_")), None)


def lists_of_sources(config: RunConfig) -> Mapping[str, Sequence[SourceSection] | None]:
    return {"data.train": config.data.train, "data.eval": config.data.eval, "sft.data": config.sft.data}


def sources_of(config: RunConfig) -> Iterator[tuple[str, SourceSection]]:
    """Path and source of every entry of `data.train`, `data.eval` and `sft.data`."""
    for path, sources in lists_of_sources(config).items():
        yield from ((f"{path}.{number}", source) for number, source in enumerate(sources or ()))


def key_of(path: str, source: SourceSection) -> Callable[[str], str]:
    """The path of a key by its name: the source's own where it sets it, else that of `data`."""
    return lambda name: f"{path}.{name}" if getattr(source, name) is not None else f"data.{name}"


def _needed(config: RunConfig, part: str, prompts: Columns) -> Columns:
    """Columns that the stages read of the sources in `part`, given those of a prompt; none where none reads it."""
    data, sft = config.data, config.sft
    pairs: Columns = []
    if "reward_model" in config.stages:
        rm = config.rm
        pairs = [*prompts, ("rm.chosen_column", rm.chosen_column), ("rm.rejected_column", rm.rejected_column)]
        pairs += [("rm.margin_column", rm.margin_column)] if rm.margin_column is not None else []
    sft_columns = [("sft.response_column", sft.response_column)] if sft.response_column is not None else []
    sft_columns = prompts + sft_columns
    if sft.messages_column is not None:
        sft_columns = [("sft.messages_column", sft.messages_column)]
    does_sft = "sft" in config.stages
    if part == "sft.data":
        return sft_columns if does_sft else []
    if part == "data.eval":
        grouped = [("eval.by", config.eval.by)] if config.eval.by is not None else []
        return pairs or prompts + grouped
    found = pairs or (prompts if "rl" in config.stages else [])
    if does_sft and sft.data is None:
        found = found + [column for column in sft_columns if column not in found]
    if found and data.order_column is not None:
        found = [*found, ("data.order_column", data.order_column)]
    return found


def _columns(data: DataSection, key: Callable[[str], str]) -> Columns:
    """Columns of a prompt; `key` gives the path of a key by its name."""
    named = template_columns(data.template) if data.template is not None else {"prompt"}
    columns = [(key("template"), name) for name in sorted(named - {"prompt"})]
    if "prompt" in named:
        columns.append((key("prompt_column"), data.prompt_column))
    columns += [(key("image_columns"), name) for name in data.image_columns]
    optional = ((key("answer_column"), data.answer_column), (key("id_column"), data.id_column))
    return columns + [(name, column) for name, column in optional if column is not None]


def template_columns(template: str) -> set[str]:
    """Columns that a plain template names in braces; `{{name}}` is not one."""
    return {name for name in _PLACEHOLDER.findall(template) if name}


def _columns_exist(source_key: str, name: str, path: Path, columns: Columns) -> Iterator[Breach]:
    try:
        present = _column_names(path)
    except (*UNREADABLE, ValueError, csv.Error) as error:
        yield Breach((source_key,), f"{name} cannot be read: {error}")
        return
    for key, column in columns:
        if present is not None and column not in present:
            close = nearest(column, present, cutoff=60)
            hint = f"Did you mean {close}? " if close else ""
            has = ", ".join(sorted(present)[:12])
            yield Breach((key, source_key), f"{name} has no column {column!r}. {hint}It has: {has}")


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """A row's columns, and what is in those that are objects under dotted names: `reward_model.ground_truth`."""
    inner = {
        f"{name}.{key}": value
        for name, column in values.items()
        if isinstance(column, Mapping)
        for key, value in flat(column).items()
    }
    return inner | dict(values)


def _column_names(path: Path) -> set[str] | None:
    """Column names of a saved dataset, a Parquet file, a CSV file's header or another file's first row, with dotted
    ones; None when that row is malformed, which is left to the reader of rows: it knows `data.max_bad_rows`.
    """
    if path.is_dir():
        return set(flat(_saved_features(path)))
    if path.name.endswith(".parquet"):
        return set(flat(_parquet_columns(path)))
    open_file: Any = gzip.open if path.suffix == ".gz" else open
    kind = path.name.removesuffix(".gz")
    if kind.endswith(".csv"):
        with open_file(path, "rt", encoding="utf-8-sig", newline="") as lines:
            header = next(csv.reader(lines), None)
        if not header:
            raise ValueError("it has no header line")
        return set(header)
    with open_file(path, "rb") as lines:
        if kind.endswith(".json"):
            text = lines.read(_FIRST_ROW_BYTES).decode("utf-8-sig", errors="replace").lstrip().removeprefix("[")
        else:
            read = iter(lambda: lines.readline(_FIRST_ROW_BYTES), b"")
            text = next((line for line in read if line.strip()), b"").decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise ValueError("it is empty")
    try:
        row, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    return set(flat(row)) if isinstance(row, dict) else None


def _parquet_columns(path: Path) -> dict[str, Any]:
    import pyarrow
    import pyarrow.parquet

    def inside(kind: Any) -> Any:
        return {field.name: inside(field.type) for field in kind} if pyarrow.types.is_struct(kind) else None

    try:
        return {field.name: inside(field.type) for field in pyarrow.parquet.read_schema(path)}
    except pyarrow.ArrowException as error:
        raise ValueError(f"not Parquet ({error})") from error


def _saved_features(path: Path) -> dict[str, Any]:
    """Of the first split, if there are several."""
    if (splits := path / "dataset_dict.json").is_file():
        path /= json.loads(splits.read_bytes())["splits"][0]

    def inside(feature: Any) -> Any:
        is_object = isinstance(feature, dict) and "_type" not in feature
        return {name: inside(inner) for name, inner in feature.items()} if is_object else None

    return inside(json.loads((path / "dataset_info.json").read_bytes())["features"])


def is_saved_dataset(path: Path) -> bool:
    """Whether `save_to_disk` of Hugging Face datasets made this folder."""
    return isfile(path / "state.json") or isfile(path / "dataset_dict.json")


def files_of(source: str, folder: Path) -> dict[str, Path] | None:
    """The files of a source by the names to show: one that is there or was meant to be, or those that a pattern such as
    `train-*.jsonl` matches, sorted; None for a folder or a dataset of the hub."""
    pattern = Path(source).expanduser()
    path = folder / pattern
    if isfile(path):
        return {path.name: path}
    if glob.has_magic(source):
        names = sorted(glob.glob(str(pattern), root_dir=folder, recursive=True))
        return {name: folder / name for name in names if isfile(folder / name)}
    return {path.name: path} if _LOOKS_LIKE_A_FILE.search(source) else None


def _beside(path: Path) -> str:
    names = [p.name for p in sorted(path.parent.glob("*")) if p.name.endswith(FILE_KINDS)] if isdir(path.parent) else []
    close = nearest(path.name, names, cutoff=60)
    if close:
        return f". Did you mean {close}?"
    return f". There: {', '.join(names[:8])}" if names else ""
