"""`hone export`: a checkpoint as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.arguments import Overrides, RunOrFolder, examples
from hone.run.folder import load_run

EXAMPLES = examples(
    "hone export run.yaml --to my-model",
    "hone export run.yaml --to my-model --step 100",
    "hone export run.yaml --to my-model --best",
    "hone export run.yaml --to my-adapter --adapter",
    "hone export run.yaml --to my-model --push-to-hub me/my-model",
)


def export(
    run: RunOrFolder,
    overrides: Overrides = None,
    to: Annotated[Path, typer.Option(help="Folder to write; must not exist.")] = Path("hf"),
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest complete one.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Export the best checkpoint (checkpoint.best).")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export only the adapter, in peft's format, instead of merged weights.")
    ] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(help="Repository of the Hugging Face hub to upload the folder to, made if need be.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; else it is private.")] = False,
) -> None:
    """Write a checkpoint as a directory that Transformers loads."""
    if public and push_to_hub is None:
        raise typer.BadParameter("--public needs --push-to-hub")
    loaded = load_run(run, overrides or ())

    from hone import assemble

    found = assemble.export_run(
        loaded, to=to, step=step, best=best, adapter=adapter, push_to_hub=push_to_hub, public=public
    )
    typer.echo(found)
