"""Memory in tests: a gauge that says what it is told, and what torch's allocator really handed out."""

import gc
from bisect import bisect_right

from torch.profiler import ProfilerActivity, profile


class FakeGauge:
    """Says what it is told; `peak` may be a function."""

    kind = "cpu"
    what = "made up"
    capacity_bytes = 64 << 30

    def __init__(self, peak=0):
        self.peak = peak
        self.given_back = 0

    def reset(self):
        pass

    def peak_bytes(self):
        return self.peak() if callable(self.peak) else self.peak

    def give_back(self):
        self.given_back += 1


PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::baddbmm_")


def allocated(work, *, scratch=True):
    """Most bytes that torch's allocator had handed out at once during `work`, beyond those before.

    Garbage is collected before and not during `work`: that would count what was made earlier as given back.

    Args:
        scratch: whether that includes what a matrix product takes beside its result. In bfloat16 it depends on the
            CPU: one without instructions for it makes the result in float32 first.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
            work()
    finally:
        if was_enabled:
            gc.enable()
    events = recorded.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    if not scratch:
        spans = [(one.start_ns(), one.start_ns() + one.duration_ns()) for one in events if one.name() in PRODUCTS]
        changes = _kept_after(sorted(spans), changes)
    now = most = 0
    for _, size in changes:
        now += size
        most = max(most, now)
    return most


def _kept_after(spans, changes):
    """Changes of memory without pairs of one block taken and given back in one span of time."""
    begins, open_blocks, dropped = [begin for begin, _ in spans], {}, set()
    for number, (time_ns, size) in enumerate(changes):
        span = bisect_right(begins, time_ns) - 1
        if span < 0 or time_ns > spans[span][1]:
            continue
        blocks = open_blocks.setdefault((span, abs(size)), [])
        if size > 0:
            blocks.append(number)
        elif blocks:
            dropped |= {blocks.pop(), number}
    return [change for number, change in enumerate(changes) if number not in dropped]
