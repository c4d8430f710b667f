"""`hone eval`: evaluation of a model on the run file's evaluation data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.arguments import AsJson, Overrides, RunOrFolder, examples
from hone.config.load import Loaded
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
    else:
        show(evaluation.metrics, loaded)


def show(metrics: Mapping[str, float], loaded: Loaded) -> None:
    """Print the figures."""
    settings = loaded.config.eval
    how = (
        "greedy" if settings.temperature == 0 else f"{settings.samples} samples at temperature {settings.temperature:g}"
    )
    typer.echo(f"{loaded.config.data.eval}: {how} per prompt")
    for name, value in metrics.items():
        typer.echo(f"  {name.removeprefix('eval/'):<30} {value:.4g}")
