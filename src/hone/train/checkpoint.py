"""Checkpoints on disk: written aside, hashed, synced, renamed into place; the newest valid one is read back.

A checkpoint is a folder, `step-000100` in stage rl and `sft-step-000100` in stage sft, with these files:

    tensors.safetensors   the tensors of a `Trainer.snapshot()`, in their own dtypes; of several ranks one file each,
                          tensors-00000-of-00004.safetensors and so on; of a critic or a reference on devices of
                          its own critic.safetensors and so on
    state.json            the run's `Progress`, what the snapshot had as plain values, and what run it is: its resolved
                          configuration and hashes of its inputs
    manifest.json         format, stage and step; size and BLAKE2b hash of the other files, and a hash of itself

A folder under that name is whole by construction: it is written as `.tmp-<name>` and renamed when every byte has
reached the disk. Hashes are for what the disk or a person does to it later. Nothing here is pickled, so reading a
checkpoint runs no code of it.

On how many ranks it was written is no matter: see `tensor_files.py` for the files of tensors.

Not for weights that other programs read (`model.load.save_hf` writes those), and not a lock: one process saves
at a time, the one that holds the run folder's lock. Reading needs no lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hone.errors import CheckpointError
from hone.runtime.files import make_folder, set_aside, sync
from hone.train.optim import FRESH
from hone.train.tensor_files import FileFacts, SavedTensors, Snapshot, write_synced
from hone.types import Progress

FORMAT = 2
STAGE_ORDER = ("sft", "reward_model", "rl")
"""A checkpoint of a later stage is newer than any of an earlier one."""

STATE, MANIFEST = "state.json", "manifest.json"
_NAME = re.compile(r"(?:(?P<stage>[a-z_]+)-)?step-(?P<step>\d{6,})")
_ASIDE, _REPLACED, _REMOVED = ".tmp-", ".replaced-", ".removed-"
_VERIFIED_AT_ONCE = 8
"""Files that are hashed beside each other."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint, read back and verified."""

    progress: Progress
    tensors: SavedTensors
    """Read from the disk, to the CPU, when they are asked for; in the dtypes they were saved in."""
    rest: dict[str, Any]
    path: Path
    run: Mapping[str, Any]
    """Identity of the run that it belongs to, as given to `Checkpoints`."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that were not whole: one line each, saying which file and why. For the user to see."""

    def without_optimizer(self) -> SavedCheckpoint:
        """The same weights and progress with Adam's moments, the critic's too, at zero: see `optim.FRESH`."""
        rest = {**self.rest, FRESH: True}
        rest |= {"critic": {**self.rest["critic"], FRESH: True}} if "critic" in self.rest else {}
        return replace(self, rest=rest)


