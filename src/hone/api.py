"""Python API: `hone.train` and `hone.check`, for scripts and notebooks.

    run = hone.train("run.yaml", rewards=[my_reward], train=[{"prompt": "2+2="}, ...])
    run.metrics, run.model_path, run.report

The config and the Python objects become a run file's content; `hone.assemble` does the rest.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hone.config.load import Loaded, load_mapping
from hone.devices import machine_kind
from hone.errors import ConfigError, DataError
from hone.reward.given import GIVEN
from hone.run.folder import RunFolder
from hone.run.report import CheckReport
from hone.runtime.processes import environment_restored

if TYPE_CHECKING:
    from hone.observe.observer import OnMetrics

T = TypeVar("T")

Config = str | Path | Mapping[str, Any]
"""A run file, a run's folder (with the settings that the run was started with), or the content of a run file."""
Data = str | Path | Iterable[Mapping[str, Any]]
"""A file, the name of a Hugging Face dataset, or the rows themselves: a list, a `datasets.Dataset`."""


@dataclass(frozen=True)
class Run:
    """Results of a run, read from its folder."""

    path: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: `stage`, `step` and the metrics that docs/reference/metrics.md lists."""
        return [json.loads(line) for line in RunFolder.read(self.path).metrics.read_text("utf-8").splitlines()]

    @property
    def model_path(self) -> Path:
        """The final weights, a Hugging Face directory."""
        return RunFolder(self.path).hf

    @property
    def report(self) -> Path:
        """The HTML report."""
        return RunFolder(self.path).report


def train(
    config: Config,
    *,
    rewards: Sequence[Callable[..., Any]] | None = None,
    train: Data | None = None,
    eval: Data | None = None,
    callbacks: Sequence[OnMetrics] = (),
    resume: bool = False,
    fresh: bool = False,
    accept_changed_inputs: bool = False,
    without: Collection[Literal["optimizer", "random"]] = (),
) -> Run:
    """Train: every stage of the config, in order, as `hone train` does. Also from a notebook.

    Args:
        config: a run file, a run's folder or a dictionary; relative paths in a dictionary start at the current folder.
        rewards: functions in place of `reward.components`, in Hone's form or TRL's. One that can be imported runs in a
            process that is killed when it hangs; one defined in a notebook or a script runs on a thread of this one.
        train: prompts in place of `data.train`.
        eval: prompts in place of `data.eval`.
        callbacks: called with each line of metrics, a dictionary as in `Run.metrics`.
        resume: continue the run that is in the folder.
        fresh: move the run that is in the folder aside, and start a new one.
        accept_changed_inputs: resume although data, model or code differ from the checkpoint's.
        without: parts of the checkpoint that a resumed run leaves out: AdamW's moments, or the seed.
    Raises:
        HoneError: the run failed. `Stopped` after Ctrl-C or a notebook interrupt, with a checkpoint.
    """
    interrupted = threading.Event()
    with _loaded(config, rewards, train, eval) as loaded, _process_as_before():
        from hone import assemble

        def work() -> Path:
            return assemble.train(
                loaded,
                resume=resume,
                fresh=fresh,
                accept_changed_inputs=accept_changed_inputs,
                without=without,
                callbacks=callbacks,
                interrupted=interrupted,
            )

        return Run(_outside_of_loop(work, interrupted))


def check(
    config: Config,
    *,
    rewards: Sequence[Callable[..., Any]] | None = None,
    train: Data | None = None,
    eval: Data | None = None,
) -> CheckReport:
    """Check the config, its data, its tokenizer and its rewards on real rows, as `hone check` does.

    Arguments are those of `train`. `CheckReport.is_ok`: a run could start; `problems`: why not.
    """
    try:
        with _loaded(config, rewards, train, eval) as loaded, _process_as_before():
            from hone import assemble

            return _outside_of_loop(lambda: assemble.check_run(loaded), threading.Event())
    except ConfigError as error:
        return CheckReport(problems=error.problems)


@contextmanager
def _loaded(
    config: Config, rewards: Sequence[Callable[..., Any]] | None, train: Data | None, eval: Data | None
) -> Iterator[Loaded]:
    """The resolved config with the Python objects; inside, functions of this process are found by name."""
    sections, source, run_file = _sections(config)
    functions: dict[str, Callable[..., Any]] = {}
    if rewards is not None:
        components = [_component(function, functions) for function in rewards]
        sections["reward"] = {**sections.get("reward", {}), "components": components}
    data = {part: given for part, given in (("train", train), ("eval", eval)) if given is not None}
    named = {part: _place(given) for part, given in data.items() if isinstance(given, str | Path)}
    rows = {part: _jsonl(given, part) for part, given in data.items() if not isinstance(given, str | Path)}

    def load(places: Mapping[str, str]) -> Loaded:
        changed = {**sections, "data": {**sections.get("data", {}), **named, **places}} if data else sections
        return load_mapping(changed, source=source, run_file=run_file)

    token = GIVEN.set(functions)
    try:
        yield load(_written(rows, load)) if rows else load({})
    finally:
        GIVEN.reset(token)


def _sections(config: Config) -> tuple[dict[str, Any], str, Path]:
    """Content of a run file, its name in problems, and the file that it stands for."""
    if isinstance(config, Mapping):
        return dict(config), "config", Path("config")
    path = Path(config)
    if not path.is_dir():
        return {"extends": path.name}, "Python", path
    folder = RunFolder.read(path)
    settings = folder.identity()
    settings["run"]["dir"] = str(path)
    return settings, str(folder.run_yaml), folder.run_file


def _component(function: Callable[..., Any], functions: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """A reward's entry in `reward.components`; `functions` gets those that only this process has."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    file = getattr(module, "__file__", None) or ""
    is_importable = module is not None and getattr(module, "__spec__", None) is not None and file.endswith(".py")
    if is_importable and name.isidentifier() and getattr(module, name, None) is function:
        return {"use": f"{getattr(module, '__name__', '')}:{name}", "name": name}
    plain = re.sub(r"\W+", "_", getattr(function, "__name__", type(function).__name__)).strip("_") or "reward"
    name = plain
    while name in functions:
        name = f"{plain}_{len(functions) + 1}"
    functions[name] = function
    return {"use": "given", "name": name, "args": {"function": name}}


