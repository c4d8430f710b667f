"""Row counts of a data source: read, kept, dropped, malformed; when malformed rows end the run; and progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from hone.config.run import DataSection
from hone.errors import DataError

FIRST_LINE_S, LINE_EVERY_S = 2.0, 10.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Row counts of one source; `str()` is a log line."""

    source: str
    read: int
    kept: int
    too_long: int
    """Rows dropped because they have more than `max_tokens` tokens."""
    longest_tokens: int
    """Length of the longest row seen, dropped ones included."""
    max_tokens: int
    """Of a prompt; where whole conversations are read, of these."""
    bad: int
    """Malformed rows skipped."""
    first_bad: tuple[str, ...]
    """The first few of them, with the reason."""
    of: int | None = None
    """Rows of the source, where only a sample of them was read."""

    def __str__(self) -> str:
        text = f"{self.source}: {self.kept:,} of {self.read:,} rows"
        if self.of is not None:
            text += f", a sample of the {self.of:,} there are"
        if self.too_long:
            text += f"; {self.too_long:,} dropped, longer than {self.max_tokens} tokens"
            text += f" (longest: {self.longest_tokens})"
        if self.bad:
            text += f"; {self.bad:,} malformed rows skipped (first: {self.first_bad[0]})"
        return text


class Tally:
    """Counter of one pass over one source. `data.max_bad_rows` bounds malformed rows."""

    def __init__(self, data: DataSection, source: str, *, max_tokens: int) -> None:
        self.data, self.source, self.max_tokens = data, source, max_tokens
        self.read = self.kept = self.too_long = self.longest = 0
        self.bad: list[str] = []
        self.of: int | None = None
        """Rows of the source, where only a sample of them is read."""

    def fits(self, num_tokens: int) -> bool:
        """Whether a row is short enough; one that is not is counted."""
        self.longest = max(self.longest, num_tokens)
        self.too_long += num_tokens > self.max_tokens
        return num_tokens <= self.max_tokens

    def reject(self, what: str) -> None:
        """Count a malformed row. Raises DataError beyond the number that the run file allows."""
        self.bad.append(what)
        if not self.data.max_bad_rows:
            raise DataError(f"{what}. Fix the row, or let data.max_bad_rows of them be skipped.")
        if len(self.bad) > self.data.max_bad_rows:
            first = "\n  ".join(self.bad[:5])
            raise DataError(
                f"{self.source}: {len(self.bad)} malformed rows after {self.read} read, more than data.max_bad_rows "
                f"({self.data.max_bad_rows}). The first:\n  {first}"
            )

    def report(self) -> LoadReport:
        return LoadReport(
            source=self.source, read=self.read, kept=self.kept, too_long=self.too_long, longest_tokens=self.longest,
            max_tokens=self.max_tokens, bad=len(self.bad), first_bad=tuple(self.bad[:5]), of=self.of,
        )  # fmt: skip


class LoadProgress:
    """Lines about a pass over many rows, the first after two seconds, then one every ten."""

    def __init__(self, what: str, say: Callable[[str], None], *, total: int | None = None, unit: str = "rows") -> None:
        self._what, self._say, self._total, self._unit = what, say, total, unit
        self._started = time.monotonic()
        self._next = self._started + FIRST_LINE_S

    def at(self, count: int) -> None:
        """`count` rows are done."""
        now = time.monotonic()
        if now >= self._next:
            share = f" of {self._total:,} {self._unit} ({count / self._total:.0%})" if self._total else f" {self._unit}"
            self._say(f"{self._what}: {count:,}{share}, {now - self._started:.0f} s")
            self._next = now + LINE_EVERY_S


def on_stderr(line: str) -> None:
    """Shows a line about loading data where no run shows it."""
    print(line, file=sys.stderr, flush=True)
