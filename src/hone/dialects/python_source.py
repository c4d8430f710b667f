"""TRL in a Python file: `GRPOConfig(...)`, `GRPOTrainer(...)` and `LoraConfig(...)`, read as syntax and never run.

A name is followed to its only assignment, `args.x` to the default of `add_argument("--x")`; anything else is a hole.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import Any

from hone.dialects.foreign import DialectError, ForeignKey, ForeignRun, hole

MAX_DEPTH = 8
_TRAINER_ARGUMENTS = {
    "model": "model_name_or_path",
    "reward_funcs": "reward_funcs",
    "train_dataset": "train_dataset",
    "eval_dataset": "eval_dataset",
    "environment_factory": "environment_factory",
    "tools": "tools",
    "rollout_func": "rollout_func",
}
_OF_DATASET = ("path", "name", "split", "data_files", "data_dir")
"""Of what `load_dataset` takes, what says which rows."""
_ADAPTER = {"r": "lora_r", "target_modules": "lora_target_modules"}
_RL = ("GRPO", "RLOO", "AsyncGRPO")


def read_python(text: str, source: str) -> ForeignRun:
    """The configuration of the first RL trainer of a file, or else of the first trainer.

    Raises:
        DialectError: it is no Python, or has no trainer of TRL's.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DialectError(f"{source}: is not Python that can be read: {error}") from None
    names = _Names(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [call for call in calls if _called(call).endswith("Config") and _trainer_of(_called(call))]
    trainers = [call for call in calls if _called(call).endswith("Trainer") and _trainer_of(_called(call))]
    if not configs and not trainers:
        raise DialectError(f"{source}: has no GRPOConfig(...) or other configuration of TRL's trainers")
    found = sorted(
        [*configs, *trainers], key=lambda call: (not _trainer_of(_called(call)).startswith(_RL), call.lineno)
    )
    kind = _trainer_of(_called(found[0]))
    keys: dict[str, ForeignKey] = {}
    for call in configs:
        if _trainer_of(_called(call)) == kind:
            for argument in call.keywords:
                if argument.arg is not None:
                    keys.setdefault(
                        argument.arg, ForeignKey(argument.arg, names.value(argument.value), argument.value.lineno)
                    )
            break
    for call in trainers:
        if _trainer_of(_called(call)) == kind:
            for argument in call.keywords:
                key = _TRAINER_ARGUMENTS.get(argument.arg or "")
                if key and key not in keys:
                    keys[key] = ForeignKey(key, names.trainer_value(key, argument.value, source), argument.value.lineno)
            break
    for call in calls:
        if _called(call) == "LoraConfig" and any(a.arg == "peft_config" for t in trainers for a in t.keywords):
            for argument in call.keywords:
                key = _ADAPTER.get(argument.arg or "", argument.arg or "")
                keys.setdefault(key, ForeignKey(key, names.value(argument.value), argument.value.lineno))
            keys.setdefault("use_peft", ForeignKey("use_peft", True, call.lineno))
            break
    notes = () if len(configs) < 2 else (f"{len(configs)} configurations in the file; read the first of {kind}",)
    return ForeignRun("trl", f"{kind}Config", tuple(keys.values()), source, found[0].lineno, notes=notes)


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


_KINDS = (
    *(
        "AsyncGRPO",
        "GRPO",
        "RLOO",
        "PPO",
        "SFT",
        "DPO",
        "OnlineDPO",
        "KTO",
        "ORPO",
        "CPO",
        "BCO",
        "XPO",
        "NashMD",
        "GKD",
    ),
    *("GOLD", "Reward", "PRM", "Distillation", "TPO", "SDFT", "SDPO", "MiniLLM", "GFPO", "PAPO"),
)


def _trainer_of(name: str) -> str:
    kind = name.removesuffix("Config").removesuffix("Trainer")
    return kind if kind in _KINDS else ""


class _Names:
    """What names of a file stand for, as far as one assignment says it."""

    def __init__(self, tree: ast.Module) -> None:
        found: dict[str, list[ast.expr]] = defaultdict(list)
        self.arguments: dict[str, ast.expr | None] = {}
        self.functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        self.imported: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id].append(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                found[node.target.id].append(node.value)
            elif isinstance(node, ast.Call) and _called(node) == "add_argument":
                self._argument(node)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                self.imported |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        self.assigned = {name: values[0] for name, values in found.items() if len(values) == 1}

    def _argument(self, call: ast.Call) -> None:
        flags = [node.value for node in call.args if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if flags and flags[-1].startswith("--"):
            name = flags[-1].lstrip("-").replace("-", "_")
            is_switch = isinstance(action := given.get("action"), ast.Constant) and action.value == "store_true"
            self.arguments[name] = given.get("default") or (ast.Constant(False) if is_switch else None)

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Plain data, with holes for what is not known."""
        if depth > MAX_DEPTH:
            return hole(_text(node))
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str | int | float | bool | None) else hole(_text(node))
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item, depth + 1) for item in node.elts]
        if isinstance(node, ast.Dict):
            return {
                str(self.value(key, depth + 1)): self.value(item, depth + 1)
                for key, item in zip(node.keys, node.values, strict=True)
                if key is not None
            }
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.value(node.operand, depth + 1)
            return -value if isinstance(value, int | float) else hole(_text(node))
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node, depth)
        if isinstance(node, ast.Name) and node.id in self.assigned:
            value = self.value(self.assigned[node.id], depth + 1)
            return hole(node.id) if isinstance(value, str) and value == hole(_text(self.assigned[node.id])) else value
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and "arg" in node.value.id:
            default = self.arguments.get(node.attr)
            return self.value(default, depth + 1) if default is not None else hole(_text(node))
        return hole(_text(node))

    def _arithmetic(self, node: ast.BinOp, depth: int) -> Any:
        left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
        if any(not isinstance(side, int | float) or abs(side) > 1e15 for side in (left, right)):
            return hole(_text(node))
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.FloorDiv) and right:
            return left // right
        return left / right if isinstance(node.op, ast.Div) and right else hole(_text(node))

    def trainer_value(self, key: str, node: ast.expr, source: str) -> Any:
        if key == "reward_funcs":
            nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
            return [self._function(item, source) for item in nodes]
        if key in ("train_dataset", "eval_dataset"):
            return self._dataset(node)
        if isinstance(node, ast.Name) and isinstance(value := self.assigned.get(node.id), ast.Call):
            node = value
        if isinstance(node, ast.Call) and _called(node) == "from_pretrained" and node.args:
            return self.value(node.args[0])
        return self.value(node)

    def _function(self, node: ast.expr, source: str, depth: int = 0) -> Any:
        if isinstance(node, ast.Name):
            if node.id in self.functions:
                return f"{source}:{node.id}"
            if node.id in self.imported:
                return self.imported[node.id]
            if node.id in self.assigned and depth < MAX_DEPTH:
                return self._function(self.assigned[node.id], source, depth + 1)
        return self.value(node)

    def _dataset(self, node: ast.expr, depth: int = 0) -> Any:
        """What `load_dataset` is given, through selections and assignments."""
        if depth > MAX_DEPTH:
            return hole(_text(node))
        if isinstance(node, ast.Name) and node.id in self.assigned:
            return self._dataset(self.assigned[node.id], depth + 1)
        if isinstance(node, ast.Subscript):
            inner = self._dataset(node.value, depth + 1)
            split = self.value(node.slice)
            return (
                {**inner, "split": split} if isinstance(inner, dict) and isinstance(split, str) else hole(_text(node))
            )
        if isinstance(node, ast.Call) and _called(node) == "load_dataset" and node.args:
            given = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
            names = dict(zip(("path", "name"), map(self.value, node.args), strict=False))
            return {"split": "train"} | {key: given[key] for key in _OF_DATASET if key in given} | names
        return hole(_text(node))


def _text(node: ast.expr) -> str:
    try:
        return " ".join(ast.unparse(node).split())[:120]
    except (ValueError, RecursionError):
        return "an expression"
