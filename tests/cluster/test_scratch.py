"""Folders that are gone with their process."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from hone.runtime.scratch import Scratch

MAKE = """
import sys, time
from hone.runtime.scratch import Scratch
print(Scratch("toy-").path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def aged(folder):
    os.utime(folder, (0, 0))


def test_a_folder_goes_with_its_process_and_a_killed_one_leaves_it_to_the_next(temporary):
    with subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.PIPE, text=True) as other:
        theirs = temporary / other.stdout.readline().strip()
        (theirs / "socket").write_text("")
        aged(theirs)
        mine = Scratch("toy-")
        assert theirs.is_dir(), "its owner lives"
        other.send_signal(signal.SIGKILL)
    aged(theirs)
    again, different = Scratch("toy-"), Scratch("other-")
    assert not theirs.exists() and mine.path.is_dir()
    for folder in (mine, again, different):
        folder.remove()
    assert not list(temporary.iterdir())


def test_a_folder_that_was_just_made_is_left_alone(temporary):
    young, old = temporary / "toy-young", temporary / "toy-old"
    young.mkdir()
    old.mkdir()
    aged(old)
    Scratch("toy-").remove()
    assert young.is_dir() and not old.exists()