class Checkpoints:
    """The checkpoints of one run, in `folder`; the newest `keep` of them and the best one stay on disk."""

    def __init__(self, folder: Path, keep: int, run: Mapping[str, Any] | None = None) -> None:
        """`run`: JSON values that say what run this is; every checkpoint has them."""
        self.folder = folder
        self.keep = keep
        self._run = dict(run or {})
        self._num_bytes: int | None = None
        """Of the checkpoint written last."""

    def save(self, progress: Progress, snapshot: Snapshot) -> Path:
        """Write a checkpoint, then remove the ones older than the newest `keep`, except the one at
        `progress.best_step`. Returns its folder.

        A checkpoint of the same stage and step is replaced; at every moment, also after a kill, one of the two is
        found by `newest`.

        Raises CheckpointError when the disk is full or refuses; what was there before is untouched then.
        """
        name = _name(progress)
        whole = {"progress": asdict(progress), "rest": snapshot.rest, "run": self._run}
        state = json.dumps(whole, indent=1).encode()
        final, aside = self.folder / name, self.folder / (_ASIDE + name)
        try:
            make_folder(self.folder)
            self._sweep()
            aside.mkdir()
            files = snapshot.write(aside)
            files[STATE] = write_synced(aside / STATE, lambda file: file.write(state))
            facts = {file: asdict(one) for file, one in files.items()}
            manifest = {"format": FORMAT, "stage": progress.stage, "step": progress.step, "files": facts}
            sealed = json.dumps({**manifest, "seal": _seal(manifest)}, indent=1).encode()
            write_synced(aside / MANIFEST, lambda file: file.write(sealed))
            sync(aside)
            if final.exists():
                final.rename(self.folder / (_REPLACED + name))
            aside.rename(final)
            sync(self.folder)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(self._refused(final, error, snapshot.num_bytes)) from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._num_bytes = snapshot.num_bytes
        best = None if progress.best_step is None else _name(replace(progress, step=progress.best_step))
        self._remove_older_than(final, spare=best)
        return final

    def disk_metrics(self) -> dict[str, float]:
        """Room on the disk, and what a checkpoint takes of it."""
        found = {"memory/disk_free_gib": self._free_bytes() / 2**30}
        return found if self._num_bytes is None else {**found, "memory/disk_checkpoint_gib": self._num_bytes / 2**30}

    def newest(self) -> SavedCheckpoint | None:
        """The newest checkpoint that is whole, or None when there is none at all.

        Raises CheckpointError when there are checkpoints but every one of them is torn: to start from nothing
        is then the user's decision.
        """
        skipped: list[str] = []
        candidates = self.paths()
        for path in reversed(candidates):
            try:
                loaded = self.load(path)
            except CheckpointError as error:
                if not os.path.lexists(path):  # a run that is still going removed it: there is a newer one
                    return self.newest()
                skipped.append(str(error))
            else:
                return replace(loaded, skipped=tuple(skipped))
        if skipped:
            raise CheckpointError(
                "\n".join([f"{self.folder}: none of {len(skipped)} checkpoints is whole:", *skipped])
                + "\nRestore one from a copy, or start again with --fresh."
            )
        return None

    def at(self, stage: str, step: int) -> SavedCheckpoint:
        """The checkpoint of one step. Raises CheckpointError when it was never written, removed, or is torn."""
        path = self.folder / _name(Progress(stage=stage, step=step))
        if not path.exists():
            found = ", ".join(path.name for path in self.paths()) or "none"
            raise CheckpointError(f"{path}: no such checkpoint. There are: {found}.")
        return self.load(path)

    def forget_incomplete_best(self, progress: Progress) -> list[str]:
        """Let `progress` continue without a best step when its checkpoint is gone or not whole; that is set aside.

        Returns the warnings to show.
        """
        if progress.best_step is None or progress.stage != "rl":
            return []
        try:
            self.at("rl", progress.best_step)
            return []
        except CheckpointError as error:
            value = f"{progress.best_metric} = {progress.best_value:.4g}"
            messages = [f"the best checkpoint ({value}) is lost: {error} A new best is looked for from here on"]
        path = self.folder / _name(replace(progress, step=progress.best_step))
        if os.path.lexists(path):
            messages.append(set_aside(self.folder.parent, path, "is not whole"))
        progress.best_step = progress.best_value = None
        return messages

    def load(self, path: Path) -> SavedCheckpoint:
        """Read one checkpoint. Raises CheckpointError naming the file that is missing, truncated or altered."""
        try:
            manifest = _unsealed((path / MANIFEST).read_bytes())
            _verify(path, {name: FileFacts(**facts) for name, facts in manifest["files"].items()})
            state = json.loads((path / STATE).read_bytes())
            progress = Progress.from_dict(state["progress"])
            name = path.name.removeprefix(_REPLACED)
            if _NAME.fullmatch(name) and name != _name(progress):
                raise _Torn(f"it holds {_name(progress)}")
            tensors = SavedTensors([path / name for name in sorted(manifest["files"]) if name != STATE])
            return SavedCheckpoint(progress, tensors, state["rest"], path, state.get("run", {}))
        except (_Torn, OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            why = str(error) or type(error).__name__
            if isinstance(error, FileNotFoundError) and error.filename:
                why = f"{Path(error.filename).name} is missing"
            elif isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                why = f"{MANIFEST} or {STATE} is not JSON: {error}"
            raise CheckpointError(f"{path} is not whole: {why}") from error

    def newest_run(self) -> Mapping[str, Any] | None:
        """Identity of the run in the newest checkpoint; None when none has it. Tensors are not read."""
        for path in reversed(self.paths()):
            try:
                facts = FileFacts(**_unsealed((path / MANIFEST).read_bytes())["files"][STATE])
                _verify(path, {STATE: facts})
                if run := json.loads((path / STATE).read_bytes()).get("run"):
                    return run
            except (_Torn, OSError, ValueError, KeyError, TypeError):
                continue
        return None

    def paths(self) -> list[Path]:
        """Every checkpoint's folder, whole or not, oldest first."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name.removeprefix(_REPLACED))
            stage = (match["stage"] or "rl") if match else None
            if match and stage in STAGE_ORDER:
                # A replaced one counts until it is removed: a kill between the two renames leaves nothing else.
                found.append((STAGE_ORDER.index(stage), int(match["step"]), not path.name.startswith("."), path))
        return [path for *_, path in sorted(found)]

    def _remove_older_than(self, newest: Path, *, spare: str | None) -> None:
        """Keep `newest`, the `keep - 1` before it, and the one named `spare`.

        Later ones are torn (else the run would be past them).
        """
        self._sweep()
        paths = self.paths()
        older = paths[: paths.index(newest)]
        for path in older[: max(0, len(older) - (self.keep - 1))]:
            if path.name == spare:
                continue
            path.rename(path.with_name(_REMOVED + path.name))  # first: a kill must not leave half a checkpoint
        self._sweep()

    def _sweep(self) -> None:
        """Tidy up after saves, this one and ones that were killed."""
        for path in self.folder.glob(f"{_REPLACED}*"):
            name = self.folder / path.name.removeprefix(_REPLACED)
            if not name.exists():  # killed between two renames: its successor never arrived
                path.rename(name)
        for prefix in (_ASIDE, _REPLACED, _REMOVED):
            for path in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _free_bytes(self) -> int:
        existing = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        return shutil.disk_usage(existing).free

    def _refused(self, path: Path, error: OSError, num_bytes: int) -> str:
        needed_mib, free_mib = num_bytes / 2**20, self._free_bytes() / 2**20
        kept = [path.name for path in self.paths()]
        return (
            f"{path}: cannot be written: {error.strerror or error}. It needs {needed_mib:,.1f} MiB; "
            f"{free_mib:,.1f} MiB are free there. Make room, or move the run's folder to a larger disk. "
            + (f"{kept[-1]} is untouched: continue with --resume." if kept else "There is no older checkpoint.")
        )


class _Torn(Exception):
    """Why a checkpoint is not whole."""


def _name(progress: Progress) -> str:
    if progress.stage not in STAGE_ORDER:
        raise ValueError(f"a checkpoint's stage must be one of {STAGE_ORDER}, got {progress.stage!r}")
    return ("" if progress.stage == "rl" else f"{progress.stage}-") + f"step-{progress.step:06d}"


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _unsealed(data: bytes) -> dict[str, Any]:
    manifest = json.loads(data)
    seal = manifest.pop("seal", None)
    if manifest.get("format") != FORMAT:
        raise _Torn(f"{MANIFEST} has format {manifest.get('format')!r}; this version of Hone reads {FORMAT}")
    if seal != _seal(manifest):
        raise _Torn(f"{MANIFEST} was altered")
    return manifest


def _verify(folder: Path, files: Mapping[str, FileFacts]) -> None:
    def verify(name: str) -> None:
        path, facts = folder / name, files[name]
        found_bytes = path.stat().st_size
        if found_bytes != facts.size_bytes:
            raise _Torn(f"{name} has {found_bytes:,} bytes instead of {facts.size_bytes:,}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "blake2b").hexdigest() != facts.blake2b:
                raise _Torn(f"{name} was altered")

    with ThreadPoolExecutor(_VERIFIED_AT_ONCE) as threads:
        list(threads.map(verify, files))
