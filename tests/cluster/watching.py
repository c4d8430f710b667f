"""Not a test: what tests of processes look at, and a run file with toy services."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import psutil

TOY = Path(__file__).with_name("toy_service.py")


def toy(*flags: str) -> list[str]:
    """The command of a toy service."""
    return [sys.executable, str(TOY), "{port}", *flags]


def processes_of(port: int) -> list[psutil.Process]:
    """Toy services that were started for a port."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if str(TOY) in words and str(port) in words and "reaper.py" not in " ".join(words):
            found.append(process)
    return found


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def gone(processes: list[psutil.Process], within_s: float = 5.0) -> bool:
    """Whether all of them end in time."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not alive


def wait_for(holds, within_s: float = 20.0):
    """The first true answer of `holds`."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if answer := holds():
            return answer
        time.sleep(0.02)
    raise AssertionError("it did not come to pass")
