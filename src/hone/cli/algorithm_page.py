"""docs/algorithms.md: the mathematics of every row and function, from the registries and the presets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hone.config.layers import PRESETS, preset_names
from hone.config.run import AlgorithmSection
from hone.config.source import read_yaml

if TYPE_CHECKING:
    from hone.algo.registry import Entry

_INTRO = """\
# Algorithms

A row of choices, `algorithm` in the run file, and no code of its own:

    loss = sum_t weight_t * (-correction_t * clip(ratio_t, A_t) + kl_loss_coef * KL_t - entropy_coef * H_t)

`credit` makes the advantages A, before the update; `ratio` and `clip` make what is maximised of them; `aggregate` makes
the weights, from counts over the whole optimizer step on all ranks, so that a gradient never depends on how the step
is divided. Any combination may be asked for; `hone check` refuses what contradicts itself, or what a run cannot give.

l is the logprob of a token now, l_old before the update, l_s when it was sampled, l_ref under the reference; rho =
exp(l - l_old); R is the shaped reward of a sample; m is 1 on tokens that the policy wrote, and only those are tokens
here: what an environment wrote is no time step."""

_CREDIT = """\
Rewards are shaped first, each step optional: `reward_clip` of the raw reward, `truncated_reward_factor`,
`normalize_rewards` (running mean and deviation, in the checkpoint), `overlong_buffer_tokens`. What a sample earned over
its baseline is a reward at its last own token; `kl_reward_coef` takes each token's KL from that token's reward; an
advantage is the return from there on, discounted by `gamma`."""

_CRITIC = """\
With a critic: delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lambda A_(t+1), both carried over tokens
with m = 0 unchanged. The critic's target is A + V before whitening, its loss 0.5 max((V - target)^2, (V_old + clip(V -
V_old, +-value_clip) - target)^2), weighted as the row weighs tokens. V_t is of the state before token t."""

_KL = """\
d = l - l_ref. d = 0.5 gives 0.5, 0.125, 0.10653 and 0.5; d = -1 gives -1, 0.5, 0.71828 and 1. In a loss k1 has no
gradient on average and is refused. With `kl_target` the one coefficient that is set follows

    coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * samples of the update / kl_horizon_samples

where KL is a mean over tokens or over whole responses, as `kl_target_unit` says. 50 updates in a row beyond +-20% on
one side are told as a warning. Coefficient and count are in the checkpoint."""

_CORRECTION = """\
w = exp(l_old - l_s), detached, its log bounded to +-20 first. `auto` is `tis` where samples may be stale, else none.
`old_logprobs: sampler` takes the ratio to l_s itself: no pass for l_old, and one clip bounds staleness and mismatch."""

_DIFFERENCES = """\
## Different from others on purpose

| Here | Elsewhere | The number |
|---|---|---|
| A tool's tokens are no time steps of GAE | steps like any other | 200 of them turn an advantage of 0 into -0.5 at \
lambda 0.95 |
| A group of one scored sample has advantage 0 | its reward, or NaN | R = 7 gives 0, not 7 |
| A group of equal rewards has advantage exactly 0 | rounding over 1e-6 | eight times 0.1 in float32 |
| The reward is clipped before the baseline | after it | R = 9 clipped to 1 beside 0: 0.5, not 1 |
| An unscored sample is in no baseline | a reward of 0 | 1, -, 3, 5 has mean 3, not 2.25 |
| Standard deviations are unbiased | some divide by n | 0, 0, 0, 1 has 0.5, not 0.433 |
| Denominators are counts of the whole optimizer step | of the microbatch | gradients equal to 1e-6 for any split |
| The KL target says its unit | per sequence or per token, unsaid | 0.1 per token of 200 tokens is 20 per sequence |
| Clip-Cov takes the largest covariances inside its range | draws at random there | a batch alone decides |
| A truncated sample keeps a part of a positive reward only | of any reward | -3 stays -3, not -1.5 |"""


def algorithms_page() -> str:
    """The whole page."""
    from hone.algo.advantage import CREDIT  # here: pages are made with torch, and everything else in cli/ without
    from hone.algo.correction import CORRECTION
    from hone.algo.kl import KL
    from hone.algo.loss import AGGREGATE, CLIP, RATIO

    parts = [_INTRO, "## Rows", _rows()]
    parts += ["## Credit", _CREDIT, _table(CREDIT), _CRITIC]
    parts += ["## Ratio", _table(RATIO), "## Clip", _table(CLIP), "## Aggregation", _table(AGGREGATE)]
    parts += ["## KL", _table(KL), _KL, "## Off-policy correction", _table(CORRECTION), _CORRECTION, _DIFFERENCES]
    return "\n\n".join(parts) + "\n"


def _rows() -> str:
    lines = ["| `extends:` | credit | ratio | clip | aggregate | KL |", "|---|---|---|---|---|---|"]
    for name in preset_names():
        if name.startswith("algorithm/"):
            row = _row_of(name)
            cells = (row.credit, row.ratio, _clip(row), row.aggregate, _kl(row))
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _row_of(name: str) -> AlgorithmSection:
    node, _ = read_yaml((PRESETS / f"{name}.yaml").read_text("utf-8"), name)
    values: Any = node.plain() if node is not None else {}
    return AlgorithmSection(**values["algorithm"])


def _clip(row: AlgorithmSection) -> str:
    bounds = {
        "none": "",
        "sapo": f", tau {row.sapo_tau[0]:g} and {row.sapo_tau[1]:g}",
        "cispo": f", above {1 + row.clip_high:g}",
    }
    text = row.clip + bounds.get(row.clip, f", {row.clip_low:g} and {row.clip_high:g}")
    return text + (f", dual {row.dual_clip:g}" if row.dual_clip is not None else "")


def _kl(row: AlgorithmSection) -> str:
    if row.kl_loss_coef:
        return f"{row.kl_loss_coef:g} {row.kl_estimator} in the loss"
    return f"{row.kl_reward_coef:g} {row.kl_estimator} in the reward" if row.kl_reward_coef else "none"


def _table(entries: Mapping[str, Entry[Any]]) -> str:
    lines = ["| Name | Formula | Paper | Needs |", "|---|---|---|---|"]
    for name, entry in entries.items():
        formula = entry.formula.replace("|", "\\|")
        needs = ", ".join(sorted(entry.needs)).replace("_", " ")
        lines.append(f"| `{name}` | {formula} | {entry.paper} | {needs} |")
    return "\n".join(lines)
