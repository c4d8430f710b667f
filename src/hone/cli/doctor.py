"""`hone doctor`: what is wrong with a run, by its metrics; without a run, with the machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from hone.cli.arguments import AsJson, examples
from hone.doctor.failure import RUN_FAILED
from hone.doctor.walk import RECENT
from hone.observe.sinks import broken_words

if TYPE_CHECKING:
    from hone.doctor.watch import Alarm
    from hone.run.status import Diagnosis

EXAMPLES = examples(
    "hone doctor",
    "hone doctor runs/qwen3-0.6b",
    "hone doctor runs/qwen3-0.6b --all",
    "hone doctor runs/qwen3-0.6b --json",
)
WIDTH = 110


def doctor(
    run_dir: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN_DIR]", help="Folder of a run. Without: check the machine.", show_default=False),
    ] = None,
    show_all: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Show every alarm in full, and the walk through a run that does not learn. Without: the first alarm, "
            "the names of the others, and the walk where there is no alarm.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with a run: the first abnormal metric, the likely cause, and what to change.

    Without a run: what a run on this machine would trip over. Exit code 0: no alarm (or advice alone) and no problem,
    1: an alarm or a problem. An alarm that has ended is still one of the run: it is shown as ended, and counts.
    """
    if run_dir is None:
        _machine(as_json=as_json)
        return
    from hone.run.status import diagnose

    found = diagnose(run_dir)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "format": 1,
                    "state": found.state,
                    "last_steps": found.last_steps,
                    "alarms": [asdict(alarm) for alarm in found.alarms],
                    "walk": [asdict(one) for one in found.walk],
                    "broken_lines": list(found.broken_lines),
                },
                indent=2,
            )
        )
    else:
        for line in lines_of(found, show_all=show_all):
            typer.echo(line)
    if any(not alarm.is_advice for alarm in found.alarms):
        raise typer.Exit(1)


def _machine(*, as_json: bool) -> None:
    from hone.run.machine import CHECKS

    checks = [check for look in CHECKS for check in look(Path())]
    if as_json:
        typer.echo(json.dumps({"format": 1, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            do = f"Do: {check.do}" if check.do else ""
            for line in _wrapped(f"{check.state:<8} {check.what:<16}", check.found, do):
                typer.echo(line)
    if any(check.state == "problem" for check in checks):
        raise typer.Exit(1)


def lines_of(found: Diagnosis, *, show_all: bool) -> list[str]:
    """Printed lines of a diagnosis."""
    steps = ", ".join(f"{stage} step {step}" for stage, step in found.last_steps.items()) or "no step yet"
    lines = [f"{found.path}: {steps}; {found.state}", *filter(None, [broken_words(found.broken_lines)])]
    has_alarm = any(not alarm.is_advice for alarm in found.alarms)
    if not has_alarm:
        lines.append("no alarm" if found.last_steps else "no metrics: logs/training.log says how far it came")
    shown = found.alarms if show_all else found.alarms[:1]
    for number, alarm in enumerate(shown):
        title = "advice" if alarm.is_advice else "first abnormal" if number == 0 else "then"
        lines += ["", *_alarm_lines(alarm, title)]
    if left := found.alarms[len(shown) :]:
        names = ", ".join(f"{alarm.name} ({_steps(alarm)})" for alarm in left)
        lines += ["", f"{len(left)} more, --all shows them: {names}"]
    return [*lines, *_walk_lines(found)] if show_all or not has_alarm else lines


def _walk_lines(found: Diagnosis) -> list[str]:
    """Questions for a run that does not learn."""
    if not found.walk:
        return []
    width = max(len(one.question) for one in found.walk)
    rows = [
        line
        for one in found.walk
        for line in _wrapped(f"{one.answer:<8} {one.question:<{width}}", one.found, f"Do: {one.do}" if one.do else "")
    ]
    return ["", f"If it does not learn, in this order (means of the last {RECENT} steps):", *rows]


def _steps(alarm: Alarm) -> str:
    """Where it is, within a stage."""
    return f"step {alarm.since}" if alarm.ended is None else f"steps {alarm.since} to {alarm.ended}, ended"


def _alarm_lines(alarm: Alarm, title: str) -> list[str]:
    if alarm.ended is not None:
        when = f"in {alarm.stage} {_steps(alarm)}"
    else:
        when = f"{'in' if alarm.name == RUN_FAILED else 'since'} {alarm.stage} {_steps(alarm)}"
    rows = [
        (title, f"{alarm.metric} {when}  [{alarm.level}: {alarm.name}]"),
        ("pattern", alarm.pattern),
        *(("evidence" if i == 0 else "", text) for i, text in enumerate(alarm.evidence)),
        ("likely cause", f"{alarm.cause}: {alarm.what}"),
        ("change", alarm.change),
        ("to confirm", alarm.confirm),
        ("limit from", alarm.source),
    ]
    return [line for name, text in rows for line in _wrapped(f"{name:<15}", text)]


def _wrapped(title: str, *texts: str) -> list[str]:
    """Texts beside a title, each on lines of its own."""
    width = WIDTH - len(title) - 1
    lines = [line for text in texts for line in wrap(text, width, break_long_words=False, break_on_hyphens=False)]
    return [f"{title if place == 0 else ' ' * len(title)} {line}" for place, line in enumerate(lines)]
