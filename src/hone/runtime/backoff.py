"""Restart limits: a bound on restarts within an hour, and exponential back-off."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 3600.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0


class Restarts:
    """A bound on restarts within an hour; each wait is twice the one before.

    Args:
        bound: restarts within any hour.
        clock: seconds.
        first_wait_s: before the first restart within an hour.
    """

    def __init__(
        self, bound: int, clock: Callable[[], float] = time.monotonic, *, first_wait_s: float = FIRST_WAIT_S
    ) -> None:
        self.bound, self._first_wait_s = bound, first_wait_s
        self.total = 0
        """Restarts counted so far."""
        self._clock = clock
        self._times: deque[float] = deque()

    @property
    def count(self) -> int:
        """Restarts within the last hour."""
        while self._times and self._clock() - self._times[0] > WINDOW_S:
            self._times.popleft()
        return len(self._times)

    def next_wait_s(self) -> float | None:
        """Count a restart, and return the wait before it; None beyond the bound."""
        if self.count >= self.bound:
            return None
        self._times.append(self._clock())
        self.total += 1
        return min(self._first_wait_s * 2 ** (len(self._times) - 1), LONGEST_WAIT_S)
