import threading

import pytest

from hone.errors import HoneError
from hone.observe.background import Background


def test_jobs_run_in_order_and_drain_waits_for_them():
    done = []
    background = Background()
    for i in range(50):
        background.submit(lambda i=i: done.append(i))
    background.drain()
    assert done == list(range(50))
    background.close()


def test_a_failure_of_ours_reaches_the_caller_once():
    def fail():
        raise KeyError("ours")

    background = Background()
    background.submit(fail)
    with pytest.raises(KeyError, match="ours"):
        background.drain()
    background.close()


def test_a_writer_that_hangs_ends_in_a_message_not_in_a_wait():
    release = threading.Event()
    background = Background(capacity=1, deadline_s=0.05)
    background.submit(release.wait)
    with pytest.raises(HoneError, match=r"taken nothing for 0\.05 s"):
        for _ in range(3):
            background.submit(lambda: None)
    with pytest.raises(HoneError, match="taken nothing"):
        background.drain()
    with pytest.raises(HoneError, match="taken nothing"):
        background.close()
    release.set()
