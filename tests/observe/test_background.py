import threading
import time

import pytest

from hone.observe.background import Background


def test_jobs_run_in_order_and_drain_waits_for_them():
    done = []
    background = Background(pytest.fail)
    for i in range(50):
        background.submit(lambda i=i: done.append(i))
    background.drain()
    assert done == list(range(50))
    background.close()


def test_bulk_jobs_leave_room_for_others():
    """While the writer is behind, who submits many large jobs waits, and who submits a small one does not."""
    release, done = threading.Event(), []
    background = Background(pytest.fail, capacity=8)
    background.submit(release.wait)

    def submit_many():
        for number in range(12):
            background.submit(lambda number=number: done.append(number), bulk=True)

    submitting = threading.Thread(target=submit_many)
    submitting.start()
    while background._jobs.qsize() < 5:
        time.sleep(0.001)
    background._wait_s = lambda: 0  # a small job that had to wait would be dropped, with a warning
    for name in "abc":
        background.submit(lambda name=name: done.append(name))
    del background._wait_s
    assert submitting.is_alive()
    release.set()
    submitting.join()
    background.close()
    assert sorted(map(str, done)) == sorted([*map(str, range(12)), *"abc"])


def test_a_failure_of_ours_reaches_the_caller_once():
    def fail():
        raise KeyError("ours")

    background = Background(pytest.fail)
    background.submit(fail)
    with pytest.raises(KeyError, match="ours"):
        background.drain()
    background.close()


def test_a_writer_that_hangs_is_warned_of_and_what_finds_no_place_is_counted():
    release, warned, done, tried = threading.Event(), [], [], 0
    background = Background(warned.append, capacity=1, patience_s=0.05)
    background.submit(release.wait)
    for number in range(4):
        background.submit(lambda number=number: done.append(number))
    background.drain()
    assert len(warned) == 1 and "has taken nothing for 0.05 s" in warned[0]
    background.patience_s = 10.0
    release.set()
    while len(warned) < 2:
        background.submit(lambda: done.append("late"))
        tried += 1
    background.close()
    num_dropped = 3 + tried - done.count("late")
    assert done[0] == 0 and f"take data again; {num_dropped} writes were dropped" in warned[1]
