"""Console output of a run: a live view on a terminal, plain lines elsewhere, or only warnings (`console_figures.py`).

Also logs/training.log, which keeps the plain lines. The live view draws on its own thread from a snapshot, so logging
never waits for a terminal; plain output never contains control characters. A console that is gone (a closed pipe or
terminal, a full disk) ends nothing but the output there.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console as RichConsole
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from hone.observe.console_figures import ConsoleState, plain_line, render, spread
from hone.types import Group

T = TypeVar("T")

NUM_MESSAGES = 5
"""Last messages in the live view."""
REFRESHES_PER_S = 2
PLAIN_INTERVAL_S = 2.0


class View:
    """A view of a run, empty: others show some of it."""

    def update(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        pass

    def begin(self, stage: str, total_steps: int) -> None:
        pass

    def show(self, groups: Sequence[Group]) -> None:
        pass

    def say(self, message: str) -> None:
        pass

    def warn(self, message: str) -> None:
        pass

    def close(self, message: str) -> None:
        pass


class Lasting:
    """A text stream whose first failed write sends it, and all that is written there later, to /dev/null."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._kept(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._kept(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _kept(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except OSError:
            # The descriptor is replaced: what the stream has in its buffer would fail again, at the latest at exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            return work()


class QuietView(View):
    """Only warnings, on stderr."""

    def warn(self, message: str) -> None:
        print(f"warning: {message}", file=Lasting(sys.stderr), flush=True)


class PlainView(View):
    """One line of text at most every `PLAIN_INTERVAL_S`; the first and the last figures always show."""

    def __init__(self, title: str, total_steps: int, stream: TextIO) -> None:
        self._state, self._stream = ConsoleState(title, total_steps), stream
        self._lock = threading.Lock()
        self._shown_at = -math.inf
        self._pending = False

    def begin(self, stage: str, total_steps: int) -> None:
        with self._lock:
            self._flush()
            self._state.begin(stage, total_steps)
            self._shown_at = -math.inf

    def update(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            self._state.update(stage, step, values)
            self._pending = True
            if time.perf_counter() - self._shown_at >= PLAIN_INTERVAL_S:
                self._flush()

    def say(self, message: str) -> None:
        with self._lock:
            for line in message.splitlines():
                self._print(line)

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}")

    def close(self, message: str) -> None:
        with self._lock:
            self._flush()
        self.say(message)

    def _flush(self) -> None:
        if self._pending:
            self._pending, self._shown_at = False, time.perf_counter()
            self._print(plain_line(self._state))

    def _print(self, text: str) -> None:
        self._write("".join(c if c.isprintable() else " " for c in text))

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LogView(PlainView):
    """logs/training.log: what the plain view shows, each line with the time. A full disk ends nothing else."""

    def __init__(self, path: Path, title: str, total_steps: int, *, resume: bool) -> None:
        """Begins the file anew unless the run is resumed."""
        super().__init__(title, total_steps, sys.stdout)
        self._path = path
        if not resume:
            path.write_text("")

    def _write(self, line: str) -> None:
        with suppress(OSError), self._path.open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


class LiveView(View):
    """The full view, redrawn at most `REFRESHES_PER_S` times a second by rich's own thread."""

    def __init__(self, title: str, total_steps: int, console: RichConsole) -> None:
        self._state = ConsoleState(title, total_steps)
        self._lock = threading.Lock()
        self._messages: deque[Text] = deque(maxlen=NUM_MESSAGES)
        self._final: list[Text] = []
        """Messages since the last figures, all of which stay on the screen at the end."""
        self._console = console
        self._live = Live(console=console, refresh_per_second=REFRESHES_PER_S, get_renderable=self._render)
        self._live.start()

    def begin(self, stage: str, total_steps: int) -> None:
        with self._lock:
            self._state.begin(stage, total_steps)

    def update(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            self._state.update(stage, step, values)
            self._final.clear()

    def show(self, groups: Sequence[Group]) -> None:
        with self._lock:
            self._state.group = max(groups, key=spread, default=None)

    def say(self, message: str) -> None:
        self._add(Text(message))

    def warn(self, message: str) -> None:
        self._add(Text(f"warning: {message}", style="yellow"))

    def _add(self, message: Text) -> None:
        with self._lock:
            self._messages.append(message)
            self._final.append(message)

    def close(self, message: str) -> None:
        with self._lock:
            self._state.group = None
            if len(self._final) > NUM_MESSAGES:
                self._messages = deque(self._final)
        self._live.stop()  # leaves the last view on the screen
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Panel:
        with self._lock:
            return render(self._state, list(self._messages), width=self._console.width)


def open_view(kind: str, title: str, total_steps: int) -> View:
    """The view that `observe.console` names; auto is live on a terminal and plain elsewhere."""
    stdout = cast(TextIO, Lasting(sys.stdout))
    console = RichConsole(file=stdout)
    if kind == "quiet":
        return QuietView()
    if kind == "live" or (kind == "auto" and console.is_terminal and not console.is_dumb_terminal):
        return LiveView(title, total_steps, console)
    return PlainView(title, total_steps, stdout)
