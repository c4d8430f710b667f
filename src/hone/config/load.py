"""Loader of run files: layers of YAML to a RunConfig, with the origin of every value and all problems at once.

Layers, weakest first: the files that `extends:` names (presets such as `algorithm/dapo`, or paths relative to the
file that names them), each before the file that extends it; the run file; `section.key=value` from the command
line. Mappings merge, everything else replaces. A relative path starts at the folder of the file that it is
written in, on the command line at the run file's. What a key means is `run.py`; what must hold between keys `rules.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from hone.config import schema
from hone.config.derived import run_dir, run_name
from hone.config.layers import Stack, override
from hone.config.messages import foreign_names, is_secret_key, is_secret_value, unknown_key, wrong_value
from hone.config.render import resolved_yaml
from hone.config.rules.rules import breaches
from hone.config.run import RunConfig
from hone.config.yaml_tree import COMMAND_LINE, Node, Problem, Where, too_large
from hone.errors import ConfigError

_KEY = re.compile(r"\w+(\.\w+)+")


@dataclass(frozen=True, slots=True)
class Setting:
    """One layer gave one path a value."""

    path: str
    value: Any
    where: Where


@dataclass(frozen=True)
class Loaded:
    """A resolved run file: the configuration, and where everything in it came from."""

    config: RunConfig
    run_file: Path
    tree: Node
    """All layers merged; keys that no layer set are not in it."""
    settings: tuple[Setting, ...]
    """Every value that any layer set, weakest layer first."""

    @property
    def name(self) -> str:
        """The run's name, which `{name}` stands for."""
        return run_name(self.config, self.run_file)

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return run_dir(self.config, self.run_file)

    def path(self, text: str) -> Path:
        """A path written in the run file: relative ones start at the run file's folder."""
        return self.run_file.parent / Path(text).expanduser()

    @cached_property
    def origins(self) -> Mapping[str, tuple[Setting, ...]]:
        """Dotted path of every value that is set -> the layers that set it; the last one won."""
        return {path: self.history(path) for path, _ in self.tree.leaves() if path}

    def history(self, path: str) -> tuple[Setting, ...]:
        """Every setting of a path, of what holds it or of what it holds, weakest layer first."""
        return tuple(
            setting
            for setting in self.settings
            if setting.path == path or path.startswith(f"{setting.path}.") or setting.path.startswith(f"{path}.")
        )

    def as_yaml(self) -> str:
        """The whole resolved file, defaults included, each value with a comment that says where it comes from."""
        return resolved_yaml(self.config, self.where, title=f"Resolved from {self.run_file}")

    def where(self, path: str) -> Where | None:
        """Where the value that won was written; None if it is the default."""
        node = self.tree.find(path)
        return node.where if node else None

    def located(self, problem: str) -> str:
        """A problem that begins with a key, behind the place where the key was written."""
        key = _KEY.match(problem)
        where = self.where(key[0]) if key else None
        return f"{where}  {problem}" if where else problem


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, needed: str | None = None, needs_programs: bool = True
) -> Loaded:
    """Resolve a run file.

    Args:
        path: the run file.
        overrides: `section.key=value`, values in YAML; list entries by number (`reward.components.0.weight=2`).
        needed: the one section that is to be read, for commands that only score or only start services. What other
            sections lack, or how they fit together, is then no problem; unknown keys and wrong values are, as ever.
        needs_programs: programs that the run would start must be here.
    Raises:
        ConfigError: with every problem of every layer.
    """
    stack = Stack(Path(path).parent)
    tree = stack.read(Path(path), str(path), asked_by=None)
    return _resolved(stack, tree, Path(path), overrides, needed, needs_programs)


def load_mapping(sections: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str, run_file: Path) -> Loaded:
    """Like `load_config`, of the content of a run file as plain data.

    Args:
        source: how problems name where the data is from.
        run_file: gives the name of the run and the folder where relative paths start; it is not read.
    """
    stack, tree = Stack(run_file.parent), Node.of(sections, Where(source))
    rule = "must be what a run file can hold: text, a number, true or false, null, a list or a mapping"
    problems: list[Problem] = []
    for path, leaf in tree.leaves():
        for value in leaf.scalars():
            if not isinstance(value, str | int | float | None):
                problems.append(Problem(Where(source), path, f"{rule} (got {type(value).__name__})"))
            elif refusal := too_large(value):
                problems.append(Problem(Where(source), path, refusal))
    if problems:
        raise _error(problems)
    return _resolved(stack, stack.take(tree, run_file), run_file, overrides)


