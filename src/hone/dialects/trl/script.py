"""TRL in a Python file: `GRPOConfig(...)`, `GRPOTrainer(...)` and what goes into them, read as syntax and never run."""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from hone.config.messages import is_secret_value
from hone.dialects.foreign import DialectError, ForeignKey, ForeignRun, hole, looks_secret
from hone.dialects.python_names import Names, called, text_of
from hone.dialects.trl.script_data import dataset

_TRAINER_ARGUMENTS = {
    "model": "model_name_or_path",
    "reward_funcs": "reward_funcs",
    "args": "",
    "train_dataset": "train_dataset",
    "eval_dataset": "eval_dataset",
    "environment_factory": "environment_factory",
    "tools": "tools",
    "rollout_func": "rollout_func",
}
"""Arguments of a trainer that say something of the run, the first five in the order of their places."""
_ADAPTER = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
_NOT_OF_ADAPTER = ("use_gradient_checkpointing", "random_state", "max_seq_length", "loftq_config", "model")
_OF_MODEL = {"load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit", "revision": "model_revision"}
_OF_MODEL["trust_remote_code"] = "trust_remote_code"
_RL = ("GRPO", "RLOO", "AsyncGRPO")
_KINDS = (
    *("AsyncGRPO", "GRPO", "RLOO", "PPO", "SFT", "DPO", "OnlineDPO", "KTO", "ORPO", "CPO", "BCO", "XPO", "NashMD"),
    *("GKD", "GOLD", "Reward", "PRM", "Distillation", "TPO", "SDFT", "SDPO", "MiniLLM", "GFPO", "PAPO"),
)
FROM_COMMAND_LINE = "GRPOConfig"
"""Key of the hole where a script has its configuration from its command line."""


