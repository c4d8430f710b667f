"""The run file of a translated command: a preset where one fits, the keys that differ, and what each of them was; and
the report of the import, as text: one line per foreign key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hone.config import schema
from hone.config.layers import PRESETS, preset_names
from hone.config.render import inline
from hone.config.yaml_tree import read_yaml
from hone.dialects.foreign import shown
from hone.dialects.translate import Imported, Line, default_of
from hone.dialects.verdict import GAPS, HOLE, VerdictKind

_ORDER = (
    "run",
    "model",
    "data",
    "reward",
    "services",
    "rollout",
    "algorithm",
    "train",
    "critic",
    "lora",
    "eval",
    "checkpoint",
    "observe",
    "cluster",
    "gate",
    "seed",
)
_WIDTH = 46
_MAX_COMMENT = 150
_REQUIRED = ("model.path", "data.train", "reward.components")
_EVAL = (
    "eval.every",
    "eval.before_training",
    "eval.samples",
    "eval.temperature",
    "eval.top_p",
    "eval.top_k",
    "data.eval_rows",
    "data.eval_split",
)


def run_file_of(imported: Imported) -> str:
    """Text of the run file. What is missing is marked where it belongs, and in required keys by `???`."""
    settings = {key: value for key, (value, _) in imported.settings().items()}
    comments = {key: _comment(lines) for key, (_, lines) in imported.settings().items()}
    for key in _REQUIRED:
        if key not in settings:
            settings[key] = [{"use": HOLE}] if key == "reward.components" else HOLE
            comments[key] = "to be filled in"
    settings = _consistent(settings)
    preset, rest = _best_preset(settings)
    for key in rest.keys() - settings.keys():
        comments[key] = f"{imported.foreign.tool}'s; {preset} has another value"
    gaps = _gaps(imported)
    keys = sorted({*rest, *gaps}, key=_place)
    body = _level([key.split(".") for key in keys], 0, rest, comments, gaps)
    head = [
        f"# Imported from {imported.foreign.tool} {imported.version} by `hone import {shown(imported.foreign.source)}`."
    ]
    others = [
        _one_line(f"{line.verdict.kind}: {line.key}: {line.verdict.note}", 2 * _MAX_COMMENT)
        for line in imported.gaps
        if not line.about
    ]
    head += [f"# {line}" for line in others]
    return "\n".join([*head, *([f"extends: {preset}"] if preset else []), *body]) + "\n"


def _consistent(settings: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing beside the other keys."""
    kept = dict(settings)
    if "data.eval" not in kept:
        for key in _EVAL:
            kept.pop(key, None)
    if "run.steps" in kept:
        kept.pop("run.epochs", None)
    if not kept.get("lora.rank"):
        kept = {key: value for key, value in kept.items() if not key.startswith("lora.")}
    if kept.get("algorithm.credit", "group_norm") not in ("group_norm", "gdpo"):
        kept.pop("algorithm.std_floor", None)
    if kept.get("algorithm.credit", "group_norm") != "gae":
        kept = {key: value for key, value in kept.items() if not key.startswith("critic.")}
    if kept.get("algorithm.clip") not in (None, "ppo", "clip_cov", "tv_mask"):
        kept.pop("algorithm.dual_clip", None)
    if not kept.get("algorithm.kl_loss_coef") and not kept.get("algorithm.kl_reward_coef"):
        for name in ("estimator", "clip", "target", "horizon_samples"):
            kept.pop(f"algorithm.kl_{name}", None)
        kept.pop("algorithm.reference_refresh_every", None)
    if kept.get("algorithm.ratio") == "none":
        for name in ("clip_low", "clip_high", "dual_clip", "correction", "correction_low", "correction_high"):
            kept.pop(f"algorithm.{name}", None)
    if kept.get("cluster.backend") != "ray":
        kept = {key: value for key, value in kept.items() if not key.startswith("cluster.")}
    return kept


