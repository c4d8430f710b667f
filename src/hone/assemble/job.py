"""Job: what all stages of a run share, and arithmetic, signals and failures around them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from hone.assemble.memory import RunMemory
from hone.config.load import Loaded
from hone.config.run import RunConfig, RunSection
from hone.config.topology import Topology
from hone.data.cache import DataCache
from hone.data.chat import Tokenizer
from hone.devices import FoundDevices, device_of
from hone.doctor.watch import Alarm, AlarmWatch
from hone.errors import ConfigError, HoneError, Stopped, StoppedByAlarm
from hone.memory.guard import Guard
from hone.model.kernels import use_fused_kernels
from hone.observe.observer import Observer
from hone.run.folder import RunFolder
from hone.runtime.processes import stop_signals_handled
from hone.services.supervisor import Services
from hone.train.checkpoint import Checkpoints
from hone.train.fixed_sums import prepare_fixed_sums

T = TypeVar("T")

INTERRUPT_POLL_S = 0.1


class LiveAlarms:
    """Reports alarms of one run as they begin and end, and asks it to stop where `observe.stop_on` says so.

    Args:
        settings: the resolved run file, nested.
        saved: `Progress.alarms` of the checkpoint that the run continues from.
        stop_on: names of the alarms that end the run.
        stop: set to end it, as the first stop signal does.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        observer: Observer,
        *,
        saved: Mapping[str, Any],
        stop_on: Collection[str],
        stop: asyncio.Event,
    ) -> None:
        self._watch, self._observer = AlarmWatch(settings), observer
        if saved:
            self._watch.restore(saved)
        self._stop_on, self._stop = frozenset(stop_on), stop
        self._stopped_by: Alarm | None = None
        observer.follow(self._take, self._watch.state)

    def stopped(self, resume_hint: str) -> Stopped:
        """The error that ends a run which was asked to stop."""
        if self._stopped_by is None:
            return Stopped(resume_hint)
        alarm = self._stopped_by
        return StoppedByAlarm(f"stopped by alarm {alarm.name}: {alarm.pattern}. {resume_hint}")

    def _take(self, line: Mapping[str, Any]) -> None:
        for alarm in self._watch.add(line):
            tell = self._observer.say if alarm.is_advice else self._observer.warn
            if alarm.ended is not None:
                tell(f"{alarm.title} ended at {alarm.stage} step {alarm.ended}")
                self._observer.event("alarm_ended", name=alarm.name, stage=alarm.stage, step=alarm.ended)
                continue
            tell(alarm.line)
            self._observer.event("alarm", **{name: v for name, v in asdict(alarm).items() if name != "ended"})
            if alarm.name in self._stop_on and not self._stop.is_set():
                self._observer.warn(f"stopping because of alarm {alarm.name} (observe.stop_on)")
                self._stopped_by = alarm
                self._stop.set()


@dataclass
class Job:
    """What all stages of a run share."""

    loaded: Loaded
    folder: RunFolder
    observer: Observer
    tokenizer: Tokenizer
    checkpoints: Checkpoints
    compute: ThreadPoolExecutor
    stop: asyncio.Event
    device: torch.device
    """Device of this process, or of the ranks and engines of a cluster."""
    found: FoundDevices
    services: Services
    memory: RunMemory
    topology: Topology
    alarms: LiveAlarms

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def base_dir(self) -> Path:
        """Where relative paths of the run file start."""
        return self.loaded.run_file.parent

    @cached_property
    def data_cache(self) -> DataCache:
        """Cache of this run's data; shows its progress on the console."""
        return DataCache(self.observer.say)

    @property
    def guard(self) -> Guard:
        """The memory guard."""
        return self.memory.ladder

    @property
    def stage_parts(self) -> tuple[Observer, Checkpoints, ThreadPoolExecutor, asyncio.Event]:
        """What the run of every stage takes from the job, in the order of `loop.run.Stage`."""
        return self.observer, self.checkpoints, self.compute, self.stop

    async def computed(self, work: Callable[[], T], *, phase: str) -> T:
        """Work done on the compute thread, from its start again if it runs out of memory. All arithmetic belongs there:
        see `rollout.worker` for why."""
        ladder = self.memory.ladder

        def guarded() -> T:
            with ladder.phase(phase):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self.compute, ladder.attempt, guarded)


def set_up_arithmetic(run: RunSection, processes: int = 1) -> torch.device:
    """Threads, kernel caches, and the device that `run` asks for.

    Args:
        processes: how many share the cores.
    """
    # oneDNN compiles a kernel for every shape it meets and keeps it, PyTorch keeps another record of each: without
    # bounds, training in bfloat16 grew by 18 MiB a step. Sizes are rounded so that some hundred shapes come again and
    # again (`sizes.round_size`); the second record never made anything faster.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "8")
    torch.set_num_threads(run.threads or max(1, len(os.sched_getaffinity(0)) // processes))
    device = device_of(run.device, "run.device")
    fuses = device.type == "cuda" if run.fused_kernels is None else run.fused_kernels
    use_fused_kernels(device.type if fuses else None)
    if run.deterministic:
        prepare_fixed_sums()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, which only products of float32 notice
    if device.type == "cpu":
        with ThreadPoolExecutor(1) as passing:  # its OpenMP threads end with it
            passing.submit(use_fast_float32_products).result()
    return device


def use_fast_float32_products() -> None:
    """Let the CPU library choose faster float32 matrix products, where their error stays that of float32.

    "medium" is up to twice as fast on AVX-512 machines at the same error; elsewhere it may round to bfloat16, so it
    is kept only if a product of this very machine is right to 2e-6.
    """
    torch.set_float32_matmul_precision("medium")
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 256, 256, generator=generator)
    exact = a.double() @ b.double()
    if ((a @ b) - exact).abs().max() > 2e-6 * exact.abs().max():
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def asks_to_stop(stop: asyncio.Event, observer: Observer, interrupted: threading.Event | None) -> Iterator[None]:
    """The first stop signal requests a clean end, a second one exits immediately. `interrupted`, which another thread
    sets, counts as a signal."""

    def handle(_: signal.Signals) -> None:
        if stop.is_set():
            os._exit(Stopped.exit_code)
        observer.say(
            "stopping: finishing or dropping the current step, then saving a checkpoint; "
            "press Ctrl-C again to exit immediately"
        )
        stop.set()

    async def wait_for_interrupt(interrupted: threading.Event) -> None:
        while not interrupted.is_set():
            await asyncio.sleep(INTERRUPT_POLL_S)
        handle(signal.SIGINT)

    waiting = asyncio.create_task(wait_for_interrupt(interrupted)) if interrupted else None
    try:
        with stop_signals_handled(handle):
            yield
    finally:
        if waiting:
            waiting.cancel()


def in_new_loop(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but keeps the thread's own event loop."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


def first_cause(group: BaseExceptionGroup) -> BaseException:
    """Which of several simultaneous failures to show: a HoneError if there is one."""
    pending: list[BaseException] = [group]
    leaves: list[BaseException] = []
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, HoneError)), leaves[0])


@contextlib.contextmanager
def located(loaded: Loaded) -> Iterator[None]:
    """Adds the line of the key to problems of the run file that are found after loading."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([loaded.located(problem) for problem in error.problems]) from error
