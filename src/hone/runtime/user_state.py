"""What Hone remembers for a user, from run to run; runs of that user may write it at once."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """$XDG_STATE_HOME/hone, else ~/.local/state/hone. It may not be there yet."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hone"


def write_user_state(path: Path, text: str) -> None:
    """Replace a file of it: of several writers the last one stays. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.new")
    aside.write_text(text)
    aside.replace(path)
