"""Fingerprint of served rewards: a hash over everything that a score depends on besides its item.

Settings (components, weights, args), the code of `hone.reward`, users' functions with their packages and the local
modules that they import, and files and model directories that args name. Equal fingerprints mean equal scores, as far
as files show: a remote service has a fingerprint of its own. Imports and runs no user code.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import hone
from hone.config.load import Loaded
from hone.config.rewards import builtin_reward
from hone.reward.resolve import resolve

_PACKAGE = Path(hone.__file__).parent


def fingerprint(loaded: Loaded) -> str:
    """`sha256:...` of a file's rewards. Reads every file that it covers, model weights too: a second per GB or so."""
    folder = loaded.run_file.parent.resolve()
    components = loaded.config.reward.components
    settings = [{"use": c.use, "name": c.name, "weight": c.weight, "args": c.args} for c in components]
    users = code_files((component.use for component in components), folder)
    own = [path for path in (_PACKAGE / "reward").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files = [_PACKAGE / "types.py", *own, *users, *named_files([c.args for c in components], folder)]
    contents = sorted((path.name, digest(path)) for path in set(files))  # by name: folders differ between machines
    text = json.dumps([hone.__version__, settings, contents], sort_keys=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def digest(path: Path) -> str:
    """Of all bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_files(uses: Iterable[str], folder: Path) -> Iterator[Path]:
    """The files of the user's functions, of their packages, and of modules beside them that they import."""
    pending: list[Path] = []
    for use in uses:
        if builtin_reward(use).runs != "stateful":
            place = resolve(use, folder).place
            pending += [Path(place)] if place.endswith(".py") else _module_files(place, folder)
    seen: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in seen or _PACKAGE in path.parents or path.suffix == ".pyc":
            continue
        seen.add(path)
        yield path
        for module in _imports(path) if path.suffix == ".py" else ():
            for root in (path.parent, folder):
                pending += [root / f"{module}.py"] if (root / f"{module}.py").is_file() else []
                pending += (root / module).rglob("*.py") if (root / module / "__init__.py").is_file() else []


def _imports(path: Path) -> Iterator[str]:
    """First parts of what a file imports; what cannot be parsed is found out when it is imported."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def _module_files(name: str, folder: Path) -> list[Path]:
    """The file of a module, or all files of the package that it is in, data too; imports neither."""
    spec = PathFinder.find_spec(name.partition(".")[0], [str(folder), *sys.path])
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [p for root in spec.submodule_search_locations for p in Path(root).rglob("*") if p.is_file()]
    return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []


def named_files(value: Any, folder: Path) -> Iterator[Path]:
    """Files, and files of model directories, that a text somewhere in args is the path of."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Iterable) and not isinstance(value, str):
        for child in value:
            yield from named_files(child, folder)
    elif isinstance(value, str) and 0 < len(value) < 1024 and "\0" not in value:
        path = folder / Path(value).expanduser()
        if path.is_file():
            yield path
        elif (path / "config.json").is_file():
            yield from (file for file in path.iterdir() if file.is_file())
