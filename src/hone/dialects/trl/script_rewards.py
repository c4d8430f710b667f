"""Reward functions of a script, as a file of their own: the script itself cannot be imported without training."""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Sequence

from hone.config.messages import is_secret_value
from hone.dialects.foreign import looks_secret
from hone.dialects.python_names import Names, called

_RUNS = ("parse_args", "parse_known_args", "parse_args_and_config", "parse_args_into_dataclasses", "load_dataset")
"""Calls that a reward function's file must not make."""


class _Stuck(Exception):
    """Something that cannot be copied."""


def copied(names: Names, text: str, functions: Sequence[str], source: str) -> str | None:
    """Text of a file with these functions and what they use; None where they use what the script computes, or where the
    text has a secret."""
    found: dict[int, str] = {}
    try:
        for function in functions:
            _collect(names, text, names.definitions[function], found)
    except _Stuck:
        return None
    parts = [found[line] for line in sorted(found)]
    return f'"""Rewards, copied from {source} by `hone import`."""\n\n' + "\n\n".join(parts) + "\n"


def _collect(names: Names, text: str, node: ast.stmt, found: dict[int, str]) -> None:
    """Add a statement, and before it what its names stand for."""
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    if first in found:
        return
    for part in ast.walk(node):
        literal = part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else None
        is_secret = literal is not None and (is_secret_value(literal) or looks_secret("value", literal))
        if is_secret or (isinstance(part, ast.Call) and called(part) in _RUNS):
            raise _Stuck
    found[first] = textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    for used in _free_names(node):
        if used.id in names.definitions:
            _collect(names, text, names.definitions[used.id], found)
        elif used.id in names.imports:
            _collect(names, text, names.imports[used.id], found)
        elif assigned := names.assignments(used.id, used):
            if len(assigned) > 1 or not assigned[0].is_certain or assigned[0].value is None:
                raise _Stuck
            _collect(names, text, assigned[0].statement, found)
        elif not hasattr(builtins, used.id) and used.id != "__file__":
            raise _Stuck


def _free_names(node: ast.stmt) -> list[ast.Name]:
    """Names that a statement reads and does not make itself."""
    own: set[str | None] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            own.add(part.arg)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            own.add(part.id)
        elif isinstance(part, ast.ExceptHandler | ast.FunctionDef | ast.ClassDef) and part is not node:
            own.add(part.name)
        elif isinstance(part, ast.alias):
            own.add(part.asname or part.name.partition(".")[0])
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)]
    return [part for part in names if part.id not in own]
