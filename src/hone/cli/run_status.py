"""`hone status RUN_DIR`: the state of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hone.observe.console import HEADLINE, duration, number

if TYPE_CHECKING:
    from hone.run.status import RunStatus


def show_run(path: Path, name: str, *, with_audit: bool, as_json: bool) -> int:
    """Print the state of a run. Returns the exit code: 1 when the audit found a violation."""
    from hone.run.audit import audit_file
    from hone.run.folder import RunFolder
    from hone.run.status import read_status
    from hone.services.state import read_state

    folder = RunFolder.read(path)
    status = read_status(folder)
    services = read_state(folder.path)
    found = audit_file(folder.events) if with_audit else None
    if as_json:
        shown: dict[str, Any] = {"name": name, **status.as_dict()}
        shown["services"] = services.as_dict()["services"] if services else []
        if found is not None:
            shown["audit"] = found.as_dict()
        typer.echo(json.dumps(shown, indent=2))
    else:
        for line in lines_of(name, status):
            typer.echo(line)
        for service in services.services if services else ():
            was = service.state if status.running else f"was {service.state}"
            typer.echo(f"  service {service.name}: {was} at {service.url}, process {service.pid}, log {service.log}")
        if found is not None:
            typer.echo(f"audit: {found}")
    return 1 if found is not None and found.violations else 0


def lines_of(name: str, status: RunStatus) -> list[str]:
    """Printed lines of a run."""
    from hone.run.status import described

    ended = f"not running; {status.outcome}" if status.outcome else "not running; it was killed or not started"
    lines = [f"{name}: {'running' if status.running else ended}"]
    if status.stage is not None:
        of = f" of {status.steps}" if status.steps is not None else ""
        pace = f", {number(status.step_s)} s a step" if status.step_s is not None else ""
        left = f", {duration(status.eta_s)} left" if status.eta_s is not None else ""
        lines.append(f"  {status.stage} step {status.step}{of}{pace}{left}")
    if status.phase_s is not None:
        version = "" if status.version is None else f"; version {status.version} is live"
        groups = f", {status.in_flight} groups in flight" if status.in_flight else ""
        lines.append(f"  {status.phase} for {duration(status.phase_s)}{version}{groups}")
    last = status.last or {}
    values = [f"{label} {number(last[metric])}" for metric, label in HEADLINE.items() if last.get(metric) is not None]
    if values:
        lines.append(f"  {', '.join(values)}")
    if status.ranks is not None and status.running:
        lines.append(f"  trainer: {status.ranks} rank{'' if status.ranks == 1 else 's'}")
    for replica, found in status.replicas.items():
        version = "" if found.version is None else f", version {found.version}"
        lines.append(f"  {replica}: {found.state}{version}{_because(found.why)}")
    return [*lines, *(f"    {described(event)}" for event in status.recent)]


def _because(why: str) -> str:
    return f"; {why.splitlines()[0]}" if why else ""
