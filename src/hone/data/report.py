"""Row counts of a data source: read, kept, dropped, malformed; and when malformed rows end the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hone.config.run import DataSection
from hone.data.sources import BadRow, SourceRow
from hone.errors import DataError


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

    def __str__(self) -> str:
        text = f"{self.source}: {self.kept:,} of {self.read:,} rows"
        if self.too_long:
            text += f"; {self.too_long:,} dropped, longer than {self.max_tokens} tokens"
            text += f" (longest: {self.longest_tokens})"
        if self.bad:
            text += f"; {self.bad:,} malformed rows skipped (first: {self.first_bad[0]})"
        return text


class Tally:
    """Counter of one pass over one source. `data.on_bad_row` decides about malformed rows."""

    def __init__(self, data: DataSection, source: str, *, max_tokens: int) -> None:
        self.data, self.source, self.max_tokens = data, source, max_tokens
        self.read = self.kept = self.too_long = self.longest = 0
        self.bad: list[str] = []

    def rows(self, found: Iterable[SourceRow | BadRow]) -> Iterator[SourceRow]:
        """The rows that could be read, all of them counted."""
        for row in found:
            self.read += 1
            if isinstance(row, BadRow):
                self.reject(f"{row.where}: {row.problem}")
            else:
                yield row

    def fits(self, num_tokens: int) -> bool:
        """Whether a row is short enough; one that is not is counted."""
        self.longest = max(self.longest, num_tokens)
        self.too_long += num_tokens > self.max_tokens
        return num_tokens <= self.max_tokens

    def reject(self, what: str) -> None:
        """Count a malformed row. Raises DataError when the run file does not allow (so many of) them."""
        self.bad.append(what)
        if self.data.on_bad_row == "error":
            raise DataError(f"{what}. Fix the row, or set data.on_bad_row=skip.")
        if len(self.bad) > self.data.max_bad_rows:
            first = "\n  ".join(self.bad[:5])
            raise DataError(
                f"{self.source}: {len(self.bad)} malformed rows after {self.read} read, more than data.max_bad_rows "
                f"({self.data.max_bad_rows}). The first:\n  {first}"
            )

    def report(self) -> LoadReport:
        return LoadReport(
            source=self.source, read=self.read, kept=self.kept, too_long=self.too_long, longest_tokens=self.longest,
            max_tokens=self.max_tokens, bad=len(self.bad), first_bad=tuple(self.bad[:5]),
        )  # fmt: skip


def nothing_left(report: LoadReport) -> str:
    """The message for a source that yields nothing to train on."""
    if report.read == 0:
        return f"{report.source}: holds no rows (or `rows` selects none of them)"
    return f"{report}. No row is left: raise data.max_prompt_tokens, or fix the rows."
