"""From a file's text to `ForeignRun`: which tool it is of, which command, and the command's keys."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from hone.config.render import flattened
from hone.config.yaml_tree import Problem, read_yaml
from hone.dialects.foreign import DialectError, ForeignKey, ForeignRun, ForeignService, Tool, hole
from hone.dialects.shell import ShellCommand, read_script
from hone.dialects.trl.script import read_python

MAX_BYTES = 4 << 20
TOOLS: tuple[Tool, ...] = ("verl", "openrlhf", "trl", "mindspeed", "prime-rl", "nanochat")

_VERL = re.compile(r"(^|[/.])verl[/.]|(^|[/.])recipe[/.].*main|main_ppo|main_dapo")
_OPENRLHF = re.compile(r"openrlhf[./]cli[./](\w+)")
_TRL_MODULE = re.compile(r"trl\.scripts\.(\w+)")
_TRL_SCRIPT = re.compile(r"(trl|examples)/(scripts|experimental|sft|research_projects)/[\w/]*?(\w+)\.py$")
_NANOCHAT = re.compile(r"(^|/)scripts[./](chat_rl|chat_sft|base_train|mid_train)\b")
_TRL_VERBS = ("grpo", "rloo", "sft", "dpo", "kto", "reward", "ppo", "env", "vllm-serve", "async_grpo")
_MINDSPEED = ("megatron_training", "rl_config", "actor_config", "generate_config")
_TRL_KEYS = ("model_name_or_path", "dataset_name", "per_device_train_batch_size", "num_generations", "output_dir")
_OPENRLHF_KEYS = ("pretrain", "prompt_data", "rollout_batch_size", "actor_num_nodes", "actor.model_name_or_path")
_RL = r"ppo|grpo|rloo|dapo|nanochat|async"
_HYDRA = re.compile(r"[+~]{0,2}[A-Za-z_][\w@/]*([.][\w{}@\-*]+)*=", re.DOTALL)


def read_foreign(
    text: str,
    source: str,
    tool: Tool | None = None,
    script: Callable[[str], str | None] = lambda path: None,
    path: str | None = None,
) -> ForeignRun:
    """Read a foreign file.

    Args:
        source: its name, for messages; its ending helps to recognise the format.
        tool: the tool; None: recognise it.
        script: text of a file that a command of TRL's names, where it is there: a script that calls the trainer, or
            `--config`.
        path: where the file is, for a script that looks for its own folder; None: not known.

    Raises:
        DialectError: of no tool that is known, or not readable as what it seems to be.
    """
    if "\0" in text or len(text) > MAX_BYTES:
        raise DialectError(f"{source}: is not a script or configuration (binary, or above {MAX_BYTES >> 20} MiB)")
    ending = source.rpartition(".")[2].lower()
    if ending == "py" or (ending not in ("sh", "bash", "slurm", "yaml", "yml", "toml") and _is_python(text)):
        return _of_tool(read_python(text, source), tool)
    has_tables = "#!/" not in text[:4] and re.search(r"^\[+[\w.]+\]+\s*(#.*)?$", text, re.MULTILINE)
    if ending == "toml" or (ending not in ("sh", "bash", "slurm", "yaml", "yml") and has_tables):
        return _of_tool(_toml(text, source), tool)
    if ending in ("yaml", "yml"):
        return _of_tool(_yaml(text, source, tool), tool)
    commands = read_script(text, path)
    found, notes = _named(commands)
    found = [command for command in found if tool in (None, command.tool)] or list(_started(commands, script))
    if found:
        best = min(found, key=lambda one: (not re.search(_RL, one.program.lower()), one.line or 0))
        others = [f"line {command.line}: {command.program}" for command in found if command is not best]
        which = f"the file has {len(found)} commands; read the one of line {best.line}, and not {', '.join(others)}"
        notes = (*((which,) if others else ()), *notes)
        chosen = replace(best, source=source, notes=notes, services=services_of(commands))
        return _with_script(_with_configuration(chosen, script), script)
    try:
        return _of_tool(_yaml(text, source, tool), tool)
    except DialectError:
        wanted = f" of {tool}" if tool else " of verl, OpenRLHF, TRL, MindSpeed-RL or prime-rl"
        raise DialectError(
            f"{source}: no command or configuration{wanted} was found. Name the tool with --from, or give the command "
            "line itself on standard input"
        ) from None


def _of_tool(foreign: ForeignRun, tool: Tool | None) -> ForeignRun:
    if tool is not None and foreign.tool != tool:
        raise DialectError(f"{foreign.source}: is of {foreign.tool}, not of {tool}")
    return foreign


def _named(commands: list[ShellCommand]) -> tuple[list[ForeignRun], tuple[str, ...]]:
    """Commands of a tool; arguments without a program count where there is nothing else, as on standard input."""
    found = [(command, run) for command in commands if (run := _recognised(command)) is not None]
    stray = [command for command, _ in found if _HYDRA.match(command.words[0]) or command.words[0].startswith("-")]
    named = [run for command, run in found if command not in stray]
    if not named:
        return [run for _, run in found], ()
    why = "arguments without a program, which no command gets: a comment or a line without \\ ends the one above"
    return named, tuple(f"line {command.line}: {why}" for command in stray)


def _started(commands: Iterable[ShellCommand], script: Callable[[str], str | None]) -> Iterator[ForeignRun]:
    """Commands that start a script of TRL's with arguments of its own."""
    for command in commands:
        for at, word in enumerate(command.words):
            if word.endswith(".py") and _is_python(script(word) or ""):
                words = [*_launched(list(command.words[:at])), *command.words[at + 1 :]]
                yield _flags("trl", word, words, command)


