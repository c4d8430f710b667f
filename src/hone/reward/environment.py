"""Rewards of environments, as one more reward component.

The reward of a sample that met an environment is the sum of its turns' rewards, with weight 1, plus the weighted sum of
the run file's components. Where each turn's reward belongs among the tokens stays on the sample (`types.Turn`), and
`algo.advantage` puts it there. A sample whose environment failed has no reward at all, whatever other components give
its part.
"""

from __future__ import annotations

import math

from hone.types import Fault, Group, Score


class FromEnvironment:
    """Scorer: the sum over a sample's turns, or a fault of infrastructure."""

    async def score(self, group: Group) -> tuple[Score, ...]:
        return tuple(
            Score(None, Fault.INFRA, sample.fault)
            if sample.fault
            else Score(math.fsum(turn.reward for turn in sample.turns))
            for sample in group.samples
        )
