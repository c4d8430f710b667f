"""`hone report`: the page of a run, made again from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.arguments import examples

EXAMPLES = examples("hone report runs/qwen3-0.6b")


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.", show_default=False)],
) -> None:
    """Write report.html of a run up to its last step: after a kill, or where the file is lost.

    A run writes it too, about every two minutes and at its end.
    """
    from hone.errors import RunFolderError
    from hone.observe.report import write_report
    from hone.run.folder import RunFolder

    if RunFolder.read(run_dir).is_in_use():
        raise RunFolderError(
            f"{run_dir}: the run is active, and writes report.html about every two minutes. `hone ui {run_dir}` shows "
            "it live."
        )
    typer.echo(f"wrote {write_report(run_dir)}")
