"""Rules that look outside the run file: data files and their columns, rewards, model directories.

Looks, and runs nothing: a reward's file is parsed and not imported, of a data file only its first row is read, and
hub names are not looked up. Whole data sets and models are checked by the rest of `hone check`.
"""

from __future__ import annotations

import ast
import csv
import glob
import gzip
import importlib.util
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from hone.config.derived import overridden, section_of
from hone.config.engine import EngineSection
from hone.config.layers import is_dir, is_file
from hone.config.messages import nearest
from hone.config.rewards import BUILTIN_REWARDS, registered_rewards
from hone.config.rules import Breach
from hone.config.rules.engines import engines_of
from hone.config.run import DataSection, RunConfig
from hone.config.source import SourceSection

FILE_KINDS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")

UNREADABLE = (OSError, EOFError, zlib.error)
"""Raised where a file, compressed or not, cannot be read further."""
_LOOKS_LIKE_A_FILE = re.compile(r"^[./~]|\.(json|jsonl|gz|csv|tsv|txt|parquet|arrow|zst)$")
_PLACEHOLDER = re.compile(r"\{\{\w+(?:\.\w+)*\}\}|\{(\w+(?:\.\w+)*)\}")
_FIRST_ROW_BYTES = 4 << 20


def data_files_exist(config: RunConfig, folder: Path) -> Iterator[Breach]:
    """Data that looks like a file has a format that is read, and has the columns that the run file names."""
    for key, source, columns in _sources(config):
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
            if is_file(path):
                yield from _columns_exist(key, name, path, columns)
            else:
                yield Breach((key,), f"{source!r} does not exist, looked for at {path}{_beside(path)}")


def _indexed(path: Path) -> Path | None:
    """The prefix of Megatron's pair of files, if the path is it, one of the two, or a prefix of prefixes."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if not is_dir(prefix.parent):
        return None
    pairs = (
        index.with_suffix("") for index in sorted(prefix.parent.glob("*.idx")) if index.with_suffix(".bin").is_file()
    )
    return next((pair for pair in pairs if pair.name == prefix.name or pair.name.startswith(f"{prefix.name}_")), None)


Columns = list[tuple[str, str]]
"""The key that names a column, and the column."""


def sources_of(config: RunConfig) -> Iterator[tuple[str, SourceSection]]:
    """Path and source of every entry of `data.train`, `data.eval` and `sft.data`."""
    lists = {"data.train": config.data.train, "data.eval": config.data.eval, "sft.data": config.sft.data}
    for path, sources in lists.items():
        yield from ((f"{path}.{number}", source) for number, source in enumerate(sources or ()))


def key_of(path: str, source: SourceSection) -> Callable[[str], str]:
    """The path of a key by its name: the source's own where it sets it, else that of `data`."""
    return lambda name: f"{path}.{name}" if getattr(source, name) is not None else f"data.{name}"


def _sources(config: RunConfig) -> Iterator[tuple[str, str, Columns]]:
    """Key, source and needed columns of every data source that the stages read."""
    several = {"data.train": len(config.data.train) > 1, "data.eval": len(config.data.eval or ()) > 1}
    for path, source in sources_of(config):
        part = path.rpartition(".")[0]
        needed = _needed(config, part, _columns(section_of(config.data, source), key_of(path, source)))
        if needed:
            yield path if several.get(part) else part, source.path, needed


def _needed(config: RunConfig, part: str, prompts: Columns) -> Columns:
    """Columns that the stages read of the sources in `part`, given those of a prompt; none where none reads it."""
    data, sft = config.data, config.sft
    pairs = prompts + _pair_columns(config) if "reward_model" in config.stages else []
    imitated = [("sft.response_column", sft.response_column)] if sft.response_column is not None else []
    imitated = prompts + imitated
    if sft.messages_column is not None:
        imitated = [("sft.messages_column", sft.messages_column)]
    does_sft = "sft" in config.stages
    if part == "sft.data":
        return imitated if does_sft else []
    if part == "data.eval":
        grouped = [("eval.by", config.eval.by)] if config.eval.by is not None else []
        return pairs or prompts + grouped
    found = pairs or (prompts if "rl" in config.stages else [])
    if does_sft and sft.data is None:
        found = found + [column for column in imitated if column not in found]
    if found and data.order_column is not None:
        found = [*found, ("data.order_column", data.order_column)]
    return found


def _pair_columns(config: RunConfig) -> Columns:
    rm = config.rm
    columns = [("rm.chosen_column", rm.chosen_column), ("rm.rejected_column", rm.rejected_column)]
    return columns + ([("rm.margin_column", rm.margin_column)] if rm.margin_column is not None else [])


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
    return is_file(path / "state.json") or is_file(path / "dataset_dict.json")


