"""`hone ui`: runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.arguments import examples

PORT = 8900

EXAMPLES = examples("hone ui", "hone ui runs/gsm8k", "hone ui experiments --port 0")


def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Folder with runs, or of a run.", show_default="runs")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port of 127.0.0.1 to listen on; 0: a free one.")] = PORT,
) -> None:
    """Show runs in a browser, live: list, curves, samples, comparison.

    Listens on this machine's own address; the printed one has a token. Ctrl-C ends it.
    """
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is a file; name a folder with runs, or of a run")
    if not folder.exists():
        typer.echo(f"warning: {folder} does not exist yet; runs are shown as soon as they are there", err=True)

    from hone.ui.server import run_ui

    run_ui(folder, port=port)
