"""`hone plan`: does it fit, before anything starts? Closed forms, no torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hone.cli.arguments import AsJson, RunFile, examples
from hone.config.load import load_config
from hone.errors import MemoryExhausted
from hone.plan.hardware import find_hardware
from hone.plan.ledger import gib
from hone.plan.placement import is_placement, placement_from
from hone.plan.planner import Plan, plan
from hone.plan.verdict import level_of

EXAMPLES = examples(
    "hone plan run.yaml",
    "hone plan run.yaml --hardware 8xH100-80G model.path=Qwen/Qwen3-8B",
    "hone plan run.yaml --hardware 8xA100-40G placement.engine.tensor_parallel=2 --json",
)


def plan_command(
    run_file: RunFile,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="section.key=value",
            help="Settings that win over the file's; those under `placement.` say how models are spread over devices.",
            show_default=False,
        ),
    ] = None,
    hardware: Annotated[
        str, typer.Option(metavar="8xH100-80G", help="Devices to plan for; `this` measures the machine in use.")
    ] = "this",
    as_json: AsJson = False,
) -> None:
    """Predict memory of every phase on every kind of device, and say whether it fits.

    Exit code 0 when it fits or is tight, 4 when it does not fit.
    """
    given = words or []
    loaded = load_config(run_file, [word for word in given if not is_placement(word)])
    found = plan(
        loaded.config,
        find_hardware(hardware),
        folder=loaded.run_file.parent,
        placement=placement_from([word for word in given if is_placement(word)]),
    )
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        show(found, Console())
    if found.verdict.level == "does not fit":
        raise typer.Exit(MemoryExhausted.exit_code)


def show(found: Plan, console: Console) -> None:
    """Print a plan for people."""
    arch = found.inputs.architecture
    console.print(
        f"{arch.model_type}, {arch.total_parameters:,} parameters, {arch.kv_bytes_per_token():,} B of cache per token; "
        f"{found.inputs.hardware.title}, {found.inputs.placement.mode}",
        markup=False,
        highlight=False,
    )
    for ledger in found.ledgers:
        table = Table(title=f"{ledger.count} x {ledger.device}, {gib(ledger.capacity_bytes)}: {level_of(ledger)}")
        for column in ("phase", "moment", "peak", "of it"):
            table.add_column(column, justify="right" if column == "peak" else "left")
        for moment in ledger.phase_peaks():
            largest = ", ".join(f"{term.name} {gib(term.bytes)}" for term in moment.by_size()[:3])
            table.add_row(moment.phase, moment.name, gib(moment.bytes), largest)
        console.print(table)
    console.print(f"{found.verdict.level}: {found.verdict.sentence}", markup=False, highlight=False)
    for problem in (*found.verdict.problems, *found.notes):
        console.print(problem, markup=False, highlight=False)
