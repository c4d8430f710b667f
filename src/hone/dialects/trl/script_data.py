"""Data sets of a TRL script: what `load_dataset` is called with, and what is done to its rows where that has a
counterpart in `data`. The rest is named, as code that the rows go through."""

from __future__ import annotations

import ast
import re
from typing import Any

from hone.dialects.python_names import MAX_DEPTH, Names, called, text_of

_OF_DATASET = ("path", "name", "split", "data_files", "data_dir")
"""Of what `load_dataset` takes, what says which rows."""
_UNCHANGED = ("shuffle", "remove_columns", "cast_column", "select_columns", "with_format", "flatten_indices")
"""Methods after which the rows say the same."""
_READERS = {"from_json": "json", "from_csv": "csv", "from_parquet": "parquet"}

DatasetEntry = dict[str, Any]
"""Arguments of `load_dataset`, keys of `data`, and `code`: what cannot be said by them."""


def dataset(names: Names, node: ast.expr) -> DatasetEntry:
    """A `DatasetEntry`, whose path is None where the rows are made in code."""
    found = _entry(names, node, 0)
    return {"path": None, "code": [text_of(names.follow(node))]} if found is None else found


def _entry(names: Names, node: ast.expr, depth: int) -> DatasetEntry | None:
    node = names.follow(node)
    if depth > MAX_DEPTH:
        return None
    if isinstance(node, ast.Subscript):
        return _part(names, node, depth)
    if not isinstance(node, ast.Call):
        return None
    name = called(node)
    if name == "load_dataset" and (node.args or node.keywords):
        given = {keyword.arg: names.value(keyword.value) for keyword in node.keywords}
        placed = dict(zip(("path", "name"), map(names.value, node.args), strict=False))
        return {key: given[key] for key in _OF_DATASET if key in given} | placed
    if name == "load_from_disk" and node.args:
        return {"path": names.value(node.args[0])}
    if name in _READERS and node.args:
        return {"path": _READERS[name], "data_files": names.value(node.args[0])}
    if isinstance(node.func, ast.Attribute):
        inner = _entry(names, node.func.value, depth + 1)
        return None if inner is None else _changed(names, inner, node)
    returned = names.returned(node)
    return None if returned is None else _entry(names, returned, depth + 1)


def _part(names: Names, node: ast.Subscript, depth: int) -> DatasetEntry | None:
    """A split, of a data set with several or of a list of them."""
    inner, key = _entry(names, node.value, depth + 1), names.value(node.slice)
    if inner is None:
        return None
    split = inner.get("split")
    if isinstance(key, int) and isinstance(split, list) and key < len(split):
        return inner | {"split": split[key]}
    if not isinstance(key, str):
        return None
    return inner if "train_test_split" in " ".join(inner.get("code", ())) else inner | {"split": key}


def _changed(names: Names, entry: DatasetEntry, call: ast.Call) -> DatasetEntry:
    """The rows after one method."""
    name, arguments = called(call), [names.value(argument) for argument in call.args]
    if name in _UNCHANGED:
        return entry
    if name in ("select", "take") and "rows" not in entry and (rows := _slice(call, arguments)):
        return entry | {"rows": rows}
    if name == "rename_column" and len(arguments) == 2 and (key := _COLUMNS.get(str(arguments[1]))):
        return entry | {key: arguments[0]}
    if name == "map" and call.args and not any(keyword.arg == "batched" for keyword in call.keywords):
        return _mapped(names, entry, call)
    return _with_code(entry, f"{name}({', '.join(text_of(argument) for argument in (*call.args, *call.keywords))})")


_COLUMNS = {"prompt": "prompt_column", "answer": "answer_column"}


def _with_code(entry: DatasetEntry, text: str) -> DatasetEntry:
    return entry | {"code": [*entry.get("code", []), text]}


def _slice(call: ast.Call, arguments: list[Any]) -> str | None:
    if called(call) == "take":
        return f"0:{arguments[0]}" if arguments and isinstance(arguments[0], int) else None
    bounds = re.fullmatch(r"range\((?:(\d+), ?)?(\d+)\)", text_of(call.args[0])) if call.args else None
    return f"{bounds[1] or 0}:{bounds[2]}" if bounds else None


# ---- rows made from rows