def files_of(source: str, folder: Path) -> dict[str, Path] | None:
    """The files of a source by the names to show: one that is there or was meant to be, or those that a pattern such as
    `train-*.jsonl` matches, sorted; None for a folder or a dataset of the hub."""
    pattern = Path(source).expanduser()
    path = folder / pattern
    if is_file(path):
        return {path.name: path}
    if glob.has_magic(source):
        names = sorted(glob.glob(str(pattern), root_dir=folder, recursive=True))
        return {name: folder / name for name in names if is_file(folder / name)}
    return {path.name: path} if _LOOKS_LIKE_A_FILE.search(source) else None


def _beside(path: Path) -> str:
    names = (
        [p.name for p in sorted(path.parent.glob("*")) if p.name.endswith(FILE_KINDS)] if is_dir(path.parent) else []
    )
    close = nearest(path.name, names, cutoff=60)
    if close:
        return f". Did you mean {close}?"
    return f". There: {', '.join(names[:8])}" if names else ""


def rewards_can_be_had(config: RunConfig, folder: Path) -> Iterator[Breach]:
    for number, component in enumerate(config.reward.components):
        problem = _reward_problem(component.use, folder)
        if problem:
            yield Breach((f"reward.components.{number}.use",), problem)


def _reward_problem(use: str, folder: Path) -> str | None:
    if use in BUILTIN_REWARDS:
        return None
    path = use if ":" in use else registered_rewards().get(use)
    if path is None:
        named = (*BUILTIN_REWARDS, *registered_rewards())
        close = nearest(use, named, cutoff=60)
        hint = f"Did you mean {close}?" if close else f"Built in or installed: {', '.join(named)}."
        return f"no reward is called {use!r}. {hint} Your own: package.module:function or file.py:function"
    return _code_problem(path, folder, "function")


def environment_can_be_had(config: RunConfig, folder: Path) -> Iterator[Breach]:
    use = config.rollout.environment.use
    if use is None:
        return
    problem = _code_problem(use, folder, "class")
    if problem:
        yield Breach(("rollout.environment.use",), problem)


def _code_problem(use: str, folder: Path, kind: str) -> str | None:
    target, colon, name = use.rpartition(":")
    if not colon:
        return f"must be package.module:{kind} or file.py:{kind} (got {use!r})"
    if not name.isidentifier():
        return f"must end in the name of a {kind} after the colon (got {use!r})"
    if target.endswith(".py"):
        path = folder / Path(target).expanduser()
        if not is_file(path):
            return f"{target} does not exist, looked for at {path}"
        return _defines(path, name, target)
    if not all(part.isidentifier() for part in target.split(".")):
        return f"must be package.module:{kind} or file.py:{kind} (got {target}:{name})"
    first, *rest = target.split(".")
    spec = importlib.util.find_spec(first)
    for part in rest:
        spec = spec and PathFinder.find_spec(part, spec.submodule_search_locations or [])
        if spec is None:
            break
    if spec is None:
        return f"there is no module {target!r} to import here. Is its package installed?"
    origin = spec.origin
    return _defines(Path(origin), name, target) if origin and origin.endswith(".py") else None


