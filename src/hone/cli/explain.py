"""`hone explain`: meaning, value and origin of a key, and what is derived from it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from hone.cli.arguments import AsJson, RunFile, examples
from hone.config import schema
from hone.config.load import Loaded, load_config
from hone.config.messages import unknown_key
from hone.config.quantities import derived_from
from hone.config.render import inline, resolved_yaml, value_at
from hone.config.yaml_tree import Problem, Where
from hone.errors import ConfigError
from hone.services.gpus import assumed_devices, settled_on

EXAMPLES = examples(
    "hone explain run.yaml",
    "hone explain run.yaml rollout.group_size",
    "hone explain run.yaml train train.prompts_per_step=64",
    "hone explain run.yaml rollout.group_size --json",
)


def explain(
    run_file: RunFile,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key] section.key=value", help="A key or section to explain, and overrides."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a key: its value, its origin, what derives from it. Without a key: the whole resolved file."""
    keys = [word for word in words or () if "=" not in word]
    if len(keys) > 1:
        raise typer.BadParameter(f"one key at a time (got {', '.join(keys)})")
    loaded = load_config(run_file, [word for word in words or () if "=" in word])
    path = keys[0] if keys else ""
    if not path or schema.is_section(path) or (schema.is_section_list(path) and path not in schema.all_keys()):
        typer.echo(_values_json(loaded, path) if as_json else _values_yaml(loaded, path), nl=False)
        return
    explanation = explain_key(loaded, path)
    typer.echo(json.dumps(explanation, indent=2) if as_json else as_text(explanation))


def explain_key(loaded: Loaded, path: str) -> dict[str, Any]:
    """Explanation of one key, as plain data.

    Raises:
        ConfigError: there is no such key.
    """
    key = schema.find_key(path)
    try:
        value = value_at(loaded.config, path)
    except KeyError:
        said = unknown_key(path) if key is None else "the run file has no such entry"
        raise ConfigError([str(Problem(Where(str(loaded.run_file)), path, said))]) from None
    assert key is not None, "what has a value has a key"
    is_whole_key = key.path == schema.generic(path)
    default = json.loads(json.dumps(key.default, default=list)) if is_whole_key and not key.required else None
    return {
        "key": path,
        "value": value,
        "unit": key.unit if is_whole_key else "",
        "meaning": key.meaning,
        "rule": key.rule if is_whole_key else "an entry of a free mapping",
        "default": default,
        "required": key.required,
        "layers": _layers(loaded, path, default, has_default=is_whole_key and not key.required),
        "derives": _derives(loaded, path),
    }


def _layers(loaded: Loaded, path: str, default: Any, *, has_default: bool) -> list[dict[str, Any]]:
    """Origins of the key or a part of it, weakest first; `wins` marks the effective ones."""
    is_default = loaded.where(path) is None
    rows = [{"where": "default", "path": path, "value": default, "wins": is_default}] if has_default else []
    last = {setting.path: setting for setting in loaded.history(path)}
    for setting in loaded.history(path):
        wins = setting is last[setting.path] and loaded.where(setting.path) == setting.where
        rows.append({"where": str(setting.where), "path": setting.path, "value": setting.value, "wins": wins})
    return rows


def _derives(loaded: Loaded, path: str) -> list[dict[str, Any]]:
    loaded, choices = settled_on(loaded, assumed_devices(loaded.config))
    here = [
        {"name": "on this machine", "value": choice.value, "unit": "", "formula": choice.why}
        for choice in choices
        if choice.key == path
    ]
    known = derived_from(path)
    found = ((derived, derived.compute(loaded.config)) for derived in known)
    return here + [
        {"name": derived.name, "value": value, "unit": derived.unit, "formula": derived.formula}
        for derived, value in found
        if value is not None
    ]


def as_text(explanation: dict[str, Any]) -> str:
    """Print an explanation."""
    default = "required" if explanation["required"] else f"default {inline(explanation['default'])}"
    lines = [
        f"{explanation['key']} = {inline(explanation['value'])}{_unit(explanation['unit'])}",
        f"  {explanation['meaning']}",
        f"  {explanation['rule']}; {default}",
    ]
    rows = explanation["layers"]
    width = max((len(row["where"]) for row in rows), default=0)
    lines += ["", "Set by"] if rows else []
    for row in rows:
        name = "" if row["path"] == explanation["key"] else f"{row['path']} = "
        mark = ">" if row["wins"] else " "
        lines.append(f"{mark} {row['where']:<{width}}  {name}{inline(row['value'])}{'  wins' if row['wins'] else ''}")
    lines += ["", "Derives"] if explanation["derives"] else []
    for row in explanation["derives"]:
        lines.append(f"  {row['name']} = {_plain(row['value'])}{_unit(row['unit'])}  ({row['formula']})")
    return "\n".join(lines)


def _plain(value: int | bool | str) -> str:
    return value if isinstance(value, str) else inline(value)


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""


def _values_yaml(loaded: Loaded, path: str) -> str:
    if not path:
        return loaded.as_yaml()
    section = path if schema.is_section(path) else path.rpartition(".")[0]
    return resolved_yaml(loaded.config, loaded.where, section=section, title=section)


def _values_json(loaded: Loaded, path: str) -> str:
    data = value_at(loaded.config, path) if path else loaded.config.model_dump(mode="json")
    origins = {leaf: str(loaded.where(leaf)) for leaf in loaded.origins if not path or leaf.startswith(f"{path}.")}
    return json.dumps({"run_file": str(loaded.run_file), "values": data, "origins": origins}, indent=2) + "\n"
