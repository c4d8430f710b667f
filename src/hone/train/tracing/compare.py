"""A trace beside the closed form: the same moments, and how far apart they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hone.plan.ledger import Moment
from hone.train.tracing.memory import Moments
from hone.types import Batch, read_only

SHALLOW, DEEPER = 3, 5
"""Layers that are traced; each moment of a deeper model lies on the line through them. Two would not do: FSDP2 gathers
the next layer while one computes."""


@dataclass(frozen=True, slots=True)
class Point:
    """One moment of one kind of device, in bytes of tensors; the largest of a phase where only one side knows more."""

    device: str
    phase: str
    moment: str
    planned: int
    traced: int

    @property
    def error(self) -> float:
        """Of the closed form, as a share of the trace."""
        return self.planned / self.traced - 1

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "device": self.device,
            "phase": self.phase,
            "moment": self.moment,
            "planned_bytes": self.planned,
            "traced_bytes": self.traced,
            "error": self.error,
        }


def compared(
    device: str, planned: Iterable[Moment], traced: Moments, *, without: frozenset[str] = frozenset()
) -> list[Point]:
    """Moments that both know, then the peak of every phase that both know.

    Args:
        without: names of terms that no trace has: what is no tensor, or belongs to an engine.
    """
    plan: Moments = {}
    for moment in planned:
        size = sum(term.bytes for term in moment.terms if term.name not in without)
        plan[moment.phase, moment.name] = max(size, plan.get((moment.phase, moment.name), 0))
    points = [Point(device, *key, plan[key], size) for key, size in traced.items() if key in plan]
    for phase in dict.fromkeys(phase for phase, _ in traced):
        both = [[size for (other, _), size in side.items() if other == phase] for side in (plan, traced)]
        if all(both):
            points.append(Point(device, phase, "peak", *map(max, both)))
    return points


def over_depth(trace: Callable[[int], Moments], layers: int, *, dense_layers: int = 0) -> Moments:
    """The moments of a model of `layers` layers, from traces of shallow ones where it is deep.

    Args:
        trace: makes one of a model of so many layers.
        dense_layers: first layers that are unlike the rest.
    """
    shallow, deeper = dense_layers + SHALLOW, dense_layers + DEEPER
    if layers <= deeper:
        return trace(layers)
    low, high = trace(shallow), trace(deeper)
    return {key: low[key] + (high[key] - low[key]) * (layers - shallow) // (deeper - shallow) for key in low}


def full_microbatch(tokens: int, *, max_prompt: int, max_response: int, group: int) -> Batch:
    """A batch of one microbatch that computes exactly `tokens`: prompts and responses as long as may be, the last of
    them cut to what is left.

    Every response to a prompt is another one; the columns are those that any algorithm reads.
    """
    prompts: list[int] = []
    prompt_S: list[int] = []
    length_S: list[int] = []
    left = tokens
    while left > 0:
        prompts.append(min(max_prompt, -(-left // 2)))
        left -= prompts[-1]
        for _ in range(group):
            prompt_S.append(len(prompts) - 1)
            length_S.append(1 + min(max_response - 1, left))
            left -= length_S[-1] - 1
            if left == 0:
                break
    total = sum(length_S)
    ids = [(sample + place) % 2**15 for sample, length in enumerate(length_S) for place in range(length)]
    names = ("advantages_T", "ref_logprobs_T", "value_T", "return_T")
    return Batch(
        prompts=tuple(read_only([0] * length, np.int32) for length in prompts),
        prompt_S=torch.tensor(prompt_S),
        length_S=torch.tensor(length_S),
        token_ids_T=torch.tensor(ids),
        loss_mask_T=torch.ones(total),
        sampler_logprobs_T=torch.zeros(total),
        reward_S=torch.ones(len(length_S)),
        columns={name: torch.ones(total) for name in names},
    )
