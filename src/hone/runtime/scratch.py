"""Temporary folders removed with the process that made them: at its end, or, if it was killed, when the next process
makes one of the same kind.

A folder belongs to the process that holds its lock, which the kernel takes away from a process that ends in any way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_YOUNG_S = 60.0
"""A folder may have been made and not be locked yet."""


class Scratch:
    """A new empty folder of this process.

    Args:
        kind: its name begins so. Folders of that kind whose owner is gone are removed.
    """

    def __init__(self, kind: str) -> None:
        _sweep(kind)
        self.path = Path(tempfile.mkdtemp(prefix=kind))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it with what is in it. To be called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(kind: str) -> None:
    """Remove this user's folders of that kind without a lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{kind}*"):
        with contextlib.suppress(OSError):  # another user's, or another process removed it first
            found = folder.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _YOUNG_S:
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
