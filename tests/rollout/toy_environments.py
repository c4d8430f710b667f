"""Not a test: environments that behave and misbehave in known ways, for the process in which environments live."""

import asyncio
import os
import random
import time

from hone.rollout.env import Observation


class Echo:
    """Says the turn back in brackets, three times; counts its own turns to show that it has a memory of its own."""

    def __init__(self, episode, *, times=3):
        self.episode, self.left = episode, times

    def step(self, turn):
        self.left -= 1
        if self.left < 0:
            return None
        return Observation(f"[{turn}{self.left}]", reward=0.5, metrics={"calls": 1})


class AsyncEcho(Echo):
    async def step(self, turn):
        await asyncio.sleep(0.01)
        return super().step(turn)


class Chance(Echo):
    def step(self, turn):
        return Observation(f"{random.Random(self.episode.seed).random()}")


class Misbehaves:
    """Does on the second turn what `how` says; on the first one all is well."""

    def __init__(self, episode, *, how, only=None):
        self.how, self.first, self.well = how, True, only not in (None, episode.sample_index)

    def step(self, turn):
        if self.first or self.well:
            self.first = False
            return Observation("?")
        match self.how:
            case "raises":
                raise ValueError("no such\ntool")
            case "exits":
                raise SystemExit(3)
            case "dies":
                os._exit(7)
            case "blocks":
                time.sleep(60)
            case "awaits":
                return asyncio.sleep(60)
            case "refuses to be cancelled":
                return self.stubborn()
            case "gives a text":
                return "24"
            case "gives a number":
                return Observation(24)  # type: ignore[arg-type]
            case "gives NaN":
                return Observation("x", reward=float("nan"))
            case "gives a bad metric":
                return Observation("x", metrics={"a/b": 1.0})
            case "gives a word as reward":
                return Observation("x", reward="much")  # type: ignore[arg-type]
            case "gives no end":
                return Observation("x" * (2 << 20))

    async def stubborn(self):
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue


class FailsToStart:
    def __init__(self, episode):
        raise KeyError("no table")

    def step(self, turn): ...


class NoStep:
    def __init__(self, episode): ...
