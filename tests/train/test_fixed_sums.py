"""run.deterministic: PyTorch's kernels with a fixed order of sums, while a trainer computes and no longer."""

import os
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest
import torch
from cases import ROWS, algorithm_of, make_batch, make_groups, make_trainer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hone.assemble.job import set_up_arithmetic
from hone.config.run import RunSection
from hone.model.decoder import Decoder
from hone.model.layout import Layout
from hone.model.varlen_attention import FLASH, varlen_attention
from hone.runtime.processes import environment_restored
from hone.train.fixed_sums import fixed_sums

RAISING = {"put", "put_", "histc", "median", "kthvalue", "nll_loss2d_forward", "ctc_loss", "resize_"}
"""Operators without such a kernel on CUDA (docstring of `torch.use_deterministic_algorithms`), beside cumulative sums
of floating-point numbers and counts with weights."""

FILLING = cast(Any, torch.utils.deterministic)


class Watch(TorchDispatchMode):
    """Operators, and whether sums are in a fixed order as they run."""

    def __init__(self):
        super().__init__()
        self.fixed, self.raising, self.names = set(), set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.fixed.add(torch.are_deterministic_algorithms_enabled())
        self.names.add(name)
        is_float_sum = name in ("cumsum", "cumsum_") and args[0].is_floating_point()
        if name in RAISING or is_float_sum or (name == "bincount" and len(args) > 1):
            self.raising.add(str(func))
        return func(*args, **(kwargs or {}))


def a_step(trainer, name):
    """One optimizer step, watched."""
    algorithm, policy = algorithm_of(name), trainer.policy
    batch = make_batch(make_groups(), algorithm)
    prepared, every, tokens = policy._prepare(batch, algorithm), np.arange(len(batch.length_S)), batch.length_S.numpy()
    with Watch() as watch:
        policy.optimizer_step(lambda: policy.accumulate(prepared, every, algorithm, tokens))
    return watch


@pytest.mark.parametrize("name", ROWS)
def test_a_step_is_in_fixed_order_and_needs_no_operator_that_has_none(name):
    watch = a_step(make_trainer(deterministic=True), name)
    assert watch.fixed == {True} and not watch.raising
    assert not torch.are_deterministic_algorithms_enabled()
    assert a_step(make_trainer(), name).fixed == {False}


def test_nor_does_the_attention_of_gpus():
    layout = Layout.build([list(range(40)), list(range(300))], [0, 0, 1], [[1] * 30, [1] * 8, [1] * 90])
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(len(layout.token_ids_X), 4, 64, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(len(layout.token_ids_X), 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        for window in (None, 16):
            with Watch() as watch:
                out = varlen_attention(layout, FLASH)(0, q, k, v, window)
                torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
            assert not watch.raising and {"_varlen_attn", "_varlen_attn_backward", "index_add_"} <= watch.names


def test_passes_without_gradient_are_too(monkeypatch):
    seen = []

    def hidden(self, *args, plain=Decoder.hidden):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return plain(self, *args)

    monkeypatch.setattr(Decoder, "hidden", hidden)
    batch = make_batch(make_groups(), algorithm_of("grpo"))
    for is_on in (True, False):
        seen.clear()
        make_trainer(deterministic=is_on).policy.logprobs(batch)
        assert set(seen) == {is_on}


def test_a_failure_inside_leaves_nothing_on():
    fills = FILLING.fill_uninitialized_memory
    with suppress(ValueError), fixed_sums(True), fixed_sums(True):
        assert not FILLING.fill_uninitialized_memory
        raise ValueError
    assert not torch.are_deterministic_algorithms_enabled()
    assert FILLING.fill_uninitialized_memory == fills


def test_the_sums_are_the_same_numbers():
    batch = make_batch(make_groups(), algorithm_of("grpo"))
    found = []
    for is_on in (True, False):
        policy = make_trainer(deterministic=is_on).policy
        policy.update(batch, algorithm_of("grpo"), [np.arange(len(batch.length_S))])
        found.append(torch.cat([weight.flatten() for _, weight in policy.master_weights()]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_products_on_gpus_have_workspaces_of_a_fixed_size():
    threads = torch.get_num_threads()
    with environment_restored("CUBLAS_WORKSPACE_CONFIG"):
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        set_up_arithmetic(RunSection(device="cpu", threads=threads))
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        set_up_arithmetic(RunSection(device="cpu", threads=threads, deterministic=True))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
