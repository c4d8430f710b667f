"""Shared command-line arguments, and examples in help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)]
RunOrFolder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.yaml | RUN_DIR",
        help="Run file, or the folder of a run (with its own settings).",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="section.key=value",
        help="Overrides of the file's settings, such as train.optimizer.lr=1e-5.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, with `problems` where there are any.")]


def examples(*commands: str) -> str:
    """The closing lines of a verb's help."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])  # \b: keep the lines as they are
