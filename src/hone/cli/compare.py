"""`hone plan --compare`: planned and measured memory of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from hone.memory.record import Compared, Record, comparison, table


def show_comparison(folder: Path, *, as_json: bool) -> None:
    """Print the comparison of a run, finished or not.

    Raises:
        RunFolderError: no run there, or one of a version that measured nothing.
    """
    record, found = comparison(folder)
    if as_json:
        typer.echo(json.dumps(_as_dict(record, found), indent=2))
        return
    for line in table(found, record) or ["no step is finished yet"]:
        typer.echo(line)
    for change in record.changes:
        typer.echo(f"  {change.sentence}")


def _as_dict(record: Record, found: Sequence[Compared]) -> dict[str, Any]:
    return {
        "format": 1,
        "measured_by": record.what,
        "limit_bytes": record.limit_bytes,
        "phases": [
            {
                "stage": row.stage,
                "phase": row.phase,
                "measured_bytes": row.measured_bytes,
                "planned_bytes": row.expected.bytes if row.expected else None,
                "moment": row.expected.moment if row.expected else None,
            }
            for row in found
        ],
        "changes": [asdict(change) for change in record.changes],
    }
