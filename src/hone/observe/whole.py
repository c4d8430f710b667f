"""Files that are replaced as a whole: a kill at any moment leaves the old one or the new one, never a part."""

from __future__ import annotations

from pathlib import Path

ASIDE = ".new"
"""What a kill may leave beside a file: its name and this."""


def write_whole(path: Path, text: str) -> None:
    """Replace a file, or make it, in one step. Raises OSError; the old one is untouched then."""
    aside = path.with_name(path.name + ASIDE)
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
