"""Experiment trackers: Weights & Biases, SwanLab, Trackio and MLflow, each an extra, imported when asked for.

A run folder is one run of a tracker; a resumed run continues it. What is written is left to the observer's background
thread. The run's metadata is its configuration.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from hone.config.run import ObserveSection
from hone.errors import ConfigError, HoneError
from hone.observe.sinks import COLUMNS, SampleRow
from hone.runtime.files import write_whole

MLFLOW_BATCH = 100
"""Parameters of one request."""
MLFLOW_CHARS = 5000
"""Length limit of a parameter's value."""


@dataclass(frozen=True)
class Labels:
    """What a run is called and found by."""

    name: str
    group: str | None = None
    """Group of runs that it belongs to."""
    tags: tuple[str, ...] = ()


class Tracker(Protocol):
    """One run at a tracker."""

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None: ...
    def write_samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Show samples of a step as a table."""
        ...

    def close(self) -> None: ...


def open_trackers(folder: Path, settings: ObserveSection, labels: Labels, metadata: Mapping[str, Any]) -> list[Tracker]:
    """The trackers that the run file names.

    Args:
        folder: of the run; each tracker has a folder of its own in it.
        metadata: what they are given as the run's configuration; may be nested.

    Raises:
        ConfigError: a package or a key is missing. HoneError: a service does not answer.
    """
    found: list[Tracker] = []
    if settings.wandb:
        found.append(Wandb(folder / "wandb", settings.wandb, labels, metadata))
    if settings.swanlab:
        found.append(SwanLab(folder / "swanlab", settings.swanlab, labels, metadata))
    if settings.trackio:
        found.append(Trackio(folder / "trackio", settings.trackio, labels, metadata))
    if settings.mlflow:
        found.append(MLflow(folder / "mlflow", settings.mlflow, labels, metadata))
    return found


def _require(tracker: str, project: str) -> None:
    if find_spec(tracker) is None:
        missing = f"observe.{tracker} = {project!r} needs a package that is not installed"
        raise ConfigError([f"{missing}: pip install 'hone-rl[{tracker}]'"])


def _run_id(folder: Path) -> str:
    """The run's id at the tracker: made once, kept in the folder, so that a resumed run finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "id"
    if not path.exists():
        write_whole(path, os.urandom(6).hex())
    return path.read_text()


def _by_stage(stage: str, values: Mapping[str, float]) -> dict[str, float]:
    """Names with their stage, since each stage counts its own steps."""
    return {f"{stage}/{name}": value for name, value in values.items()}


class Wandb:
    """One Weights & Biases run per run folder; a resumed run continues it. WANDB_MODE=offline needs no key."""

    def __init__(self, folder: Path, project: str, labels: Labels, metadata: Mapping[str, Any]) -> None:
        """Raises ConfigError when the package or the key is missing, HoneError when the service does not answer."""
        _require("wandb", project)
        offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
        if not offline and not os.environ.get("WANDB_API_KEY"):
            raise ConfigError(
                [
                    f"observe.wandb = {project!r} needs a key: set the environment variable WANDB_API_KEY, "
                    "or WANDB_MODE=offline to log into the run's folder and upload later with `wandb sync`"
                ]
            )
        import wandb

        settings = wandb.Settings(
            init_timeout=30,
            finish_timeout=45,
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
        )
        try:
            self._run = wandb.init(
                project=project,
                name=labels.name,
                group=labels.group,
                tags=labels.tags,
                dir=str(folder),
                id=_run_id(folder),
                resume="allow",
                settings=settings,
                config=dict(metadata),
            )
        except wandb.Error as error:
            raise HoneError(f"observe.wandb = {project!r}: Weights & Biases cannot be reached: {error}") from error
        self._run.define_metric("*", step_metric="step")

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "stage": stage, "step": step})

    def write_samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._run.log({"samples": table, "stage": stage, "step": step})

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    """SwanLab; without SWANLAB_API_KEY the run is written into the folder, for `swanlab sync`."""

    def __init__(self, folder: Path, project: str, labels: Labels, metadata: Mapping[str, Any]) -> None:
        _require("swanlab", project)
        import swanlab  # pyright: ignore[reportMissingImports]

        mode = os.environ.get("SWANLAB_MODE") or ("online" if os.environ.get("SWANLAB_API_KEY") else "offline")
        self._run = swanlab.init(
            project=project,
            name=labels.name,
            group=labels.group,
            tags=list(labels.tags) or None,
            id=_run_id(folder),
            resume="allow",
            mode=mode,
            log_dir=str(folder),
            config=dict(metadata),
        )

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log(_by_stage(stage, values), step=step)

    def write_samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        shown = [["" if cell is None else cell for cell in row] for row in rows]
        table = swanlab.echarts.Table()
        table.add(list(COLUMNS), shown)
        self._run.log({f"{stage}/samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio: on this machine, for `trackio show`; TRACKIO_DIR says where."""

    def __init__(self, folder: Path, project: str, labels: Labels, metadata: Mapping[str, Any]) -> None:
        _require("trackio", project)
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project,
            name=f"{labels.name}-{_run_id(folder)}",
            group=labels.group,
            config=json.loads(json.dumps(metadata, default=str)),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log(_by_stage(stage, values), step=step)

    def write_samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        table = trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._run.log({f"{stage}/samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow at MLFLOW_TRACKING_URI; without it, in a database in the folder."""

    def __init__(self, folder: Path, project: str, labels: Labels, metadata: Mapping[str, Any]) -> None:
        _require("mlflow", project)
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        folder.mkdir(parents=True, exist_ok=True)
        given = os.environ.get("MLFLOW_TRACKING_URI")
        uri = given or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        files = None if given else (folder / "artifacts").absolute().as_uri()
        known = folder / "id"
        try:
            self._client = MlflowClient(uri)
            if known.exists():
                self._id = known.read_text()
                self._client.update_run(self._id, status="RUNNING")
                return
            experiment = self._client.get_experiment_by_name(project)
            place = experiment.experiment_id if experiment else self._client.create_experiment(project, files)
            tags = dict.fromkeys(labels.tags, "")  # MLflow's have values
            if labels.group:
                tags["group"] = labels.group
            self._id = self._client.create_run(place, run_name=labels.name, tags=tags).info.run_id
            params = [Param(name, str(value)[:MLFLOW_CHARS]) for name, value in _leaves(metadata)]
            for start in range(0, len(params), MLFLOW_BATCH):
                self._client.log_batch(self._id, params=params[start : start + MLFLOW_BATCH])
        except MlflowException as error:
            raise HoneError(f"observe.mlflow = {project!r}: MLflow at {uri} cannot be used: {error}") from error
        write_whole(known, self._id)

    def write_samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        columns = {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}
        self._client.log_table(self._id, columns, f"samples/{stage}/step-{step:06d}.json")

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, value in _by_stage(stage, values).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in tree.items():
        where = f"{path}.{name}" if path else str(name)
        if isinstance(child, Mapping) and child:
            yield from _leaves(child, where)
        else:
            yield where, child
