"""Aggregation of component scores: to rewards, the weighted sum with inapplicable and failed components; to metrics.

A sample's reward is comparable with its siblings' only if it is made of the same components. So one that applies to
none of a prompt's samples is left out for all of them, as TRL leaves it out; one that is missing for some leaves those
without a reward. No number ever stands for a missing score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

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


# ---- metrics of a step's scores, component by component


def component_metrics(groups: Sequence[Group], weights: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
    """`reward/<component>_*` of the scored groups of a step; statistics without a single value are left out.

    `_zero_std_group_frac` is over groups with two scores or more: those in which all of its scores are equal.
    `_variance_share` is cov(weight * score, reward) / var(reward) over the samples with a reward. The shares sum to 1;
    one below 0 is of a component that works against the others. `_length_corr` is the correlation of the weighted score
    and the response's length in tokens. A component without a weight has neither.
    A component's own metrics (`Score.metrics`) follow as `reward/<component>_<part>_*`, mean and that.
    """
    metrics: dict[str, float] = {}
    for name in groups[0].scores if groups else ():
        per_group = [group.scores[name] for group in groups]
        metrics |= {f"reward/{name}_{key}": value for key, value in _statistics(per_group).items()}
        if weight := weights.get(name, 0.0):
            weighted = _variance_share(groups, name, weight) | _length_correlation(groups, name, weight)
            metrics |= {f"reward/{name}_{key}": value for key, value in weighted.items()}
        for part in dict.fromkeys(part for scores in per_group for score in scores for part in score.metrics):
            values = [[score.metrics[part] for score in scores if part in score.metrics] for scores in per_group]
            metrics[f"reward/{name}_{part}_mean"] = _mean([value for group in values for value in group])
            metrics |= {f"reward/{name}_{part}_{key}": value for key, value in _silent_groups(values).items()}
    return metrics


def _statistics(per_group: Sequence[Sequence[Score]]) -> dict[str, float]:
    values = [[score.value for score in scores if score.value is not None] for scores in per_group]
    flat = [value for group in values for value in group]
    lost = sum(score.fault is not None and score.value is None for scores in per_group for score in scores)
    broken = sum(score.fault is not None and score.value is not None for scores in per_group for score in scores)
    num_samples = max(1, sum(map(len, per_group)))
    found = {"fault_frac": lost / num_samples}
    if broken:
        found["broken_response_frac"] = broken / num_samples
    if apart := sum(not score.applies for scores in per_group for score in scores):
        found["not_applied_frac"] = apart / num_samples
    if flat:
        mean = _mean(flat)
        variance = _mean([(value - mean) ** 2 for value in flat])
        found |= {"mean": mean, "std": math.sqrt(variance), "min": min(flat), "max": max(flat)}
    return found | _silent_groups(values)


def _variance_share(groups: Sequence[Group], name: str, weight: float) -> dict[str, float]:
    pairs = [
        (weight * score.value, reward)
        for group in groups
        for score, reward in zip(group.scores[name], group.rewards, strict=True)
        if reward is not None and score.value is not None
    ]
    if not pairs:
        return {}
    covariance, _, variance = _covariance(pairs)
    return {"variance_share": covariance / variance} if variance else {}


def _length_correlation(groups: Sequence[Group], name: str, weight: float) -> dict[str, float]:
    pairs = [
        (weight * score.value, len(sample.token_ids))
        for group in groups
        for score, sample in zip(group.scores[name], group.samples, strict=True)
        if score.value is not None
    ]
    if not pairs:
        return {}
    covariance, *variances = _covariance(pairs)
    return {"length_corr": covariance / math.sqrt(math.prod(variances))} if all(variances) else {}


def _covariance(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Covariance of the pairs' two values, and the variance of each."""
    mean_a, mean_b = _mean([a for a, _ in pairs]), _mean([b for _, b in pairs])
    return (
        _mean([(a - mean_a) * (b - mean_b) for a, b in pairs]),
        _mean([(a - mean_a) ** 2 for a, _ in pairs]),
        _mean([(b - mean_b) ** 2 for _, b in pairs]),
    )


def _silent_groups(values: Sequence[Sequence[float]]) -> dict[str, float]:
    comparable = [group for group in values if len(group) > 1]
    if not comparable:
        return {}
    return {"zero_std_group_frac": sum(min(group) == max(group) for group in comparable) / len(comparable)}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
