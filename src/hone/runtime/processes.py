"""A Python process of our own beside the run: started anew, killed with all that it started, never outliving the run.

What the pools of rewards (`reward/pool.py`) and environments (`rollout/env_pool.py`) share: starting, messages, ending.
And what the run's own process changes for a while: signal handlers, the environment.
Not here: what is said over the channel, and when a process has taken too long. Imports nothing heavy, because what runs
in such a process imports it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

HEADER = struct.Struct("!Q")
"""Length of the pickled message that follows. Pickle crosses only between this project's own processes."""
_PR_SET_PDEATHSIG = 1
_MAIN = "import sys; sys.path[:] = {path!r}; from {module} import main; main({fd}, {pid})"


def start(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `module.main(channel_fd, parent_pid)` in a fresh interpreter; the socket is our end of its channel.

    In a session of its own: Ctrl-C is for the run to handle, and a kill reaches what the process itself started. To be
    called from the thread that the process belongs to: Linux lets it live no longer than the thread that started it.
    """
    ours, theirs = socket.socketpair()
    command = _MAIN.format(path=list(sys.path), module=module, fd=theirs.fileno(), pid=os.getpid())
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return process, ours


def begin(parent_pid: int) -> None:
    """The first thing that `main` does: end with the parent, and print among the messages, not into the run's output.

    Where it is not Linux, the closed channel ends it.
    """
    end_with(parent_pid)
    os.dup2(2, 1)


def end_with(parent_pid: int) -> None:
    """Have Linux kill this process when its parent dies, however hard."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)


@contextlib.contextmanager
def environment_restored(*names: str) -> Iterator[None]:
    """On exit these environment variables, or all of them where none is named, are what they were on entry."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in names or os.environ.keys() | before.keys():
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


@contextlib.contextmanager
def stop_signals_handled(handle: Callable[[signal.Signals], object]) -> Iterator[None]:
    """The running event loop calls `handle` for SIGINT, SIGTERM and, unless `nohup` has it ignored, SIGHUP; on exit
    the handlers from before are back. Outside the main thread, where Python allows no handlers, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    came: set[signal.Signals] = set()

    def handle_once_if_hangup(number: signal.Signals) -> None:
        # A terminal that closes sends SIGHUP twice: the kernel does, and the shell.
        if number is not signal.SIGHUP or not came:
            handle(number)
        came.add(number)

    for number in before:
        loop.add_signal_handler(number, handle_once_if_hangup, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # None: installed by C code, and not to be had from Python
                signal.signal(number, handler)


def framed(message: Any) -> bytes:
    """A message as it crosses the channel."""
    return with_header(pickle.dumps(message))


def with_header(pickled: bytes) -> bytes:
    """A message that is pickled already, as it crosses the channel."""
    return HEADER.pack(len(pickled)) + pickled


def receive(channel: socket.socket) -> Any:
    """The next message; None when the other side is gone. Blocks."""
    header = _read(channel, HEADER.size)
    return pickle.loads(_read(channel, HEADER.unpack(header)[0])) if header else None


def _read(channel: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = channel.recv(num_bytes - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


async def receive_async(reader: asyncio.StreamReader) -> Any:
    """The next message; None when the other side is gone."""
    try:
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def kill(process: subprocess.Popen[bytes]) -> int:
    """End a process and what it started, now. Returns its exit code, negative for a signal."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # before it is reaped, while the number is surely its own
    return await asyncio.shield(asyncio.to_thread(process.wait))


def how_it_ended(code: int) -> str:
    """An exit code for people."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
