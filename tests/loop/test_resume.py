"""kill -9 at any moment loses nothing: a resumed run equals the uninterrupted one, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import metrics_of, weights_of, write_run

from hone.cli.main import main
from hone.run.audit import audit_file


def train(run_file, *arguments):
    return main(["train", str(run_file), *arguments])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train(write_run(folder)) == 0
    return folder


def samples_of(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "run" / "samples").rglob("*.gz"))}


def test_the_same_file_gives_the_same_weights(uninterrupted, tmp_path):
    assert train(write_run(tmp_path)) == 0
    assert weights_of(tmp_path) == weights_of(uninterrupted)
    assert metrics_of(tmp_path) == metrics_of(uninterrupted)


@pytest.mark.slow("twenty-one starts of a run")
@pytest.mark.timeout(300)
def test_twenty_kills_change_nothing(tmp_path):
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    assert train(write_run(uninterrupted, steps=150)) == 0
    run_file = write_run(killed, steps=150)  # long enough that most of twenty lives do not reach its end
    program = Path(__file__).with_name("killed_runs.py")
    done = subprocess.run(
        [sys.executable, program, run_file, "20", "1"], capture_output=True, text=True, timeout=280, check=True
    )
    lives = json.loads(done.stdout.splitlines()[-1])
    assert lives["exit"] == 0
    assert lives["killed"] >= 15 and lives["during_save"] >= 1, "the faults really happened"
    assert weights_of(killed) == weights_of(uninterrupted)
    assert metrics_of(killed) == metrics_of(uninterrupted)
    assert samples_of(killed) == samples_of(uninterrupted)
    found = audit_file(killed / "run" / "events.jsonl")
    assert found.violations == () and found.updates == 150
    assert found.counts["stopped"] < found.counts["started"], "lives that were killed did not end in order"


@pytest.mark.parametrize("torn", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_torn_newest_checkpoint_is_skipped_and_told(uninterrupted, tmp_path, torn, capsys):
    run_file = write_run(tmp_path)
    assert train(run_file) == 0
    newest = tmp_path / "run" / "checkpoints" / "step-000008" / torn
    newest.write_bytes(newest.read_bytes()[:-7])
    assert train(run_file, "--resume") == 0
    log = (tmp_path / "run" / "logs" / "training.log").read_text()
    assert f"checkpoint skipped: {newest.parent}" in log and "step-000007" in log
    assert weights_of(tmp_path) == weights_of(uninterrupted)
    assert metrics_of(tmp_path) == metrics_of(uninterrupted)