def read_python(text: str, source: str, given: Mapping[str, Any] = MappingProxyType({})) -> ForeignRun:
    """The configuration of the first RL trainer of a file, or else of the first trainer.

    Args:
        given: arguments of the command that starts the file.

    Raises:
        DialectError: it is not Python, or has no trainer of TRL's.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DialectError(f"{source}: is not Python that can be read: {error}") from None
    try:
        return _Script(tree, text, source, given).run()
    except RecursionError:
        raise DialectError(f"{source}: has expressions that are too deep to read") from None


class _Script:
    def __init__(self, tree: ast.Module, text: str, source: str, given: Mapping[str, Any]) -> None:
        self.tree, self.text, self.source, self.given = tree, text, source, given
        self.names = Names(tree, given)
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.keys: dict[str, ForeignKey] = {}
        self.files: dict[str, str] = {}

    def run(self) -> ForeignRun:
        ends = ("Config", "Trainer")
        configs, trainers = ([call for call in self.calls if _kind(called(call), end)] for end in ends)
        found = sorted([*configs, *trainers], key=lambda call: (not _kind(called(call)).startswith(_RL), call.lineno))
        if not found:
            raise DialectError(f"{self.source}: has no GRPOConfig(...) or other configuration of TRL's trainers")
        kind = _kind(called(found[0]))
        trainer = next((call for call in trainers if _kind(called(call)) == kind), None)
        arguments = _arguments(trainer) if trainer else {}
        config = self.names.follow(arguments["args"]) if "args" in arguments else None
        if not (isinstance(config, ast.Call) and config in configs):
            config = next((call for call in configs if _kind(called(call)) == kind), None)
        if config is not None:
            self._configured(config)
        if "args" in arguments:
            self._set_later(arguments["args"])
        if config is None and "args" in arguments and not self.given:
            self._add(FROM_COMMAND_LINE, hole(text_of(arguments["args"])), arguments["args"])
        readers: dict[str, Callable[[ast.expr], Any]] = {"reward_funcs": self._rewards, "model": self._model}
        readers |= dict.fromkeys(("train_dataset", "eval_dataset"), partial(dataset, self.names))
        for name, node in arguments.items():
            if key := _TRAINER_ARGUMENTS[name]:
                self._add(key, readers.get(name, self.names.value)(node), node)
        if trainer is not None:
            self._adapted(trainer, arguments.get("model"))
        notes = () if len(configs) < 2 else (f"{len(configs)} configurations in the file; read the one of {kind}",)
        return ForeignRun(
            "trl",
            f"{kind}Config",
            tuple(self.keys.values()),
            self.source,
            found[0].lineno,
            notes=notes,
            files=self.files,
            script_arguments=frozenset(self.names.defaults),
        )

    def _add(self, key: str, value: Any, node: ast.AST) -> None:
        self.keys.setdefault(key, ForeignKey(key, value, getattr(node, "lineno", None)))

    def _configured(self, config: ast.Call) -> None:
        for argument in config.keywords:
            if argument.arg is not None:
                self._add(argument.arg, self.names.value(argument.value), argument.value)
                continue
            expanded = self.names.value(argument.value)
            for key, value in expanded.items() if isinstance(expanded, dict) else [(text_of(argument.value), expanded)]:
                self._add(key, value, argument.value)

    def _set_later(self, config: ast.expr) -> None:
        """`config.key = value` between the configuration and the trainer."""
        for node in ast.walk(self.tree):
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Attribute) and text_of(target.value) == text_of(config):
                assert isinstance(node, ast.Assign)
                self.keys[target.attr] = ForeignKey(target.attr, self.names.value(node.value), node.lineno)

    def _model(self, node: ast.expr) -> Any:
        call = self._loading(node)
        if call is None:
            return self.names.value(node)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        for name, key in _OF_MODEL.items():
            if name in given:
                self._add(key, self.names.value(given[name]), given[name])
        quantised = self.names.follow(given["quantization_config"]) if "quantization_config" in given else None
        if isinstance(quantised, ast.Call):
            for keyword in quantised.keywords:
                if keyword.arg in _OF_MODEL:
                    self._add(keyword.arg, self.names.value(keyword.value), keyword.value)
        named = next((given[name] for name in ("model_name", "pretrained_model_name_or_path") if name in given), None)
        return self.names.value(call.args[0] if call.args else named)

    def _loading(self, node: ast.expr) -> ast.Call | None:
        """The `from_pretrained` that a model comes from, through `.to(...)` and adapters."""
        for _ in range(8):
            node = self.names.follow(node)
            if isinstance(node, ast.Subscript):
                node = node.value
            elif not isinstance(node, ast.Call):
                return None
            elif called(node) == "from_pretrained":
                return node
            elif called(node) in ("get_peft_model", "prepare_model_for_kbit_training") and node.args:
                node = node.args[0]
            elif isinstance(node.func, ast.Attribute):
                node = node.func.value
            elif (returned := self.names.returned(node)) is not None:
                node = returned
            else:
                return None
        return None

    def _adapted(self, trainer: ast.Call, model: ast.expr | None) -> None:
        """`peft_config` of the trainer, or the adapter that the model was given before."""
        given = {keyword.arg: keyword.value for keyword in trainer.keywords}
        config = self.names.follow(given["peft_config"]) if "peft_config" in given else None
        if isinstance(config, ast.IfExp):
            config = next((part for part in (config.body, config.orelse) if isinstance(part, ast.Call)), None)
        before = self.names.follow(model) if model is not None else None
        if isinstance(before, ast.Call) and called(before) == "get_peft_model":
            second = self.names.follow(before.args[1]) if len(before.args) > 1 else before
            config = second if isinstance(second, ast.Call) else before
        if not isinstance(config, ast.Call) or not config.keywords:
            return
        for keyword in config.keywords:
            if keyword.arg and keyword.arg not in _NOT_OF_ADAPTER:
                self._add(_ADAPTER.get(keyword.arg, keyword.arg), self.names.value(keyword.value), keyword.value)
        self._add("use_peft", True, config)

    # ---- rewards

    def _rewards(self, node: ast.expr) -> list[Any]:
        node = self.names.follow(node)
        items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        places = [self._reward(item) for item in items]
        own = [place for place in places if place in self.names.definitions]
        name = f"{self.source.rpartition('/')[2].removesuffix('.py')}_rewards.py"
        text = copied(self.names, self.text, own, self.source) if own else None
        if text is not None:
            self.files[name] = text
        where = name if text is not None else self.source
        return [f"{where}:{place}" if place in own else place for place in places]

    def _reward(self, node: ast.expr) -> str:
        followed = node if isinstance(node, ast.Name) and node.id in self.names.definitions else self.names.follow(node)
        if isinstance(followed, ast.Name) and followed.id in self.names.definitions:
            return followed.id
        if isinstance(followed, ast.Name) and followed.id in self.names.imported:
            return self.names.imported[followed.id]
        value = self.names.value(followed)
        return value if isinstance(value, str) else hole(text_of(node))


def _kind(name: str, end: str = "") -> str:
    """GRPO of `GRPOConfig` and `GRPOTrainer`; empty for others."""
    if not name.endswith(end or ("Config", "Trainer")):
        return ""
    kind = name.removesuffix("Config").removesuffix("Trainer")
    return kind if kind in _KINDS else ""


def _arguments(trainer: ast.Call) -> dict[str, ast.expr]:
    """Those of `_TRAINER_ARGUMENTS`, by name."""
    placed: Iterator[tuple[str, ast.expr]] = zip(_TRAINER_ARGUMENTS, trainer.args[:5], strict=False)
    named = {keyword.arg: keyword.value for keyword in trainer.keywords if keyword.arg in _TRAINER_ARGUMENTS}
    return {name: node for name, node in (dict(placed) | named).items() if name and text_of(node) != "None"}


_RUNS = ("parse_args", "parse_known_args", "parse_args_and_config", "parse_args_into_dataclasses", "load_dataset")
"""Calls that a reward function's file must not make."""


class _Stuck(Exception):
    """Something that cannot be copied."""


def copied(names: Names, text: str, functions: Sequence[str], source: str) -> str | None:
    """Text of a file with these reward functions and what they use, as the script cannot be imported without training.

    None where they use what the script computes, or where the text has a secret.
    """
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
