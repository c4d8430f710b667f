"""Memory gauges of the compute device: peaks by phase, usage and utilisation.

On a GPU this is what torch's allocator held for tensors; a CUDA context and what other libraries take are not in it.
On a CPU it is the resident memory of this process, libraries included: torch has no allocator of its own there, and
its profiler's memory events cost more than what they watch. Linux keeps the high-water mark and lets us start it anew
(/proc/self/clear_refs); where it does not, a peak is the largest figure seen at a phase's ends. Both are of the whole
process: phases that overlap, as sampling and training do with `rollout.max_staleness`, see each other's memory.

Not here: what to do when there is too little (`memory.ladder`), and what was expected (`plan.planner`).
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol

import psutil

from hone.devices import is_accelerator, module_of
from hone.plan.hardware import memory_limit_bytes

if TYPE_CHECKING:
    import torch

BUSY_EVERY_S = 1.0
"""NVML's own figure is a mean over about as long."""

_WORDS = (
    "out of memory",  # CUDA, and most others
    "can't allocate memory",  # torch on a CPU
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had: torch's on any device, numpy's, or the system's."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def capacity_of(device: torch.device) -> int:
    """Bytes of the whole device; of a CPU, what this process may use."""
    if not is_accelerator(device):
        return memory_limit_bytes()
    module = module_of(device)
    return module.get_device_properties(module.current_device()).total_memory


class Gauge(Protocol):
    """Reads one device's memory. Cheap enough for every phase, no synchronisation."""

    kind: Literal["cpu", "gpu"]
    what: str
    """Name of what is measured, for messages."""
    capacity_bytes: int
    """Memory of the whole device."""

    def reset(self) -> None:
        """Begin a new peak."""
        ...

    def peak_bytes(self) -> int:
        """The most since `reset`."""
        ...

    def give_back(self) -> None:
        """Hand what is freed but held back to the system, so that it can be had again in other sizes."""
        ...


class HostGauge:
    """Resident memory of this process."""

    kind: Literal["cpu", "gpu"] = "cpu"
    what = "resident memory of this process"

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._status = self._clear = -1
        self._process = psutil.Process()
        with suppress(OSError):
            self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            os.pwrite(self._clear, b"5", 0)
        self.keeps_peaks = self._clear >= 0
        """Whether the kernel keeps the high-water mark for us."""

    def __del__(self) -> None:
        for handle in (self._status, self._clear):
            if handle >= 0:
                os.close(handle)

    def reset(self) -> None:
        if self.keeps_peaks:
            os.pwrite(self._clear, b"5", 0)

    def peak_bytes(self) -> int:
        if not self.keeps_peaks:
            return self._process.memory_info().rss
        status = os.pread(self._status, 8192, 0)
        at = status.index(b"VmHWM:") + 6
        return int(status[at : status.index(b"kB", at)]) << 10

    def give_back(self) -> None:
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


class DeviceGauge:
    """What torch's allocator holds for tensors on the process's accelerator.

    Args:
        budget_bytes: the allocator refuses to go beyond it; None leaves it the whole device.
    """

    kind: Literal["cpu", "gpu"] = "gpu"
    what = "tensors in torch's allocator on the device"

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        self._torch = module_of(device)
        self.capacity_bytes = capacity_of(device)
        if budget_bytes is not None and budget_bytes < self.capacity_bytes:
            self._torch.set_per_process_memory_fraction(budget_bytes / self.capacity_bytes)

    def reset(self) -> None:
        self._torch.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return self._torch.max_memory_allocated()

    def give_back(self) -> None:
        gc.collect()
        self._torch.empty_cache()


class Meter:
    """Peaks of phases. A phase that opens or closes begins a new peak for all that are open; any thread may.

    Args:
        gauge: of the device that computes.
    """

    def __init__(self, gauge: Gauge) -> None:
        self.gauge = gauge
        self._lock = threading.Lock()
        self._open: dict[str, tuple[int, int]] = {}
        """Phase -> how many of it are open, and its peak so far."""
        self._peaks: dict[str, int] = {}
        self._process_peak = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what happens inside."""
        self.open(name)
        try:
            yield
        finally:
            self.close(name)

    def open(self, name: str) -> None:
        with self._lock:
            self._fold()
            count, peak = self._open.get(name, (0, 0))
            self._open[name] = (count + 1, peak)
            self._process_peak = max(self._process_peak, _process_peak_bytes())  # the reset forgets it
            self.gauge.reset()

    def close(self, name: str) -> None:
        with self._lock:
            self._fold()
            count, peak = self._open.pop(name)
            if count > 1:
                self._open[name] = (count - 1, peak)
            self._peaks[name] = max(peak, self._peaks.get(name, 0))

    def peak_bytes(self) -> int:
        """The most since the last phase opened."""
        return self.gauge.peak_bytes()

    def take_peaks(self) -> dict[str, int]:
        """Bytes by phase, of those that closed since the last call."""
        with self._lock:
            peaks, self._peaks = self._peaks, {}
        return peaks

    @property
    def open_phase(self) -> str | None:
        """The phase that was opened last and is not closed."""
        return next(reversed(self._open), None)

    def forget(self, name: str) -> None:
        """Take no account of what that phase took so far; of one that is open, from here on."""
        with self._lock:
            self._fold()
            self._peaks.pop(name, None)
            if name in self._open:
                self._open[name] = (self._open[name][0], 0)
            self.gauge.reset()

    def process_peak_bytes(self) -> int:
        """Largest resident memory of this process so far, whatever was reset since."""
        with self._lock:
            self._process_peak = max(self._process_peak, _process_peak_bytes())
            return self._process_peak

    def _fold(self) -> None:
        """Credit the peak up to now to every open phase."""
        if self._open:
            now = self.gauge.peak_bytes()
            self._open = {name: (count, max(peak, now)) for name, (count, peak) in self._open.items()}


class Busy:
    """How busy the GPU is: the mean of NVML's figures, read once a second by a thread that ends with the process."""

    def __init__(self, read: Callable[[], float], *, every_s: float = BUSY_EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self._lock = threading.Lock()
        self._sum, self._count = 0.0, 0
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="hone-busy", daemon=True).start()

    def take_mean(self) -> float | None:
        """Share of the time since the last call in which the GPU computed, from 0 to 1; None before a first reading."""
        with self._lock:
            total, count = self._sum, self._count
            self._sum, self._count = 0.0, 0
        return total / count if count else None

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                busy = self._read()
            except Exception:  # boundary: whatever a driver's library raises ends this record, nothing else
                return
            with self._lock:
                self._sum, self._count = self._sum + busy, self._count + 1


def nvml_reader() -> Callable[[], float] | None:
    """A function that reads the busy share of the GPU that torch computes on; None without NVML's Python package."""
    try:
        import pynvml  # type: ignore[import-not-found]
        import torch

        pynvml.nvmlInit()
        handle: Any = pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        )
    except Exception:  # boundary: no package, no driver, or a device that NVML does not know
        return None
    return lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100


def _process_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
