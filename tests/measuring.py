"""Memory in tests: a gauge that says what it is told, and what torch's allocator really handed out."""

import gc

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


def allocated(work):
    """Most bytes that torch's allocator had handed out at once during `work`, beyond those before.

    Garbage is collected before and not during `work`: that would count what was made earlier as given back.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            work()
    finally:
        if was_enabled:
            gc.enable()
    now = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
