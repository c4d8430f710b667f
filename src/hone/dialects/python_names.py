"""What names of a Python file stand for, as far as its text says: it is read as syntax and never run.

A name is followed to the last assignment before its use, `args.x` to the argument of the command that starts the file
or else to its default (`add_argument`, a field of a class). Anything else is a hole.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hone.dialects.foreign import hole
from hone.dialects.values import plain_value

MAX_DEPTH = 12
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Assigning = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For
_BRANCHES = (ast.If, ast.Try, ast.For, ast.While, ast.Match)


@dataclass(frozen=True)
class Assignment:
    """One assignment to a name."""

    statement: ast.stmt
    value: ast.expr | None
    """None: it changes the name in another way than `name = value`."""
    is_certain: bool
    """Not in a branch or loop."""


class Names:
    """Names of one file.

    Args:
        given: arguments of the command that starts it, as written.
    """

    def __init__(self, tree: ast.Module, given: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._assigned: dict[tuple[int, str], list[Assignment]] = defaultdict(list)
        self._bound: dict[tuple[int, str], ast.expr] = {}
        self._outer: dict[int, ast.AST] = {}
        self._scopes: dict[int, ast.AST] = {}
        self._given = given
        self.defaults: dict[str, ast.expr | None] = {}
        """Of the script's own arguments, and of fields of its classes; None: there is none, or several."""
        self.definitions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = {}
        """Functions and classes, also inside others."""
        self.imports: dict[str, ast.Import | ast.ImportFrom] = {}
        self.imported: dict[str, str] = {}
        """Name -> `module:name`, of `from module import name`."""
        self._visit(tree, tree, is_certain=True)

    def _visit(self, node: ast.AST, scope: ast.AST, *, is_certain: bool) -> None:
        is_main_guard = isinstance(node, ast.If) and "__name__" in text_of(node.test)
        is_branch = isinstance(node, _BRANCHES) and not is_main_guard
        for child in ast.iter_child_nodes(node):
            self._scopes[id(child)] = scope
            inner, certain = scope, is_certain and not is_branch
            if isinstance(child, Function | ast.ClassDef):
                inner, certain = child, True
                self._outer[id(child)] = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.definitions[child.name] = child
            if isinstance(child, ast.Import | ast.ImportFrom):
                for alias in child.names:
                    self.imports[alias.asname or alias.name.partition(".")[0]] = child
                    if isinstance(child, ast.ImportFrom) and child.module and child.level == 0:
                        self.imported[alias.asname or alias.name] = f"{child.module}:{alias.name}"
            elif isinstance(child, ast.AnnAssign) and isinstance(scope, ast.ClassDef):
                default = child.value
                if isinstance(default, ast.Call) and called(default) in ("field", "Field"):
                    default = next((word.value for word in default.keywords if word.arg == "default"), None)
                self._default(child.target.id if isinstance(child.target, ast.Name) else None, default)
            elif isinstance(child, Assigning):
                self._assign(child, scope, certain)
            elif isinstance(child, ast.Call) and called(child) == "add_argument":
                self._argument(child)
            self._visit(child, inner, is_certain=certain)

    def _assign(self, node: Assigning, scope: ast.AST, certain: bool) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple | ast.List) else None
            for place, part in enumerate(parts or [target]):
                if isinstance(part, ast.Name):
                    expr = value
                    if parts and value is not None:
                        expr = ast.copy_location(ast.Subscript(value, ast.Constant(place), ast.Load()), value)
                        self._scopes[id(expr)] = self._scopes[id(expr.slice)] = scope
                    self._assigned[id(scope), part.id].append(Assignment(node, expr, certain))

    def _argument(self, call: ast.Call) -> None:
        flags = [node.value for node in call.args if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if flags and flags[-1].startswith("--"):
            switch = {"store_true": False, "store_false": True}.get(str(getattr(given.get("action"), "value", "")))
            default = given.get("default") or (None if switch is None else ast.Constant(switch))
            self._default(flags[-1].lstrip("-").replace("-", "_"), default)

    def _default(self, name: str | None, value: ast.expr | None) -> None:
        if name is not None:
            self.defaults[name] = value if name not in self.defaults else None

    # ---- following

    def scopes(self, node: ast.AST) -> Iterator[ast.AST]:
        """The scope of a node of the file and those around it."""
        scope = self._scopes.get(id(node))
        while scope is not None:
            yield scope
            scope = self._outer.get(id(scope))

    def assignments(self, name: str, at: ast.AST) -> list[Assignment]:
        """All of a name in the nearest scope that has any."""
        for scope in self.scopes(at):
            if found := self._assigned.get((id(scope), name)):
                return found
        return []

    def follow(self, node: ast.expr) -> ast.expr:
        """The expression that a name stands for; the node itself where that is not known."""
        for _ in range(MAX_DEPTH):
            if not isinstance(node, ast.Name):
                break
            value = self._followed(node)
            if value is None or value is node:
                break
            node = value
        return node

    def _followed(self, node: ast.Name) -> ast.expr | None:
        for scope in self.scopes(node):
            if bound := self._bound.get((id(scope), node.id)):
                return bound
        found = self.assignments(node.id, node)
        earlier = [one for one in found if (one.statement.end_lineno or 0) < node.lineno]
        before = earlier or (found if len(found) == 1 else [])
        if not before or (len(before) > 1 and not before[-1].is_certain):
            return None
        return before[-1].value

    def returned(self, call: ast.Call) -> ast.expr | None:
        """What a call of a function of the file gives, where that has one `return`; its parameters are then known."""
        function = self.definitions.get(called(call)) if isinstance(call.func, ast.Name) else None
        if not isinstance(function, ast.FunctionDef):
            return None
        returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
        if len(returns) != 1 or returns[0].value is None:
            return None
        parameters = function.args.posonlyargs + function.args.args
        defaults = function.args.defaults
        pairs = zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
        values = {parameter.arg: value for parameter, value in pairs}
        values |= {parameter.arg: value for parameter, value in zip(parameters, call.args, strict=False)}
        values |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        self._bound |= {(id(function), name): value for name, value in values.items()}
        return returns[0].value

    # ---- values

    def value(self, node: ast.expr | None, depth: int = 0) -> Any:
        """Plain data, with holes for what is not known."""
        if node is None or depth > MAX_DEPTH:
            return hole("an expression" if node is None else text_of(node))
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str | int | float | bool | None) else hole(text_of(node))
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item, depth + 1) for item in node.elts]
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {str(self.value(k, depth + 1)): self.value(v, depth + 1) for k, v in pairs if k is not None}
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
            return "".join(str(self.value(part, depth + 1)) for part in parts)
        if isinstance(node, ast.UnaryOp):
            value = self.value(node.operand, depth + 1)
            if isinstance(node.op, ast.Not) and isinstance(value, bool):
                return not value
            is_number = isinstance(node.op, ast.USub) and isinstance(value, int | float)
            return -value if is_number else hole(text_of(node))
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node, depth)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            values = [self.value(part, depth + 1) for part in node.values]
            return next((value for value in values if value and not _is_hole(value)), values[-1])
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.Subscript):
            whole, key = self.value(node.value, depth + 1), self.value(node.slice, depth + 1)
            places = whole if isinstance(whole, dict) else range(len(whole)) if isinstance(whole, list) else ()
            return whole[key] if key in places else hole(text_of(node))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in self.imports:
            return self._argument_value(node, depth)
        followed = self.follow(node)
        if followed is node:
            return hole(text_of(node))
        value = self.value(followed, depth + 1)
        return hole(node.id) if isinstance(node, ast.Name) and value == hole(text_of(followed)) else value

    def _argument_value(self, node: ast.Attribute, depth: int) -> Any:
        if node.attr in self._given:
            given = self._given[node.attr]
            return plain_value(given) if isinstance(given, str) else given
        default = self.defaults.get(node.attr)
        parsed = self.follow(node.value)
        if default is None and self._given and isinstance(parsed, ast.Subscript) and "parse_args" in text_of(parsed):
            return None  # an argument of TRL's own that the command leaves at its default
        return hole(text_of(node)) if default is None else self.value(default, depth + 1)

    def _call(self, node: ast.Call, depth: int) -> Any:
        name, arguments = called(node), [self.value(argument, depth + 1) for argument in node.args]
        if name in ("str", "Path") and len(arguments) == 1:
            return arguments[0] if _is_hole(arguments[0]) else str(arguments[0])
        if name in ("int", "float", "bool") and len(arguments) == 1:
            value = plain_value(arguments[0]) if isinstance(arguments[0], str) and name != "bool" else arguments[0]
            is_number = isinstance(value, int | float) and abs(value) < 1e15
            return {"int": int, "float": float, "bool": bool}[name](value) if is_number else hole(text_of(node))
        if name in ("is_bf16_supported", "is_bfloat16_supported"):
            return True  # of the device, where Hone computes in bfloat16
        if name == "join" and arguments and all(isinstance(part, str) for part in arguments):
            return "/".join(arguments)
        if name in ("get", "getenv") and len(arguments) == 2 and "env" in text_of(node.func):
            return arguments[1]
        if name == "dict" and not arguments:
            return {keyword.arg: self.value(keyword.value, depth + 1) for keyword in node.keywords if keyword.arg}
        returned = self.returned(node)
        return hole(text_of(node)) if returned is None else self.value(returned, depth + 1)

    def _arithmetic(self, node: ast.BinOp, depth: int) -> Any:
        left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
        if isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str):
            return left + right
        if isinstance(node.op, ast.Div) and isinstance(left, str) and isinstance(right, str):
            return f"{left}/{right}"  # of paths
        if any(not isinstance(side, int | float) or abs(side) > 1e15 for side in (left, right)):
            return hole(text_of(node))
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.FloorDiv) and right:
            return left // right
        return left / right if isinstance(node.op, ast.Div) and right else hole(text_of(node))


def called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def text_of(node: ast.AST) -> str:
    try:
        return " ".join(ast.unparse(node).split())[:120]
    except (ValueError, RecursionError):
        return "an expression"


def _is_hole(value: Any) -> bool:
    return isinstance(value, str) and "\ue000" in value
