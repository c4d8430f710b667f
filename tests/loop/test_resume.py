"""kill -9 at any moment loses nothing: a resumed run equals the uninterrupted one, bit for bit."""

import shutil

import pytest
from surviving import assert_kills_change_nothing
from tiny import metrics_of, weights_of, write_run

from hone.cli.main import main


def train(run_file, *arguments):
    return main(["train", str(run_file), *arguments])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train(write_run(folder)) == 0
    return folder


def test_the_same_file_gives_the_same_weights(uninterrupted, tmp_path):
    assert train(write_run(tmp_path)) == 0
    assert weights_of(tmp_path) == weights_of(uninterrupted)
    assert metrics_of(tmp_path) == metrics_of(uninterrupted)


@pytest.mark.slow("twenty-one starts of a run")
@pytest.mark.timeout(300)
def test_twenty_kills_change_nothing(tmp_path):
    # long enough that most of twenty lives do not reach its end
    whole, killed = (write_run(tmp_path / name, steps=150) for name in ("whole", "killed"))
    assert train(whole) == 0
    assert_kills_change_nothing(whole, killed, kills=20, seed=1, updates=150)


@pytest.mark.parametrize(
    "torn",
    [
        "manifest.json",
        *(pytest.param(name, marks=pytest.mark.slow("a run more")) for name in ("tensors.safetensors", "state.json")),
    ],
)
def test_an_incomplete_newest_checkpoint_is_skipped_and_reported(uninterrupted, tmp_path, torn, capsys):
    run_file = write_run(tmp_path)
    assert train(run_file) == 0
    newest = tmp_path / "run" / "checkpoints" / "step-000008" / torn
    newest.write_bytes(newest.read_bytes()[:-7])
    assert train(run_file, "--resume") == 0
    log = (tmp_path / "run" / "logs" / "training.log").read_text()
    assert f"checkpoint skipped: {newest.parent}" in log and "step-000007" in log
    assert weights_of(tmp_path) == weights_of(uninterrupted)
    assert metrics_of(tmp_path) == metrics_of(uninterrupted)


KEEP = "checkpoint.keep=20"


@pytest.fixture(scope="module")
def with_every_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("every")
    assert train(write_run(folder), KEEP) == 0
    return folder


@pytest.fixture
def halfway(with_every_checkpoint, tmp_path):
    """A run, and a copy of it as it was after four of its eight updates."""
    whole, copy = with_every_checkpoint, tmp_path / "copy"
    shutil.copytree(whole, copy)
    for step in range(5, 9):
        shutil.rmtree(copy / "run" / "checkpoints" / f"step-{step:06d}")
    run_file = copy / "tiny.yaml"
    run_file.write_text(run_file.read_text().replace(str(whole), str(copy)))
    return whole, run_file


def test_a_resume_without_the_optimizer_keeps_weights_steps_and_schedule(halfway):
    whole, run_file = halfway
    assert train(run_file, KEEP, "--resume", "--without", "optimizer") == 0
    assert weights_of(run_file.parent) != weights_of(whole)
    before, after = ([line for line in metrics_of(of) if "train/lr" in line] for of in (whole, run_file.parent))
    assert [line["train/lr"] for line in after] == [line["train/lr"] for line in before]
    same = ("rollout/reward_mean", "train/loss", "train/grad_norm")
    assert [after[4][name] for name in same] == [before[4][name] for name in same], "weights and samples are the same"
    assert "continues without the optimizer state" in (run_file.parent / "run" / "logs" / "training.log").read_text()


def test_a_resume_without_the_random_state_takes_another_seed(halfway, capsys):
    whole, run_file = halfway
    assert train(run_file, KEEP, "--resume", "seed=5") == 2
    assert "seed: 0 -> 5" in capsys.readouterr().err
    assert train(run_file, KEEP, "--resume", "--without", "random", "seed=5") == 0
    assert metrics_of(run_file.parent)[:6] == metrics_of(whole)[:6]
    assert weights_of(run_file.parent) != weights_of(whole)
    assert train(run_file, "--without", "random") == 2, "it is of --resume"
