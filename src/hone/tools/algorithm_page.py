"""Generator of docs/reference/algorithms.md: formulas of every preset and function, from the tables of `algo`.

Written by hand: the notation, what happens around the functions, and deliberate differences from other trainers.
Every number there is computed by `tests/algo/test_algorithm_page.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hone.config.algorithm import AlgorithmSection
from hone.config.layers import PRESETS, preset_names
from hone.config.render import inline
from hone.config.yaml_tree import read_yaml

if TYPE_CHECKING:
    from hone.algo.registry import Entry

_INTRO = """\
# Algorithms

An algorithm is a row of choices, `algorithm` in the run file, without code of its own:

    loss = aggregate( -w J + kl_loss_coef KL - entropy_coef H )

`credit` makes the advantages A, before the update; `ratio` and `clip` make J of them, what is maximised; `aggregate`
adds the tokens up, by counts over the whole optimizer step on all ranks, so that a gradient never depends on how the
step is divided. Any combination is possible; `hone check` refuses contradictions and what a run cannot provide.

    m           1 on tokens that the policy sampled; only those count as tokens: environment text is not a time step
    l           logprob of a token now; l_old before the update, l_s when it was sampled, l_ref under the reference
    rho         what `ratio` gives, the multiplier of the advantage
    w           exp(l_old - l_s), what `correction` bounds; 1 without correction
    d           l - l_ref, what a KL estimator reads
    H           entropy of the policy at a token
    R           shaped reward of a sample; mean, std and best are over the scored samples of its prompt, its group
    r_t         reward of token t: R at its sample's last token, but for what an environment gave for single turns,
                which stands at their last tokens; less kl_reward_coef KL_t"""

_CURVES = """\
![Accuracy of every row over its steps](../presets.svg)

Every row on the arithmetic of GSM8K, from one supervised model, with one optimizer and one seed. No row is tuned, and
one run shows little of a difference of a point or two. What the size of the task forces is set otherwise; it stands in
`benchmarks/presets.py`, which draws this."""

_CREDIT = """\
Rewards are shaped first, each step optional: `reward_clip` of the raw reward, `truncated_reward_factor`,
`normalize_rewards` (running mean and deviation, in the checkpoint), `overlong_buffer_frac`. What a sample earned over
its baseline is a reward at its last own token; `kl_reward_coef` takes each token's KL from that token's reward; an
advantage is the return from there on, discounted by `gamma`, and `advantage_clip` bounds it last of all. `gae` and
`reinforce_pp` take no baseline from whole samples: with them an environment's reward for a turn stands at the turn's
last own token, and the sample's last has the rest of R, so that the rewards of its tokens still add up to R."""

_FILTER = """\
With `drop_uninformative` a group whose clipped rewards are all equal is replaced by that of a new prompt, until the
update is full; a step that drops more than `max_dropped_per_kept` groups for each one it needs ends the run. Of a
synchronous run the replacements of a step start together. `rollout/pass_rate` counts dropped groups too; everything
else under `rollout/` is of what is trained on."""

_CRITIC = """\
With a critic: delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lambda A_(t+1), both carried over tokens
with m = 0 unchanged. The critic's target is A + V before whitening, its loss 0.5 max((V - target)^2, (V_old + clip(V -
V_old, +-value_clip) - target)^2), weighted as the row weighs tokens. V_t is of the state before token t."""

_KL = """\
d = 0.5 gives 0.5, 0.125, 0.10653 and 0.5; d = -1 gives -1, 0.5, 0.71828 and 1. In loss and reward each token's
estimate is kept within +-`kl_clip`, 10 by default, so that one token cannot outweigh all others: at d = -15, k3 is
3,269,001. A bounded token has no gradient from the KL; `train/kl_clipped_frac` counts them.
`weighted_k3`, in the loss alone, is k3 times the ratio: its expected gradient is that of the KL, also on samples of an
earlier policy. With `kl_target` the one
coefficient that is set follows

    coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * samples of the update / kl_horizon_samples

where KL is a mean over tokens or over whole responses, as `kl_target_unit` says. 50 updates in a row beyond +-20% on
one side cause a warning. Coefficient and count are in the checkpoint."""

