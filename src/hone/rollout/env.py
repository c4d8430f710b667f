"""Environment interface: one episode that answers the policy's turns; its checks and metrics.

    class Calculator:
        def __init__(self, episode: Episode, **args): ...
        def step(self, turn: str) -> Observation | None: ...        (or async)

An environment is made for one sample, asked once after each of its turns, and discarded: there is no reset to get
wrong. It sees text only; `episodes.py` appends what it says as tokens that carry no loss. It runs in a process of its
own (`env_pool.py`), which imports this file, so nothing heavy is imported here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.types import Prompt, Sample

MAX_OBSERVATION_CHARACTERS = 1 << 20
"""Nothing that long fits a context; tokenising it would only stop the run for a while."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What an environment is made for: one sample of one prompt."""

    prompt: Prompt
    """With the gold answer and every other column of the row."""
    sample_index: int
    seed: int
    """Seed of the environment's randomness: a function of (run seed, stream, prompt, sample), not of time or order."""


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer to one turn. Returning None instead says `Observation(text=None)`."""

    text: str | None = None
    """Appended to the sample, which the policy then continues. None: the episode is over."""
    reward: float = 0.0
    """Reward of this turn; the sample's reward has the sum over its turns as a component named `environment`.
    Credit with a return for each token (`gae`, `reinforce_pp`) has it at the turn's last one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Logged as `rollout/env_<name>_mean`: summed over a sample's turns, averaged over samples. Identifiers only."""


class Environment(Protocol):
    """One episode. Made by calling what the run file names with (episode, **args)."""

    def step(self, turn: str) -> Observation | Awaitable[Observation | None] | None:
        """Answer a turn: its text without special tokens, with the stop string that ended it.

        Called after every turn, the last one that the limits allow included; a text is then dropped, the reward
        counts. Whatever it raises is a fault of infrastructure: the sample is not scored.
        """
        ...


class BadEnvironment(Exception):
    """An environment returned an invalid answer; the message has the reason."""


def check_observation(returned: Any) -> Observation:
    """A valid observation of plain values from whatever a step returned. Raises BadEnvironment."""
    if returned is None:
        return Observation()
    if not isinstance(returned, Observation):
        raise BadEnvironment(f"returned {type(returned).__name__}, not Observation or None")
    text = returned.text
    if text is not None and not isinstance(text, str):
        raise BadEnvironment(f"gave a text that is {type(text).__name__}")
    if text is not None and len(text) > MAX_OBSERVATION_CHARACTERS:
        raise BadEnvironment(f"gave a text of {len(text)} characters; at most {MAX_OBSERVATION_CHARACTERS} are taken")
    try:
        metrics = {str(name): float(value) for name, value in returned.metrics.items()}
        reward = float(returned.reward)
    except (AttributeError, TypeError, ValueError) as error:
        raise BadEnvironment(f"gave a reward or metrics that are not numbers: {error}") from error
    for name, value in {"reward": reward, **metrics}.items():
        if not math.isfinite(value) or not name.isidentifier():
            raise BadEnvironment(f"gave {name!r} = {value}; names must be identifiers and values finite")
    return Observation(None if text is None else str(text), reward, metrics)


def episode_seed(seed: int, stream: str, prompt_index: int, sample_index: int) -> int:
    """The 64-bit seed of an episode's own randomness, the same on every machine and in every process."""
    words = f"environment/{seed}/{stream}/{prompt_index}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def episode_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """`<prefix>turns_mean`, `<prefix>tool_tokens_mean`, `<prefix>env_<name>_mean`; nothing of samples without turns.

    Means over samples; of the environment's own numbers over the samples that it did not fail.
    """
    if not any(sample.turns for sample in samples):
        return {}
    tool_tokens = sum(int((~sample.loss_mask).sum()) for sample in samples if sample.loss_mask is not None)
    metrics = {
        f"{prefix}turns_mean": sum(len(sample.turns) for sample in samples) / len(samples),
        f"{prefix}tool_tokens_mean": tool_tokens / len(samples),
    }
    whole = [sample for sample in samples if not sample.fault]
    sums: dict[str, float] = {}
    for name, value in (item for sample in whole for turn in sample.turns for item in turn.metrics.items()):
        sums[name] = sums.get(name, 0.0) + value
    return metrics | {f"{prefix}env_{name}_mean": value / len(whole) for name, value in sorted(sums.items())}
