"""The command `hone import`: another tool's command or configuration as a run file, with a verdict on each key."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.arguments import AsJson, examples
from hone.dialects.foreign import DialectError, Tool
from hone.dialects.reading import MAX_BYTES, TOOLS, read_foreign
from hone.dialects.translate import translate
from hone.dialects.writing import report_lines, run_file_of
from hone.runtime.files import write_whole

EXAMPLES = examples(
    "hone import train_grpo.sh --to run.yaml",
    "hone import grpo.py --from trl --version 0.24.0",
    "hone import configs/grpo_qwen25_7b.yaml --to run.yaml --json",
    "cat job.sh | hone import - > run.yaml",
)
GAPS_EXIT = 5
"""Something was refused or is not known; the run file is written all the same."""


def import_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A shell script or command line (verl, OpenRLHF, TRL), YAML (TRL, MindSpeed-RL), Python (TRL) or TOML "
            "(prime-rl); - reads standard input.",
            show_default=False,
        ),
    ],
    tool: Annotated[
        Tool | None, typer.Option("--from", metavar="TOOL", help=f"{', '.join(TOOLS)}; without it, recognised.")
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(metavar="V", help="The tool's version, for its defaults; without it, the newest known."),
    ] = None,
    to: Annotated[Path | None, typer.Option(metavar="RUN.yaml", help="Write the run file here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Import another tool's run: write a run file, and say what became of every key. Nothing of FILE is executed.

    Exit code 0 when everything has a counterpart or needs none, 5 when something is missing (marked in the run file), 2
    when FILE cannot be read.
    """
    if to is not None and to.exists():
        raise typer.BadParameter(f"{to} exists. Name another file, or remove it", param_hint="--to")
    source, place = (file.name, str(file)) if str(file) != "-" else ("stdin", None)
    foreign = read_foreign(_text(file), source, tool, lambda path: _script(file, path), place)
    imported = translate(foreign, version)
    text = run_file_of(imported)
    if to is not None:
        files = {to.with_name(name): content for name, content in imported.foreign.files.items()}
        for path in files:
            if path.exists():
                raise typer.BadParameter(f"{path}, for the reward functions, exists. Remove it", param_hint="--to")
        for path, content in {to: text, **files}.items():
            write_whole(path, content)
    if as_json:
        written = {"run_file": str(to) if to else None, "text": text}
        typer.echo(json.dumps(imported.as_dict() | written, indent=2, default=str))
    else:
        if to is None:
            typer.echo(text, nl=False)
        typer.echo("\n".join(report_lines(imported, to)), err=to is None)
    raise typer.Exit(GAPS_EXIT if imported.gaps else 0)


def _script(file: Path, path: str) -> str | None:
    """A script that a command names, from here or from the folder of its file."""
    for folder in (Path(), file.parent):
        if (found := folder / path).is_file() and found.stat().st_size <= MAX_BYTES:
            return _text(found)
    return None


def _text(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise DialectError(f"{file}: is not text in UTF-8") from None
    except OSError as error:
        raise DialectError(f"{file}: cannot be read: {error.strerror or error}") from None
