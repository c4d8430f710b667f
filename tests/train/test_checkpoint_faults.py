"""Checkpoints under a full disk, a missing permission and SIGKILL at any moment.

Every test carries a witness that its fault really happened.
"""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hone.errors import CheckpointError
from hone.train.checkpoint import Checkpoints
from hone.train.tensor_files import LiveSnapshot
from hone.types import Progress

SAVE_FOR_EVER = """
import sys, torch
from pathlib import Path
from hone.train.checkpoint import Checkpoints
from hone.train.tensor_files import LiveSnapshot
from hone.types import Progress
torch.set_num_threads(1)
checkpoints, step = Checkpoints(Path(sys.argv[1]), 2), int(sys.argv[2])
while True:
    step += 1
    tensors = {f"layer_{i}": torch.full((50_000,), float(step + i)) for i in range(8)}
    for _ in range(2):  # the second replaces the first
        checkpoints.save(Progress(step=step, next_prompt=32 * step), LiveSnapshot(tensors, {"step": step}))
    print(step, flush=True)
"""


def assert_is_one_of_the_saved(checkpoints: Checkpoints) -> int:
    loaded = checkpoints.newest()
    assert loaded is not None and loaded.skipped == ()
    step = loaded.progress.step
    assert loaded.progress == Progress(step=step, next_prompt=32 * step) and loaded.rest == {"step": step}
    assert loaded.path.name.endswith(f"step-{step:06d}")
    for layer in range(8):
        assert torch.equal(loaded.tensors[f"layer_{layer}"], torch.full((50_000,), float(step + layer)))
    return step


def kill_while_saving(folder: Path, rounds: int, seed: int) -> int:
    """Kill a process that saves without a pause, `rounds` times; returns how often it was caught inside a save."""
    chance, step, inside = random.Random(seed), 0, 0
    for _ in range(rounds):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(folder), str(step)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        reported = int(child.stdout.readline())  # the start-up is over and something was saved
        time.sleep(chance.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        reported = max([reported, *map(int, child.stdout.read().split())])
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()

        inside += any(path.name.startswith(".") for path in folder.iterdir())
        step = assert_is_one_of_the_saved(Checkpoints(folder, 2))
        assert step >= reported, "a save that had returned was lost"
    return inside


@pytest.mark.slow("many runs of a process that is killed")
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    assert kill_while_saving(tmp_path, rounds=20, seed=2) >= 5


class Killed(BaseException):
    """Stands for SIGKILL at one system call: nothing after it in the process has an effect."""


@pytest.mark.parametrize("replacing", [False, True])
def test_a_kill_at_every_single_rename_and_sync(tmp_path, monkeypatch, replacing):
    """Systematic where the other is random: after each of the calls that change what is on disk, look."""

    def tensors(step: int) -> dict[str, torch.Tensor]:
        return {f"layer_{layer}": torch.full((50_000,), float(step + layer)) for layer in range(8)}

    def save(folder: Path, step: int) -> None:
        Checkpoints(folder, 2).save(
            Progress(step=step, next_prompt=32 * step), LiveSnapshot(tensors(step), {"step": step})
        )

    newest_after = []
    for fatal_call in range(100):
        folder = tmp_path / str(fatal_call)
        for step in (1, 2, 3):
            save(folder, step)
        calls = 0

        def counted(real):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls > fatal_call:  # noqa: B023
                    raise Killed
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", counted(os.fsync))
            patch.setattr(Path, "rename", counted(Path.rename))
            patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
            try:
                save(folder, 3 if replacing else 4)
                finished = True
            except Killed:
                finished = False
        newest_after.append(assert_is_one_of_the_saved(Checkpoints(folder, 2)))
        save(folder, 4)  # the resumed run gets there, and leaves nothing aside
        assert [path.name for path in sorted(folder.iterdir())] == ["step-000003", "step-000004"]
        if finished:
            break
    assert len(newest_after) > 5, "the fault was never injected"
    assert newest_after[0] == 3 and newest_after[-1] == (3 if replacing else 4)


@contextlib.contextmanager
def largest_file(num_bytes: int):
    """This process can write no larger file; Python ignores the signal that says so."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_that_says_how_much_and_harms_nothing(tmp_path):
    Checkpoints(tmp_path, 2).save(Progress(step=1), LiveSnapshot({"weight": torch.ones(10)}, {}))
    with largest_file(100_000), pytest.raises(CheckpointError) as raised:
        Checkpoints(tmp_path, 2).save(Progress(step=2), LiveSnapshot({"weight": torch.zeros(1_000_000)}, {}))
    message = str(raised.value)
    assert "cannot be written: File too large" in message  # the witness
    assert "step-000002" in message and "needs 3.8 MiB" in message and "MiB are free" in message
    assert "step-000001 is untouched" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert Checkpoints(tmp_path, 2).newest().progress.step == 1


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot be written: Not a directory.*no older checkpoint"):
        Checkpoints(tmp_path / "file" / "checkpoints", 2).save(Progress(), LiveSnapshot({"weight": torch.ones(1)}, {}))
