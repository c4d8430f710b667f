"""Processes that form one gloo process group and do what a test asks of them, all alike."""

import os
import select
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from hone.runtime.worker_pool import framed, receive, spawn

GROUP_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 240.0


class Gang:
    """`size` processes; `gang(function, *args)` calls the function in each and returns what each one returned.

    The function is known by its module and name; arguments and results are pickled. None outlives this process.
    """

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gang")
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}):
            self._members: list[tuple[subprocess.Popen[bytes], socket.socket]] = [spawn(__name__) for _ in range(size)]
        for rank, (_, channel) in enumerate(self._members):
            channel.sendall(framed((rank, size, f"file://{Path(self._folder.name) / 'meet'}")))

    def __call__(self, function: Callable[..., Any], *args: Any, **named: Any) -> list[Any]:
        for _, channel in self._members:
            channel.sendall(framed((function, args, named)))
        until = time.monotonic() + ANSWER_TIMEOUT_S
        answers = []
        for rank, (_, channel) in enumerate(self._members):
            ready, _, _ = select.select([channel], [], [], max(until - time.monotonic(), 0))
            assert ready, f"rank {rank} has not answered"
            answers.append(receive(channel))
        failed = [answer for answer in answers if answer is None or isinstance(answer, Failure)]
        assert not failed, "\n".join(map(str, failed))
        return answers

    def close(self) -> None:
        for process, channel in self._members:
            channel.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._folder.cleanup()


class Failure(str):
    """The traceback of a member."""


def main(channel: socket.socket) -> None:
    """A member's life, until the channel closes."""
    import torch

    from hone.train.mesh import process_group

    torch.set_num_threads(1)
    rank, size, address = receive(channel)
    cpu = torch.device("cpu")
    with process_group(cpu, rank=rank, world_size=size, address=address, timeout_s=GROUP_TIMEOUT_S):
        while (task := receive(channel)) is not None:
            function, args, named = task
            try:
                answer = function(*args, **named)
            except Exception:
                answer = Failure(traceback.format_exc())
            channel.sendall(framed(answer))
