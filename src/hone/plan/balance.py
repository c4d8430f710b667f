"""How many devices sample and how many train, where each has its own: the split whose slower side is fastest.

Practice says rollout : policy : critic = 1 : 1 : 1; what balances is what the lengths, the model and the memory say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from hone.plan.inputs import Inputs

GENERATING = ("rollout", "reward")
"""Phases on the devices that sample."""


class Times(Protocol):
    """What of a plan a split is judged by."""

    @property
    def phases(self) -> Mapping[str, float]: ...


Judged = Callable[[Inputs], tuple[float, Times]]
"""Inputs -> what is impossible about them (0: nothing), and the times of a step."""


def balanced(inputs: Inputs, judged: Judged) -> Inputs:
    """The inputs with `engine_devices` set, and `critic_devices` where the critic has some of its own."""
    best, least = inputs, None
    for candidate in _splits(inputs):
        impossible, time = judged(candidate)
        cost = (impossible, slower_side_s(time))
        if least is None or cost < least:
            best, least = candidate, cost
    return best


def slower_side_s(time: Times) -> float:
    """Seconds of what takes longer, sampling or everything else."""
    sampling = sum(seconds for phase, seconds in time.phases.items() if phase in GENERATING)
    return max(sampling, sum(time.phases.values()) - sampling)


def equal_thirds(inputs: Inputs) -> Inputs:
    """Rollout : policy : critic = 1 : 1 : 1, rounded down."""
    return _with(inputs, max(1, _devices(inputs) // 3), max(1, _devices(inputs) // 3))


def _splits(inputs: Inputs) -> Iterator[Inputs]:
    placement, devices = inputs.placement, _devices(inputs)
    each, ways = placement.engine.tensor_parallel, placement.tensor_parallel * placement.context_parallel
    own_critic = bool(placement.critic_devices and inputs.critic)
    for engines in range(each, devices, each):
        for critics in range(1, devices - engines) if own_critic else (0,):
            trainers = devices - engines - critics
            if trainers >= ways and trainers % ways == 0:
                yield _with(inputs, engines, critics)


def _with(inputs: Inputs, engines: int, critics: int) -> Inputs:
    split = {"engine_devices": engines, "critic_devices": critics}
    return replace(inputs, placement=inputs.placement.model_copy(update=split))


def _devices(inputs: Inputs) -> int:
    """Devices to split: all but those of a judge of its own."""
    judge = inputs.placement.judge
    return inputs.hardware.devices - (judge.devices if judge else 0)
