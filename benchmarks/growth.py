"""How much a long run's records grow, and what resuming with them costs, from a synthetic run.

    python benchmarks/growth.py --updates 100000

Writes the events and metrics of N updates of 32 groups through the run's own sinks, then opens them again as a
resumed run does, audits them, and makes the pages of `hone ui`: of the run (`report.html` is made of the same) against
the same from every line, of the list and of a comparison. Processor seconds, since both sides read from memory.
`one line each` is what the same events would take unmerged. Memory is the largest that Python held while it resumed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from hone.observe.events import MOST_WAITING, EventLog
from hone.observe.report import report_data
from hone.observe.sinks import MetricsFile
from hone.run.audit import audit_file
from hone.ui.server import Runs

GROUPS = 32
METRICS = {f"train/synthetic_metric_{number}": 0.123456789 * number for number in range(60)}


class Run:
    """Events and metrics of a synchronous run whose groups finish out of order."""

    def __init__(self, folder: Path) -> None:
        self.unmerged_bytes = self._waiting = 0
        self.events = EventLog(folder / "events.jsonl", resume_bytes=None, warn=print)
        self.metrics = MetricsFile(folder / "metrics.jsonl", None)

    def tell(self, kind: str, **fields: object) -> None:
        self.unmerged_bytes += (
            len(json.dumps({"at": 1732283105.1234, "kind": kind, **fields}, separators=(",", ":"))) + 1
        )
        self.events.write(kind, **fields)
        self._waiting += 1

    def update(self, step: int) -> None:
        prompts = list(range(GROUPS * (step - 1), GROUPS * step))
        for prompt in prompts:
            self.tell("group_started", prompts=[prompt])
        for late in range(4):  # four tenths of a second, so four lines
            for prompt in prompts[late::4]:
                self.tell("group_finished", prompts=[prompt], versions=(step - 1, step - 1))
            self.tell("evaluated", step=late)
        if self._waiting > MOST_WAITING // 2:  # a real run is slower than the thread that writes
            self.events.position()
            self._waiting = 0
        self.tell("training", step=step)
        self.tell("trained", step=step, prompts=prompts, oldest=step - 1)
        self.tell("published", version=step)
        self.metrics.write("rl", step, METRICS)


def resumed(folder: Path) -> tuple[float, float]:
    """Seconds and MiB that opening the records again takes."""
    positions = [(folder / name).stat().st_size for name in ("metrics.jsonl", "events.jsonl")]
    tracemalloc.start()
    started = time.perf_counter()
    MetricsFile(folder / "metrics.jsonl", positions[0]).close()
    EventLog(folder / "events.jsonl", resume_bytes=positions[1], warn=print).close()
    seconds, peak = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 2**20


def pages(folder: Path) -> dict[str, float]:
    """Processor seconds that the data of each page of the run take."""
    runs = Runs(folder)
    parts: dict[str, Callable[[], object]] = {
        "run": lambda: runs.run("."),
        "run, every line": lambda: report_data(folder, max_lines=None),
        "list": runs.list,
        "comparison": lambda: runs.comparison(["."]),
    }
    found: dict[str, float] = {}
    for name, make in parts.items():
        started = time.process_time()
        make()
        found[name] = time.process_time() - started
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=2000)
    updates = parser.parse_args().updates
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / ".identity.json").write_text(json.dumps({"run_file": "run.yaml", "config": {}}))
        run = Run(folder)
        run.tell("stage", stage="rl", steps=updates)
        run.tell("started", step=0, permits=GROUPS, max_staleness=0)
        run.tell("published", version=0)
        for step in range(1, updates + 1):
            run.update(step)
        run.events.close()
        run.metrics.close()
        events, metrics = ((folder / name).stat().st_size for name in ("events.jsonl", "metrics.jsonl"))
        print(f"{updates:,} updates: metrics.jsonl {metrics / 2**20:,.1f} MiB")
        thousandth, share = 1000 / updates / 2**20, events / run.unmerged_bytes
        print(
            f"events.jsonl {events / 2**20:,.1f} MiB, {events * thousandth:.2f} per 1,000 updates; "
            f"one line each {run.unmerged_bytes * thousandth:.2f}: {share:.2f} of it"
        )
        print("pages, processor s: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in pages(folder).items()))
        seconds, mib = resumed(folder)
        print(f"resuming: {seconds:.3f} s, {mib:.2f} MiB")
        started = time.perf_counter()
        found = audit_file(folder / "events.jsonl")
        seconds = time.perf_counter() - started
        print(f"audit: {seconds:.1f} s, {found.updates:,} updates, {len(found.violations)} violations")


if __name__ == "__main__":
    main()
