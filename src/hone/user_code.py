"""Modules of the user's: importing one by name or from a file, and saying in a line what it raised.

Shared by the processes in which rewards (`reward/resolve.py`) and environments (`rollout/env_worker.py`) live; the run
itself never imports what a user wrote.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DETAIL_CHARACTERS = 200
"""Of what is kept of a message: details are stored with each sample."""


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
    """`ValueError: message`, on one line, bounded."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:DETAIL_CHARACTERS]
