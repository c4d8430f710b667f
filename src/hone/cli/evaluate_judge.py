"""`hone eval-judge`: evaluation of a judge on preference pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.arguments import AsJson, Overrides, examples
from hone.config.load import load_rewards

EXAMPLES = examples(
    "hone eval-judge run.yaml pairs.jsonl",
    "hone eval-judge run.yaml pairs.jsonl --url http://127.0.0.1:8000",
    "hone eval-judge run.yaml pairs.jsonl reward.components[0].args.votes=5",
)


def evaluate_judge(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="A run file, or a file with a reward section.")],
    pairs: Annotated[Path, typer.Argument(help="JSONL rows with prompt, chosen, rejected and optionally answer.")],
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the component, if the file has several judges.")] = None,
    url: Annotated[str | None, typer.Option(help="URL of the judge, instead of the file's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a judge on preference pairs: accuracy, consistency when swapped, canaries."""
    loaded = load_rewards(file, overrides or ())
    from hone.assemble.judge import evaluate_judge_of

    figures = evaluate_judge_of(loaded, pairs, name=name, url=url)
    if as_json:
        typer.echo(json.dumps(dict(figures), indent=2))
        return
    for figure, value in figures.items():
        typer.echo(f"  {figure:<26} {value:.4g}")