def _place(given: str | Path) -> str:
    """An absolute path, or the dataset name unchanged."""
    return str(Path(given).absolute()) if isinstance(given, Path) or Path(given).exists() else given


def _jsonl(rows: Iterable[Mapping[str, Any]], part: str) -> str:
    try:
        return "".join(f"{json.dumps(dict(row), ensure_ascii=False)}\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise DataError(f"{part}: rows are mappings of plain JSON values, from column to value: {error}") from error


def _written(rows: Mapping[str, str], load: Callable[[Mapping[str, str]], Loaded]) -> dict[str, str]:
    """Files with rows beside the run's folder, named by their content, so that the run can be resumed from anywhere."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="hone-") as folder:  # the run's folder is known only once the config is resolved
        first = {part: Path(folder) / f"{part}.jsonl" for part in rows}
        for part, file in first.items():
            file.write_text(rows[part], "utf-8")
        run_dir = load({part: str(file) for part, file in first.items()}).run_dir.absolute()
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    places = {}
    for part, text in rows.items():
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        places[part] = run_dir.with_name(f"{run_dir.name}.{part}-{digest}.jsonl")
        places[part].write_text(text, "utf-8")
    return {part: str(file) for part, file in places.items()}


def _outside_of_loop(work: Callable[[], T], interrupted: threading.Event) -> T:
    """Run work that needs its own event loop: here, or on a thread if a loop is running, as in a notebook.

    KeyboardInterrupt, or anything else that ends the wait, sets `interrupted`, and the work is waited for.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="hone") as thread:
        working = thread.submit(contextvars.copy_context().run, work)
        try:
            while True:
                try:
                    return working.result()
                except KeyboardInterrupt:
                    interrupted.set()
        finally:
            interrupted.set()


@contextmanager
def _process_as_before() -> Iterator[None]:
    """Restore process-wide settings after a run: PyTorch's threads and precision, visible GPUs."""
    import torch

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        with environment_restored(machine_kind().variable):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
