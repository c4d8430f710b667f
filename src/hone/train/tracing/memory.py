"""Bytes alive while code runs, counted operator by operator.

`LiveMemory` sees every storage that an operator takes or returns, and learns when it is freed. Around it,
`fake_tensors` lets the code run on shapes alone: real classes, real autograd, no numbers.

What it cannot see is what a kernel takes for itself and gives back before it returns, and where autograd would add two
gradients in place but not under a dispatch mode, so a trace comes out a little high. tests/plan/test_trace.py
says how much, against torch's own CPU allocator.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from hone.model.attention import flash_anywhere
from hone.model.kernels import fused_by
from hone.plan.activations import Pass

Moments = dict[tuple[str, str], int]
"""Most bytes alive at each moment, by phase and moment as in `plan.ledger`."""


class LiveMemory(TorchDispatchMode):
    """Counts live bytes, and the most of them at each moment that `at` names."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peaks: Moments = {}
        self._moment = ("start", "states made")
        self._sizes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._is_blind = False

    def at(self, phase: str, moment: str) -> None:
        """What is alive from now on counts for this moment."""
        self._moment = (phase, moment)
        self._note()

    def as_one_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, of whose tensors only the results are counted."""
        unseen = self._blind(function)

        def call(*args: Any, **named: Any) -> Any:
            found = unseen(*args, **named)
            self._look(found)
            self._note()
            return found

        return call

    def __enter__(self) -> LiveMemory:
        """FSDP2 frees gathered weights by resizing their storage, and DTensor makes tensors of global shapes to learn
        the shape of a result: the first is counted, the second is not."""
        self._resize, self._infer = UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached
        UntypedStorage.resize_ = self._counting_resize()
        ShardingPropagator._propagate_tensor_meta_non_cached = self._blind(self._infer)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached = self._resize, self._infer
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it will come again as operators on local tensors
        if self._is_blind:
            return func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            # What a fake tensor of one element is read as: a comparison has no exception, a norm is finite.
            dtype = args[0].dtype
            if dtype == torch.bool:
                return False
            return 1.0 if dtype.is_floating_point else 1
        for arg in args:
            self._look(arg)
        result = func(*args, **(kwargs or {}))
        self._look(result)
        self._note()
        return result

    def _look(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add(value)
        elif isinstance(value, (tuple, list)):
            for part in value:
                self._look(part)

    def _add(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a wrapper, whose parts come on their own
            return
        if storage in self._sizes:
            return
        size = [storage.nbytes()]
        self._sizes[storage] = size
        self.now += size[0]
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: list[int]) -> None:
        self.now -= size[0]

    def _note(self) -> None:
        if self.now > self.peaks.get(self._moment, -1):
            self.peaks[self._moment] = self.now

    def _counting_resize(self) -> Callable[..., None]:
        memory, plain = self, UntypedStorage.resize_

        def resize(self: UntypedStorage, size: int) -> None:
            plain(self, size)
            counted = memory._sizes.get(self)
            if counted is not None:
                memory.now += size - counted[0]
                counted[0] = size
                memory._note()

        return resize

    def _blind(self, infer: Callable[..., Any]) -> Callable[..., Any]:
        def inferred(*args: Any, **named: Any) -> Any:
            before, self._is_blind = self._is_blind, True
            try:
                return infer(*args, **named)
            finally:
                self._is_blind = before

        return inferred


class _TracedValues(TorchFunctionMode):
    """Real tensors keep their values: indices are made of them. Fake ones have none: a list of them is of ones, and
    their bytes, which only a fingerprint reads, are zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.data_ptr):
            if not isinstance(args[0], FakeTensor):
                with unset_fake_temporarily():
                    return func(*args)
            if func is Tensor.tolist:
                return np.ones(args[0].shape).tolist()
            if func is Tensor.data_ptr:
                return 0
            if func is Tensor.numpy:
                if args[0].dtype == torch.int32:
                    return np.zeros(args[0].shape, np.int32)
                raise TypeError("cannot be traced: the code reads values of a tensor that has none")
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_tensors(memory: LiveMemory) -> Iterator[None]:
    """Inside, tensors are shapes, and `memory` counts what they would take."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # deepcopy asks whether it is 0
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # its output may be a view; it is not written to
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_TracedValues())
        stack.enter_context(memory)
        yield


@contextmanager
def kernels_of(memory: LiveMemory, work: Pass) -> Iterator[None]:
    """Inside, attention and fused kernels are those that the plan of a pass counts."""
    with (
        flash_anywhere() if work.is_flash else nullcontext(),
        fused_by(memory.as_one_kernel, "cpu") if work.fused else nullcontext(),
    ):
        yield


@contextmanager
def backward_begins(then: Callable[[], None]) -> Iterator[None]:
    """Inside, calls `then` at each backward pass."""

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.backward:
                then()
            return func(*args, **(kwargs or {}))

    with Watch():
        yield
