"""A capture of decoding steps for CPUs: it replays recorded operators as a CUDA graph replays kernels."""

from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hone.rollout.graphs import StepGraphs

WAITING = ("_local_scalar_dense", "nonzero", "_to_copy", "is_nonzero", "equal", "unique", "masked_select")
"""Operators that wait for a GPU, copy to or from it, or have shapes that only it knows."""


class Recorder(TorchDispatchMode):
    """Operators in order, with their arguments and results."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, out))
        return out


def recorded(step, inputs):
    """(operators, result) of a step."""
    with Recorder() as recorder:
        out = step(*inputs)
    return recorder.ops, out


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


def argument(value, sources):
    """What an operator is given: a number, or shape and place of a tensor."""
    if not isinstance(value, Tensor):
        return value
    assert storage_of(value) in sources, f"memory that the graph does not own is read: {value.shape}"
    return sources[storage_of(value)], tuple(value.shape), value.stride(), value.storage_offset()


def described(ops, inputs, kept):
    """What was launched: each operator with its numbers, and of its tensors the shape and where they lie: in which
    input, at which address of the memory that outlives the step, or in the result of which operator before."""
    sources = {storage_of(one): ("kept", storage_of(one)) for one in kept}
    sources |= {storage_of(one): ("input", number) for number, one in enumerate(inputs)}
    found = []
    for number, (func, args, kwargs, out) in enumerate(ops):
        found.append((func, [argument(leaf, sources) for leaf in tree_leaves((args, kwargs))]))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                sources.setdefault(storage_of(leaf), ("result", number))
    return found


class RecordedCapture:
    """See `Capture`. A replay runs the recorded operators again, on the very same tensors and with the same numbers."""

    def __init__(self, kept):
        self.kept = kept
        """A function that returns the tensors that outlive a step: weights and cache."""
        self.replays = 0

    def __call__(self, step, inputs):
        ops, out = recorded(step, inputs)
        waits = [func for func, *_ in ops if any(name in str(func) for name in WAITING)]
        assert not waits, f"a recorded step waits for its device: {waits}"
        self.launched = described(ops, inputs, self.kept())
        out.fill_(torch.nan)  # only recorded, not computed

        def replay():
            self.replays += 1
            for func, args, kwargs, was in ops:
                tree_map(into, was, func(*args, **kwargs))

        return replay, out


def into(was, now):
    """Put a result where the recorded one is; views and operators in place are there already."""
    if isinstance(was, Tensor) and storage_of(was) != storage_of(now):
        was.copy_(now)
    return was


class CheckedGraphs(StepGraphs):
    """Graphs that compute every step that they replay without them too, and compare: same operators on the same memory,
    same result to the last bit."""

    def __init__(self, kept, **settings):
        self.counts, self.captures = Counter(), []
        super().__init__(lambda: self._begin(kept), **settings)

    def _begin(self, kept):
        self.captures.append(RecordedCapture(kept))
        return self.captures[-1]

    def drop(self):
        self.counts["dropped"] += 1
        self._launched = {}
        super().drop()

    def run(self, place, step, inputs):
        bucket, (ops, expected) = (place, *(one.shape for one in inputs)), recorded(step, inputs)
        before = self._graphs.get(bucket)
        result = super().run(place, step, inputs)
        graph = self._graphs.get(bucket)
        self.counts["replayed" if before else "recorded" if graph else "eager"] += 1
        if graph is not None:
            capture = self.captures[-1]
            if before is None:
                self._launched[bucket] = capture.launched
            assert described(ops, inputs, capture.kept()) == self._launched[bucket], "a replay is not what would be run"
        assert torch.equal(result, expected)
        return result
