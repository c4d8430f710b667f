"""A checkpoint that was copied is written while training goes on; none is lost, and no failure either."""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fakes import fake_run

from hone.errors import CheckpointError
from hone.train.checkpoint import Checkpoints
from hone.train.tensor_files import write_tensors


class Slow:
    """A snapshot of one number, which is written when `go` is set."""

    is_live, num_bytes, rest = False, 4, {}

    def __init__(self, number: float, go: threading.Event, error: OSError | None = None) -> None:
        self.number, self.go, self.error = number, go, error

    def write(self, folder: Path):
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        return {"tensors.safetensors": write_tensors(folder / "tensors.safetensors", {"x": torch.tensor(self.number)})}


def run_that_saves(folder: Path, *snapshots: Slow):
    run = fake_run()
    run.checkpoints = Checkpoints(folder, 2)
    waiting = iter(snapshots)
    run.trainer.snapshot = lambda: next(waiting)
    return run


def kinds(run) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in run.observer.events]


def test_training_continues_while_a_checkpoint_is_written(tmp_path):
    async def main():
        go = threading.Event()
        run = run_that_saves(tmp_path, Slow(1.0, go))
        run.progress.step, run.progress.next_prompt = 1, 10
        await run.save()
        run.progress.step, run.progress.next_prompt = 2, 20  # of the next update
        assert kinds(run) == [("saving", 1)] and not run.checkpoints.paths()
        go.set()
        await run.saved()
        assert kinds(run) == [("saving", 1), ("saved", 1)]
        loaded = run.checkpoints.newest()
        assert (loaded.progress.step, loaded.progress.next_prompt) == (1, 10), "as it was when it was copied"

    asyncio.run(main())


def test_the_next_save_waits_for_the_one_before(tmp_path):
    async def main():
        first, second = threading.Event(), threading.Event()
        run = run_that_saves(tmp_path, Slow(1.0, first), Slow(2.0, second))
        run.progress.step = 1
        await run.save()
        run.progress.step = 2
        saving = asyncio.create_task(run.save())
        await asyncio.sleep(0.05)
        assert kinds(run) == [("saving", 1)], "the copy's memory is still in use"
        first.set()
        await saving
        assert kinds(run) == [("saving", 1), ("saved", 1), ("saving", 2)]
        second.set()
        await run.saved()
        assert run.checkpoints.newest().tensors["x"] == 2.0

    asyncio.run(main())


def test_a_failure_is_raised_by_the_next_save_and_what_was_there_stays(tmp_path):
    async def main():
        go = threading.Event()
        go.set()
        run = run_that_saves(tmp_path, Slow(1.0, go), Slow(2.0, go, OSError(28, "No space left on device")))
        run.progress.step = 1
        await run.save()
        run.progress.step = 2
        await run.save()
        run.progress.step = 3
        with pytest.raises(CheckpointError, match=r"step-000002: cannot be written: No space left.*step-000001 is"):
            await run.save()
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]

    asyncio.run(main())


def test_a_run_that_ends_for_another_reason_tells_of_the_failure_and_keeps_its_own(tmp_path):
    async def main():
        go, said = threading.Event(), []
        go.set()
        run = run_that_saves(tmp_path, Slow(1.0, go, OSError(5, "Input/output error")))
        run.observer.warn = said.append
        await run.save()
        await run.settle()
        await run.settle()
        assert len(said) == 1 and "Input/output error" in said[0]

    asyncio.run(main())


KILLED_WHILE_WRITING = """
import asyncio, os, sys, threading
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_background_save import Slow, run_that_saves

class Fatal(Slow):
    def write(self, folder):
        files = super().write(folder)
        print("written, not in place", flush=True)
        os.kill(os.getpid(), 9)

async def main():
    go = threading.Event(); go.set()
    run = run_that_saves(Path(sys.argv[1]), Slow(1.0, go), Fatal(2.0, go))
    run.progress.step = 1
    await run.save()
    run.progress.step = 2
    await run.save()
    await asyncio.sleep(30)

asyncio.run(main())
"""


@pytest.mark.slow("kills a run while it saves")
def test_a_kill_while_one_is_written_leaves_the_one_before(tmp_path):
    program = KILLED_WHILE_WRITING.format(tests=str(Path(__file__).parent))
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert killed.returncode == -signal.SIGKILL and "not in place" in killed.stdout, "witness"
    found = Checkpoints(tmp_path, 2).newest()
    assert found is not None and found.progress.step == 1 and not found.skipped
    assert (tmp_path / ".tmp-step-000002").is_dir(), "witness"
