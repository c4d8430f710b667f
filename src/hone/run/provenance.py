"""Where a run comes from: the command line that started it and the commit of its run file."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hone.config.messages import is_secret_key, is_secret_value

GIT_TIMEOUT_S = 10.0


def provenance(folder: Path, words: Sequence[str] | None = None) -> dict[str, str]:
    """`command`, and `git_commit` where the folder is of a repository.

    Args:
        folder: of the run file.
        words: of the command line; None: this process's.
    """
    found = {"command": shlex.join(_shown(word) for word in (sys.argv if words is None else words))}
    try:
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return found
    return found | ({"git_commit": done.stdout.strip()} if done.returncode == 0 else {})


def _shown(word: str) -> str:
    key, equals, value = word.partition("=")
    if equals and (is_secret_key(key.rpartition(".")[2]) or is_secret_value(value)):
        return f"{key}=[hidden]"
    return "[hidden]" if is_secret_value(word) else word