_CORRECTION = """\
w is detached, its log bounded to +-20 first; means and sums are over a sample's own tokens. `auto` is `tis` where
samples may be stale, else none. `old_logprobs: sampler` takes the ratio to l_s itself: no pass for l_old, and one clip
bounds staleness and mismatch."""

_REJECTION = """\
r_t = l_s - l_old of a sample's own tokens. What `rejection` does not keep leaves the loss, its KL and entropy terms and
the denominators; its reward stays in the baseline. `correction` is independent of it."""

_ENTROPY = """\
`top_entropy_frac: 0.2` gives advantages to the fifth of the update's tokens with the highest entropy before it, and 0
to the others ([arXiv:2506.01939](https://arxiv.org/abs/2506.01939)); they stay in the denominators. With
`entropy_target` the coefficient c follows the entropy H of each update
([arXiv:2505.22312](https://arxiv.org/abs/2505.22312)):

    c += entropy_coef_step if H <= entropy_target else -entropy_coef_step, within [0, entropy_coef_max]

and the next update's bonus is c H if H was at the target or below, else none."""

_ON_PURPOSE = """\
## Where ours differs

Each of these changes what is learnt. Others are read at verl 012be9d, OpenRLHF 01359b4 and TRL v0.11; from the dual
clip on, at verl 0.9.1 and TRL 1.16.

### Tool tokens are not time steps

Generalised advantages and discounted returns step over the policy's own tokens, however many a tool wrote in between.
Say the policy writes one token, reads 200 tokens of a tool and writes one more, the critic says 0.5 before both, and
the reward is 0.5: all goes as expected, and the advantage of the first token is exactly 0. With values and rewards of
the tool masked but its tokens counted as steps it is -0.50 at lambda 0.95. verl does as we do, OpenRLHF counts them.

### A turn's reward is not paid to later turns

An environment gives 1 for the first of two turns, and the answer earns 2 at the end. With `gae` and `reinforce_pp` the
returns are 3 before the first turn and 2 before the second. With the sum at the end both are 3, and the second turn is
paid for what the first one earned.

### The reward is clipped, not what a baseline left of it

Rewards of 100 and 0 with `reward_clip: [0, 1]` have advantages of 0.5 and -0.5. Clipped after the group's mean was
taken, they are 1 and 0: nothing bounds the reward, and the worse sample is not discouraged. OpenRLHF clips after it.

### A group of one says nothing

A sample without scored siblings has nothing to be compared with: with a reward of 7 its advantage is 0. verl takes a
mean of 0 and a deviation of 1 for such a group, and the advantage is 7.

### Equal rewards say nothing, to the last bit

Eight float32 rewards of 0.1 differ from their mean by -7.5e-09. Over their deviation, that is an advantage of -0.83
with OpenRLHF's floor of 1e-09, and of -0.0074 with 1e-06. Here the range of the rewards decides, and the advantage is
exactly 0.

### An unscored sample is not a bad sample

Of eight right answers one could not be scored: the others are equal, and all advantages are 0. The sample is masked
from the loss and from the baseline. Given a reward of 0 instead, it has -2.47 and its siblings 0.35: the policy learns
that a network error is a wrong answer.

### The KL target says its unit

A KL of 0.03 nats per token is 6 per sequence of 200 tokens. With `kl_target: 6` and `kl_target_unit: per_sequence` the
coefficient stays as it is; read as nats per token the same target is far off, and after 200 updates of 256 samples, at
a horizon of 10,000, the coefficient is 0.36 of what it was. verl hands its controller a mean over tokens and TRL a sum
over the sequence, both as `target`.

### Denominators are counts of the whole optimizer step

Of two microbatches one has 10 tokens with a loss of 1 each, the other 90 tokens with a loss of 0. Their token mean is
0.1, the mean of the means of both is 0.5. Here it is 0.1 however the step is divided.

### k1 is refused in the loss

Its expected gradient is that of log pi under pi, and so 0: it adds noise and holds nothing. Under a policy of 0.7, 0.2
and 0.1 and a uniform reference the KL has the gradient 0.31, -0.16, -0.15 in the logits. In a loss, k1 has 0.00, 0.00,
0.00 on average; k2 has 0.31, -0.16, -0.15; k3 has 0.37, -0.13, -0.23, that of the KL the other way round. In the reward
k1 is right.

### A truncated sample is never better off

`truncated_reward_factor: 0.5` makes 1.5 of a reward of 3, and leaves -3 as it is: half of it would be a reward for
running into the limit.

### Dual clip is on in one row only

A token with a ratio of 6 and an advantage of -1 has a loss of 6. With `dual_clip: 3.0`, which `algorithm/ppo` sets, it
has 3 and no gradient. verl has this bound of 3 in every row that uses its default loss, GRPO and DAPO among them: set
`dual_clip` to compare with it.

### A rejected sample stays in the denominators

`correction: icepop` and `sequence_mask` reject by a weight of 0 on the objective. The tokens still count where the row
divides, and keep their KL and entropy terms. Of two samples of 10 tokens with a loss of 1 each one is rejected: the
token mean is 0.5. With a KL of 1 nat per token at `kl_loss_coef: 0.1` it is 0.6. verl takes rejected tokens out of the
mask: its means are 1 and 1.1.

### The KL in the reward comes after the group's baseline

Rewards of 1 and 0, with 2 and 4 nats of KL at `kl_reward_coef: 0.1`: the advantages are 0.3 and -0.9. verl, and TRL's
RLOO, take the KL off the reward first and the mean of the group then: 0.6 and -0.6. A baseline does not change the
expected gradient; with normalisation by the group's deviation theirs divides the KL by it too, and ours does not.

### Standard deviations are unbiased

One right answer of eight has an advantage of 2.47 with `group_norm`; with the biased deviation (over n, not n - 1) it
would be 2.65. Whitening does the same over the tokens of the update, where it makes no difference: 1.0001 in 4,096
tokens. To either deviation `std_floor` is added, 1e-06 by default; TRL adds 1e-04. verl adds 1e-08 to the variance when
it whitens.

### Clip-Cov decides by the batch alone

The paper and verl draw at random among the tokens whose covariance is in the range, with the logprobs of each optimizer
step, and leave out those that the ratio's clip has stopped. Here the largest covariances in the range are taken, once
for each update, with the logprobs before it (of the sampler, where nothing else asks for the trainer's): 20 of 100,000
tokens with the preset's share of 0.0002, and at least one.

### The length penalty ends at the limit

With a limit of 100 tokens and `overlong_buffer_frac: 0.2` the penalty is 0 up to 80 tokens, -0.5 at 90 and -1 at 100.
Longer responses do not occur, because they are cut there; the penalty for them would still be -1, as in the paper. In
verl it grows on: -1.5 at 110."""

