"""Weights that leave a trainer's rank: in host memory or on the disk, never on its device."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hone.cluster import actors
from hone.cluster.actors import Seat, TrainerRank
from hone.errors import CheckpointError
from hone.model.load import read_weights
from hone.model.shards import write_weights


class Learner:
    """Has two weights on a device, and counts how many of them were gathered."""

    hf_config = None

    def __init__(self, device):
        self.device, self.gathered = device, 0

    def weights(self):
        for name, size in (("a", 3), ("b", 5)):
            self.gathered += 1
            yield name, torch.ones(size, dtype=torch.bfloat16, device=self.device)

    def master_weights(self):
        return ((name, weight.float()) for name, weight in self.weights())

    def write_weights(self, folder, dtype):
        write_weights(folder, self.master_weights(), dtype=dtype)


def test_memory_is_given_back_after_publishing_before_the_engines_wake(monkeypatch):
    """By each rank of those that take turns: also by one that sends nothing and gathers with the others."""
    monkeypatch.setattr(actors, "end_with_ray", lambda: None)
    monkeypatch.setattr(actors, "make_transport", lambda name, host: None)

    def published(number, takes_turns):
        happened = []

        def send(weights, *_, **__):
            happened.append(f"sent {len(list(weights))}")

        monkeypatch.setattr(actors, "publish", send)
        monkeypatch.setattr(actors, "give_back_memory", lambda: happened.append("given back"))

        @contextmanager
        def make(seat: Seat) -> Iterator[Any]:
            yield Learner("cpu")

        async def answer():
            rank = TrainerRank(60.0)
            await rank.build(make, Seat(number, 2, "file:///unused", takes_turns=takes_turns))
            engines: Any = {"engine-0": SimpleNamespace(ranks=(0,))}
            await rank.publish(engines, "ipc", "u", version=1, bucket_size=1, timeout_s=1.0)
            happened.append("answered")

        asyncio.run(answer())
        return happened

    assert published(0, True) == ["sent 2", "given back", "answered"]
    assert published(1, True) == ["given back", "answered"]
    assert published(0, False) == ["sent 2", "answered"]


@pytest.fixture
def ask(monkeypatch):
    """Has a rank of two do something; returns its answer and its learner."""
    monkeypatch.setattr(actors, "end_with_ray", lambda: None)  # this process is no actor

    def ask(number, device, method, *args):
        learner = Learner(device)

        @contextmanager
        def make(seat: Seat) -> Iterator[Any]:
            yield learner

        async def answer():
            rank = TrainerRank(60.0)
            await rank.build(make, Seat(number, 2, "file:///unused"))
            return await getattr(rank, method)(*args)

        return asyncio.run(answer()), learner

    return ask


def test_rank_0_writes_and_the_others_gather_with_it(ask, tmp_path):
    for number in (0, 1):
        answer, learner = ask(number, "cpu", "write_weights", tmp_path, torch.float32)
        assert answer is None and learner.gathered == 2
    assert {name: weight.tolist() for name, weight in read_weights(tmp_path)} == {"a": [1.0] * 3, "b": [1.0] * 5}


@pytest.mark.parametrize("method", ["write_weights", "weights"])
def test_no_weight_leaves_a_rank_on_its_device(ask, tmp_path, method):
    """Device `meta` stands for a GPU: it refuses a copy to the host, so one is tried, and nothing else gets out."""
    args = (tmp_path, torch.float32) if method == "write_weights" else ()
    with pytest.raises(NotImplementedError, match="meta"):
        ask(0, "meta", method, *args)
    answer, learner = ask(1, "meta", method, *args)  # gathers on its device, and returns nothing
    assert answer is None and learner.gathered == 2


def test_a_folder_that_a_rank_cannot_write_is_named(ask, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere.*rank 0.*a disk that all machines see"):
        ask(0, "cpu", "write_weights", tmp_path / "nowhere", torch.float32)