def _defines(path: Path, name: str, shown: str) -> str | None:
    """Whether a Python file binds a name at its top level, without running it."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        return f"{shown} is not valid Python: {getattr(error, 'msg', error)}{f' on line {line}' if line else ''}"
    names, has_star = _bound_names(tree)
    if name in names or has_star:
        return None
    close = nearest(name, names)
    return f"{shown} defines no {name!r}.{f' Did you mean {close}?' if close else ''}"


def _bound_names(tree: ast.Module) -> tuple[list[str], bool]:
    """Names bound at the top level, `if` and `try` blocks included; and whether a star import may bind more."""
    names: list[str] = []
    has_star = False
    blocks: list[ast.AST] = list(tree.body)
    for node in blocks:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.append(node.name)
            case ast.Import() | ast.ImportFrom():
                has_star |= any(alias.name == "*" for alias in node.names)
                names += [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names += [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            case ast.If() | ast.Try() | ast.With() | ast.ExceptHandler():
                blocks += list(ast.iter_child_nodes(node))
    return names, has_star


MEGATRON_MARK = "latest_checkpointed_iteration.txt"
"""In every folder of Megatron checkpoints."""


def local_directories_are_models(config: RunConfig, folder: Path) -> Iterator[Breach]:
    """A path that is, or was meant as, a local directory must hold what its key needs. Hub names are not looked up."""
    for key, text, needed in (
        ("model.path", config.model.path, "config.json"),
        ("critic.path", config.critic.path, "config.json"),
        ("lora.start", config.lora.start, "adapter_config.json"),
        ("model.tokenizer", config.model.tokenizer, "tokenizer_config.json"),
        *((f"services.{name}.policy", service.policy, "config.json") for name, service in config.services.items()),
    ):
        if text is None:
            continue
        path = folder / Path(text).expanduser()
        if not text.strip():
            yield Breach((key,), "must not be empty; null takes the default")
        elif is_dir(path):
            if (path / MEGATRON_MARK).is_file():
                yield Breach(
                    (key,),
                    f"{text!r} is a Megatron checkpoint: name the Hugging Face directory that it was converted from, "
                    "or convert it to one",
                )
            elif not (path / needed).is_file():
                yield Breach((key,), f"{text!r} is a directory without {needed}, so not a Hugging Face one")
        elif text.startswith(("/", ".", "~")) or text.count("/") > 1:
            yield Breach((key,), f"{text!r} does not exist, looked for at {path}")
        elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text):
            yield Breach((key,), f"{text!r} is neither a directory nor a hub name such as Qwen/Qwen3-0.6B")


def served_rewards_exist(config: RunConfig, folder: Path) -> Iterator[Breach]:
    for name, service in config.services.items():
        if service.reward is not None and not is_file(path := folder / Path(service.reward).expanduser()):
            close = nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")] if is_dir(path.parent) else [])
            hint = f". Did you mean {close}?" if close else ""
            yield Breach((f"services.{name}.reward",), f"{service.reward!r} does not exist, looked for at {path}{hint}")


# ---- programs, which a plan does without


def commands_can_be_run(config: RunConfig, folder: Path) -> Iterator[Breach]:
    for name, service in config.services.items():
        if service.command is not None and find_program(service.command[0], folder) is None:
            yield Breach(
                (f"services.{name}.command",),
                f"there is no program {service.command[0]!r} to run here. Install it, put it on the PATH, or write its "
                "path; `hone plan` does without it",
            )


def engines_can_be_started(config: RunConfig, folder: Path) -> Iterator[Breach]:
    """vLLM is here where a service's engine needs it."""
    for name, engine in engines_of(config):
        gpus = len(config.services[name].devices)
        if served_by(engine, folder) == "vllm":
            continue
        if engine.use == "vllm":
            yield Breach((f"services.{name}.engine.use",), f"= vllm, and {NO_VLLM}. Install it, or leave `use` out")
        elif gpus > 1:
            yield Breach(
                (f"services.{name}.engine", f"services.{name}.devices"),
                f"{gpus} GPUs need vLLM, and {NO_VLLM}. Install it, or give the service one GPU",
            )


NO_VLLM = "there is no program `vllm` beside this Python or on the PATH"


def served_by(engine: EngineSection, folder: Path) -> Literal["hone", "vllm"]:
    """What a service's engine is, here."""
    return "vllm" if engine.use != "hone" and find_program("vllm", folder) is not None else "hone"


def find_program(word: str, folder: Path) -> str | None:
    """The program that a command's first word names: on the PATH, or relative to the run file's folder.

    Programs beside this Python, such as `hone` itself, come before the PATH.
    """
    if "/" in word:
        return shutil.which(str(folder.absolute() / Path(word).expanduser()))
    return shutil.which(word, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def architecture_of(config: RunConfig, folder: Path) -> Mapping[str, Any]:
    """The keys of the model's config.json, where they can be known without the hub; else none."""
    architecture: Any = config.model.init
    if config.model.path is not None:
        file = folder / Path(config.model.path).expanduser() / "config.json"
        try:
            architecture = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
    return overridden(architecture, config.model.override) if isinstance(architecture, dict) else {}


def context_limit(config: RunConfig, folder: Path) -> int | None:
    """The model's context in tokens (`max_position_embeddings`), where it can be known without the hub."""
    limit = architecture_of(config, folder).get("max_position_embeddings")
    return limit if isinstance(limit, int) and not isinstance(limit, bool) else None


FileRule = Callable[[RunConfig, Path], Iterator[Breach]]
FILE_RULES: tuple[FileRule, ...] = (
    data_files_exist,
    rewards_can_be_had,
    environment_can_be_had,
    local_directories_are_models,
    served_rewards_exist,
)
PROGRAM_RULES: tuple[FileRule, ...] = (commands_can_be_run, engines_can_be_started)
"""Of what this machine has installed: for runs, not for plans."""
