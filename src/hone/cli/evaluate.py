"""`hone eval`: evaluation of a model on the run file's evaluation data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.arguments import AsJson, Overrides, RunOrFolder, examples
from hone.config.load import load_config
from hone.run.folder import load_run

EXAMPLES = examples(
    "hone eval run.yaml",
    "hone eval run.yaml eval.samples=8 eval.pass_k=[1,8]",
    "hone eval run.yaml eval.temperature=0 --model runs/base/hf",
)


def evaluate(
    run: RunOrFolder,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory to evaluate, instead of the run's result.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the trained model: unbiased pass@k, sampled or greedy."""
    loaded = load_run(run, overrides or ())

    from hone import assemble

    evaluation = assemble.evaluate_run(loaded, model=model)
    if as_json:
        typer.echo(json.dumps(dict(evaluation.metrics), indent=2))
        return
    settings = loaded.config.eval
    how = (
        "greedy" if settings.temperature == 0 else f"{settings.samples} samples at temperature {settings.temperature:g}"
    )
    sources = ", ".join(source.path for source in loaded.config.data.eval or ())
    typer.echo(f"{sources}: {how} per prompt")
    for name, value in evaluation.metrics.items():
        typer.echo(f"  {name.removeprefix('eval/'):<30} {value:.4g}")


JUDGE_EXAMPLES = examples(
    "hone eval-judge run.yaml pairs.jsonl",
    "hone eval-judge run.yaml pairs.jsonl --url http://127.0.0.1:8000",
    "hone eval-judge run.yaml pairs.jsonl reward.components.0.args.votes=5",
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
    loaded = load_config(file, overrides or (), needed="reward")
    from hone.assemble.verbs import evaluate_judge_of

    figures = evaluate_judge_of(loaded, pairs, name=name, url=url)
    if as_json:
        typer.echo(json.dumps(dict(figures), indent=2))
        return
    for figure, value in figures.items():
        typer.echo(f"  {figure:<26} {value:.4g}")
