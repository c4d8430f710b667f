"""A power cut at any moment loses nothing that a checkpoint, `hf/` or the audit rely on: on a real ext4, without its
journal."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import metrics_of, weights_of, write_run

from hone.cli.main import main


@pytest.fixture
def disk(tmp_path):
    """An ext4 image and where it may be mounted."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("only root may mount an ext4 image")
    image, folder = tmp_path / "disk.img", tmp_path / "killed"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(96 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True).returncode:
        pytest.skip("this machine has no loop devices")
    yield image, folder
    subprocess.run(["umount", folder], capture_output=True)


@pytest.mark.slow("eleven lives of a run")
@pytest.mark.timeout(400)
def test_ten_power_cuts_change_nothing(tmp_path, disk):
    image, folder = disk
    uninterrupted = tmp_path / "uninterrupted"
    assert main(["train", str(write_run(uninterrupted, steps=60))]) == 0
    run_file = write_run(tmp_path / "files", steps=60)
    run_file.write_text(run_file.read_text().replace(str(tmp_path / "files"), str(folder)))
    subprocess.run(["umount", folder], check=True)
    program = Path(__file__).with_name("power_cuts.py")
    done = subprocess.run(
        [sys.executable, program, run_file, image, folder, "10", "1"], capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stderr + (tmp_path / "files" / "lives.log").read_text()
    lives = json.loads(done.stdout.splitlines()[-1])
    assert lives["with_checkpoints"] >= 3, "the cuts came while there was something to lose"
    assert (lives["exit"], lives["has_hf"], lives["violations"], lives["updates"]) == (0, True, [], 60)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    assert weights_of(folder) == weights_of(uninterrupted)
    assert metrics_of(folder) == metrics_of(uninterrupted)
