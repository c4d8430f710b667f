"""A supervised step is one optimizer step over its rows, however RL divides and repeats its updates."""

import pytest
from tiny import metrics_of, weights_of, write_run

from hone.cli.main import main


def sft_run(folder, *settings: str):
    run_file = write_run(folder)
    assert main(["train", str(run_file), "stages=[sft]", *settings]) == 0
    return weights_of(folder), metrics_of(folder)


@pytest.mark.parametrize("setting", ["train.passes_per_batch=2", "train.samples_per_optimizer_step=4"])
def test_what_divides_an_update_leaves_sft_alone(tmp_path, setting):
    assert sft_run(tmp_path / "as RL divides", setting) == sft_run(tmp_path / "plain")