_NEEDS = {
    "siblings": "a group of 2 or more",
    "old_logprobs": "logprobs from before the update",
    "ref_logprobs": "a frozen reference",
    "values": "a critic",
    "greedy_reward": "a greedy sample of each prompt",
    "scores": "the scores of the reward's components",
    "policy_logprobs": "the policy's logprobs before credit",
}
"""Display names of `Entry.needs`."""


def algorithms_page() -> str:
    """The whole page."""
    from hone.algo.advantage import CREDIT  # here: pages are made with torch, and everything else in cli/ without
    from hone.algo.correction import CORRECTION, REJECTION
    from hone.algo.kl import KL
    from hone.algo.loss import AGGREGATE, CLIP, RATIO

    presets = [AlgorithmPreset.read(name) for name in preset_names() if name.startswith("algorithm/")]
    parts = [_INTRO, "## Rows", _overview(presets), _CURVES, *map(_row, presets)]
    parts += ["## Credit", _CREDIT, _FILTER, _table(CREDIT), _CRITIC]
    parts += ["## Ratio", _table(RATIO), "## Clip", _table(CLIP), "## Aggregation", _table(AGGREGATE)]
    parts += ["## KL", _table(KL), _KL, "## Off-policy correction", _table(CORRECTION), _CORRECTION]
    parts += ["## Rejection", _REJECTION, _table(REJECTION), "## Entropy", _ENTROPY, _ON_PURPOSE]
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class AlgorithmPreset:
    """One file of config/presets/algorithm/."""

    name: str
    """What `extends:` takes."""
    comment: str
    """Whose row it is, and why it is so."""
    values: Mapping[str, Any]
    """The keys that the file sets."""
    row: AlgorithmSection

    @classmethod
    def read(cls, name: str) -> AlgorithmPreset:
        text = (PRESETS / f"{name}.yaml").read_text("utf-8")
        node, _ = read_yaml(text, name)
        assert node is not None, f"preset {name} cannot be read"
        values: dict[str, Any] = node.plain()["algorithm"]
        comment = "\n".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
        comment = re.sub(r" Sets the whole of `algorithm`[^.]*\.", "", comment)
        return cls(name, comment, values, AlgorithmSection(**values))


