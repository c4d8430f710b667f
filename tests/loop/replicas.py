"""Fake replicas of an engine that die, hang and lie when a test says so, and a router over them."""

import asyncio
import random

from fakes import InlineExecutor, Observer

from hone.errors import EngineError
from hone.rollout.engine import Request, Sampling
from hone.rollout.router import Router
from hone.types import Prompt, Sample, VersionSpan

SAMPLING = Sampling(max_tokens=4, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=())


def request(prompt=0, samples=4, stream="train"):
    return Request(Prompt(f"p{prompt}", prompt, "1+1=", (1, 2)), samples, SAMPLING, 0, stream)


def token_of(prompt, sample):
    """What is drawn depends on prompt and sample alone, as it does in real engines at one version."""
    return 1 + (7 * prompt + 3 * sample) % 11


class FakeReplica:
    """Draws its samples one after the other, one second each."""

    def __init__(self, name="a", seconds=lambda: 1.0):
        self.name, self.seconds = name, seconds
        self.version, self.bytes = -1, "nothing"
        self.requests, self.loads = [], []
        self.asleep = self.closed = self.hangs = self.refuses_weights = False
        self.died = asyncio.get_running_loop().create_future()

    def die(self, why="was killed by SIGKILL"):
        if not self.died.done():
            self.died.set_result(why)

    async def living(self, seconds):
        """Time passes, unless it dies."""
        if self.hangs:
            await asyncio.sleep(1e7)
        await asyncio.wait({self.died}, timeout=seconds)
        if self.died.done():
            raise EngineError(f"{self.name} {self.died.result()}")

    async def generate(self, request, on_sample=None):
        self.requests.append(request)
        samples = []
        for index in range(request.first_sample, request.first_sample + request.num_samples):
            await self.living(self.seconds())
            token = token_of(request.prompt.index, index)
            samples.append(
                Sample(request.prompt.id, index, (token,), (-0.5,), (VersionSpan(self.version, 1),), "stop", str(token))
            )
            if on_sample is not None:
                on_sample(samples[-1])
        return tuple(samples)

    async def load(self, weights, version):
        await self.living(self.seconds() / 2)
        if self.refuses_weights:
            raise EngineError(f"{self.name} has no memory for weights")
        self.loads.append(version)
        self.version, self.bytes = version, f"bytes of {version}"

    async def sleep(self):
        await self.living(0)
        self.asleep = True

    async def wake(self):
        await self.living(0)
        self.asleep = False

    async def close(self):
        self.closed = True
        self.die("was closed")

    def fingerprint(self):
        return self.bytes


class Fleet:
    """A router over fake replicas that are replaced by new ones when they die."""

    def __init__(self, names="ab", *, restarts=100, silence_s=60.0, patience_s=600.0, seed=0, random_latencies=False):
        clock = random.Random(seed)
        self.seconds = (lambda: clock.choice([0, 0.1, 1, 3])) if random_latencies else (lambda: 1.0)
        self.lives = {name: [FakeReplica(name, self.seconds)] for name in names}
        self.observer = Observer()
        self.cannot_start = False
        self.prepare = lambda replica: None
        """Called with each replica that is started again."""
        self.router = Router(
            {name: lives[0] for name, lives in self.lives.items()},
            self.observer,
            silence_s=silence_s,
            call_s=silence_s,
            patience_s=patience_s,
            restart=self.start,
            restarts=restarts,
            start_s=50.0,
            threads=InlineExecutor(),
        )

    async def start(self, name):
        await asyncio.sleep(5)
        if self.cannot_start:
            raise EngineError("no device is left")
        self.lives[name].append(FakeReplica(name, self.seconds))
        self.prepare(self.lives[name][-1])
        return self.lives[name][-1]

    def now(self, name):
        return self.lives[name][-1]

    def events(self, *kinds):
        return [event for event in self.observer.events if event["kind"] in kinds]