def _best_preset(settings: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The preset of `algorithm` that leaves the fewest keys to write, and those keys."""
    best: tuple[str | None, dict[str, Any]] = (None, _differing(settings, {}))
    for name in preset_names():
        if not name.startswith("algorithm/"):
            continue
        values = {f"algorithm.{key}": value for key, value in _preset(name).items()}
        if any(values.get(key, default_of(key)) != settings.get(key, default_of(key)) for key in _KIND_OF_ALGORITHM):
            continue
        rest = _differing(settings, values)
        if len(rest) + 1 < len(best[1]):
            best = (name, rest)
    return best


_KIND_OF_ALGORITHM = ("algorithm.credit", "algorithm.ratio")
"""A preset with another one is the name of another algorithm."""


def _differing(settings: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Keys to write above a preset: where the value is another, or where the preset must be taken back."""
    found = {key: value for key, value in settings.items() if value != preset.get(key, default_of(key))}
    for key, value in preset.items():
        if key not in settings and value != default_of(key):
            found[key] = default_of(key)
    return found


@cache
def _preset(name: str) -> dict[str, Any]:
    root, _ = read_yaml((PRESETS / f"{name}.yaml").read_text("utf-8"), name)
    assert root is not None
    return root.plain()["algorithm"]


def _comment(lines: list[Line]) -> str:
    parts = []
    for line in lines[:3]:
        value = "" if line.value is None or isinstance(line.value, dict) else f" = {line.value}"
        parts.append(f"{line.key}{value}" + (f" ({line.verdict.note})" if line.verdict.note else ""))
    return _one_line("; ".join(parts))


def _one_line(text: Any, most: int = _MAX_COMMENT) -> str:
    plain = "".join(char if char.isprintable() else "?" for char in str(shown(str(text))))
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."


def _gaps(imported: Imported) -> dict[str, list[str]]:
    """Our key -> comments on what is missing there."""
    found: dict[str, list[str]] = {}
    for line in imported.gaps:
        if line.about and line.verdict.kind in GAPS:
            value = "" if line.value is None else f" = {line.value}"
            note = _one_line(f"{line.verdict.kind}: {line.key}{value}: {line.verdict.note}", 2 * _MAX_COMMENT)
            found.setdefault(line.about[0], []).append(note)
    return found


# ---- text


def _place(key: str) -> tuple[int, int, str]:
    section = key.partition(".")[0]
    order = list(schema.all_keys())
    generic = schema.generic(key)
    return (
        _ORDER.index(section) if section in _ORDER else len(_ORDER),
        order.index(generic) if generic in order else len(order),
        key,
    )


def _level(
    paths: list[list[str]],
    depth: int,
    settings: Mapping[str, Any],
    comments: Mapping[str, str],
    gaps: Mapping[str, list[str]],
) -> Iterator[str]:
    indent = "  " * depth
    done: set[str] = set()
    for path in paths:
        name = path[depth]
        if name in done:
            continue
        done.add(name)
        key = ".".join(path[: depth + 1])
        inner = [other for other in paths if other[: depth + 1] == path[: depth + 1] and len(other) > depth + 1]
        if inner:
            lines = list(_level(inner, depth + 1, settings, comments, gaps))
            is_set = any(not line.lstrip().startswith("#") for line in lines)
            yield f"{indent}{name}:" if is_set else f"{indent}# {name}:"
            yield from lines
            continue
        for gap in gaps.get(key, []):
            yield f"{indent}# {name}: {gap}"
        if key in settings:
            yield from _value(f"{indent}{name}:", settings[key], comments.get(key, ""), indent)


def _value(label: str, value: Any, comment: str, indent: str) -> Iterator[str]:
    note = f"  # {comment}" if comment else ""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        yield f"{label}{note}"
        for item in value:
            yield f"{indent}  - {_flow(item)}"
    elif isinstance(value, dict):
        yield f"{label}{note}"
        for name, child in value.items():
            yield f"{indent}  {inline(name)}: {_flow(child)}"
    else:
        yield f"{f'{label} {inline(value)}':<{_WIDTH}}{note}".rstrip()


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{inline(name)}: {_flow(child)}" for name, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(child) for child in value) + "]"
    return inline(value)


_KINDS: tuple[VerdictKind, ...] = ("refused", "hole", "mapped", "default", "placement", "automatic", "secret")
_TITLES: dict[VerdictKind, str] = {
    "refused": "refused: not in Hone",
    "hole": "holes: not known without running the script",
    "mapped": "mapped",
    "default": "defaults written out, because Hone's differ",
    "placement": "placement, memory and speed",
    "automatic": "automatic here",
    "secret": "secrets, left out",
}
_MAX_VALUE = 60


def report_lines(imported: Imported, to: Path | None) -> Iterator[str]:
    """What became of each key, gaps first."""
    foreign = imported.foreign
    where = f"{foreign.source}:{foreign.line}" if foreign.line else foreign.source
    yield f"{where}: {shown(foreign.program)}, {foreign.tool} {imported.version}"
    yield from (f"note: {shown(note)}" for note in foreign.notes)
    for name in foreign.files:
        where = f"written to {to.with_name(name)}" if to else f"left out: with --to they are written to {name}"
        yield f"note: the reward functions, {where}"
    for kind in _KINDS:
        lines = [line for line in imported.lines if line.verdict.kind == kind]
        if lines:
            yield f"{_TITLES[kind]} ({len(lines)})"
        for line in lines:
            value = "" if line.value is None else f" = {_cut(str(line.value))}"
            settings = ", ".join(f"{key} = {_cut(inline(value))}" for key, value in line.verdict.settings.items())
            note = f"  ({line.verdict.note})" if line.verdict.note and settings else line.verdict.note
            arrow = f" -> {settings}" if settings else ": " if note else ""
            yield f"  {line.key}{value}{arrow}{note}"
    gaps = len(imported.gaps)
    end = f"{gaps} gaps, marked in the file" if gaps else "complete"
    yield f"{f'{to}: ' if to else ''}{len(imported.keys)} keys; {end}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