def _overview(presets: list[AlgorithmPreset]) -> str:
    lines = ["| `extends:` | credit | ratio | clip | aggregate | KL |", "|---|---|---|---|---|---|"]
    for preset in presets:
        row, kl = preset.row, "none"
        if row.kl_loss_coef:
            kl = f"{row.kl_loss_coef:g} {row.kl_estimator} in the loss"
        elif row.kl_reward_coef:
            kl = f"{row.kl_reward_coef:g} {row.kl_estimator} in the reward"
        cells = (row.credit, row.ratio, _clip(row), row.aggregate, kl)
        lines.append(f"| `{preset.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _clip(row: AlgorithmSection) -> str:
    bounds = {
        "none": "",
        "sapo": f", tau {row.sapo_tau[0]:g} and {row.sapo_tau[1]:g}",
        "cispo": f", above {1 + row.clip_high:g}",
    }
    text = row.clip + bounds.get(row.clip, f", {row.clip_low:g} and {row.clip_high:g}")
    return text + (f", dual {row.dual_clip:g}" if row.dual_clip is not None else "")


def _row(preset: AlgorithmPreset) -> str:
    """One preset: what its file says of it, what it computes, its numbers and its needs."""
    from hone.algo.algorithm import Algorithm

    block = "\n".join(f"    {line}" for line in _mathematics(preset.row))
    numbers = [f"`{k}: {inline(value)}`" for k, value in preset.values.items() if value and not isinstance(value, str)]
    needs = _needs(Algorithm(preset.row, max_response_tokens=1).needs)
    facts = [f"Numbers: {', '.join(numbers)}."] if numbers else []
    facts += [f"Needs: {needs}."] if needs else []
    return "\n\n".join([f"### `{preset.name}`", _linked(preset.comment), block, "\n".join(facts)])


def _mathematics(row: AlgorithmSection) -> list[str]:
    """The formulas of a row's choices, one to a line."""
    from hone.algo.advantage import CREDIT
    from hone.algo.kl import KL
    from hone.algo.loss import AGGREGATE, CLIP, RATIO

    ratio, kl = RATIO[row.ratio].formula, KL[row.kl_estimator].formula
    penalty = f" + {row.kl_loss_coef:g} KL" if row.kl_loss_coef else ""
    lines = [
        f"reward     r_t = R at the last token, less {row.kl_reward_coef:g} KL_t" if row.kl_reward_coef else "",
        f"KL         {kl}" if row.kl_reward_coef or row.kl_loss_coef else "",
        f"credit     A = {CREDIT[row.credit].formula}",
        f"ratio      {ratio if ' = ' in ratio else f'rho_t = {ratio}'}",
        f"clip       J = {CLIP[row.clip].formula}",
        f"aggregate  loss = {AGGREGATE[row.aggregate].formula}, of -J{penalty}",
    ]
    return [line for line in lines if line]


def _table(entries: Mapping[str, Entry[Any]]) -> str:
    lines = ["| Name | Formula | Paper | Needs |", "|---|---|---|---|"]
    for name, entry in entries.items():
        formula = entry.formula.replace("|", "\\|")
        lines.append(f"| `{name}` | {formula} | {_linked(entry.paper)} | {_needs(entry.needs)} |")
    return "\n".join(lines)


def _needs(needs: frozenset[str]) -> str:
    return ", ".join(text for need, text in _NEEDS.items() if need in needs)


def _linked(text: str) -> str:
    """The text with every arXiv number a link."""
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
