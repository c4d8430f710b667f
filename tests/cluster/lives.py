"""Not a test: a process that imports Hone once and starts and ends launchers, again and again.

    python lives.py RUN.yaml SIGNAL LIVES SEED

Each life is a fork that runs `hone train --resume`; it gets the signal at a random moment, and then nothing of it may
be left: no process that was started for the run file's folder, nobody listening on its services' ports. Prints one
JSON line per life: exit code, what its services were doing, what was left. A life that does not end is killed, and none
outlives this process.
"""

import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
from watching import listens, wait_for

import hone.assemble  # noqa: F401 (the slow import, before the forks)
from hone.cli.main import main
from hone.config.load import load_config
from hone.services.state import read_state

LEFT_WITHIN_S = 5.0
ENDS_WITHIN_S = 60.0
SIGNALS = {signal.SIGINT, signal.SIGTERM}
_PR_SET_PDEATHSIG = 1


def live(run_file: str) -> int:
    # What a signal raises in the functions that Python calls after a fork is only printed, and the signal is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            log = os.open(Path(run_file).with_name("lives.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            code = main(["train", run_file, "--resume"])
        except KeyboardInterrupt:  # before or after `main`, which answers it alike
            code = 130
        finally:
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return pid


def ended(pid: int) -> int:
    """Its exit code, negative for a signal, once it has ended."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(found[1])


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes with the folder in their command line or as their working directory, this one's own aside."""
    found = []
    for process in psutil.process_iter():
        try:
            is_its = str(folder) in " ".join(process.cmdline()) or process.cwd() == str(folder)
            if is_its and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def what_is_left(folder: Path, ports: set[int]) -> list[str]:
    """Processes and ports that are still there after LEFT_WITHIN_S."""
    deadline = time.monotonic() + LEFT_WITHIN_S
    while True:
        left = [str(process) for process in processes_of(folder)] + [str(port) for port in ports if listens(port)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def end(run_file: str, number: int, after_s: float, *, knows_services: bool) -> dict:
    """One life, and its end so long after its start, or after it first told of its services."""
    folder, run_dir = Path(run_file).parent, load_config(run_file).run_dir
    (run_dir / "services.json").unlink(missing_ok=True)
    pid = live(run_file)
    if knows_services:
        wait_for(lambda: read_state(run_dir), ENDS_WITHIN_S)
    time.sleep(after_s)
    state = read_state(run_dir)
    os.kill(pid, number)
    code = ended(pid)
    ports = {int(service.url.rpartition(":")[2]) for service in state.services} if state else set()
    doing = state.services[0].state if state else None
    left = what_is_left(folder, ports)
    return {"exit": code, "doing": doing, "left": left}


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_file, number, lives, seed = sys.argv[1], signal.Signals[sys.argv[2]], int(sys.argv[3]), int(sys.argv[4])
    rng = random.Random(seed)
    for life in range(lives):
        # The first ones at moments that are surely different: before, during and after the start of the services.
        after_s = (0.0, 0.4, 2.0)[life] if life < 3 else rng.uniform(0.0, 2.5)
        knows_services = life > 2 and life % 4 != 3  # on a busy machine the start alone may take longer than that
        print(json.dumps(end(run_file, number, after_s, knows_services=knows_services)), flush=True)
