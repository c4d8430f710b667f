"""Aggregation of component scores to rewards: the weighted sum, with inapplicable and failed components.

A sample's reward is comparable with its siblings' only if it is made of the same components. So one that applies to
none of a prompt's samples is left out for all of them, as TRL leaves it out; one that is missing for some leaves those
without a reward. No number ever stands for a missing score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hone.types import Fault, Group, Score

PARTLY = Score(
    None,
    Fault.INFRA,
    "returned None for this response and a score for others of its prompt: without it, its sum would be another reward",
)
NOTHING = Score(None, Fault.DATA, "no component of the reward applies to this row")
ALONE = Score(
    None,
    Fault.DATA,
    "returned None, and whether it does so for the prompt's other responses is not known where each is scored by "
    "itself: ask for whole groups (mode: groupwise)",
)


def settled(
    scores: Mapping[str, tuple[Score, ...]], weights: Mapping[str, float], *, is_whole_group: bool = True
) -> dict[str, tuple[Score, ...]]:
    """A group's scores by component, with a fault in place of every "does not apply" that must not be passed over.

    Args:
        is_whole_group: the samples are all that will be compared with each other.
    """
    weighted = [name for name in scores if weights[name]]
    out_of_it = {name for name in weighted if not any(score.applies for score in scores[name])}
    found = dict(scores)
    for name in weighted:
        if out_of_it.issuperset(weighted):
            instead = NOTHING
        elif not is_whole_group:
            instead = ALONE
        elif name in out_of_it:
            continue
        else:
            instead = PARTLY
        found[name] = tuple(score if score.applies else instead for score in scores[name])
    return found


def weighted_sums(
    scores: Mapping[str, tuple[Score, ...]], weights: Mapping[str, float], num_samples: int
) -> tuple[float | None, ...]:
    """The reward of each sample, of `settled` scores; None where a component with a weight has failed."""
    weighted = [(weights[name], scores[name]) for name in scores if weights[name]]
    return tuple(_sum(weighted, sample) for sample in range(num_samples))


def _sum(weighted: Sequence[tuple[float, tuple[Score, ...]]], sample: int) -> float | None:
    total = 0.0
    for weight, scores in weighted:
        score = scores[sample]
        if score.value is not None:
            total += weight * score.value
        elif score.applies:
            return None
    return total


class FromEnvironment:
    """Scorer of what environments gave: the sum over a sample's turns, or a fault of infrastructure.

    It has weight 1, beside the weighted sum of the run file's components. Where each turn's reward belongs among the
    tokens stays on the sample (`types.Turn`), and `algo.advantage` puts it there. A sample whose environment failed has
    no reward at all, whatever other components give its part.
    """

    async def score(self, group: Group) -> tuple[Score, ...]:
        return tuple(
            Score(None, Fault.INFRA, sample.fault)
            if sample.fault
            else Score(math.fsum(turn.reward for turn in sample.turns))
            for sample in group.samples
        )
