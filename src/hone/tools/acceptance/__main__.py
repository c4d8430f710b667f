"""Runner of the acceptance run: each part in a process of its own within its time, JSON lines, a page, an exit code.

    python -m hone.tools.acceptance                       # every part, the page and the lines in runs/gpu
    python -m hone.tools.acceptance --parts devices,numbers
    python -m hone.tools.acceptance --tiny                # tiny shapes: the same code on a CPU, in a minute

Exit code 0 when every expectation is met, 1 when one is missed. Needs no network and no model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hone.devices import devices_here
from hone.services.process import LocalServiceProcess
from hone.tools.acceptance.figures import Figure, append, page, read_lines
from hone.tools.acceptance.parts import PARTS
from hone.tools.acceptance.runs import last_line

LIMIT_S, TOTAL_S = 480.0, 2400.0


def main(arguments: Sequence[str]) -> int:
    """Run parts; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hone.tools.acceptance", description="The acceptance run of a GPU machine."
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of one part")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="of all parts together")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    found = devices_here("auto")
    options.out.mkdir(parents=True, exist_ok=True)
    lines = options.out / "acceptance.jsonl"
    lines.unlink(missing_ok=True)
    started, is_gpu = time.monotonic(), found.device_type != "cpu"
    for part in parts:
        left_s = started + options.total_s - time.monotonic()
        run_part(part, lines, tiny=options.tiny, limit_s=min(options.limit_s, left_s), is_gpu=is_gpu)
    append(lines, [Figure("all", "total_s", time.monotonic() - started)], is_gpu=is_gpu)
    rows = read_lines(lines)
    title = f"Acceptance run on {found.per_node} {found.resource}{'s' if found.per_node > 1 else ''}"
    (options.out / "acceptance.md").write_text(page(rows, title), "utf-8")
    missed = [row for row in rows if row["holds"] is False]
    for row in missed:
        print(f"missed: {row['part']} {row['figure']} {row['case']}: {row['value']:.4g}, expected {row['expected']}")
    print(f"{options.out / 'acceptance.md'}: {len(rows)} figures, {len(missed)} expectations missed")
    return 1 if missed else 0


def run_part(part: str, lines: Path, *, tiny: bool, limit_s: float, is_gpu: bool) -> None:
    """One part in a process of its own, which writes its figures itself; whether it came to its end is a figure too.

    What it prints is in a log beside `lines`. Where no time is left it does not begin.
    """
    words = [sys.executable, "-m", "hone.tools.acceptance.parts", part, str(lines), *(["--tiny"] if tiny else [])]
    started, log = time.monotonic(), lines.with_name(f"{part}.log")
    log.unlink(missing_ok=True)
    failure = why_failed(words, log, limit_s) if limit_s > 0 else "no time was left for it"
    figures = [
        Figure(part, "finished", float(not failure), note=failure),
        Figure(part, "seconds", time.monotonic() - started),
    ]
    append(lines, figures, is_gpu=is_gpu)
    print(f"{part}: {f'failed: {failure}' if failure else 'done'} ({figures[1].value:.0f} s)", flush=True)


def why_failed(words: Sequence[str], log: Path, limit_s: float) -> str:
    """Run a command with its output appended to `log`. Nothing that it started outlives it, or this process.

    Args:
        limit_s: seconds after which it is killed.
    Returns:
        "" when it ended with exit code 0; else the last line of its log, or what became of it.
    """

    async def ended() -> str:
        process = await LocalServiceProcess.begin(
            words, log=log, folder=Path.cwd(), environment=os.environ, stop_timeout_s=0.0
        )
        try:
            return await process.ended() if await process.ended_within(limit_s) else f"not done within {limit_s:.0f} s"
        finally:
            await process.kill()

    how = asyncio.run(ended())
    if how == "ended with exit code 0":
        return ""
    return (last_line(log) if how.startswith("ended with") else "") or how


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
