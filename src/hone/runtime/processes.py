"""Process-wide settings that are set or restored: the signal of a dying parent, the environment, signal handlers, the
garbage collector; and work that is done together, or that a stop interrupts.

Imports nothing heavy, because worker processes import it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

_PR_SET_PDEATHSIG = 1
T = TypeVar("T")


def end_with(parent_pid: int) -> None:
    """Have Linux kill this process when its parent dies, however hard."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)


def own_command() -> str:
    """`hone`, or the path that it was called by where a shell would not find it, for commands that users copy."""
    called = sys.argv[0]
    if Path(called).name == "hone" and shutil.which("hone") is None:
        return shlex.quote(called)
    return "hone"


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


YOUNG_OBJECTS = 50_000
"""Objects made before a collection of the young generation: a step of a large run makes hundreds of thousands, all of
which live until it ends."""


@contextlib.contextmanager
def spared_collector() -> Iterator[None]:
    """Leave what exists now out of collections.

    With torch and Transformers imported that is a million objects, and each full collection would stop the process for
    300 ms to look at them.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order, begun in that order. The first failure cancels the rest."""
    async with asyncio.TaskGroup() as tasks:
        begun = [tasks.create_task(one) for one in work]
    return [task.result() for task in begun]


def retrieved(ended: asyncio.Future[Any]) -> None:
    """Callback that marks an exception as retrieved: what waited may be gone, and asyncio warns of exceptions that are
    never read."""
    if not ended.cancelled():
        ended.exception()


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> asyncio.Future[T] | None:
    """`work` once it is done, its `result()` still to be asked for; or None, with `work` cancelled, when `stop` is set
    first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working if working.done() else None
    finally:
        stopping.cancel()
        working.cancel()  # of no effect on what is done
