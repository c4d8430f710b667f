"""What a run that was killed again and again leaves: what one that never was leaves."""

import json
import subprocess
import sys
from pathlib import Path

from tiny import metrics_of, weights_of

from hone.run.audit import audit_file


def assert_kills_change_nothing(whole: Path, killed: Path, *, kills: int, seed: int, updates: int) -> None:
    """Run the run file `killed` with `kills` kills at random moments; `whole` is the run file of a run that ended."""
    program = Path(__file__).with_name("killed_runs.py")
    done = subprocess.run(
        [sys.executable, program, killed, str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    lives = json.loads(done.stdout.splitlines()[-1])
    assert lives["exit"] == 0
    assert lives["killed"] >= 3 * kills // 4 and lives["during_save"] >= 1, "the faults really happened"
    assert weights_of(killed.parent) == weights_of(whole.parent)
    assert metrics_of(killed.parent) == metrics_of(whole.parent)
    assert samples_of(killed.parent) == samples_of(whole.parent)
    found = audit_file(killed.parent / "run" / "events.jsonl")
    assert found.violations == () and found.updates == updates
    assert found.counts["stopped"] < found.counts["started"], "lives that were killed did not end in order"


def samples_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "run" / "samples").rglob("*.gz"))}