def _with_configuration(command: ForeignRun, script: Callable[[str], str | None]) -> ForeignRun:
    """A command of TRL with the keys of its `--config`; those of the command line win."""
    given = {key.key.replace("-", "_"): str(key.value) for key in command.keys}
    path = given.get("config", "")
    text = script(path) if command.tool == "trl" and path else None
    if text is None:
        return command
    read = _yaml(text, path, "trl")
    added = tuple(key for key in read.keys if key.key not in given)
    return replace(
        command,
        keys=(*command.keys, *added),
        notes=(*command.notes, *read.notes, f"{path} was read too: keys of the command line win"),
        script_arguments=command.script_arguments | {"config"},
    )


def _with_script(command: ForeignRun, script: Callable[[str], str | None]) -> ForeignRun:
    """A command of TRL with what its script adds: model, data and rewards of the trainer's call."""
    text = script(command.program) if command.tool == "trl" and command.program.endswith(".py") else None
    if text is None:
        return command
    given = {key.key.replace("-", "_"): key.value for key in command.keys}
    called = read_python(text, command.program, given)
    added = tuple(key for key in called.keys if key.key not in given)
    notes = (*command.notes, f"{command.program} was read too: what its trainer is called with, and its defaults")
    return replace(
        command,
        program=called.program,
        keys=(*command.keys, *added),
        notes=notes,
        files=called.files,
        script_arguments=command.script_arguments | called.script_arguments,
    )


# ---- documents


def _is_python(text: str) -> bool:
    return re.search(r"^\s*(from trl|import trl)\b|\b(GRPO|RLOO|SFT|DPO)Config\(", text, re.MULTILINE) is not None


def _toml(text: str, source: str) -> ForeignRun:
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DialectError(f"{source}: is not TOML that can be read: {error}") from None
    keys = [ForeignKey(key, value) for key, value in flattened(_listed(tree)).items()]
    return ForeignRun("prime-rl", "rl", tuple(keys), source)


def _listed(tree: Any) -> Any:
    """Lists of tables with one entry as that entry under `name[]`; of several, each under its number."""
    if not isinstance(tree, dict):
        return str(tree) if not isinstance(tree, str | int | float | bool | list | None) else tree
    listed: dict[str, Any] = {}
    for name, child in tree.items():
        if isinstance(child, list) and child and all(isinstance(entry, dict) for entry in child):
            for number, entry in enumerate(child):
                listed[f"{name}[{number if len(child) > 1 else ''}]"] = _listed(entry)
        else:
            listed[name] = _listed(child)
    return listed


