"""Access log: a line for errors and requests with an id, sums for the others.

A trainer asks hundreds of times a second, for days. Of each route the first good answer has a line; those that follow
within half a minute are summed up at its end.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

log = logging.getLogger("hone.serve")


@dataclass(frozen=True, slots=True)
class Answered:
    """One request, as far as the log is concerned."""

    what: str
    """Method, route and status."""
    elapsed_ms: float
    request_id: str
    traceparent: str
    """Empty when the sender gave none."""
    is_remarkable: bool
    """It has a line in any case."""

    def line(self) -> str:
        trace = f" traceparent={self.traceparent}" if self.traceparent else ""
        return f"{self.what} {self.elapsed_ms:.1f} ms request={self.request_id}{trace}"


class AccessLog:
    """Access log of one server, in its event loop.

    Args:
        sum_s: seconds of good answers in one line.
    """

    def __init__(self, sum_s: float = 30.0) -> None:
        self._sum_s = sum_s
        self._more: dict[str, list[float]] = {}
        """Milliseconds of each good answer since the first, by what was asked."""

    def write(self, answered: Answered) -> None:
        if answered.is_remarkable:
            log.info(answered.line())
        elif answered.what in self._more:
            self._more[answered.what].append(answered.elapsed_ms)
        else:
            log.info(answered.line())
            self._gather(answered.what)

    def _gather(self, what: str) -> None:
        self._more[what] = []
        asyncio.get_running_loop().call_later(self._sum_s, self._sum, what)

    def _sum(self, what: str) -> None:
        if elapsed_ms := sorted(self._more.pop(what)):
            log.info("%s", sum_line(what, elapsed_ms, self._sum_s))
            self._gather(what)


def sum_line(what: str, elapsed_ms: list[float], sum_s: float) -> str:
    """What several answers were like.

    Args:
        elapsed_ms: ascending, at least one.
        sum_s: seconds in which they were given.
    """
    number = len(elapsed_ms)
    half, most = elapsed_ms[number // 2], elapsed_ms[int(0.95 * (number - 1))]
    return (
        f"{what} {number:,} more in {sum_s:g} s: p50 {half:.1f} ms, p95 {most:.1f} ms, longest {elapsed_ms[-1]:.1f} ms"
    )
