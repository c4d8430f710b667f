"""Where a run comes from: the command line that started it, the commit of its run file, and the machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from hone.config.messages import is_secret_key, is_secret_value
from hone.devices import nvidia_smi

GIT_TIMEOUT_S = 10.0


def provenance(folder: Path, words: Sequence[str] | None = None) -> dict[str, str]:
    """`command` and `hardware`, and `git_commit` where the folder is of a repository.

    Args:
        folder: of the run file.
        words: of the command line; None: this process's.
    """
    found = {"command": shlex.join(_shown(word) for word in (sys.argv if words is None else words))}
    parts = [f"{len(os.sched_getaffinity(0))} CPU cores", f"{psutil.virtual_memory().total / 2**30:.0f} GiB"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no such GPU, or its driver does not answer
        parts += [f"{count} x {name}" for name, count in Counter(nvidia_smi("name").splitlines()).items()]
    found["hardware"] = ", ".join(parts)
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
