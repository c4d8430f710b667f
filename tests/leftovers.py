"""What a test may not leave behind in its process, because it would reach the tests after it."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator

ONCE_PER_PROCESS = {
    "PYTEST_CURRENT_TEST",  # pytest's own
    "TORCHINDUCTOR_CACHE_DIR",  # these two are PyTorch's own, set when its compiler is first imported
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "GOMP_SPINCOUNT",  # the next three: Hone's defaults for its process, read once when a library loads
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "LRU_CACHE_CAPACITY",
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def leaves_nothing(name: str) -> Iterator[None]:
    """Fail, naming `name`, where the environment, the working directory, signal handlers or the event loop differ at
    the end from what they were at the beginning. All is put back, so that one culprit is named and not the next."""
    before = state()
    yield
    left = [f"{what}: {old!r} -> {new!r}" for what, old, new in changes(before, state())]
    restore(before)
    assert not left, f"{name} left behind in this process: " + "; ".join(left)


def state() -> dict[str, dict]:
    return {
        "environment": {name: value for name, value in os.environ.items() if name not in ONCE_PER_PROCESS},
        "process": {"working directory": working_directory(), "event loop": default_loop()},
        "signal": {number.name: signal.getsignal(number) for number in SIGNALS},
    }


def changes(before: dict[str, dict], after: dict[str, dict]) -> Iterator[tuple[str, object, object]]:
    for kind in before:
        for name in before[kind].keys() | after[kind].keys():
            old, new = before[kind].get(name), after[kind].get(name)
            if old is not new and old != new:
                yield f"{kind} {name}", old, new


def restore(before: dict[str, dict]) -> None:
    for name in os.environ.keys() - before["environment"].keys() - ONCE_PER_PROCESS:
        del os.environ[name]
    os.environ.update(before["environment"])
    os.chdir(before["process"]["working directory"])
    if default_loop() is not before["process"]["event loop"]:
        asyncio.set_event_loop(before["process"]["event loop"])
    if threading.current_thread() is threading.main_thread():
        for name, handler in before["signal"].items():
            if handler is not None:
                signal.signal(signal.Signals[name], handler)


def working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def default_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that `get_event_loop` would hand out on this thread, without making one."""
    policy = asyncio.get_event_loop_policy()
    return getattr(getattr(policy, "_local", None), "_loop", None)
