"""Rewards: from the samples of a prompt to scores, with failures typed and never turned into numbers.

Writing one needs nothing but this package:

    from hone.reward import reward

    @reward(minimum=0.0, maximum=1.0)
    def short(group, *, limit: int = 100):
        return [float(len(sample.text) <= limit) for sample in group.samples]
"""

from hone.reward.signature import reward
from hone.types import Fault, Group, Prompt, Sample, Score

__all__ = ["Fault", "Group", "Prompt", "Sample", "Score", "reward"]
