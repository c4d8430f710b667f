"""In which order the processes of a cluster are started and offloaded, recorded by fakes."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.assemble.ray_workers import RayWorkers
from hone.config.run import RunConfig


class Engine:
    """Takes a moment to start and to fall asleep, so that what does not wait for it comes first."""

    def __init__(self, name, happened):
        self.name, self._happened = name, happened

    async def sleep(self):
        await asyncio.sleep(0)
        self._happened.append("engine sleeps")

    async def is_well(self):
        return True


class Scoring:
    shares_devices = True

    def __init__(self, happened):
        self._happened = happened

    async def start(self):
        self._happened.append("judge starts")


class Observer:
    def say(self, message):
        pass

    warn = say

    def event(self, kind, **fields):
        pass

    def during(self, name, what):
        return nullcontext()


class Workers(RayWorkers):
    """Records what would be processes."""

    def __init__(self, *, is_shared, kept=()):
        self.happened = []
        topology = SimpleNamespace(
            sleeps=lambda role: is_shared, trainer=SimpleNamespace(devices=(0, 1)), apart={}, pools=()
        )
        config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d"}})
        self._job = SimpleNamespace(topology=topology, config=config, observer=Observer())
        self._settings = config.cluster
        vars(self)["_engines"] = {name: Engine(name, self.happened) for name in kept}
        self._replicas = dict.fromkeys(("engine-0", "engine-1"))
        self._model_folder, self._scores = Path("unused"), False
        self.scoring = Scoring(self.happened)

    def _new_trainer(self, needs) -> Any:
        return object()

    def _start_trainer(self, trainer, saved):
        self.happened.append("trainer starts")
        return {"rank-0": 1}

    async def start_engine(self, name) -> Any:
        await asyncio.sleep(0.05)  # a trainer that does not wait has started then
        engine: Any = Engine(name, self.happened)
        self._engines[name] = engine
        self.happened.append("engine starts")
        return engine


def started(workers):
    async def assemble():
        _, router = await workers.assemble(frozenset(), None)
        await router.close()

    asyncio.run(assemble())
    return workers.happened


@pytest.mark.parametrize("kept", [(), ("engine-0",)])
def test_on_shared_devices_engines_are_there_and_offloaded_before_the_trainer_starts(kept):
    starts = ["engine starts"] * (2 - len(kept))
    assert started(Workers(is_shared=True, kept=kept)) == [
        *("judge starts", *starts, "engine sleeps", "engine sleeps", "trainer starts")
    ]


def test_on_devices_of_their_own_all_start_at_once_and_none_sleeps():
    happened = started(Workers(is_shared=False))
    assert sorted(happened) == ["engine starts", "engine starts", "judge starts", "trainer starts"]
    assert happened.index("trainer starts") < 3, "it waited for the engines"


def test_no_trainer_starts_beside_an_engine_that_failed():
    class Failing(Workers):
        async def start_engine(self, name):
            if name == "engine-1":
                raise RuntimeError("No available memory for the cache blocks")
            return await super().start_engine(name)

    workers = Failing(is_shared=True)
    with pytest.RaisesGroup(RuntimeError, flatten_subgroups=True):
        started(workers)
    assert "trainer starts" not in workers.happened
