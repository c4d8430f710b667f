"""Generator of docs/reference/: config.md, metrics.md and algorithms.md, each from its registry.

Run as `python -m hone.tools.docs` (`make docs`); a test compares the committed pages with what this makes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from hone.config import schema
from hone.config.layers import PRESETS, preset_names
from hone.config.render import inline
from hone.observe.metrics import METRICS
from hone.tools.algorithm_page import algorithms_page

_NOTE = "<!-- Made from the code by `make docs`; do not edit. -->"

_CONFIG_INTRO = """\
# The run file

One YAML file of sections. `extends:` names presets or other files to build on; keys of the file win over them, and
`section.key=value` on the command line wins over the file. Mappings merge, lists replace. Unknown keys are refused.
A relative path starts at the folder of the file that it is written in (on the command line: at the run file's);
`run.dir` starts at the current folder, where `hone` is called. Secrets are never in the file: they come
from the environment (`WANDB_API_KEY`, `HF_TOKEN`).

`hone explain RUN.yaml section.key` shows the value of a key in your run and its origin; `hone check RUN.yaml` finds
mistakes."""

_METRICS_INTRO = """\
# Metrics

Every metric that a run can log, in `metrics.jsonl`, TensorBoard, Weights & Biases and the report. Names are
`area/name[_unit]`; `<word>` stands for a name of yours. The healthy range is a hint, not a limit."""


def pages() -> Mapping[str, str]:
    """File name -> text of every generated page."""
    algorithms = f"{_NOTE}\n\n{algorithms_page()}"
    return {"config.md": config_page(), "metrics.md": metrics_page(), "algorithms.md": algorithms}


def config_page() -> str:
    """Every key: type, unit, default, meaning; and the presets."""
    parts = [_NOTE, _CONFIG_INTRO, _presets(), f"The {len(schema.all_keys())} keys:"]
    first: dict[type, str] = {}
    for section, keys in groupby(schema.all_keys().values(), key=lambda key: key.section):
        parts.append(f"## {f'`{section}`' if section else 'Top level'}")
        kind = schema.all_sections()[section]
        if first.setdefault(kind, section) != section:
            other = [
                f"`{k.name}` is {_default(k)} by default"
                for k in keys
                if _default(k) != _default(_twin(k, first[kind]))
            ]
            parts.append("; ".join([f"The keys of `{first[kind]}`, above", *other]) + ".")
            continue
        rows = ["| Key | Type | Unit | Default | Meaning |", "|---|---|---|---|---|"]
        rows += [_row(f"`{k.name}`", k.rule, k.unit, _default(k), k.meaning) for k in keys]
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _twin(key: schema.Key, section: str) -> schema.Key:
    """The key of the same name in another section."""
    return schema.all_keys()[f"{section}.{key.name}"]


def metrics_page() -> str:
    """Every metric: unit, meaning, healthy range."""
    parts = [_NOTE, _METRICS_INTRO]
    for area, names in groupby(sorted(METRICS), key=lambda name: name.partition("/")[0]):
        rows = ["| Metric | Unit | Healthy | Meaning |", "|---|---|---|---|"]
        for name in names:
            metric = METRICS[name]
            rows.append(_row(f"`{name}`", metric.unit, _range(metric.healthy), metric.meaning))
        parts += [f"## {area}", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _presets() -> str:
    lines = ["Presets for `extends:`", ""]
    for name in preset_names():
        comment = (PRESETS / f"{name}.yaml").read_text("utf-8").splitlines()[0].removeprefix("# ")
        lines.append(f"- `{name}`: {comment}")
    return "\n".join(lines)


def _default(key: schema.Key) -> str:
    if key.required:
        return "required"
    default = list(key.default) if isinstance(key.default, tuple) else key.default
    return f"`{inline(default)}`"


def _range(healthy: tuple[float | None, float | None] | None) -> str:
    low, high = healthy or (None, None)
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    if low is not None:
        return f"at least {low:g}"
    return f"at most {high:g}" if high is not None else ""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def main(folder: Path = Path("docs/reference")) -> int:
    """Write every page into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, "utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
