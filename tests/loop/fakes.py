"""A whole policy run against fakes, on a virtual clock: latencies are random, time is free, nothing is patched."""

import asyncio
import itertools
import random
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager, contextmanager, nullcontext
from types import MappingProxyType, SimpleNamespace

import torch

from hone.algo.shaping import informative
from hone.config.run import RunConfig
from hone.data.order import RowOrder, SourceRange
from hone.loop.buffer import GroupBuffer
from hone.loop.run import PolicyRun
from hone.rollout.engine import Sampling
from hone.train.tensor_files import LiveSnapshot
from hone.train.trainer import measured
from hone.types import Group, Position, Progress, Prompt, Sample, Score, VersionSpan


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self):
        super().__init__()
        self._virtual_now = 0.0
        select = self._selector.select

        def jump(timeout):
            if timeout:
                self._virtual_now += timeout
            return select(0)

        self._selector.select = jump

    def time(self):
        return self._virtual_now


def run_virtually(coroutine):
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(asyncio.wait_for(coroutine, 1e9))


class InlineExecutor(Executor):
    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Prompts:
    def __init__(self, explode_at=None):
        self.explode_at, self.taken = explode_at, 0
        self.order = RowOrder([SourceRange("", 0, 1000)], seed=0)

    def rows(self):
        return [*itertools.islice(self.starting_at(0), 1000)]

    def starting_at(self, index):
        while True:
            if index == self.explode_at:
                raise RuntimeError("data set exploded")
            self.taken = max(self.taken, index + 1)
            yield Prompt(f"p{index}", index, "1+1=", (1, 2))
            index += 1


class Engine:
    """Samples one token per response after a random latency; remembers which version sampled it."""

    def __init__(self, clock, explode_at=None):
        self.version, self.clock, self.active, self.explode_at = -1, clock, 0, explode_at

    async def generate(self, request, on_sample=None):
        if request.prompt.index == self.explode_at:
            raise ValueError("engine exploded")
        version, self.active = self.version, self.active + 1
        await asyncio.sleep(self.clock.choice([0, 0, 0.2, 1, 7]))
        self.active -= 1
        return tuple(
            Sample(request.prompt.id, i, (1 + i % 2,), (-0.5,), (VersionSpan(version, 1),), "stop", "2")
            for i in range(request.num_samples)
        )

    async def load(self, weights, version):
        await asyncio.sleep(0.2)
        self.version = version

    def fingerprint(self):
        return "same"


class RandomRewards:
    weights = MappingProxyType({"fake": 1.0})

    def __init__(self, clock, equal_frac):
        self.clock, self.equal_frac = clock, equal_frac

    @asynccontextmanager
    async def begin(self, prompt):
        yield SimpleNamespace(on_sample=None, finish=lambda samples: self.score(Group(prompt, samples)))

    async def score(self, group: Group) -> Group:
        await asyncio.sleep(self.clock.choice([0, 0.1, 2]))
        equal = self.clock.random() < self.equal_frac
        rewards = tuple(0.0 if equal else float(i % 2) for i in range(len(group.samples)))
        return group.scored({"fake": tuple(Score(r) for r in rewards)}, rewards)

    def enough(self, group: Group) -> bool:
        return True

    def expect(self, fingerprints):
        pass

    def fingerprints(self):
        return {}

    def http_metrics(self):
        return {}


class Trainer:
    device = torch.device("cpu")

    def __init__(self):
        self.prompts_seen = []

    def update(self, batch, algorithm):
        self.prompts_seen.append(list(batch.prompts))
        return {"train/loss": 0.0}

    def logprobs(self, batch, *, reference=False, temperature=None):
        return batch.sampler_logprobs_T

    def logprobs_and_entropies(self, batch):
        return batch.sampler_logprobs_T, -batch.sampler_logprobs_T

    def measure(self, batch, needs):
        return measured(self, batch, needs)

    def weights(self):
        return iter(())

    def snapshot(self):
        return LiveSnapshot({}, {})


class Observer:
    def __init__(self):
        self.rows, self.records, self.events, self.warnings = [], [], [], []

    @contextmanager
    def span(self, name, **args):
        yield

    @contextmanager
    def work(self, role, what):
        yield

    def during(self, role, what):
        return nullcontext()

    def log(self, stage, step, values):
        self.rows.append((stage, step, dict(values)))

    def event(self, kind, **fields):
        self.events.append({"at": 0.0, "kind": kind, **fields})

    def warn(self, text):
        self.warnings.append(text)

    def record(self, stage, step, groups, advantages, figures=None):
        self.records.append((step, [g.prompt.index for g in groups], advantages is not None))

    def position(self):
        return Position()


class EarlyBuffer(GroupBuffer):
    """A planted bug: returns permits when groups are taken, before the weights trained on them are live."""

    owed = 0

    async def take(self, count, **options):
        groups = await super().take(count, **options)
        super().release(count)
        self.owed = count
        return groups

    def release(self, count):
        if self.owed:  # the loop's own call, after publishing
            self.owed = 0
        else:
            super().release(count)


def fake_run(
    max_staleness=0, *, seed=0, steps=30, prompts=4, group=2, equal_frac=0.3, engine_fails=None, data_fails=None
):
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "run": {"steps": steps},
            "rollout": {"group_size": group, "max_staleness": max_staleness},
            "train": {"prompts_per_step": prompts},
            "algorithm": {"drop_uninformative": True, "max_dropped_per_kept": 1000},
            "gate": {"enabled": False},
            "checkpoint": {"every": 0},
        }
    )
    clock = random.Random(seed)
    algorithm = SimpleNamespace(
        needs=frozenset(),
        informative=lambda rewards: informative(rewards, None),
        after_update=lambda batch, metrics: ({}, None),
        assign=lambda batch: (batch.with_column("advantages_T", torch.ones_like(batch.sampler_logprobs_T)), {}),
    )
    return PolicyRun(
        config=config,
        progress=Progress(),
        trainer=Trainer(),
        observer=Observer(),
        checkpoints=SimpleNamespace(save=lambda *args: None),
        compute=InlineExecutor(),
        stop=asyncio.Event(),
        prompts=Prompts(data_fails),
        engine=Engine(clock, engine_fails),
        rewards=RandomRewards(clock, equal_frac),
        algorithm=algorithm,
        sampling=Sampling(max_tokens=4, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=()),
        eos_ids=frozenset({2}),
        weights_are_shared=True,
        evaluate=None,
        gate_passed=True,
    )
