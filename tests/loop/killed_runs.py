"""Not a test: a process that imports Hone once and lives through a run that is killed again and again.

    python killed_runs.py RUN.yaml KILLS SEED

Each life is a fork that runs `hone train --resume`; it is killed with SIGKILL at a random moment. The last life runs
to its end. Prints one JSON line: how many lives were really killed, and how many of them in the middle of a save.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hone.assemble  # noqa: F401 (the slow import, before the forks)
from hone.cli.main import main
from hone.config.load import load_config


def live(run_file: str) -> int:
    pid = os.fork()
    if pid == 0:
        log = os.open(Path(run_file).with_name("lives.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(main(["train", run_file, "--resume"]))
    return pid


def kill_once(pid: int, is_due: Callable[[], bool], later_s: float = 0.0) -> None:
    """Wait (at most 20 s) until it is due, then for `later_s`, then kill."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not is_due():
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
    time.sleep(later_s)
    os.kill(pid, signal.SIGKILL)


def loops_begun(folder: Path) -> int:
    events = folder / "events.jsonl"
    return events.read_bytes().count(b'"kind":"started"') if events.exists() else 0


def survive(run_file: str, kills: int, seed: int) -> dict:
    rng, folder = random.Random(seed), load_config(run_file).run_dir
    checkpoints = folder / "checkpoints"
    killed = saving = 0
    for number in range(kills):
        loops = loops_begun(folder) + 1
        pid = live(run_file)
        if number % 4 == 0:
            kill_once(pid, lambda: any(checkpoints.glob(".tmp-*")))
        elif number % 4 == 1:
            kill_once(pid, lambda wanted=loops: loops_begun(folder) >= wanted, rng.uniform(0.0, 0.5))
        else:
            time.sleep(rng.uniform(0.05, 1.0))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed += os.WIFSIGNALED(status)
        saving += any(checkpoints.glob(".tmp-*"))
    _, status = os.waitpid(live(run_file), 0)
    return {"killed": killed, "during_save": saving, "exit": os.waitstatus_to_exitcode(status)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(survive(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
