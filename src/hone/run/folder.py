"""Run folder: its layout, its lock, and its identity.

    run.yaml         the resolved configuration     .identity.json   the same, for comparing, and where it came from
    metrics.jsonl    events.jsonl           samples/    logs/     tensorboard/     trace.json         report.html
    checkpoints/     hf/    hf-best/        services.json         memory.json      .lock  held while a run is going
    set-aside/       what was found damaged

Opening answers one question: new, resumed, or refused? A folder with other people's files is refused in any case,
and nothing is ever deleted: `fresh` moves the old run aside. What is in the files is the business of others.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hone.config import schema
from hone.config.cluster import ClusterSection
from hone.config.load import Loaded, load_config, load_mapping
from hone.config.render import flattened
from hone.config.run import ServiceSection
from hone.errors import RunFolderError
from hone.observe.events import read_events
from hone.observe.sinks import last_metric_lines
from hone.runtime.files import ASIDE, make_folder, set_aside, write_whole
from hone.runtime.processes import own_command

SAME_NUMBERS = (
    "run.dir",
    "run.name",
    "run.group",
    "run.tags",
    "run.steps",
    "run.epochs",
    "run.threads",
    "run.devices",
    "rollout.timeout_s",
    "rollout.max_concurrent_samples",
    "rollout.kv_cache_tokens",
    "rollout.prefill_tokens",
    "train.tokens_per_microbatch",
    "train.logprob_chunk_tokens",
    "train.activation_checkpointing",
    "reward.workers",
    *(f"services.*.{key}" for key in ServiceSection.model_fields if key not in ("reward", "policy", "command")),
    *(f"cluster.{key}" for key in ClusterSection.model_fields if key != "engines"),
    "cluster.engines.tensor_parallel_size",
    "cluster.engines.gpu_memory_utilization",
    "checkpoint",
    "eval",
    "gate",
    "observe",
    "plan",
)
"""Keys and sections that may change between a run and its resumption: they decide how long it runs, what is
seen of it, or how much memory it takes, never what an update computes (beyond the rounding of float sums)."""

_IDENTITY, _LOCK = ".identity.json", ".lock"


class RunFolder:
    """A run's folder, held by this process until `close` (or the end of the process, however it ends).

    Make one with `open`, for a run, or with `read`, for a look at a run that may be going on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.resumed = False
        """Whether this run continues an earlier one, perhaps without a checkpoint."""
        self.moved_aside: Path | None = None
        """Where `fresh` moved the previous run."""
        self.notes: list[str] = []
        """Messages: what was found damaged or changed, and how the run continues."""
        self._lock: int | None = None

    @property
    def run_yaml(self) -> Path:
        return self.path / "run.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def hf_best(self) -> Path:
        return self.path / "hf-best"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        run_file: Path,
        run_yaml: str,
        config: Mapping[str, Any],
        resume: bool = False,
        fresh: bool = False,
        may_differ: Collection[str] = (),
    ) -> RunFolder:
        """Take the folder for a run of `config` (a nested mapping of JSON values) and write the run's identity.

        Args:
            run_file: relative paths in `config` start at its folder.
            run_yaml: the same configuration as text for people, written as run.yaml.
            resume: continue the run that is there; an absent or empty folder starts a new one, so that a job
                that is restarted by a scheduler can always say it.
            fresh: move the run that is there to `<path>.old-1` (or -2, ...) and start a new one.
            may_differ: keys besides `SAME_NUMBERS` that may have another value than in the run that is continued.

        Raises RunFolderError when the folder is in use, holds something else than a run, holds a run and neither
        way on was chosen, or holds a run of a configuration whose updates compute other numbers.
        """
        if resume and fresh:
            raise RunFolderError(f"{path}: --resume and --fresh exclude each other; choose one.")
        folder = cls(path)
        folder._acquire()
        try:
            left = (_LOCK, _IDENTITY + ASIDE)  # by an interrupted `open`, perhaps
            found = sorted(child.name for child in path.iterdir() if child.name not in left)
            if found and not (path / _IDENTITY).exists() and not folder._saved_run():
                more = f" and {len(found) - 3} more" if len(found) > 3 else ""
                raise RunFolderError(
                    f"{path} is not the folder of a Hone run: it holds {', '.join(found[:3])}{more}. Nothing was "
                    "touched; give the run a folder of its own with run.dir=..."
                )
            if found and fresh:
                folder.moved_aside = _free_name(folder.path)
                folder.path.rename(folder.moved_aside)
                folder.close()
                folder._acquire()
            elif found and not resume:
                raise RunFolderError(
                    f"{path} holds a run already. Options: --resume continues it, --fresh moves it to "
                    f"{_free_name(path)} and starts a new run, run.dir=... leaves it alone."
                )
            elif found:
                _refuse_changed(path, folder.identity(), _plain(config), may_differ)
                folder._repair(found)
                folder.resumed = True
            identity = identity_of(run_file, config)
            is_known = folder.resumed and folder.run_yaml.is_file() and folder._read_identity() == identity
            if folder.notes or not is_known:
                # The identity comes first: a folder with any other file in it always has one.
                write_whole(path / _IDENTITY, json.dumps(identity, indent=1))
                write_whole(folder.run_yaml, run_yaml)
            make_folder(folder.checkpoints)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """The folder of an existing run, unlocked, for reading. Raises RunFolderError when there is none."""
        if not (path / _IDENTITY).is_file() and not cls(path)._saved_run():
            raise RunFolderError(f"{path}: there is no run here. Name the run.dir that `hone train` printed.")
        return cls(path)

    def is_in_use(self) -> bool:
        """Whether a process holds the folder for a run right now."""
        try:
            with (self.path / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    def holder(self) -> tuple[int, str] | None:
        """Number and host of the process that holds the folder for a run right now."""
        if not self.is_in_use():
            return None
        _, number, _, host = (self.path / _LOCK).read_text().split()
        return int(number), host

    def stop(self, timeout_s: float) -> None:
        """Ask the run to end with a checkpoint, and wait until it has ended.

        Raises:
            RunFolderError: no run is there, it cannot be asked, or it has not ended within `timeout_s` seconds.
        """
        holder = self.holder()
        if holder is None:
            raise RunFolderError(f"{self.path}: no run is active there.")
        number, host = holder
        try:
            if host != socket.gethostname():
                raise PermissionError("it runs on another machine")
            os.kill(number, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it ended meanwhile
        except PermissionError as error:
            message = f"{self.path}: process {number} on {host} cannot be asked to stop: {error.strerror or error}."
            raise RunFolderError(message) from error
        deadline = time.monotonic() + timeout_s
        while self.holder() == holder:
            if time.monotonic() > deadline:
                raise RunFolderError(
                    f"{self.path}: process {number} has not ended within {timeout_s:g} s. It may still be saving a "
                    f"checkpoint: see {self.path / 'logs/training.log'}, and repeat the command to wait longer."
                )
            time.sleep(0.1)

    def resume_hint(self) -> str:
        """Message for a user who has stopped the run: how to resume."""
        if not self.checkpoints.is_dir() or all(path.name.startswith(".") for path in self.checkpoints.iterdir()):
            return "stopped before the first checkpoint"
        command = f"{own_command()} train --resume {shlex.quote(str(self.path))}"
        return f"stopped with a checkpoint; `{command}` continues from it"

    def killed_hint(self) -> str:
        """Message for a user whose run was killed: what is written then, and how to resume."""
        command, path = own_command(), shlex.quote(str(self.path))
        return (
            f"`{command} report {path}` writes report.html up to its last step; `{command} train --resume {path}` "
            "continues it"
        )

    def last_metrics(self, count: int) -> list[dict[str, Any]]:
        """The last whole lines of metrics.jsonl, at most `count`."""
        return last_metric_lines(self.metrics, count)

    def _read_identity(self) -> dict[str, Any]:
        """The run file and the resolved configuration that the run was last started with.

        They are the newest checkpoint's where their file is lost.
        """
        file = self.path / _IDENTITY
        try:
            found = json.loads(file.read_text())
            if not isinstance(found, dict) or not isinstance(found.get("config"), dict) or "run_file" not in found:
                raise ValueError("run_file or config is missing")
            return found
        except (OSError, ValueError) as error:
            run = self._saved_run()
            if run is None:
                raise RunFolderError(
                    f"{file} cannot be read: {error}. Restore it, or start again with --fresh."
                ) from error
            self.notes.append(f"{file} cannot be read ({error}): rebuilt from the newest checkpoint")
            return {name: run[name] for name in ("run_file", "config")}

    def identity(self) -> dict[str, Any]:
        """The resolved configuration that the run was last started with."""
        return self._read_identity()["config"]

    @property
    def run_file(self) -> Path:
        """The file that the run was last started with; it need not exist any more."""
        return Path(self._read_identity()["run_file"])

    def close(self) -> None:
        """Release the lock on the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _saved_run(self) -> Mapping[str, Any] | None:
        """What run the newest checkpoint is of."""
        from hone.train.checkpoint import Checkpoints  # torch, which `hone status` does without

        return Checkpoints(self.checkpoints, 1).newest_run()

    def _repair(self, found: list[str]) -> None:
        """Set aside damaged files that would prevent resuming. Raises RunFolderError when the checkpoints are lost."""
        # The folder is made with the run, so it is there even before the first checkpoint.
        if not self.checkpoints.is_dir():
            are_lost = self.metrics.name in found
        else:
            has_none = not any(self.checkpoints.iterdir())
            are_lost = has_none and any(event["kind"] == "saved" for event in read_events(self.events))
        if are_lost:
            what = "a link to nothing" if self.checkpoints.is_symlink() else "empty or missing"
            raise RunFolderError(
                f"{self.checkpoints} is {what}, though the run has records. Restore it (is its disk mounted?), or "
                "start again with --fresh."
            )
        for path in sorted((*self.path.iterdir(), *self.checkpoints.glob("*"), *self.samples.glob("*"))):
            if path.is_symlink() and not path.exists():
                self.notes.append(set_aside(self.path, path, f"is a link to nothing ({path.readlink()})"))
            elif path.name.startswith(".hf"):
                self.notes.append(set_aside(self.path, path, "is an export that was not finished"))

    def _acquire(self) -> None:
        """Lock the folder, making it if need be. Never waits: the other run may take days."""
        lock = self.path / _LOCK
        while self._lock is None:
            try:
                make_folder(self.path)
                handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise RunFolderError(
                    f"{self.path}: cannot make a run's folder here: {error.strerror}. Set run.dir=... to another place."
                ) from error
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                raise RunFolderError(
                    f"{self.path} is in use by {lock.read_text() or 'another process'}. Wait for it, stop it, or "
                    "give this run a folder of its own with run.dir=..."
                ) from None
            try:
                is_same = os.path.samestat(os.fstat(handle), lock.stat())
            except FileNotFoundError:
                is_same = False
            if is_same:
                self._lock = handle
            else:  # a run with `fresh` moved the folder away between our two calls
                os.close(handle)
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def load_run(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Resolve a run file; of a run's folder, the settings that the run was last started with.

    Raises ConfigError, and RunFolderError for a folder that is not a run's.
    """
    if not path.is_dir():
        return load_config(path, overrides)
    folder = RunFolder.read(path)
    load = partial(load_mapping, folder.identity(), source=str(folder.run_yaml), run_file=folder.run_file)
    loaded = load(overrides)
    if loaded.run_dir.resolve() != path.resolve():  # seen from another directory, or moved
        loaded = load([f"run.dir={path}", *overrides])
    return loaded


def identity_of(run_file: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What says which run this is, in the folder and in each checkpoint."""
    return _plain({"run_file": str(run_file.absolute()), "config": config})


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return candidate


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read back: tuples become lists, so that both sides compare."""
    return json.loads(json.dumps(config))


def _refuse_changed(path: Path, old: Mapping[str, Any], new: Mapping[str, Any], may_differ: Collection[str]) -> None:
    old_keys, new_keys = flattened(old), flattened(new)
    free = tuple(f"{key}." for key in SAME_NUMBERS)
    changed = [
        f"  {key}: {_shown(old_keys, key)} -> {_shown(new_keys, key)}"
        for key in sorted(old_keys.keys() | new_keys.keys())
        if not f"{schema.generic(key)}.".startswith(free) and key not in may_differ
        if _shown(old_keys, key) != _shown(new_keys, key)
    ]
    if changed:
        raise RunFolderError(
            "\n".join([f"{path}: the run there was made with other settings, so it cannot be resumed:", *changed])
            + f"\n`{own_command()} train --resume {shlex.quote(str(path))}` takes that run's settings; "
            "--fresh or run.dir=... starts a new one."
        )


def _shown(keys: Mapping[str, Any], key: str) -> str:
    return json.dumps(keys[key], sort_keys=True) if key in keys else "(not set)"