def _resolved(
    stack: Stack,
    tree: Node | None,
    run_file: Path,
    overrides: Sequence[str],
    needed: str | None = None,
    needs_programs: bool = True,
) -> Loaded:
    """`needed`: the one section that must be whole and keep the rules; None: all of them."""
    if tree is None:
        raise _error(stack.problems)
    problems = list(stack.problems)
    settings = [setting for layer in stack.layers for setting in _settings(layer)]
    for text in overrides:
        changed = override(tree, text)
        if isinstance(changed, Problem):
            problems.append(changed)
            continue
        tree, path_set = changed
        settings += _settings(tree.find(path_set) or Node(None, COMMAND_LINE), path_set)
    secrets = _secrets(settings)
    problems += secrets
    for layer in stack.layers:
        problems += [_problem(layer, error) for error in _value_errors(layer) if error.kind != "missing"]
    errors = _value_errors(tree)
    is_whole = not stack.problems  # what a broken layer would have set is not missing
    problems += [
        _problem(tree, error)
        for error in errors
        if error.kind != "missing" or (is_whole and _concerns(needed, error.path))
    ]
    config = _validated(tree, errors)
    if config is not None and is_whole:
        bad_paths = [error.path for error in errors] + [secret.key for secret in secrets]
        for breach in breaches(config, run_file, needs_programs=needs_programs):
            pairs = ((key, bad) for key in breach.keys for bad in bad_paths)
            touches_one = any(f"{key}.".startswith(f"{bad}.") or f"{bad}.".startswith(f"{key}.") for key, bad in pairs)
            if not touches_one and _concerns(needed, breach.keys[0]):
                written = next((key for key in breach.keys if tree.find(key)), breach.keys[0])
                problems.append(Problem(_nearest_where(tree, written), breach.keys[0], breach.message))
    if problems or config is None:
        raise _error(problems)
    return Loaded(config=config, run_file=run_file, tree=tree, settings=tuple(settings))


def _concerns(section: str | None, path: str) -> bool:
    """Whether a path lies in a section; None is the whole file."""
    return section is None or path.partition(".")[0] == section


def _settings(layer: Node, path: str = "") -> list[Setting]:
    return [Setting(leaf_path, leaf.plain(), leaf.where) for leaf_path, leaf in layer.leaves(path) if leaf_path]


def _secrets(settings: Iterable[Setting]) -> list[Problem]:
    """Keys and values that look like secrets: run files are shared and logged, the environment is not."""
    message = "looks like a secret. Secrets come from the environment only (WANDB_API_KEY, HF_TOKEN, ...)"
    return [
        Problem(setting.where, setting.path, message)
        for setting in settings
        if any(is_secret_key(part) for part in setting.path.split(".")) or is_secret_value(setting.value)
    ]


@dataclass(frozen=True, slots=True)
class _ValueError:
    """A value that its key refuses."""

    path: str
    kind: Literal["missing", "unknown", "wrong"]


def _value_errors(tree: Node) -> list[_ValueError]:
    try:
        _parse(tree.plain())
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        return []
    found: list[_ValueError] = []
    for detail in details:
        path = ".".join(str(part) for part in detail["loc"])
        key = schema.find_key(path)
        if detail["type"] == "extra_forbidden":
            found.append(_ValueError(path, "unknown"))
        elif key and key.path != schema.generic(path):  # an entry of a list that is one key
            found.append(_ValueError(".".join(path.split(".")[: key.path.count(".") + 1]), "wrong"))
        else:
            found.append(_ValueError(path, "missing" if detail["type"] == "missing" else "wrong"))
    return list(dict.fromkeys(found))


def _parse(plain: dict[str, Any]) -> RunConfig:
    """Strict about types (no "8" for 8) but not about lists, which is what pydantic's JSON mode does."""
    required = {name: {} for name, info in RunConfig.model_fields.items() if info.is_required()}
    return RunConfig.model_validate_json(json.dumps(required | plain), strict=True)


def _validated(tree: Node, errors: Iterable[_ValueError]) -> RunConfig | None:
    """The configuration with what is wrong left out, so that rules can look at the rest."""
    plain = tree.plain()
    for error in errors:
        _repair(plain, error)
    try:
        return _parse(plain)
    except ValidationError:
        return None


def _repair(plain: Any, error: _ValueError) -> None:
    """Take a bad value out, or put text where text is required."""
    *parents, name = error.path.split(".")
    here = plain
    for part in parents:
        if isinstance(here, list):
            here = here[int(part)] if int(part) < len(here) else {}
        else:
            here = here.setdefault(part, {})
        if not isinstance(here, dict | list):
            return
    if isinstance(here, list):
        here[int(name)] = {"use": "exact"}
        return
    here.pop(name, None)
    key = schema.find_key(error.path)
    if key and key.required:
        here[name] = "?"


def _problem(tree: Node, error: _ValueError) -> Problem:
    where, node = _nearest_where(tree, error.path), tree.find(error.path)
    if error.kind == "unknown":
        leaves = [leaf for leaf, _ in node.leaves(error.path)] if node and isinstance(node.value, dict) else []
        foreign = [f"{leaf}: {foreign_names()[leaf]}" for leaf in leaves if leaf in foreign_names()]
        said = f"is another tool's. {'; '.join(foreign)}" if foreign else unknown_key(error.path)
        return Problem(where, error.path, said)
    if error.kind == "missing":
        key = schema.find_key(error.path)
        return Problem(where, error.path, f"is required. {key.meaning if key else ''}".rstrip())
    return Problem(where, error.path, wrong_value(error.path, node.plain() if node else None))


def _nearest_where(tree: Node, path: str) -> Where:
    """Where a key was written, or else the section that should hold it."""
    while path:
        if node := tree.find(path):
            return node.where
        path = path.rpartition(".")[0]
    return tree.where


def _error(problems: Iterable[Problem]) -> ConfigError:
    unique = list(dict.fromkeys(problems))
    order = {source: number for number, source in enumerate(dict.fromkeys(p.where.source for p in unique))}
    unique.sort(key=lambda p: (p.where == COMMAND_LINE, order[p.where.source], p.where.line or 0))
    width = max(len(str(problem.where)) for problem in unique)
    return ConfigError([f"{problem.where!s:<{width}}{str(problem)[len(str(problem.where)) :]}" for problem in unique])