def _yaml(text: str, source: str, tool: Tool | None) -> ForeignRun:
    cleaned = "\n".join(line for line in text.splitlines() if not line.startswith(("%", "---")))
    repeated: list[Problem] = []
    root, problems = read_yaml(cleaned, source, repeated=repeated)
    if root is None or problems or not isinstance(root.value, dict):
        reason = str(problems[0]) if problems else f"{source}: has no keys"
        raise DialectError(f"{reason} (not YAML that can be read)")
    top = set(root.value)
    kind = tool
    if kind is None and top & set(_MINDSPEED):
        kind = "mindspeed"
    elif kind is None and top & {"actor_rollout_ref", "algorithm"} and top & {"actor_rollout_ref", "trainer"}:
        kind = "verl"
    elif kind is None and top & set(_TRL_KEYS):
        kind = "trl"
    if kind is None:
        raise DialectError(
            f"{source}: keys {', '.join(sorted(top)[:6])} are of no tool that is known; name it with --from"
        )
    if kind == "trl":
        keys = [ForeignKey(name, node.plain(), node.where.line) for name, node in root.value.items()]
    else:
        keys = [ForeignKey(path, node.plain(), node.where.line) for path, node in _leaves(root)]
    program = {"mindspeed": "MindSpeed-RL", "verl": "verl.trainer.main_ppo", "trl": "trl"}.get(kind, kind)
    notes = tuple(
        f"{one.key} is written twice: that of line {one.where.line} counts, as in the tool" for one in repeated
    )
    return ForeignRun(kind, program, tuple(keys), source, notes=notes)


