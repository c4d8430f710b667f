"""Python API: `hone.train` and `hone.check`, for scripts and notebooks.

    run = hone.train("run.yaml", rewards=[my_reward], train=[{"prompt": "2+2="}, ...])
    run.metrics, run.model_path, run.report

The config and the Python objects become a run file's content; `hone.assemble` does the rest.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import inspect
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
from hone.observe.sinks import metric_lines
from hone.reward.given import GIVEN
from hone.run.folder import RunFolder
from hone.run.report import CheckReport
from hone.runtime.processes import environment_restored

if TYPE_CHECKING:
    from hone.observe.observer import OnMetrics

T = TypeVar("T")

Config = str | Path | Mapping[str, Any]
"""A run file, a run's folder (with the settings that the run was started with), or the content of a run file."""
RewardFunctions = Callable[..., Any] | Sequence[Callable[..., Any]]
"""One reward function, or several."""
Data = str | Path | Iterable[Mapping[str, Any]]
"""A file, the name of a Hugging Face dataset, or the rows themselves: a list, a `datasets.Dataset`."""


@dataclass(frozen=True)
class Run:
    """Results of a run, read from its folder."""

    path: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: `stage`, `step` and the metrics that docs/reference/metrics.md lists."""
        return [*metric_lines(RunFolder.read(self.path).metrics)]

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
    rewards: RewardFunctions | None = None,
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
        rewards: functions, or one, in place of `reward.components`, in Hone's form or TRL's. One that can be imported
            runs in a process that is killed when it hangs; one defined in a notebook or a script runs on a thread of
            this one.
        train: prompts in place of `data.train`.
        eval: prompts in place of `data.eval`.
        callbacks: called with each line of metrics, a dictionary as in `Run.metrics`; an exception ends the run.
        resume: continue the run that is in the folder.
        fresh: move the run that is in the folder aside, and start a new one.
        accept_changed_inputs: resume although data, model or code differ from the checkpoint's.
        without: parts of the checkpoint that a resumed run leaves out: AdamW's moments, or the seed.
    Raises:
        HoneError: the run failed. `Stopped` after Ctrl-C or a notebook interrupt, with a checkpoint.
    """
    if not isinstance(callbacks, Sequence):
        raise ConfigError([f"callbacks: must be a list of functions (got {callbacks!r:.60})"])
    problems = [
        f"callbacks.{place}: must be a plain function (got {one!r:.60})"
        for place, one in enumerate(callbacks)
        if not callable(one) or inspect.iscoroutinefunction(one)
    ]
    if problems:
        raise ConfigError(problems)
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
    rewards: RewardFunctions | None = None,
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
    except DataError as error:
        return CheckReport(problems=[str(error)])


@contextmanager
def _loaded(config: Config, rewards: RewardFunctions | None, train: Data | None, eval: Data | None) -> Iterator[Loaded]:
    """The resolved config with the Python objects; inside, functions of this process are found by name."""
    sections, source, run_file = _sections(config)
    functions: dict[str, Callable[..., Any]] = {}
    if rewards is not None:
        components: list[dict[str, Any]] = []
        for function in [rewards] if callable(rewards) else rewards:
            components.append(_component(function, components, functions))
        sections["reward"] = {**_section(sections, "reward", source), "components": components}
    data = {part: given for part, given in (("train", train), ("eval", eval)) if given is not None}
    named = {  # files by their absolute paths, data sets by their names
        part: str(Path(given).absolute()) if isinstance(given, Path) or Path(given).exists() else given
        for part, given in data.items()
        if isinstance(given, str | Path)
    }
    rows = {part: _jsonl(given, part) for part, given in data.items() if not isinstance(given, str | Path)}

    def load(places: Mapping[str, str]) -> Loaded:
        changed = sections
        if data:
            changed = {**sections, "data": {**_section(sections, "data", source), **named, **places}}
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


def _section(sections: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """A section that Python objects become part of. Raises ConfigError where it is none."""
    section = sections.get(name) or {}
    if not isinstance(section, Mapping):
        raise ConfigError([f"{source}  {name}: must be a mapping from keys to values (got {type(section).__name__})"])
    return section


def _component(
    function: Callable[..., Any], others: Sequence[Mapping[str, Any]], functions: dict[str, Callable[..., Any]]
) -> dict[str, Any]:
    """A reward's entry in `reward.components`, after the `others`; `functions` gets those that only this process has.

    Raises ConfigError for what is not a function.
    """
    if not callable(function):
        raise ConfigError(
            [
                f"rewards.{len(others)}: must be a function (got {function!r:.60}). Rewards that have a name or a file "
                "stand in reward.components of the config"
            ]
        )
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    file = getattr(module, "__file__", None) or ""
    is_importable = module is not None and getattr(module, "__spec__", None) is not None and file.endswith(".py")
    if is_importable and name.isidentifier() and getattr(module, name, None) is function:
        return {"use": f"{getattr(module, '__name__', '')}:{name}", "name": _free(name, others)}
    plain = re.sub(r"\W+", "_", getattr(function, "__name__", type(function).__name__)).strip("_") or "reward"
    name = _free(plain, others)
    functions[name] = function
    return {"use": "given", "name": name, "args": {"function": name}}


def _free(name: str, others: Sequence[Mapping[str, Any]]) -> str:
    """The name, with a number behind it where another component has it."""
    taken, free, number = {other["name"] for other in others}, name, len(others) + 1
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


def _jsonl(rows: Iterable[Mapping[str, Any]], part: str) -> str:
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        hint = ". Of several splits take one, such as data['train']" if isinstance(rows, Mapping) else ""
        raise DataError(f"{part}: must be rows, each a mapping from column to value (got {type(rows).__name__}){hint}")
    lines: list[str] = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(f"{part} row {number}: must be a mapping from column to value (got {type(row).__name__})")
        try:
            line = json.dumps(dict(row), ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{part} row {number}: must hold plain JSON values: {error}") from error
        lines.append(line.encode("utf-8", "backslashreplace").decode())  # half a surrogate pair as JSON escapes it
    return "".join(f"{line}\n" for line in lines)


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