def _mapped(names: Names, entry: DatasetEntry, call: ast.Call) -> DatasetEntry:
    """The keys that a function gives each row: the prompt as messages, a column or a template, and the answer."""
    function = call.args[0]
    if isinstance(function, ast.Name):
        function = names.definitions.get(function.id, function)
    row = _MadeRow.of(names, function)
    if row is None:
        return _with_code(entry, f"map({text_of(call.args[0])})")
    for key, value in row.keys.items():
        if key == "prompt" and (found := row.prompt(value)) is not None:
            entry = entry | found
        elif (column := row.column(value)) is None or (key != column and key != "answer"):
            entry = _with_code(entry, f"{key} = {text_of(value)}")
        elif key == "answer":
            entry = entry | {"answer_column": column}
    return entry


class _MadeRow:
    """What a function of one row returns."""

    def __init__(self, names: Names, parameter: str, keys: dict[str, ast.expr]) -> None:
        self.names, self.parameter, self.keys = names, parameter, keys

    @classmethod
    def of(cls, names: Names, function: ast.AST) -> _MadeRow | None:
        if not isinstance(function, ast.FunctionDef | ast.Lambda) or not function.args.args:
            return None
        parameter, keys = function.args.args[0].arg, {}
        if isinstance(function, ast.Lambda):
            returned: ast.expr | None = function.body
        else:
            returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
            returned = returns[0] if len(returns) == 1 else None
            for node in function.body:
                target = node.targets[0] if isinstance(node, ast.Assign) else None
                if isinstance(target, ast.Subscript) and text_of(target.value) == parameter:
                    assert isinstance(node, ast.Assign)
                    keys[str(names.value(target.slice))] = node.value
        returned = None if returned is None else names.follow(returned)
        if isinstance(returned, ast.Dict):
            pairs = zip(returned.keys, returned.values, strict=True)
            keys |= {str(names.value(key)): value for key, value in pairs if key is not None}
        elif returned is None or text_of(returned) != parameter:
            return None
        return cls(names, parameter, keys)

    def column(self, node: ast.expr) -> str | None:
        """The column that an expression is."""
        node = self.names.follow(node)
        if isinstance(node, ast.Call) and called(node) == "str" and len(node.args) == 1:
            return self.column(node.args[0])
        if isinstance(node, ast.Call) and called(node) == "get" and isinstance(node.func, ast.Attribute) and node.args:
            whole, key = node.func.value, node.args[0]
        elif isinstance(node, ast.Subscript):
            whole, key = node.value, node.slice
        else:
            return None
        is_row = isinstance(whole, ast.Name) and whole.id == self.parameter
        return key.value if is_row and isinstance(key, ast.Constant) and isinstance(key.value, str) else None

    def prompt(self, node: ast.expr) -> DatasetEntry | None:
        """Keys of `data` for it."""
        node = self.names.follow(node)
        if isinstance(node, ast.Call) and called(node) == "apply_chat_template" and node.args:
            node = self.names.follow(node.args[0])
        if isinstance(node, ast.List):
            return self._messages(node)
        if (column := self.column(node)) is not None:
            return {"prompt_column": column, "chat": False}
        template = self._template(node)
        return None if template is None else {"template": template, "chat": False}

    def _messages(self, node: ast.List) -> DatasetEntry | None:
        """A system message and one of the user."""
        said: list[tuple[str, ast.expr]] = []
        for item in node.elts:
            pairs = zip(item.keys, item.values, strict=True) if isinstance(item, ast.Dict) else ()
            keys = {str(key.value) if isinstance(key, ast.Constant) else "": value for key, value in pairs}
            if keys.keys() != {"role", "content"}:
                return None
            said.append((str(self.names.value(keys["role"])), keys["content"]))
        *before, (role, content) = said or [("", node)]
        column = self.column(content) if role == "user" else None
        system = self.names.value(before[0][1]) if [who for who, _ in before] == ["system"] else None
        if column is None or (before and (not isinstance(system, str) or "\ue000" in system)):
            return None
        return {"prompt_column": column, "chat": True} | ({"system": system} if before else {})

    def _template(self, node: ast.expr) -> str | None:
        """An f-string, or text joined by `+`, of columns."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [self._template(side) for side in (node.left, node.right)]
            return None if None in sides else "".join(map(str, sides))
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        found = ""
        for part in parts:
            column = self.column(part.value if isinstance(part, ast.FormattedValue) else part)
            text = None if column is not None else self.names.value(part)
            if column is None and (not isinstance(text, str) or set(text) & set("{}\ue000")):
                return None
            found += f"{{{column}}}" if column is not None else str(text)
        return found
