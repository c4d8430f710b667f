"""Shared by all tests: one arithmetic thread, fixed random search, and a check that no test leaves anything behind."""

import gc
import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from contextlib import nullcontext
from importlib.util import find_spec

if not find_spec("vllm"):  # which asks the CPU itself what it has, and aborts where oneDNN may not use that
    # The same arithmetic and allocations whatever the CPU: with its instructions for bfloat16 oneDNN has others.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import pytest
import torch
from leftovers import leaves_nothing

if find_spec("hypothesis"):  # it is not in vLLM's environment
    import random_search  # noqa: F401  loads how long property tests search


def pytest_itemcollected(item):
    if hasattr(getattr(item, "obj", None), "hypothesis"):
        item.add_marker("property")


@pytest.fixture(autouse=True, scope="session")
def state_of_its_own(tmp_path_factory):
    """Runs remember what memory they took, and what rows became; those of tests are not to be remembered by a
    user's."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="session")
def signals_as_in_a_terminal():
    """A background job has SIGINT ignored, and one of `nohup` SIGHUP: processes that tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # as before here, and the default in a new program


@pytest.fixture(autouse=True)
def arithmetic_as_at_first():
    """Runs set threads and precision of their process; a test is not to compute as the one before it did."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """A full collection of garbage takes a second with all that is imported; tests that measure memory ask for it."""
    gc.collect()
    gc.freeze()


def nothing_left_by(node):
    """vLLM sets variables of the process that it is in, so tests of it are not checked."""
    return nullcontext() if node.get_closest_marker("vllm") else leaves_nothing(node.name)


@pytest.fixture(autouse=True, scope="module")
def module_leaves_nothing(state_of_its_own, signals_as_in_a_terminal, request):
    """Fixtures of a module end after its tests, and are checked here."""
    with nothing_left_by(request.node):
        yield


@pytest.fixture(autouse=True)
def test_leaves_nothing(request):
    with nothing_left_by(request.node):
        yield
