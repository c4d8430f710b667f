"""What device and host do meanwhile: kernels, the time in which one runs, and how often and how long the host waits."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hone.devices import synchronize
from hone.tools.acceptance.figures import Figure

WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
"""Ends of the names of a driver's calls that return when the device has done something."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One that the profiler recorded."""

    name: str
    on_device: bool
    start_us: float
    end_us: float


@dataclass(slots=True)
class DeviceUsage:
    """What was recorded between two moments; filled when the later one has come."""

    seconds: float = 0.0
    events: list[RecordedEvent] = field(default_factory=list)

    @property
    def kernels(self) -> int:
        """Kernels, copies and fills of the device."""
        return sum(event.on_device for event in self.events)

    @property
    def busy_frac(self) -> float:
        """Share of the time in which the device computes or copies."""
        return covered_us(event for event in self.events if event.on_device) / 1e6 / self.seconds

    @property
    def host_s(self) -> float:
        """Seconds in which the host does not wait for the device."""
        waits = (event for event in self.events if not event.on_device and event.name.endswith(WAITS))
        return self.seconds - covered_us(waits) / 1e6


def covered_us(events: Iterable[RecordedEvent]) -> float:
    """Time in which at least one of the events lasts."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_us):
        total += max(0.0, event.end_us - max(event.start_us, end))
        end = max(end, event.end_us)
    return total


def use_figures(part: str, use: DeviceUsage, case: str) -> Iterator[Figure]:
    """Shares of the time, of engines."""
    yield Figure(part, "decode_busy", use.busy_frac, case)
    yield Figure(part, "decode_host_frac", use.host_s / use.seconds, case)


@contextmanager
def watching() -> Iterator[DeviceUsage]:
    """Records what this process does on a GPU inside, in all threads. Recording makes each launch a little slower."""
    found = DeviceUsage()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        synchronize()
        started = time.perf_counter()
        yield found
        synchronize()
        found.seconds = time.perf_counter() - started
    found.events += [
        RecordedEvent(one.name, one.device_type != DeviceType.CPU, one.time_range.start, one.time_range.end)
        for one in recorded.events() or ()
        if not one.is_user_annotation  # which lasts as long as all kernels in it together
    ]


def watched(work: Callable[[], object]) -> DeviceUsage:
    """What is recorded of a function."""
    with watching() as found:
        work()
    return found


def synchronizations(work: Callable[[], object]) -> int:
    """How often the host waits for the GPU meanwhile."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)
