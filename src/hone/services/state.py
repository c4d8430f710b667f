"""services.json: the services of a run or of `hone up`, for `hone status` and `hone stop`.

The supervising process writes it into its folder at every change. Readers check a process number together with its
start time, because numbers are reused.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from hone.errors import DataError
from hone.runtime.files import write_whole
from hone.runtime.replicas import ReplicaState

FILE, TOKEN_FILE = "services.json", "services.token"
_SAME_START_S = 1.0
"""Tolerance of a start time: psutil computes it from the clock, which may be set. A reused number starts much later."""


@dataclass(frozen=True, slots=True)
class ServiceState:
    """A service as it was when the file was written."""

    name: str
    url: str
    state: ReplicaState
    pid: int | None
    restarts: int
    fingerprint: str
    log: str


@dataclass(frozen=True, slots=True)
class Supervision:
    """The supervising process and its services."""

    pid: int
    started_at: float
    """Unix seconds."""
    run_file: str
    stop_timeout_s: float
    """How long the slowest of them may take to stop."""
    services: tuple[ServiceState, ...]

    def process(self) -> psutil.Process | None:
        """The process, if it still runs; psutil does not signal a later one with its number."""
        try:
            process = psutil.Process(self.pid)
            is_it = abs(process.create_time() - self.started_at) < _SAME_START_S
            return process if is_it and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


def own_supervision(run_file: Path, services: tuple[ServiceState, ...], stop_timeout_s: float) -> Supervision:
    """The state that this process writes."""
    me = psutil.Process()
    return Supervision(me.pid, me.create_time(), str(run_file.absolute()), stop_timeout_s, services)


def write_state(folder: Path, supervision: Supervision) -> None:
    """Replace the folder's services.json in one step."""
    write_whole(folder / FILE, json.dumps(asdict(supervision), indent=1))


def read_state(folder: Path) -> Supervision | None:
    """Content of a folder's services.json; None when there is none, or it is not ours."""
    try:
        found = json.loads((folder / FILE).read_text())
        services = tuple(ServiceState(**service) for service in found.pop("services"))
        return Supervision(services=services, **found)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


def write_token(folder: Path, token: str) -> None:
    """Put the token of a folder's services where only this user can read it."""
    path = folder / TOKEN_FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")


def read_token(folder: Path) -> str | None:
    """The token of a folder's services; None without one."""
    with contextlib.suppress(OSError):
        return (folder / TOKEN_FILE).read_text().strip() or None
    return None


def runtime_folder() -> Path:
    """Where `hone up` keeps a folder for each name: HONE_RUNTIME_DIR, else of this user alone, and gone after a reboot.

    Raises:
        DataError: the folder is another user's, or others may write to it.
    """
    if chosen := os.environ.get("HONE_RUNTIME_DIR"):
        folder = Path(chosen)
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        folder = Path(runtime) / "hone"
    else:
        folder = Path(tempfile.gettempdir()) / f"hone-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise DataError(f"{folder} is not a folder that only this user may write to. Set HONE_RUNTIME_DIR to another.")
    return folder


def kept_up(folder: Path) -> dict[str, Supervision]:
    """What `hone up` keeps running, by name."""
    found = ((place.name, read_state(place)) for place in sorted(folder.iterdir()) if place.is_dir())
    return {name: state for name, state in found if state is not None and state.process() is not None}
