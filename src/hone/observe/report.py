"""report.html: one self-contained page about a run, made from its folder alone. No network is needed to view it.

Reads what the observer wrote (metrics.jsonl, samples/, logs/summary.json, run.yaml) and puts a bounded part of it,
as JSON, into the page `report.html` beside this file. What the model wrote is data in that page, never markup.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

SUMMARY = Path("logs") / "summary.json"


@dataclass
class Summary:
    """What a report needs to know besides metrics and samples; logs/summary.json."""

    title: str
    began_unix_s: float
    versions: Mapping[str, str] = field(default_factory=dict)
    ended_unix_s: float | None = None
    outcome: str = "running, or ended without a word"

    @classmethod
    def begin(cls, folder: Path, *, title: str, versions: Mapping[str, str], resume: bool) -> Summary:
        """A run begins, or continues: then it keeps the time at which it began."""
        summary = cls(title=title, began_unix_s=time.time(), versions=versions)
        if resume and (folder / SUMMARY).exists():
            summary.began_unix_s = cls.read(folder).began_unix_s
        summary._write(folder)
        return summary

    def end(self, folder: Path, outcome: str) -> None:
        self.ended_unix_s, self.outcome = time.time(), outcome
        self._write(folder)

    @classmethod
    def read(cls, folder: Path) -> Summary:
        return cls(**json.loads((folder / SUMMARY).read_text()))

    def _write(self, folder: Path) -> None:
        (folder / SUMMARY).write_text(json.dumps(asdict(self), indent=1))


def write_report(run_folder: Path, *, decode: Callable[[Sequence[int]], str] | None = None) -> Path:
    return run_folder / "report.html"
