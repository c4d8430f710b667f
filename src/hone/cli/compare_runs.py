"""`hone compare`: runs side by side."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.cli.arguments import AsJson, examples
from hone.observe.console_figures import duration, number

if TYPE_CHECKING:
    from hone.run.comparison import RunComparison

EXAMPLES = examples(
    "hone compare runs/lr-1e-6 runs/lr-3e-6",
    "hone compare runs/* --html comparison.html",
    "hone compare runs/* --json",
)


def compare(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR RUN_DIR ...", help="Folders of runs.", show_default=False)
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with curves, viewed without a network."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: settings that differ, evaluations, where the metrics ended, alarms."""
    from hone.observe.page import page
    from hone.run.comparison import compare_runs, comparison_data
    from hone.runtime.files import write_whole

    if html is not None:
        write_whole(html, page("Runs side by side", comparison_data(run_dirs), "compare"))
        typer.echo(f"wrote {html}", err=as_json)
        if not as_json:
            return
    found = compare_runs(run_dirs)
    if as_json:
        typer.echo(json.dumps({"format": 1, **asdict(found)}, indent=2))
        return
    for line in lines_of(found):
        typer.echo(line)


def lines_of(found: RunComparison) -> list[str]:
    """Printed lines: one column per run."""
    from hone.run.comparison import SHOWN

    runs = found.runs
    rows: list[tuple[str, list[str]]] = [("run", [run.name for run in runs])]
    rows.append(("state", [_cut(run.state) for run in runs]))
    rows.append(("steps", [", ".join(f"{stage} {step}" for stage, step in run.steps.items()) or "-" for run in runs]))
    rows.append(("samples", [f"{run.samples:,}" for run in runs]))
    rows.append(("time", [duration(run.time_s) for run in runs]))
    rows.append(("", [""] * len(runs)))
    for key, values in found.settings.items():
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        rows.append((key, [_cut(text) for text in texts]))
    rows.append(("", [""] * len(runs)))
    names = dict.fromkeys(name for run in runs for name in run.evaluations)
    rows += [(name, [_evaluation(run.evaluations.get(name)) for run in runs]) for name in names]
    shown = [name for name in SHOWN if any(name in run.ends for run in runs)]
    rows += [(name, [number(run.ends[name]) if name in run.ends else "-" for run in runs]) for name in shown]
    rows.append(("first alarm", [run.alarms[0] if run.alarms else "none" for run in runs]))
    if any(run.broken_lines for run in runs):
        rows.append(("damaged lines", [f"{len(run.broken_lines)} left out" for run in runs]))
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(runs))]
    first = max(len(name) for name, _ in rows)
    return [
        f"{name:<{first}}  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in rows
    ]


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _evaluation(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    error = f" ± {number(found['error'])}" if "error" in found else ""
    best = f" (best {number(found['best'])} at {found['best_step']:g})" if "best" in found else ""
    return f"{number(found['last'])}{error}{best}"
