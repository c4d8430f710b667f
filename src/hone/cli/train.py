"""`hone train`: run a file, or go on with a run."""

from __future__ import annotations

from typing import Annotated

import typer

from hone.cli.arguments import Overrides, RunOrFolder, examples
from hone.run.folder import load_run

EXAMPLES = examples(
    "hone train run.yaml",
    "hone train run.yaml train.optimizer.lr=3e-4 seed=1 run.dir=runs/seed-1",
    "hone train --resume runs/seed-1",
)


def train(
    run: RunOrFolder,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; an earlier run is moved aside.")] = False,
    accept_changed_inputs: Annotated[
        bool, typer.Option("--accept-changed-inputs", help="Resume with other data, weights or code than before.")
    ] = False,
) -> None:
    """Train: every stage of the run file, in order."""
    if resume and fresh:
        raise typer.BadParameter("--resume and --fresh exclude each other")
    loaded = load_run(run, overrides or ())

    from hone import assemble

    assemble.train(loaded, resume=resume, fresh=fresh, accept_changed_inputs=accept_changed_inputs)
