"""`hone check`: validation of a run file, its data, tokenizer and rewards.

First the run file alone, with nothing heavy imported; then, if it is right, data, tokenizer and rewards.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hone.cli.arguments import AsJson, Overrides, RunFile, examples
from hone.config.load import Loaded, load_config
from hone.errors import DataError, HoneError
from hone.run.report import CheckReport

EXAMPLES = examples(
    "hone check run.yaml",
    "hone check run.yaml model.path=models/qwen3-0.6b",
    "hone check run.yaml --services",
    "hone check run.yaml --json",
)


def check(
    run_file: RunFile,
    overrides: Overrides = None,
    start_services: Annotated[
        bool, typer.Option("--services", help="Start the services of the run file, to try the rewards that use them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a run file, its data, its tokenizer and its rewards on real rows."""
    try:
        loaded = load_config(run_file, overrides or ())

        from hone import assemble

        report = assemble.check_run(loaded, start_services=start_services)
    except HoneError as error:
        if not as_json:
            raise
        typer.echo(json.dumps(CheckReport(problems=[*error.problems]).as_dict(), indent=2))
        raise typer.Exit(error.exit_code) from None
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        show(report, loaded, Console())
    if not report.is_ok:
        raise typer.Exit(DataError.exit_code)


def show(report: CheckReport, loaded: Loaded, console: Console) -> None:
    """Print a report."""
    num_set, num_layers = len(loaded.origins), len({setting.where.source for setting in loaded.settings})
    console.print(f"{escape(str(loaded.run_file))}: {num_set} keys set, {num_layers} layers", highlight=False)
    for line in report.lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    width = max((len(name) for name in report.figures), default=0)
    for name, value in report.figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        console.print(f"    {name:<{width}}  {shown}", markup=False, highlight=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"[red]problem[/]  {escape(problem)}", highlight=False, soft_wrap=True)
    for warning in report.warnings:
        console.print(f"[yellow]warning[/]  {escape(warning)}", highlight=False, soft_wrap=True)
    for what in report.not_checked:
        console.print(f"[yellow]not checked[/]  {escape(what)}", highlight=False, soft_wrap=True)
    if report.is_ok:
        console.print("[green]ok[/]  " + ("as far as it could be checked" if report.not_checked else "ready to train"))
