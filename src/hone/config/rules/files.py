"""Rules that look outside the run file: rewards, environments, model directories, programs; data files in `data.py`.

Looks, and runs nothing: a reward's file is parsed and not imported, and hub names are not looked up. Whole data sets
and models are checked by the rest of `hone check`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from os.path import isdir, isfile  # unlike Path's, False for text that cannot be a path
from pathlib import Path
from typing import Any, Literal

from hone.config.derived import overridden
from hone.config.engine import EngineSection
from hone.config.rewards import BUILTIN_REWARDS, registered_rewards
from hone.config.rules import Breach
from hone.config.rules.data import data_files_exist
from hone.config.rules.engines import engines_of
from hone.config.run import RunConfig
from hone.errors import nearest


def code_can_be_had(config: RunConfig, folder: Path) -> Iterator[Breach]:
    """Rewards and the environment are built in, installed, or code that is there."""
    for number, component in enumerate(config.reward.components):
        use = component.use
        if use in BUILTIN_REWARDS:
            continue
        path = use if ":" in use else registered_rewards().get(use)
        if path is None:
            named = (*BUILTIN_REWARDS, *registered_rewards())
            close = nearest(use, named, cutoff=60)
            hint = f"Did you mean {close}?" if close else f"Built in or installed: {', '.join(named)}."
            problem = f"no reward is called {use!r}. {hint} Your own: package.module:function or file.py:function"
        else:
            problem = _code_problem(path, folder, "function")
        if problem:
            yield Breach((f"reward.components.{number}.use",), problem)
    environment = config.rollout.environment.use
    if environment is not None and (problem := _code_problem(environment, folder, "class")):
        yield Breach(("rollout.environment.use",), problem)


def _code_problem(use: str, folder: Path, kind: str) -> str | None:
    target, colon, name = use.rpartition(":")
    if not colon:
        return f"must be package.module:{kind} or file.py:{kind} (got {use!r})"
    if not name.isidentifier():
        return f"must end in the name of a {kind} after the colon (got {use!r})"
    if target.endswith(".py"):
        path = folder / Path(target).expanduser()
        if not isfile(path):
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
        elif isdir(path):
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
        if service.reward is not None and not isfile(path := folder / Path(service.reward).expanduser()):
            close = nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")] if isdir(path.parent) else [])
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
    return shutil.which(word, path=program_path())


def program_path() -> str:
    """The PATH, with the folder of this Python's programs first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


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


FileRule = Callable[[RunConfig, Path], Iterator[Breach]]
FILE_RULES: tuple[FileRule, ...] = (
    data_files_exist,
    code_can_be_had,
    local_directories_are_models,
    served_rewards_exist,
)
PROGRAM_RULES: tuple[FileRule, ...] = (commands_can_be_run, engines_can_be_started)
"""Of what this machine has installed: for runs, not for plans."""