def _leaves(node: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(node.value, dict) and node.value:
        for name, child in node.value.items():
            yield from _leaves(child, f"{path}.{name}" if path else name)
    else:
        yield path, node


# ---- commands


def _recognised(command: ShellCommand) -> ForeignRun | None:
    words = list(command.words)
    text = " ".join(words)
    for at, word in enumerate(words):
        rest = words[at + 1 :]
        if found := _OPENRLHF.search(word):
            return _flags("openrlhf", f"openrlhf.cli.{found[1]}", rest, command)
        if _VERL.search(word) and "=" not in word:
            return _overrides(word, rest, command)
        if word == "trl" and rest and rest[0] in _TRL_VERBS:
            return _flags("trl", f"trl {rest[0]}", rest[1:], command)
        if word == "-m" and rest and (found := _TRL_MODULE.fullmatch(rest[0])):
            return _flags("trl", f"trl {found[1]}", [*_launched(words[:at]), *rest[1:]], command)
        if found := _TRL_SCRIPT.search(word):
            return _flags("trl", word, [*_launched(words[:at]), *rest], command)
        if _NANOCHAT.search(word):
            return _flags("nanochat", word, [*_launched(words[:at]), *rest], command)
        if word.endswith(".py") and any(f"--{key}" in text for key in _OPENRLHF_KEYS):
            return _flags("openrlhf", f"openrlhf.cli.{word.rpartition('/')[2].removesuffix('.py')}", rest, command)
        if word.endswith(".py") and any(f"--{key}" in text for key in _TRL_KEYS[:4]):
            return _flags("trl", word, [*_launched(words[:at]), *rest], command)
    if (
        sum(word.lstrip("+~").startswith(("actor_rollout_ref.", "algorithm.", "data.", "trainer.")) for word in words)
        > 1
    ):
        return _overrides("verl.trainer.main_ppo", words, command)
    if any(word.split("=")[0].lstrip("-") in _OPENRLHF_KEYS for word in words if word.startswith("--")):
        return _flags("openrlhf", "openrlhf.cli.train_ppo_ray", words, command)
    if sum(word.split("=")[0].lstrip("-") in _TRL_KEYS for word in words if word.startswith("--")) > 1:
        return _flags("trl", "trl grpo", words, command)
    return None


_NO_SERVICE = re.compile(r"(^|/)(tensorboard|jupyter.*|ray|tail|trl|mlflow)$")


def services_of(commands: Iterable[ShellCommand]) -> tuple[ForeignService, ...]:
    """Servers that a script starts in the background: commands with a port."""
    found: dict[str, ForeignService] = {}
    for command in commands:
        words = [word for word in command.words if word != "nohup"]
        text = " ".join(words)
        port = re.search(r"--port[= ](\d{1,5})(?=\s|$)", text)
        if not command.is_background or port is None or _NO_SERVICE.search(words[0]) or _recognised(command):
            continue
        visible = dict(command.environment).get("CUDA_VISIBLE_DEVICES", "")
        devices = tuple(int(number) for number in visible.split(",")) if re.fullmatch(r"\d+(,\d+)*", visible) else ()
        program = next((word for word in words if word.endswith(".py")), words[0])
        name = re.sub(r"\W", "_", program.rpartition("/")[2].removesuffix(".py")) or "service"
        found[name] = ForeignService(name, tuple(words), int(port[1]), devices, command.line)
    return tuple(found.values())


def _launched(words: list[str]) -> list[str]:
    """The number of processes that a launcher was given in front of the script."""
    for at, word in enumerate(words):
        name, equals, value = word.lstrip("-").replace("-", "_").partition("=")
        if name in ("num_processes", "nproc_per_node"):
            return ["--num_processes", value if equals else words[at + 1] if at + 1 < len(words) else ""]
    return []


def _environment(command: ShellCommand) -> tuple[ForeignKey, ...]:
    return tuple(ForeignKey(name, value, command.line) for name, value in command.environment)


def _overrides(program: str, words: list[str], command: ShellCommand) -> ForeignRun:
    """Hydra's `key=value`, `+key=value`, `~key`, and its own options. The last of a key wins."""
    keys: dict[str, ForeignKey] = {}
    last: ForeignKey | None = None
    at, last_name = 0, ""
    while at < len(words):
        word = words[at]
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and at + 1 < len(words) and not words[at + 1].startswith("-") and "=" not in words[at + 1]:
                at += 1
                value = words[at]
            keys[name] = ForeignKey(f"--{name}", value, command.line)
        elif _HYDRA.match(word):
            key, _, value = word.partition("=")
            last_name = key.lstrip("+~")
            last = keys[last_name] = ForeignKey(key, value, command.line)
        elif word.startswith("~") and "/" not in word:
            keys[word.lstrip("~")] = ForeignKey(word, None, command.line)
        elif last is not None and any(str(last.value).count(a) > str(last.value).count(b) for a, b in ("[]", "{}")):
            keys[last_name] = replace(last, value=f"{last.value} {word}")  # a list whose author forgot the quotes
            last = keys[last_name]
        elif word.strip() and not word.startswith(("-", "&", ">")):
            name = word.strip()
            keys[name] = ForeignKey(name if "\ue000" not in name else hole(name), None, command.line)
        at += 1
    name = program.removesuffix(".py").replace("/", ".").lstrip(".")
    return ForeignRun("verl", name, tuple(keys.values()), "", command.line, _environment(command))


def _flags(tool: Tool, program: str, words: list[str], command: ShellCommand) -> ForeignRun:
    """`--key value ...`, `--key=value` and bare `--key`; words without a key are lost on the tool, too."""
    keys: dict[str, ForeignKey] = {}
    name, values = "", []

    def keep() -> None:
        if name:
            is_on = tool != "trl" or not name.startswith(("no_", "no-"))
            value: Any = is_on if not values else values[0] if len(values) == 1 else list(values)
            keys[name] = ForeignKey(name, value, command.line)

    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            keep()
            name, equals, value = word.lstrip("-").partition("=")
            values = [value] if equals else []
        elif word.strip() and word not in ("\\", "--"):
            if name:
                values.append(word)
            elif "\ue000" in word:
                keys[word] = ForeignKey(hole(word), None, command.line)
    keep()
    return ForeignRun(tool, program, tuple(keys.values()), "", command.line, _environment(command))
