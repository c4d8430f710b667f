"""Every benchmark, one after the other, each in a process of its own; `make bench`.

    python -m benchmarks.run_all                    # all of them
    python -m benchmarks.run_all checkpoint logprobs

A benchmark is a file of this folder that prints a table and explains itself in its docstring. One that fails does not
stop the others; the exit code is then 1. Run it on a quiet machine: two sides are compared within one run, but a
neighbour still widens the spread.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main(wanted: list[str]) -> int:
    """Run the named benchmarks, all when none is named. Returns the exit code."""
    found = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith(("_", "run_all"))}
    unknown = sorted(set(wanted) - set(found))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(found)}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted or found:
        print(f"\n== {name} ==", flush=True)
        started = time.monotonic()
        if subprocess.run([sys.executable, found[name]], cwd=FOLDER.parent).returncode != 0:
            failed.append(name)
        print(f"({time.monotonic() - started:.0f} s)", flush=True)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
