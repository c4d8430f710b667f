"""`make` finds a Python by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAILS = "echo 'pyenv: command not found' >&2; exit 127"
WORKS = f'exec {sys.executable} "$@"'
OLD = "exit 1  # what the probe says of Python 3.10"


@pytest.mark.parametrize(
    ("pythons", "found"),
    [
        ({"python3.11": FAILS, "python3.12": WORKS}, "python3.12 -m venv"),
        ({"python3.11": OLD, "python3": WORKS}, "python3 -m venv"),
        ({}, '[ -n "" ] || { echo "Hone needs Python 3.11, 3.12 or 3.13'),
    ],
)
def test_make_takes_the_first_python_that_runs_and_is_new_enough(tmp_path, pythons, found):
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{pythons.get(name, FAILS)}\n")
        program.chmod(0o755)
    command = ["make", "-n", "-B", "setup", "VENV=.venv-x"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and found in done.stdout, done.stdout + done.stderr


def test_the_acceptance_run_installs_nothing_into_an_environment_of_the_user_s():
    command = ["make", "--no-print-directory", "-n", "-B", "gpu", "VENV=/opt/mine"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)
    (line,) = done.stdout.splitlines()
    assert "/opt/mine/bin/python -m hone.tools.acceptance" in line and f"PYTHONPATH={ROOT}/src" in line
