"""`hone eval`: how good a model is on the run file's evaluation data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hone.cli.arguments import AsJson, Overrides, RunFile, examples
from hone.config.load import load_config

EXAMPLES = examples(
    "hone eval run.yaml",
    "hone eval run.yaml eval.samples=8 eval.pass_k=[1,8]",
    "hone eval run.yaml eval.temperature=0 --model runs/base/hf",
)


def evaluate(
    run_file: RunFile,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory to evaluate, instead of the run's result.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the trained model: unbiased pass@k, sampled or greedy."""
    loaded = load_config(run_file, overrides or ())
    from hone import build

    build.evaluate_run(loaded, model=model, as_json=as_json)
