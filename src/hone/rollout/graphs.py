"""CUDA graphs of decoding steps: a step's kernels are recorded once per bucket of shapes, then launched as one.

A step of 28 layers is some 1,500 kernels, and launching them one by one takes the host longer than a small batch
takes the GPU. The first step of a bucket runs eagerly, which also warms libraries up; the second is recorded; later
ones copy their inputs to where the recorded step reads them, and replay it. Replayed kernels have the addresses and
numbers of the recording, so all that differs between two steps of a bucket must be in its input tensors: no length from
the host, no memory from outside that may move, nothing that waits for the device.

Graphs share one pool of memory, because they never run at the same time. At most `MOST_GRAPHS` are kept; the least
recently used goes first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from hone.memory.gauges import ran_out_of_memory

log = logging.getLogger("hone.rollout")

MOST_GRAPHS = 64
"""A rollout to 2,000 tokens passes some 50 buckets."""

Step = Callable[..., Tensor]
"""What a step computes of its inputs; each call of one bucket must launch the same kernels on the same addresses."""
Capture = Callable[[Step, Sequence[Tensor]], tuple[Callable[[], None], Tensor]]
"""Records a step of these inputs into one pool of memory, and need not compute it. Returns a function that computes it
again from what is in the inputs then, and the tensor that it puts the result into."""


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures on a device: cuBLAS keeps a workspace for each stream that it was called on."""
    return torch.cuda.Stream(device)


class CudaCapture:
    """`Capture` by CUDA's stream capture, on a stream apart; a new one begins a new pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step, inputs: Sequence[Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            # thread_local: other threads may allocate memory meanwhile, which the default forbids them.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = step(*inputs)
            except BaseException:
                with suppress(RuntimeError):  # says only that the capture failed, not why
                    graph.capture_end()
                raise
            graph.capture_end()
        outside.wait_stream(self._stream)
        return graph.replay, out


class StepGraphs:
    """Graphs of the steps of one stepper.

    Args:
        start: makes a `Capture` with a new pool.
        most: graphs kept at one time.
    """

    def __init__(self, start: Callable[[], Capture], most: int = MOST_GRAPHS) -> None:
        self._start, self._most = start, most
        self._works = True
        self.drop()

    def drop(self) -> None:
        """Forget all graphs and give their memory back: addresses that they read are about to change."""
        self._capture: Capture | None = None
        self._graphs: OrderedDict[Hashable, StepGraph | None] = OrderedDict()  # None: computed once, not recorded yet

    @property
    def count(self) -> int:
        """Graphs that are kept now."""
        return sum(graph is not None for graph in self._graphs.values())

    def run(self, place: Hashable, step: Step, inputs: Sequence[Tensor]) -> Tensor:
        """The step's result; valid until the next step.

        Args:
            place: what the step's kernels depend on besides the shapes of its inputs: addresses, numbers from the host.
            inputs: what may differ between steps of a bucket. One that is the same object as the last time is not
                copied again, so it must not have been changed in place.
        """
        bucket = (place, *(one.shape for one in inputs))
        if not self._works:
            return step(*inputs)
        if bucket not in self._graphs:
            result = step(*inputs)
            self._keep(bucket, None)
            return result
        graph = self._graphs[bucket] or self._record(step, inputs)
        if graph is None:
            return step(*inputs)
        self._keep(bucket, graph)
        return graph.replay(inputs)

    def _keep(self, bucket: Hashable, graph: StepGraph | None) -> None:
        self._graphs[bucket] = graph
        self._graphs.move_to_end(bucket)
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)

    def _record(self, step: Step, inputs: Sequence[Tensor]) -> StepGraph | None:
        """None where it cannot be done; then it is not tried again. Raises what says that memory ran out."""
        self._capture = self._capture or self._start()
        try:
            return StepGraph(self._capture, step, inputs)
        except RuntimeError as error:
            self.drop()
            if ran_out_of_memory(error):
                raise
            self._works = False
            log.warning(
                "decoding runs without CUDA graphs, more slowly: recording a step failed with %s: %s. "
                "Set cluster.engines.enforce_eager=true to not try.",
                type(error).__name__,
                str(error).strip().partition("\n")[0],
            )
            return None


class StepGraph:
    """One recorded step, and the tensors that it reads."""

    def __init__(self, capture: Capture, step: Step, inputs: Sequence[Tensor]) -> None:
        self._static = [one.clone() for one in inputs]
        self._given: list[Tensor] = [*inputs]
        self._replay, self._out = capture(step, self._static)

    def replay(self, inputs: Sequence[Tensor]) -> Tensor:
        for number, (static, given, new) in enumerate(zip(self._static, self._given, inputs, strict=True)):
            if new is not given:
                static.copy_(new)
                self._given[number] = new
        self._replay()
        return self._out
