"""Tests that need something of the machine: without it they skip, and fail where CI=true."""

import os
from typing import NoReturn

import pytest

PYTHON_OF_ALL = "/usr/bin/python3" if os.geteuid() == 0 else None
"""An interpreter for programs without a sandbox: root's own may be in a folder that other users cannot read."""


def needs(what: str, found: object) -> pytest.MarkDecorator:
    """Skip a test where `found` is false; in CI it runs and fails."""
    return pytest.mark.skipif(not found and os.environ.get("CI") != "true", reason=f"needs {what}")


def missing(reason: str) -> NoReturn:
    """End a test because of what this machine lacks. A continuous-integration machine must not lack it."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
