"""`hone train`: start or resume a run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from hone.cli.arguments import Overrides, RunOrFolder, examples
from hone.run.folder import load_run

EXAMPLES = examples(
    "hone train run.yaml",
    "hone train run.yaml train.optimizer.lr=3e-4 seed=1 run.dir=runs/seed-1",
    "hone train --resume runs/seed-1",
    "hone train --resume runs/seed-1 --without optimizer --without random seed=2",
)


class Without(StrEnum):
    """Parts of a checkpoint that a resumed run may do without."""

    OPTIMIZER = "optimizer"
    RANDOM = "random"


def train(
    run: RunOrFolder,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest complete checkpoint.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run; an earlier one in the folder is moved aside.")
    ] = False,
    accept_changed_inputs: Annotated[
        bool, typer.Option("--accept-changed-inputs", help="Resume although data, weights or code have changed.")
    ] = False,
    without: Annotated[
        list[Without] | None,
        typer.Option(help="With --resume: reset AdamW's moments, or use another seed; may be given twice."),
    ] = None,
) -> None:
    """Train: every stage of the run file, in order."""
    if resume and fresh:
        raise typer.BadParameter("--resume and --fresh exclude each other")
    if without and not resume:
        raise typer.BadParameter("--without needs --resume")
    loaded = load_run(run, overrides or ())

    from hone import assemble

    assemble.train(
        loaded,
        resume=resume,
        fresh=fresh,
        accept_changed_inputs=accept_changed_inputs,
        without=[part.value for part in without or ()],
    )
