"""Atomic, durable file writes: files and folders survive kills and power cuts. And the folder of what Hone keeps for a
user from run to run.

A kill at any moment leaves the old file or the new one, never a part. So does a power cut, because the new one is
synced before it takes the name; a rename alone may reach the disk before the bytes do.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

ASIDE = ".new"
"""Suffix of temporary files that a kill may leave behind."""
_BLOCK_BYTES = 1 << 16
SET_ASIDE = "set-aside"
"""Folder for damaged files of a run."""


def write_whole(path: Path, text: str, *, suffix: str = ASIDE) -> None:
    """Replace a file, or make it, in one step. Raises OSError, which names it; the old one is untouched then.

    Args:
        suffix: of the temporary file beside it.
    """
    aside = path.with_name(path.name + suffix)
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a full disk names no file
        raise
    aside.replace(path)
    sync(path.parent)


def state_folder() -> Path:
    """$XDG_STATE_HOME/hone, else ~/.local/state/hone. It may not exist yet."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hone"


def write_user_state(path: Path, text: str) -> None:
    """Replace a file under `state_folder`; of several processes at once the last one stays. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text, suffix=f".{os.getpid()}{ASIDE}")


def sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder and those it is in, on the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def set_aside(run_folder: Path, path: Path, why: str) -> str:
    """Move something damaged in a run's folder out of the way. Returns the warning to show."""
    target, number = run_folder / SET_ASIDE / path.name, 1
    while os.path.lexists(target):
        number += 1
        target = target.with_name(f"{path.name}.{number}")
    target.parent.mkdir(exist_ok=True)
    path.rename(target)
    return f"{path} {why}: moved to {target}"


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap | bytes]:
    """A file's bytes to search in, without reading them all; none where it is empty or not there."""
    size = path.stat().st_size if path.exists() else 0
    if not size:
        yield b""
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as text:
        yield text


def whole_lines(path: Path, *, last_bytes: int | None = None) -> Iterator[bytes]:
    """The whole lines of a file; none where it does not exist. A kill may have torn the last one, which is left out.

    Args:
        last_bytes: only those in so much of its end.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        skipped = 0 if last_bytes is None else max(0, path.stat().st_size - last_bytes)
        lines.seek(skipped)
        if skipped:
            lines.readline()
        yield from (line for line in lines if line.endswith(b"\n"))


def line_start(file: BinaryIO, end: int) -> int:
    """Where the line begins that byte `end` of a file is in. Reads backwards, and no more than that line."""
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
