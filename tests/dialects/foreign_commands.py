"""Corpora of public commands, as keys and values, and their text as their authors' files would have it."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CORPORA = Path(__file__).parent / "corpora"
TOOLS_OF_CORPORA = ("verl", "openrlhf", "trl", "mindspeed")


def commands(tool: str) -> Iterator[dict[str, Any]]:
    """`path`, `module` and `keys` of each command."""
    for line in (CORPORA / f"{tool}.jsonl").read_text("utf-8").splitlines():
        yield json.loads(line)


def is_rl(tool: str, module: str) -> bool:
    """Of the programs that train a policy by RL from a reward."""
    rl = {"verl": r"^(?!.*sft)", "openrlhf": "ppo", "trl": "(?i)grpo|rloo|gspo|openenv|openreward", "mindspeed": ""}
    return re.search(rl[tool], module) is not None


def as_file(tool: str, command: dict[str, Any]) -> tuple[str, str]:
    """Text and name of a file with the command."""
    module, keys = command["module"], command["keys"]
    if tool == "verl":
        return _continued(f"python3 -m {module}", [f"{key}={_quoted(value)}" for key, value in keys]), "run.sh"
    if tool == "openrlhf":
        flags = [f"--{key}" if value is True else f"--{key} {value.rstrip(chr(92)).strip()}" for key, value in keys]
        return _continued(f"python3 -m {module}", flags), "run.sh"
    if tool == "mindspeed":
        return json.dumps(_nested(keys)), "run.yaml"
    if module == "yaml":
        return "\n".join(f"{key}: {json.dumps(value)}" for key, value in keys), "run.yaml"
    if module.endswith("Config"):
        arguments = ", ".join(f"{key}={_python(value)}" for key, value in keys)
        return f"from trl import {module}\n\nconfig = {module}({arguments})\n", "run.py"
    start = module if module.startswith("trl ") else f"accelerate launch {module}"
    flags = [f"--{key}" if value is True else f"--{key} {shlex.quote(str(value))}" for key, value in keys]
    return " ".join([start, *flags]), "run.sh"


def _continued(start: str, words: list[str]) -> str:
    return " \\\n    ".join([start, *words]) + "\n"


def _quoted(value: str) -> str:
    """In double quotes where the shell would take it apart."""
    if not set(value) & set(" \t;&") or value.startswith(('"', "$((")):
        return value
    return '"' + value.replace('"', '\\"') + '"'


def _python(value: Any) -> str:
    """An expression where the corpus has one, else a literal."""
    is_code = isinstance(value, str) and re.match(r"(f['\"]|self\.|args\.|cli_args\.|str\(|\{|\w+\.\w+ if)", value)
    return value if is_code else repr(value)


def _nested(keys: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in keys:
        *parents, name = key.split(".")
        here = tree
        for parent in parents:
            here = here.setdefault(parent, {})
        here[name] = value
    return tree
