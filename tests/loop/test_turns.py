"""Who shares the trainer's devices sleeps while it works and is awake before it is asked: the order of a whole run."""

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tiny import write_run

import hone.assemble.workers as build_workers
from hone.assemble.workers import local_workers
from hone.cli.main import main
from hone.types import Score


class Shared:
    """One device's memory: the trainer's while it works, else of who samples and scores."""

    def __init__(self):
        self.awake = {"engine": True, "judge": False}
        self.happened = []

    def note(self, what):
        if self.happened[-1:] != [what]:
            self.happened.append(what)


class Sleeper:
    def __init__(self, name, shared):
        self.name, self.shared = name, shared

    async def sleep(self):
        self.shared.awake[self.name] = False
        self.shared.note(f"{self.name} sleeps")

    async def wake(self):
        self.shared.awake[self.name] = True
        self.shared.note(f"{self.name} wakes")


class Judge(Sleeper):
    async def score(self, group):
        assert self.shared.awake["judge"], "asked while it sleeps"
        self.shared.note("scores")
        return tuple(Score(float(sum(c in "02468" for c in sample.text))) for sample in group.samples)


class Trainer:
    def __init__(self, trainer, shared):
        self._trainer, self._shared = trainer, shared

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    def update(self, batch, algorithm):
        assert not any(self._shared.awake.values()), "its device is somebody else's"
        self._shared.note("trains")
        return self._trainer.update(batch, algorithm)


@pytest.fixture
def shared(monkeypatch):
    shared = Shared()

    @asynccontextmanager
    async def workers(job, needs, saved):
        async with local_workers(job, needs, saved) as found:
            judge = Judge("judge", shared)
            yield replace(
                found,
                trainer=Trainer(found.trainer, shared),
                colocated=(Sleeper("engine", shared), judge),
                scorers={"exact": judge},
            )

    monkeypatch.setattr(build_workers, "local_workers", workers)
    return shared


def test_sampling_scoring_and_training_take_turns(shared, tmp_path):
    assert main(["train", str(write_run(tmp_path, steps=2)), "stages=[rl]"]) == 0
    wakes, sleeps = ["engine wakes", "judge wakes"], ["engine sleeps", "judge sleeps"]
    step = ["scores", *sleeps, "trains", *wakes]
    # Begun and ended with an evaluation; the export has the devices to itself.
    assert shared.happened == [*wakes, *step, *step, "scores", *sleeps]
