"""Log files of services: their last lines, and new lines as they are written."""

from __future__ import annotations

from pathlib import Path

TAIL_LINES = 50
_TAIL_BYTES = 64 << 10
EXCERPT_LINES, EXCERPT_REFILL_S = 8, 5.0
"""Lines of a log that are shown at once, and how long until one more is."""


def last_lines(path: Path, *, since: int = 0, count: int = TAIL_LINES) -> list[str]:
    """The last lines of a log, none of them written before byte `since`."""
    try:
        with path.open("rb") as log:
            log.seek(max(since, path.stat().st_size - _TAIL_BYTES))
            return log.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []


class Follower:
    """Reads what is appended to a log, whole lines at a time."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        """Begins at the end of what is there, or at its start."""
        self._path = path
        self._position = path.stat().st_size if path.exists() and not from_start else 0

    def new_lines(self) -> list[str]:
        """Lines that were finished since the last call; at most 64 KiB of them, the rest comes next."""
        try:
            with self._path.open("rb") as log:
                log.seek(self._position)
                data = log.read(_TAIL_BYTES)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _TAIL_BYTES else 0)  # or one very long line
        self._position += end
        return data[:end].decode("utf-8", "replace").splitlines()


class Excerpt:
    """A log thinned for the console: rare lines are all shown, of a line per request only one now and then."""

    def __init__(self, path: Path) -> None:
        self._follower = Follower(path)
        self._allowance, self._seen_at = float(EXCERPT_LINES), 0.0
        self._left_out = 0

    def new_lines(self, now_s: float) -> list[str]:
        """Which of several new lines to show."""
        refilled = self._allowance + (now_s - self._seen_at) / EXCERPT_REFILL_S
        self._allowance, self._seen_at = min(float(EXCERPT_LINES), refilled), now_s
        shown: list[str] = []
        for line in self._follower.new_lines():
            if self._allowance >= 1:
                self._allowance -= 1
                shown += [*self.left_out(), line]
            else:
                self._left_out += 1
        return shown

    def left_out(self) -> list[str]:
        """A line about those that were not shown since the last such line, if there were any."""
        count, self._left_out = self._left_out, 0
        return [f"... {count} more line{'' if count == 1 else 's'} in its log"] if count else []
