"""Not a test: a run on a disk of its own that loses power again and again, and then once more when it has finished.

    python power_cuts.py RUN.yaml IMAGE MOUNT CUTS SEED

The disk is an ext4 image. A cut is ext4's own shutdown without writing its journal: what was not synced is gone, as
with the power. Each life is a fork that runs `hone train --resume`; the last one runs to its end. Prints one JSON line.
"""

import fcntl
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import torch
from killed_runs import live

from hone.run.audit import audit_file

SHUTDOWN, WITHOUT_JOURNAL = 0x8004587D, 2  # FS_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH


def mount(image: Path, folder: Path) -> None:
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)


def cut(image: Path, folder: Path, pid: int | None = None) -> None:
    """Lose power, and have it again."""
    handle = os.open(folder, os.O_RDONLY)
    fcntl.ioctl(handle, SHUTDOWN, struct.pack("I", WITHOUT_JOURNAL))
    os.close(handle)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    subprocess.run(["umount", folder], check=True)
    mount(image, folder)


def await_checkpoint(folder: Path) -> None:
    """Wait (at most 30 s) until a new checkpoint has its name."""
    before, deadline = set(folder.glob("*step*")), time.monotonic() + 30
    while before >= {path for path in folder.glob("*step*") if path.name[0] != "."} and time.monotonic() < deadline:
        time.sleep(0.01)


def survive(run_file: str, image: Path, folder: Path, cuts: int, seed: int) -> dict:
    rng, run, resumed = random.Random(seed), folder / "run", 0
    for number in range(cuts):
        pid = live(run_file)
        if number % 2:
            await_checkpoint(run / "checkpoints")
        time.sleep(rng.uniform(0, 0.1) if number % 2 else rng.uniform(0.05, 1.5))
        cut(image, folder, pid)
        resumed += any(run.glob("checkpoints/*step*"))
    _, status = os.waitpid(live(run_file), 0)
    cut(image, folder)
    found = audit_file(run / "events.jsonl")
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "with_checkpoints": resumed,
        "has_hf": (run / "hf" / "model.safetensors").exists(),
        "violations": [str(violation) for violation in found.violations],
        "updates": found.updates,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    image, folder = map(Path, sys.argv[2:4])
    mount(image, folder)
    try:
        print(json.dumps(survive(sys.argv[1], image, folder, int(sys.argv[4]), int(sys.argv[5]))))
    finally:
        subprocess.run(["umount", folder])
