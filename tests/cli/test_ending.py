"""How a run ends or goes on: signals, `hone stop RUN_DIR`, a console that is gone. Real processes, pipes, terminals."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "loop"))
from tiny import write_run

HONE = [sys.executable, "-m", "hone.cli.main"]
EXEC = "os.execv(sys.argv[1], sys.argv[1:])"
NOHUP = f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); {EXEC}"
ON_TERMINAL = f"import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); {EXEC}"


def prepared(folder, *, steps):
    """A run whose console is not quiet."""
    run_file = write_run(folder, steps=steps, save_every=0)
    run_file.write_text(run_file.read_text().replace("console: quiet", "console: auto"))
    return run_file


def learning(process, folder, *, steps=1):
    """Wait until a process's run has made a number of updates more."""
    lines = folder / "run" / "metrics.jsonl"

    def made():
        return lines.read_text().count('"train/loss"') if lines.exists() else 0

    wanted, deadline = made() + steps, time.monotonic() + 90
    while made() < wanted:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def checkpoints(folder):
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))


def last_event(folder):
    return json.loads((folder / "run" / "events.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow("three processes of several seconds each")
def test_a_run_outlives_its_pipe_and_a_hangup_and_is_stopped_from_another_shell(tmp_path):
    """Started with nohup, into a pipe whose reader leaves after the first line."""
    command = [sys.executable, "-c", NOHUP, *HONE, "train", str(prepared(tmp_path, steps=100_000))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout.readline()
    process.stdout.close()
    learning(process, tmp_path)
    process.send_signal(signal.SIGHUP)
    learning(process, tmp_path, steps=3)
    stopped = subprocess.run([*HONE, "stop", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert stopped.stdout == "stopped with a checkpoint; `hone train --resume run` continues from it\n"
    assert process.wait(timeout=30) == 130 and checkpoints(tmp_path)
    assert last_event(tmp_path)["outcome"] == "stopped by the user"
    assert "rl " in (tmp_path / "run" / "logs" / "training.log").read_text()


@pytest.mark.slow("three processes of several seconds each, with the two below")
def test_a_hangup_ends_with_a_checkpoint_however_often_it_comes(tmp_path):
    process = subprocess.Popen(
        [*HONE, "train", str(prepared(tmp_path, steps=100_000))], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    learning(process, tmp_path)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and checkpoints(tmp_path)
    assert f"`hone train --resume {tmp_path / 'run'}`" in said.decode()


@pytest.mark.slow("three processes of several seconds each")
def test_a_closed_terminal_ends_with_a_checkpoint(tmp_path):
    """As when ssh is closed: the live view's terminal is gone, and the kernel sends SIGHUP."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", ON_TERMINAL, *HONE, "train", str(prepared(tmp_path, steps=100_000))]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"}
    )
    os.close(theirs)
    assert os.read(ours, 100)
    learning(process, tmp_path)
    os.close(ours)
    assert process.wait(timeout=60) == 130
    assert checkpoints(tmp_path) and last_event(tmp_path)["outcome"] == "stopped by the user"


@pytest.mark.slow("three processes of several seconds each")
@pytest.mark.parametrize("console", ["auto", "quiet", "live"])
def test_a_full_disk_under_the_output_ends_nothing(tmp_path, console):
    run_file = str(prepared(tmp_path, steps=3))
    with open("/dev/full", "w") as full:
        done = subprocess.run([*HONE, "train", run_file, f"observe.console={console}"], stdout=full, stderr=full)
    assert done.returncode == 0
    assert last_event(tmp_path)["outcome"] == "finished" and (tmp_path / "run" / "report.html").is_file()
