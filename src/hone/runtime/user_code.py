"""Import of user modules by name or from a file, and one-line summaries of what they raise.

Used in the worker processes of rewards (`reward/resolve.py`) and environments (`rollout/env_pool.py`); the run itself
never imports what a user wrote.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType

DETAIL_CHARACTERS = 240
"""Characters kept of a message: details are stored with each sample."""
_DESCRIPTION_CHARACTERS = DETAIL_CHARACTERS - len("raised ")
_NOT_THE_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    "<",
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
"""How files begin whose frames are left out: ours, frozen modules, Python's own, installed packages."""


def import_module(place: str, kind: str) -> ModuleType:
    """The module of a name, or of the path of a `.py` file.

    Args:
        kind: what it is imported as, so that the names of two kinds never meet.
    Raises:
        Whatever the module raises while it is imported.
    """
    if not place.endswith(".py"):
        return importlib.import_module(place)
    name = f"hone_{kind}_{Path(place).stem}"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None  # always so for a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> str:
    """`ValueError: message (rewards.py:9 in score, rewards.py:4 in parse: int(text))`, on one line, bounded.

    Of the traceback only the user's own lines are shown, the last three of them. What UTF-8 cannot hold is escaped.
    """
    message = " ".join(_message(error).split())
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_USERS) and frame.name not in ("<listcomp>", "<genexpr>")
    ][-3:]
    where = ""
    if frames:
        calls = ", ".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames)
        shown = f"{calls}: {frames[-1].line or ''}"[: DETAIL_CHARACTERS // 2]
        where = f" ({shown})"
    return f"{type(error).__name__}: {message}"[: _DESCRIPTION_CHARACTERS - len(where)] + where


def _message(error: BaseException) -> str:
    try:
        return str(error).encode("utf-8", "backslashreplace").decode()
    except Exception as failure:  # boundary: an exception's own code may raise anything
        return f"(its message cannot be had: {type(failure).__name__})"
