"""Reaper: the parent process of one service, which leaves nothing of it behind when the run ends.

Started by `process.py` only, as a plain script without Hone or any package on its path:

    reaper.py LOG STOP_TIMEOUT_S FOLDER COMMAND...

Standard input is the run's end of a pipe. A byte on it asks the service to stop (SIGTERM to its process group, SIGKILL
after STOP_TIMEOUT_S); its end means that the run is gone, however it went (kill -9, the kernel's memory killer), and
the service is killed at once. Standard output says `pid N` and, when the last process has ended, `exit CODE`.

On Linux every process that the service leaves behind, one that made a session of its own too, becomes the reaper's
child and is killed by it; and the service is killed should the reaper itself be. Elsewhere the service's process
group is what is ended.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILLED_WITHIN_S = 10.0
"""Until processes that survive SIGKILL (the kernel holds them in a driver) are given up."""
_CANNOT_START = 127
_CONTROL, _LINUX = 0, sys.platform == "linux"


def main(log: str, stop_timeout_s: float, folder: str, command: list[str]) -> None:
    """Start the service, wait for its end or for the word to end it, and leave nothing of it."""
    libc = ctypes.CDLL(None) if _LINUX else None
    if libc is not None:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, write = os.pipe()  # says the numbers of signals as they arrive
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    reaper = os.getpid()

    def die_with_reaper() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != reaper:  # it died before the line above
                os._exit(1)

    with open(log, "ab") as out:
        try:
            service = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=die_with_reaper,
            )
        except OSError as error:
            out.write(f"{command[0]} cannot be started: {error.strerror}\n".encode())
            _report(f"exit {_CANNOT_START}")
            return
    _report(f"pid {service.pid}")
    code = _watch(service.pid, woken, stop_timeout_s)
    _end_the_rest(service.pid)
    _report(f"exit {code}")


def _watch(service: int, woken: int, stop_timeout_s: float) -> int:
    """Wait for the service's end, asked for or not. Returns its exit code, negative for a signal."""
    deadline: float | None = None
    while True:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([_CONTROL, woken], [], [], left_s)
        asked_to_stop = woken in readable and signal.SIGTERM in os.read(woken, 4096)
        if _CONTROL in readable:
            if not os.read(_CONTROL, 4096):
                return _kill(service)
            asked_to_stop = True
        if (code := _reap(service)) is not None:
            return code
        if asked_to_stop and deadline is None:
            deadline = time.monotonic() + stop_timeout_s
            os.killpg(service, signal.SIGTERM)
        if deadline is not None and time.monotonic() >= deadline:
            return _kill(service)


def _kill(service: int) -> int:
    os.killpg(service, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(service, 0)[1])


def _reap(service: int) -> int | None:
    """Take in what has ended. Returns the exit code of the service if it is among that."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == service:
            code = os.waitstatus_to_exitcode(status)


def _end_the_rest(service: int) -> None:
    """Kill what the service started and left. The children of what is killed become ours, and are next."""
    deadline = time.monotonic() + _KILLED_WITHIN_S
    if not _LINUX:
        _signal(os.killpg, service)
    while _LINUX and time.monotonic() < deadline:
        children = _children()
        if not children:
            return
        for pid in children:
            _signal(os.kill, pid)
        _reap(service)
        time.sleep(0.002)


def _children() -> list[int]:
    """Processes whose parent is this one, those that ended and were not taken in yet included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_bytes()
            except OSError:  # ended meanwhile
                continue
            if int(stat.rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(entry.name))
    return found


def _signal(send: Callable[[int, int], None], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        send(number, signal.SIGKILL)


def _report(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the run is gone
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4:])
