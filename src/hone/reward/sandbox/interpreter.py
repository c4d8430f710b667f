"""Python interpreter of sandboxed programs, and the files that it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hone.reward.sandbox.base import SandboxUnavailable

_ASK = """
import json, os, sys, sysconfig
paths = sysconfig.get_paths()
print(json.dumps([os.path.realpath(sys.executable), sys.base_prefix, [paths["purelib"], paths["platlib"]]]))
"""
ASK_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Interpreter:
    """A Python with its standard library, and packages where they are asked for."""

    executable: str
    """Absolute, links followed."""
    prefix: str
    """Where its standard library is under."""
    packages: tuple[str, ...] = ()
    """Folders of installed packages that programs may import."""

    @classmethod
    def find(cls, python: str | None) -> Interpreter:
        """This process's Python, standard library alone; or another one by path, with the packages installed for it.

        Raises:
            SandboxUnavailable: the other one does not run.
        """
        if python is None:
            return cls(os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix))
        try:
            asked = subprocess.run(
                [python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxUnavailable(f"the interpreter {python} does not run: {error}") from error
        executable, prefix, packages = json.loads(asked.stdout)
        return cls(executable, os.path.realpath(prefix), tuple(dict.fromkeys(packages)))

    @property
    def command(self) -> tuple[str, ...]:
        """Its start, without user settings: no site packages, no working directory on the path, no files written."""
        return (self.executable, "-P", "-s", "-S", "-B")

    @cached_property
    def folders(self) -> tuple[str, ...]:
        """Folders and files that a sandbox must show, read-only, each once and none below another."""
        needed = [self.executable, *self.packages, "/usr/lib", "/usr/lib64", "/lib", "/lib64"]
        needed += [f"{self.prefix}/lib", f"{self.prefix}/lib64"]
        shown: list[str] = []
        for path in sorted(dict.fromkeys(needed), key=lambda path: len(Path(path).parts)):
            real_or_link = os.path.lexists(path)
            if real_or_link and not any(Path(path).is_relative_to(other) for other in shown):
                shown.append(path)
        return tuple(shown)
