"""A bound on restarts within any hour, and waits that double up to half a minute."""

from hone.runtime.backoff import Restarts


def test_waits_double_and_the_bound_is_kept():
    restarts = Restarts(9, clock=lambda: 0.0)
    waits = [restarts.next_wait_s() for _ in range(10)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, None] and restarts.count == 9


def test_an_hour_later_it_may_be_started_again():
    now = 0.0
    restarts = Restarts(1, clock=lambda: now)
    assert restarts.next_wait_s() == 0.5
    now = 3599.0
    assert restarts.next_wait_s() is None
    now = 3601.0
    assert restarts.count == 0 and restarts.next_wait_s() == 0.5
