"""Arguments that several verbs share, and how help shows examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)]
RunOrFolder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.yaml | RUN_DIR",
        help="The run file; or a run's folder, with the settings that the run was started with.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="section.key=value",
        help="Settings that win over the file's, such as train.optimizer.lr=1e-5.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def examples(*commands: str) -> str:
    """The closing lines of a verb's help."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])  # \b: keep the lines as they are
