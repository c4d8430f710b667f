"""The check that no test leaves anything behind finds what it looks for, names the test, and puts everything back."""

import asyncio
import os
import signal

import pytest
from leftovers import leaves_nothing


def set_a_variable(tmp_path):
    os.environ["LEFT"] = "here"


def change_a_variable(tmp_path):
    os.environ["HOME"] = "/elsewhere"


def remove_a_variable(tmp_path):
    del os.environ["HOME"]


def change_the_folder(tmp_path):
    os.chdir(tmp_path)


def change_to_a_folder_that_goes(tmp_path):
    os.chdir(tmp_path)
    tmp_path.rmdir()


def handle_a_signal(tmp_path):
    signal.signal(signal.SIGTERM, lambda *_: None)


def leave_a_loop(tmp_path):
    asyncio.set_event_loop(asyncio.new_event_loop())


@pytest.mark.parametrize(
    ("leave", "named"),
    [
        (set_a_variable, "environment LEFT: None -> 'here'"),
        (change_a_variable, "environment HOME"),
        (remove_a_variable, "environment HOME"),
        (change_the_folder, "working directory"),
        (change_to_a_folder_that_goes, "working directory"),
        (handle_a_signal, "signal SIGTERM"),
        (leave_a_loop, "event loop"),
    ],
)
def test_it_names_the_culprit_and_puts_all_back(leave, named, tmp_path):
    before = dict(os.environ), os.getcwd(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(AssertionError, match="culprit") as found, leaves_nothing("the culprit"):
        leave(tmp_path)
        loop = asyncio.get_event_loop_policy().get_event_loop() if leave is leave_a_loop else None
    if loop is not None:
        loop.close()
    assert named in str(found.value)
    assert (dict(os.environ), os.getcwd(), signal.getsignal(signal.SIGTERM)) == before


def test_it_says_nothing_of_a_test_that_cleans_up(monkeypatch, tmp_path):
    with leaves_nothing("nobody"), monkeypatch.context() as patch:
        patch.setenv("LEFT", "here")
        patch.chdir(tmp_path)
        asyncio.run(asyncio.sleep(0))
