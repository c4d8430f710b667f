"""One engine of several, as the router sees it: its lives, what it is drawing, and what was drawn before it died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby

from hone.rollout.engine import Engine, OnSample, Request
from hone.runtime.backoff import Restarts
from hone.types import Sample


class Draft:
    """A request on its way to being answered, by one replica or, when that dies, by several."""

    def __init__(self, request: Request, on_sample: OnSample | None) -> None:
        self.request = request
        self._on_sample = on_sample
        self._samples: dict[int, Sample] = {}

    def keep(self, sample: Sample) -> bool:
        """Take a finished sample and hand it on, once; False for one that is there already."""
        if sample.index in self._samples:
            return False
        self._samples[sample.index] = sample
        if self._on_sample is not None:
            self._on_sample(sample)
        return True

    @property
    def num_missing(self) -> int:
        return self.request.num_samples - len(self._samples)

    def missing(self) -> list[Request]:
        """What is still to be drawn, with the randomness that it would have been drawn with: one request, or one for
        each run of samples between those that are there."""
        request = self.request
        indices = range(request.first_sample, request.first_sample + request.num_samples)
        absent = [index for index in indices if index not in self._samples]
        runs = [[index for _, index in run] for _, run in groupby(enumerate(absent), lambda item: item[1] - item[0])]
        return [replace(request, first_sample=run[0], num_samples=len(run)) for run in runs]

    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for _, sample in sorted(self._samples.items()))


class Life:
    """A replica from its start to its end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version: int | None = None
        """Published to it; None before anything was."""
        self.drawing: dict[Draft, list[Sample]] = {}
        """Drafts it is at, with the samples that it finished of each."""
        self.seen_at = asyncio.get_running_loop().time()
        """Its last sign of life."""
        self.held: list[Callable[[], None]] = []
        """Hands on samples with tokens of the version that is being published: not before it is known to be whole."""
        self.turn = asyncio.Lock()
        """Held while weights are published to it, or while it is put to sleep or woken: one after the other."""
        self.rest = ExitStack()
        """What ends when it wakes."""
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it was given up. What it says afterwards is not listened to: it may be of weights long gone."""

    @property
    def num_missing(self) -> int:
        """Samples that it is to draw."""
        return sum(draft.num_missing for draft in self.drawing)

    def see(self) -> None:
        self.seen_at = asyncio.get_running_loop().time()

    def has(self, version: int) -> None:
        """A version was published to it; what waited for that is handed on."""
        self.version = version
        held, self.held = self.held, []
        for hand_on in held:
            hand_on()


@dataclass
class Replica:
    """A named place for an engine, whoever is in it at the time."""

    name: str
    restarts: Restarts
    life: Life | None = None
    """None while it is down."""
    why: str = ""
    """What it died of last."""
    given_up: bool = False
    num_drawn: int = field(default=0, init=False)
    """Samples since they were counted last."""
    most_missing: int = field(default=0, init=False)
    """Most samples that it was to draw at one time since then."""
