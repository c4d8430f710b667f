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
from hone.doctor.rule import LEVELS, AlarmRule
from hone.doctor.rules import RULES
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
`area/name[_unit]`; `<word>` stands for a name of yours. Beside a metric: the [alarms](alarms.md) that read it."""

_ALARMS_INTRO = """\
# Alarms

What `hone doctor RUN_DIR` and a run itself look for in the metrics ([doctor.md](../doctor.md)). An alarm begins when k
of the last n evaluations are abnormal and ends when none of them is; it is silent while a stronger one is active. Of
its causes the first one whose test holds is named; the test that separates it from the next is what to confirm. "ours"
as the source of a limit: chosen in Hone and checked against its healthy and faulty runs. Names are those of
`observe.stop_on`."""


def pages() -> Mapping[str, str]:
    """File name -> text of every generated page."""
    algorithms = f"{_NOTE}\n\n{algorithms_page()}"
    return {
        "config.md": config_page(),
        "metrics.md": metrics_page(),
        "alarms.md": alarms_page(),
        "algorithms.md": algorithms,
    }


def config_page() -> str:
    """Every key: type, unit, default, meaning; and the presets."""
    presets = ["Presets for `extends:`", ""]
    for name in preset_names():
        comment = (PRESETS / f"{name}.yaml").read_text("utf-8").splitlines()[0].removeprefix("# ")
        presets.append(f"- `{name}`: {comment}")
    parts = [_NOTE, _CONFIG_INTRO, "\n".join(presets), f"The {len(schema.all_keys())} keys:"]
    first: dict[type, str] = {}
    for section, keys in groupby(schema.all_keys().values(), key=lambda key: key.section):
        parts.append(f"## {f'`{section}`' if section else 'Top level'}")
        kind = schema.all_sections()[section]
        if first.setdefault(kind, section) != section:
            twins = ((k, schema.all_keys()[f"{first[kind]}.{k.name}"]) for k in keys)
            other = [f"`{k.name}` is {_default(k)} by default" for k, twin in twins if _default(k) != _default(twin)]
            parts.append("; ".join([f"The keys of `{first[kind]}`, above", *other]) + ".")
            continue
        rows = ["| Key | Type | Unit | Default | Meaning |", "|---|---|---|---|---|"]
        rows += [_row(f"`{k.name}`", k.rule, k.unit, _default(k), k.meaning) for k in keys]
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Every metric: unit, meaning, alarms that read it."""
    parts = [_NOTE, _METRICS_INTRO]
    for area, names in groupby(sorted(METRICS), key=lambda name: name.partition("/")[0]):
        rows = ["| Metric | Unit | Alarms | Meaning |", "|---|---|---|---|"]
        for name in names:
            metric = METRICS[name]
            alarms = ", ".join(f"`{rule.name}`" for rule in RULES if name in rule.metrics)
            rows.append(_row(f"`{name}`", metric.unit, alarms, metric.meaning))
        parts += [f"## {area}", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def alarms_page() -> str:
    """Every alarm: pattern, limit and its source, causes, what to change and how to confirm."""
    parts = [_NOTE, _ALARMS_INTRO]
    for level in LEVELS:
        parts.append(f"## {level.capitalize()}")
        parts += [_alarm(rule) for rule in RULES if rule.level == level]
    return "\n\n".join(parts) + "\n"


def _alarm(rule: AlarmRule) -> str:
    k, n = rule.of
    silent = f" Silent under {', '.join(f'`{name}`' for name in rule.silenced_by)}." if rule.silenced_by else ""
    after = f", after {rule.after} of them" if rule.after else ""
    head = [
        f"### `{rule.name}`",
        f"{rule.pattern[0].upper()}{rule.pattern[1:]}: `{rule.metrics[0]}` {rule.when.text}, in {k} of {n} "
        f"evaluations{after}. Limit: {rule.source}.{silent}",
    ]
    rows = ["| Cause | What it is | Change | To confirm |", "|---|---|---|---|"]
    rows += [_row(f"`{cause.name}`", cause.what, cause.change, cause.confirm) for cause in rule.causes]
    return "\n\n".join([*head, "\n".join(rows)])


def _default(key: schema.Key) -> str:
    if key.required:
        return "required"
    default = list(key.default) if isinstance(key.default, tuple) else key.default
    return f"`{inline(default)}`"


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
