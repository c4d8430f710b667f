"""A service's log file: its last lines, and its new ones as they come."""

from __future__ import annotations

from pathlib import Path

TAIL_LINES = 50
_TAIL_BYTES = 64 << 10


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
