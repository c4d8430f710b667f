"""`hone up`, `hone status`, `hone stop`: services that outlive runs, and the state of what is running."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.arguments import AsJson, Overrides, RunFile, examples
from hone.config.load import load_config
from hone.errors import DataError
from hone.observe.console_figures import HEADLINE, duration, number
from hone.run.folder import RunFolder

if TYPE_CHECKING:
    from hone.run.status import RunStatus


UP_EXAMPLES = examples("hone up run.yaml", "hone up judge.yaml --name judge services.judge.port=8000")
STATUS_EXAMPLES = examples("hone status", "hone status judge --json", "hone status runs/first --audit")
STOP_EXAMPLES = examples("hone stop judge", "hone stop runs/first", "hone stop --all")

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,79}")


def up(
    run_file: RunFile,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the services; default: the run file's name.")] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground; Ctrl-C stops them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start the services of a file and leave them running; runs of the same file use them."""
    loaded = load_config(run_file, overrides or (), needed="services")
    from hone.services import supervisor
    from hone.services.state import runtime_folder

    name = loaded.name if name is None else name
    if not _NAME.fullmatch(name):
        raise typer.BadParameter(f"--name must be letters, digits, `.`, `_` and `-`, at most 80 (got {name!r})")
    folder = runtime_folder() / name
    if foreground:
        supervisor.keep_up(loaded, folder, lambda line: print(line, flush=True))
        return
    arguments = [str(run_file), *(overrides or ()), "--name", folder.name]
    started = supervisor.start_supervisor(loaded, folder, arguments, lambda line: typer.echo(line, err=True))
    show(asdict(started) | {"name": folder.name, "running": True}, as_json)


def status(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME | RUN_DIR]", help="Name given by `hone up`, or a run's folder; default: all services."
        ),
    ] = None,
    as_json: AsJson = False,
    audit: Annotated[bool, typer.Option("--audit", help="Audit a run by its event log.")] = False,
) -> int:
    """Show services of `hone up`, or a run with its step, phase, speed, engines and last events."""
    from hone.services.state import kept_up, read_state, runtime_folder

    if what is None:
        if audit:
            raise typer.BadParameter("--audit needs a run's folder")
        found = {name: asdict(state) | {"running": True} for name, state in kept_up(runtime_folder()).items()}
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        for name, state in found.items() if not as_json else ():
            show(state | {"name": name}, as_json=False)
        if not found and not as_json:
            typer.echo("nothing is up")
        return 0
    folder = runtime_folder() / what if _NAME.fullmatch(what) else None
    state = read_state(folder) if folder is not None else None
    if state is not None and not audit:
        show(asdict(state) | {"name": what, "running": state.process() is not None}, as_json)
        return 0
    if not Path(what).is_dir():
        raise DataError(f"{what}: nothing of that name is up, and no run's folder is there.")
    return show_run(Path(what), what, with_audit=audit, as_json=as_json)


def stop(
    what: Annotated[
        str | None, typer.Argument(metavar="[NAME | RUN_DIR]", help="As for `hone status`; Ctrl-C stops waiting.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop all services of `hone up`.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for a run to end.")] = 600.0,
) -> None:
    """Stop services of `hone up`, or a training run, which saves a checkpoint, and wait until they have ended."""
    if (what is None) == (not everything):
        raise typer.BadParameter("name one of `hone status` or a run's folder, or say --all")
    from hone.services.state import kept_up, runtime_folder
    from hone.services.supervisor import stop_supervisor

    running = kept_up(runtime_folder())
    if what is not None and what not in running:
        if not Path(what).is_dir():
            raise DataError(f"{what} is not up, and no run's folder is there. Up: {', '.join(running) or 'nothing'}.")
        folder = RunFolder.read(Path(what))
        folder.stop(timeout_s)
        typer.echo(folder.resume_hint())
        return
    for known in running if everything else [str(what)]:
        stop_supervisor(running[known])
        typer.echo(f"stopped {known}")


def show(state: dict[str, Any], as_json: bool) -> None:
    """Print one supervisor and its services."""
    if as_json:
        typer.echo(json.dumps(state, indent=2))
        return
    typer.echo(f"{state['name']}: {'running' if state['running'] else 'not running'}")
    for service in state["services"]:
        was = service["state"] if state["running"] else f"was {service['state']}"
        typer.echo(
            f"  {service['name']}: {was} at {service['url']}, process {service['pid']}, "
            f"{service['restarts']} restarts, log {service['log']}"
        )


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
        shown: dict[str, Any] = {"name": name, **asdict(status)}
        shown["services"] = [asdict(one) for one in services.services] if services else []
        if found is not None:
            shown["audit"] = asdict(found)
        typer.echo(json.dumps(shown, indent=2))
    else:
        for line in lines_of(name, status):
            typer.echo(line)
        if not status.running and status.outcome is None and status.stage is not None:
            typer.echo(f"  {folder.killed_hint()}")
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
        why = f"; {found.why.splitlines()[0]}" if found.why else ""
        lines.append(f"  {replica}: {found.state}{version}{why}")
    return [*lines, *(f"    {described(event)}" for event in status.recent)]
