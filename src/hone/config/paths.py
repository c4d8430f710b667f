"""Whether something is at a path that a user wrote. A text that cannot be a path (too long, a NUL) names nothing."""

from __future__ import annotations

from pathlib import Path


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
