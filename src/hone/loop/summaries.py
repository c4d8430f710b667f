"""Metrics of samples: rewards, lengths, staleness, and duplicates among prompts and responses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hone.rollout.env import episode_metrics
from hone.types import Group


def summarize(groups: Sequence[Group], dropped: Sequence[Group], *, version: int, threshold: float) -> dict[str, float]:
    """Metrics of what was sampled: rewards, lengths, staleness when training began at `version`.

    All are of the groups that are trained on but for the pass rate: where groups without signal are dropped, those that
    stay say little of the policy.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = np.array([np.nan if r is None else r for group in groups for r in group.rewards])
    scored = rewards[~np.isnan(rewards)]
    lengths = np.array([len(sample.token_ids) for sample in samples])
    staleness = np.array([version - sample.versions[0].version for sample in samples if sample.versions] or [0])
    spreads = [max(r) - min(r) for group in groups if (r := group.known_rewards)]
    equal = [r[0] for group in (*groups, *dropped) if (r := group.known_rewards) and max(r) == min(r)]
    num_groups = len(groups) + len(dropped)
    is_cut = np.array([sample.finish_reason == "length" for sample in samples])
    distinct = set(map(_prompt_key, groups))
    return (
        {
            "rollout/reward_mean": float(scored.mean()),
            "rollout/reward_std": float(scored.std(ddof=1)) if len(scored) > 1 else 0.0,
            "rollout/accuracy": float((scored >= threshold).mean()),
            "rollout/unscored_frac": float(np.isnan(rewards).mean()),
            "rollout/zero_std_group_frac": sum(spread == 0 for spread in spreads) / max(1, len(spreads)),
            "rollout/all_right_group_frac": sum(reward >= threshold for reward in equal) / num_groups,
            "rollout/all_wrong_group_frac": sum(reward < threshold for reward in equal) / num_groups,
            "rollout/repeated_prompt_frac": 1 - len(distinct) / len(groups),
            "rollout/pass_rate": pass_rate((*groups, *dropped), threshold),
            "rollout/groups_dropped": float(len(dropped)),
            "rollout/response_tokens_mean": float(lengths.mean()),
            "rollout/response_tokens_max": float(lengths.max()),
            "rollout/truncated_frac": float(is_cut.mean()),
            "rollout/empty_frac": sum(not sample.text or sample.text.isspace() for sample in samples) / len(samples),
            "rollout/staleness_mean": float(staleness.mean()),
            "rollout/staleness_max": float(staleness.max()),
        }
        | _length_metrics(lengths, rewards, threshold)
        | _truncation_cost(rewards, is_cut)
        | _prompt_share((*groups, *dropped))
        | _shared_response(groups)
        | _source_metrics((*groups, *dropped), threshold)
        | episode_metrics(samples, "rollout/")
    )


def _prompt_key(group: Group) -> tuple[bytes, ...]:
    """Equal for equal prompts, pictures included."""
    return (group.prompt.token_ids.tobytes(), *(picture.digest.encode() for picture in group.prompt.pictures))


def _shared_response(groups: Sequence[Group]) -> dict[str, float]:
    """Share of the different prompts that have the most widespread response; none for a single prompt."""
    prompts_of: dict[bytes, set[tuple[bytes, ...]]] = {}
    for group in groups:
        prompt = _prompt_key(group)
        for sample in group.samples:
            prompts_of.setdefault(sample.token_ids.tobytes(), set()).add(prompt)
    num_prompts = len(set().union(*prompts_of.values()))
    if num_prompts < 2:
        return {}
    return {"rollout/shared_response_frac": max(map(len, prompts_of.values())) / num_prompts}


def pass_rate(groups: Sequence[Group], threshold: float) -> float:
    """Share of the scored samples that are right; NaN without any."""
    passed = [reward >= threshold for group in groups for reward in group.known_rewards]
    return sum(passed) / len(passed) if passed else math.nan


def _truncation_cost(rewards: NDArray[np.float64], is_cut: NDArray[np.bool_]) -> dict[str, float]:
    """Mean reward lost to truncation, over all samples; none where truncated or other samples have no score."""
    cut, ended = (found[~np.isnan(found)] for found in (rewards[is_cut], rewards[~is_cut]))
    if not len(cut) or not len(ended):
        return {}
    share = len(cut) / (len(cut) + len(ended))
    return {"rollout/truncation_cost": float(share * (ended.mean() - cut.mean()))}


def _prompt_share(groups: Sequence[Group]) -> dict[str, float]:
    """Share of the variance of the rewards that lies between prompts; nothing where they are too few or equal.

    The intraclass correlation of a one-way analysis of variance, ICC(1,1) of Shrout and Fleiss 1979. Its expectation is
    0 for a reward that is as likely high for one prompt as for another, so it may be negative by chance.
    """
    scored = [np.array(found) for group in groups if len(found := group.known_rewards) > 1]
    count = sum(map(len, scored))
    if len(scored) < 2:
        return {}
    mean = np.concatenate(scored).mean()
    between = sum(len(rewards) * (rewards.mean() - mean) ** 2 for rewards in scored) / (len(scored) - 1)
    within = sum(rewards.var() * len(rewards) for rewards in scored) / (count - len(scored))
    whole = between + (count / len(scored) - 1) * within
    return {"rollout/reward_prompt_frac": float((between - within) / whole)} if whole > 0 else {}


def _source_metrics(groups: Sequence[Group], threshold: float) -> dict[str, float]:
    """Share of the prompts and pass rate of each source, where there are several."""
    found: dict[str, float] = {}
    for source in sorted({group.prompt.source for group in groups} - {""}):
        own = [group for group in groups if group.prompt.source == source]
        found[f"rollout/prompts_frac[source={source}]"] = len(own) / len(groups)
        if not math.isnan(rate := pass_rate(own, threshold)):
            found[f"rollout/pass_rate[source={source}]"] = rate
    return found


def _length_metrics(lengths: NDArray[np.int64], rewards: NDArray[np.float64], threshold: float) -> dict[str, float]:
    """How length and reward go together; without a value of its own where one side has no samples or no spread."""
    is_scored = ~np.isnan(rewards)
    lengths, rewards = lengths[is_scored], rewards[is_scored]
    found = {}
    if lengths.std() > 0 and rewards.std() > 0:
        found["rollout/length_reward_corr"] = float(np.corrcoef(lengths, rewards)[0, 1])
    for name, chosen in (("right", rewards >= threshold), ("wrong", rewards < threshold)):
        if chosen.any():
            found[f"rollout/{name}_tokens_mean"] = float(lengths[chosen].mean())
    return found


def staleness_shares(groups: Sequence[Group], *, version: int, most: int) -> dict[str, float]:
    """Shares of the samples by staleness, as training begins at `version`; none in a synchronous run."""
    ages = [version - sample.versions[0].version for group in groups for sample in group.samples if sample.versions]
    if most == 0 or not ages:
        return {}
    return {f"rollout/staleness_{age}_frac": ages.count(age) / len(ages) for age in range(most + 1)}
