"""The gradient of every algorithm preset is its paper's formula, written out per sequence with plain autograd.

Ours goes the way of a run: collate, measure, assign, update, in two optimizer steps where the row has a ratio, so that
the second is off-policy. Theirs is Transformers' own model, one sample at a time, and uses nothing of `hone.algo`.
Lengths are ragged; some samples are truncated, one is not scored, and tools wrote some tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch
from cases import MAX_TOKENS, PRESET_FILES, ROWS, make_groups, make_model, make_trainer
from test_critic import make_critic
from torch import Tensor
from transformers import Qwen3ForCausalLM, Qwen3ForSequenceClassification

from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.run import OptimizerSection
from hone.data.pack import collate
from hone.loop.policy import learn
from hone.train.learner import Learner
from hone.types import Group, Progress, Sample

NEAR = 2e-5
"""Rotary tables and norms are float32 inside Transformers' model."""


@dataclass(frozen=True)
class Sequence:
    """A scored sample; tensors are of the tokens that the policy wrote."""

    prompt: int
    length: int
    """Of the whole response, a tool's tokens included."""
    reward: float
    greedy_reward: float | None
    sampler: Tensor
    old: Tensor
    """Logprobs before the update."""
    ref: Tensor
    now: Tensor
    """Logprobs with gradient."""
    old_value: Tensor
    value: Tensor
    """Of the state before each token, with gradient."""


# ---- the papers' formulas: loss of one optimizer step -------------------------------------------------------------


def siblings(batch: list[Sequence]) -> Iterator[tuple[Sequence, list[Sequence]]]:
    return ((s, [other for other in batch if other.prompt == s.prompt]) for s in batch)


def over_mean(batch: list[Sequence]) -> list[tuple[Sequence, float]]:
    return [(s, s.reward - fmean(o.reward for o in group)) for s, group in siblings(batch)]


def in_deviations(batch: list[Sequence]) -> list[tuple[Sequence, float]]:
    deviations = (stdev(o.reward for o in group) for _, group in siblings(batch))
    return [(s, a / (std + 1e-6)) for (s, a), std in zip(over_mean(batch), deviations, strict=True)]


def tokens(batch: list[Sequence]) -> int:
    return sum(len(s.old) for s in batch)


def clipped(rho: Tensor, advantage: float | Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.minimum(rho * advantage, rho.clamp(1 - low, 1 + high) * advantage)


def ratio(s: Sequence) -> Tensor:
    return (s.now - s.old).exp()


def whitened(parts: list[Tensor]) -> list[Tensor]:
    every = torch.cat(parts)
    return [(part - every.mean()) / (every.std() + 1e-6) for part in parts]


def grpo(batch: list[Sequence]) -> Tensor:
    """arXiv:2402.03300, equations 3 and 4: beta = 0.04. Each token's KL is at most `kl_clip`, here and below."""
    total = torch.zeros(())
    for s, a in in_deviations(batch):
        kl = (s.ref - s.now).exp() - (s.ref - s.now) - 1
        total = total + (clipped(ratio(s), a) - 0.04 * kl.clamp(max=10)).mean()
    return -total / len(batch)


def dr_grpo(batch: list[Sequence]) -> Tensor:
    """arXiv:2503.20783, with the constant denominator of its code."""
    return -sum(clipped(ratio(s), a).sum() for s, a in over_mean(batch)) / (len(batch) * MAX_TOKENS)


def dapo(batch: list[Sequence]) -> Tensor:
    """arXiv:2503.14476, equations 8 and 13, with a buffer of a fifth of the limit."""
    buffer = 0.2 * MAX_TOKENS
    punished = [replace(s, reward=s.reward + min(0.0, (MAX_TOKENS - buffer - s.length) / buffer)) for s in batch]
    return -sum(clipped(ratio(s), a, high=0.28).sum() for s, a in in_deviations(punished)) / tokens(batch)


def gspo(batch: list[Sequence]) -> Tensor:
    """arXiv:2507.18071: (pi(y) / pi_old(y))^(1 / |y|)."""
    per_sample = [
        clipped((s.now.sum() - s.old.sum()).div(len(s.now)).exp(), a, 3e-4, 4e-4) for s, a in in_deviations(batch)
    ]
    return -sum(per_sample) / len(batch)


def cispo(batch: list[Sequence]) -> Tensor:
    """arXiv:2506.13585."""
    weighted = [(ratio(s).detach().clamp(max=5.0) * a * s.now).sum() for s, a in in_deviations(batch)]
    return -sum(weighted) / tokens(batch)


def gmpo(batch: list[Sequence]) -> Tensor:
    """arXiv:2507.20673, with bounds of exp(-0.4) and exp(0.4)."""
    total = torch.zeros(())
    for s, a in in_deviations(batch):
        sign = 1 if a > 0 else -1
        kept = torch.minimum(ratio(s) ** sign, ratio(s).clamp(0.6703, 1.4918) ** sign)
        total = total + (kept.prod() ** (1 / len(s.now))) ** sign * a
    return -total / len(batch)


def sapo(batch: list[Sequence]) -> Tensor:
    """arXiv:2511.20347."""
    per_sample = []
    for s, a in in_deviations(batch):
        tau = 1.0 if a > 0 else 1.05
        per_sample.append((4 / tau * torch.sigmoid(tau * (ratio(s) - 1)) * a).mean())
    return -sum(per_sample) / len(batch)


def clip_cov(batch: list[Sequence]) -> Tensor:
    """arXiv:2505.22617, but the one token with the largest covariance of those in (1, 5) is taken."""
    rows = in_deviations(batch)
    flat = [(float(logprob), a) for s, a in rows for logprob in s.sampler]
    means = fmean(logprob for logprob, _ in flat), fmean(a for _, a in flat)
    covariances = [(logprob - means[0]) * (a - means[1]) for logprob, a in flat]
    largest = max(c for c in covariances if 1 < c < 5)
    kept = torch.tensor([float(c != largest) for c in covariances], dtype=torch.float64)
    assert len(covariances) > kept.sum()
    return -(torch.cat([clipped(ratio(s), a) for s, a in rows]) * kept).sum() / tokens(batch)


def rloo(batch: list[Sequence]) -> Tensor:
    """arXiv:2402.14740, over the constant `max_response_tokens`."""
    total = torch.zeros(())
    for s, group in siblings(batch):
        others = [o.reward for o in group if o is not s]
        total = total + (s.reward - fmean(others)) * s.now.sum()
    return -total / (len(batch) * MAX_TOKENS)


def opo(batch: list[Sequence]) -> Tensor:
    """arXiv:2505.23585: lengths weigh the baseline."""
    total = torch.zeros(())
    for s, group in siblings(batch):
        baseline = sum(len(o.now) * o.reward for o in group) / sum(len(o.now) for o in group)
        total = total + (s.reward - baseline) * s.now.sum()
    return -total / tokens(batch)


def reinforce(batch: list[Sequence]) -> Tensor:
    return -sum(a * s.now.sum() for s, a in over_mean(batch)) / tokens(batch)


def remax(batch: list[Sequence]) -> Tensor:
    """arXiv:2310.10505, with PPO's ratio after the first optimizer step."""
    known = [s for s in batch if s.greedy_reward is not None]
    return -sum(clipped(ratio(s), s.reward - s.greedy_reward).sum() for s in known) / (len(batch) * MAX_TOKENS)


def token_rewards(s: Sequence, coef: float) -> Tensor:
    """What the last token earned, less each token's KL to the reference."""
    rewards = -coef * (s.old - s.ref)
    rewards[-1] += s.reward
    return rewards


def reinforce_pp(batch: list[Sequence]) -> Tensor:
    """arXiv:2501.03262."""
    returns = [token_rewards(s, 0.01).flip(0).cumsum(0).flip(0) for s in batch]
    advantages = whitened(returns)
    return -sum(clipped(ratio(s), a).sum() for s, a in zip(batch, advantages, strict=True)) / tokens(batch)


def reinforce_pp_baseline(batch: list[Sequence], coef: float = 1e-5) -> Tensor:
    """arXiv:2501.03262, with a k2 KL."""
    advantages = whitened([torch.full_like(s.old, a) for s, a in over_mean(batch)])
    losses = [
        (-clipped(ratio(s), a) + coef * ((s.now - s.ref) ** 2 / 2).clamp(max=10)).sum()
        for s, a in zip(batch, advantages, strict=True)
    ]
    return sum(losses) / tokens(batch)


def gae(s: Sequence) -> Tensor:
    """arXiv:1506.02438, equation 16, gamma 1 and lambda 0.95."""
    rewards, advantage, following, found = token_rewards(s, 0.02), 0.0, 0.0, []
    for t in reversed(range(len(rewards))):
        advantage = rewards[t] + following - s.old_value[t] + 0.95 * advantage
        following = s.old_value[t]
        found.append(advantage)
    return torch.stack(found[::-1])


def ppo(batch: list[Sequence]) -> Tensor:
    """arXiv:1707.06347, equation 7; arXiv:1912.09729, with c = 3."""
    total = torch.zeros(())
    for s, a in zip(batch, whitened([gae(s) for s in batch]), strict=True):
        bounded = clipped(ratio(s), a)
        total = total + torch.where(a < 0, torch.maximum(bounded, 3 * a), bounded).sum()
    return -total / tokens(batch)


def ppo_critic(batch: list[Sequence]) -> Tensor:
    """Squared error of the values, pessimistic beyond 0.2."""
    total = torch.zeros(())
    for s in batch:
        target = gae(s) + s.old_value
        moved = s.old_value + (s.value - s.old_value).clamp(-0.2, 0.2)
        total = total + 0.5 * torch.maximum((s.value - target) ** 2, (moved - target) ** 2).sum()
    return total / tokens(batch)


PAPERS: dict[str, Callable[[list[Sequence]], Tensor]] = {
    function.__name__: function
    for function in (
        cispo,
        clip_cov,
        dapo,
        dr_grpo,
        gmpo,
        grpo,
        gspo,
        opo,
        ppo,
        reinforce,
        reinforce_pp,
        reinforce_pp_baseline,
        remax,
        rloo,
        sapo,
    )
}


# ---- the batch, and the plain models ------------------------------------------------------------------------------


@cache
def groups() -> tuple[Group, ...]:
    """Ragged groups with one unscored sample and one of equal rewards; a full response is a truncated one."""
    found = []
    for n, group in enumerate(make_groups(num_groups=4)):
        samples = [replace(s, finish_reason="length") if len(s.token_ids) == MAX_TOKENS else s for s in group.samples]
        greedy = Group(group.prompt, (samples[0],), {}, (None if n == 0 else 2.0,))
        found.append(replace(group, samples=tuple(samples), greedy=greedy))
    lengths = {len(s.token_ids) for group in found for s in group.samples}
    assert MAX_TOKENS in lengths and len(lengths) > 3
    return tuple(found)


def reference_model():
    """The policy at some distance: no token's KL reaches the bound of `kl_clip`."""
    model = make_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype), alpha=0.03)
    return model


def plain_model(kind: type, holder: Learner, flat: Tensor | None = None):
    """Transformers' model with the weights that a learner of ours holds, or with those of a flat buffer of its kind."""
    if flat is not None:
        holder.held.master.copy_(flat)
    config = type(holder.hf_config).from_dict(holder.hf_config.to_dict() | {"id2label": {0: "value"}})
    hf = kind(config).double().eval()
    missing, unexpected = hf.load_state_dict(dict(holder.weights()), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    return hf


def policy(flat: Tensor | None = None, model=None) -> Qwen3ForCausalLM:
    return plain_model(Qwen3ForCausalLM, make_trainer(model).policy, flat)


def critic(flat: Tensor | None = None) -> Qwen3ForSequenceClassification:
    return plain_model(Qwen3ForSequenceClassification, make_critic(), flat)


def of_states(compute: Callable[[Tensor], Tensor]) -> list[tuple[Sample, Tensor]]:
    """Every sample, and what is computed of its tokens, at the states before its response tokens."""
    samples = [(group.prompt.token_ids, sample) for group in groups() for sample in group.samples]
    return [(s, compute(torch.tensor([[*prompt, *s.token_ids]]))[len(prompt) - 1 : -1]) for prompt, s in samples]


def logprobs(hf: Qwen3ForCausalLM) -> list[Tensor]:
    """Of every sample's own tokens."""
    rows = of_states(lambda ids: hf(input_ids=ids).logits[0].log_softmax(-1))
    return [row[range(len(row)), list(sample.token_ids)][own_tokens(sample)] for sample, row in rows]


def values(hf: Qwen3ForSequenceClassification) -> list[Tensor]:
    """Of the state before each of a sample's own tokens."""
    rows = of_states(lambda ids: hf.score(hf.model(input_ids=ids).last_hidden_state[0])[:, 0])
    return [row[own_tokens(sample)] for sample, row in rows]


def own_tokens(sample: Sample) -> Tensor:
    return (
        torch.ones(len(sample.token_ids), dtype=torch.bool)
        if sample.loss_mask is None
        else torch.tensor(sample.loss_mask)
    )


def sequences(**columns: list[Tensor]) -> list[Sequence]:
    found, names = [], ("old", "ref", "now", "old_value", "value")
    samples = [(n, g, group) for n, group in enumerate(groups()) for g in range(len(group.samples))]
    for number, (n, g, group) in enumerate(samples):
        sample, reward = group.samples[g], group.rewards[g]
        if reward is not None:
            sampler = torch.tensor(sample.sampler_logprobs, dtype=torch.float32)[own_tokens(sample)]
            rest = {name: columns[name][number] if name in columns else torch.empty(0) for name in names}
            greedy = group.greedy.rewards[0]
            found.append(Sequence(n, len(sample.token_ids), reward, greedy, sampler, **rest))
    return found


@cache
def before() -> dict[str, list[Tensor]]:
    """Of policy, reference and critic before the update."""
    with torch.no_grad():
        old, ref = logprobs(policy()), logprobs(policy(model=reference_model()))
        old_value = values(critic())
    distances = torch.cat(old) - torch.cat(ref)
    assert 0.5 < distances.abs().max() < 2  # so k3 is below its bound
    return {"old": old, "ref": ref, "old_value": old_value}


Step = tuple[Tensor, Tensor]
"""Weights before an optimizer step, and its gradient."""


def steps_of(learner: Learner) -> list[Step]:
    """Grows by each optimizer step that the learner takes."""
    caught, step = [], learner.optimizer.step

    def caught_step(*agree):
        caught.append((learner.held.master.clone(), learner.held.grad.clone()))
        return step(*agree)

    learner.optimizer.step = caught_step
    return caught


def train(row: AlgorithmSection) -> tuple[list[Step], list[Step], dict[str, float]]:
    """One update: steps of the policy, of the critic if there is one, and metrics."""
    algorithm = Algorithm(row, max_response_tokens=MAX_TOKENS)
    with_critic = "values" in algorithm.needs
    trainer = make_trainer(
        reference=reference_model() if "ref_logprobs" in algorithm.needs else None,
        critic=make_critic() if with_critic else None,
        passes_per_batch=1 if row.ratio == "none" else 2,
        optimizer=OptimizerSection(lr=1e-1),
    )
    steps, critic_steps = steps_of(trainer.policy), steps_of(trainer.critic) if with_critic else []
    run = SimpleNamespace(trainer=trainer, algorithm=algorithm, progress=Progress(step=10), utilisation=None)
    _, metrics = learn(run, collate(groups()))
    assert len(steps) == (1 if row.ratio == "none" else 2)
    return steps, critic_steps, metrics


def assert_gradient(flat: Tensor, hf, holder: Learner) -> None:
    """What ours caught is what autograd left in Transformers' model."""
    holder.held.master.copy_(flat)  # a gradient, put where weights are, comes out under Hugging Face names
    ours, plain = dict(holder.weights()), {name: weight.grad for name, weight in hf.named_parameters()}
    assert set(ours) == set(plain)
    scale = max(float(grad.abs().max()) for grad in plain.values())
    assert scale > 1e-4
    for name, expected in plain.items():
        torch.testing.assert_close(
            ours[name], expected, rtol=NEAR, atol=NEAR * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


# ---- the tests ----------------------------------------------------------------------------------------------------

CLIPS = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "ppo", "clip_cov", "gspo", "gmpo", "remax"), ("low", "high")),
    **dict.fromkeys(("reinforce_pp", "reinforce_pp_baseline"), ("low", "high")),
    "cispo": ("high",),
}
"""Where the off-policy step must have met the bounds, so that the comparison is one of them too."""


@pytest.mark.parametrize("name", [path.stem for path in PRESET_FILES])
def test_the_gradient_of_a_preset_is_its_papers_formula(name):
    steps, _, metrics = train(ROWS[name])
    for weights, gradient in steps:
        hf = policy(weights)
        PAPERS[name](sequences(now=logprobs(hf), **before())).backward()
        assert_gradient(gradient, hf, make_trainer().policy)
    assert all(metrics[f"train/clip_{side}_frac"] > 0 for side in CLIPS.get(name, ()))
    assert name != "ppo" or metrics["train/clip_dual_frac"] > 0
    assert name != "clip_cov" or metrics["train/clip_cov_frac"] > 0


def test_the_kl_of_reinforce_pp_baseline_is_as_published_though_its_coefficient_is_small():
    coef = 0.1
    steps, _, _ = train(ROWS["reinforce_pp_baseline"].model_copy(update={"kl_loss_coef": coef}))
    for weights, gradient in steps:
        hf = policy(weights)
        reinforce_pp_baseline(sequences(now=logprobs(hf), **before()), coef).backward()
        assert_gradient(gradient, hf, make_trainer().policy)


def test_the_critic_of_ppo_learns_its_papers_targets():
    _, steps, metrics = train(ROWS["ppo"])
    assert len(steps) == 2 and metrics["critic/clip_frac"] > 0
    for weights, gradient in steps:
        hf = critic(weights)
        ppo_critic(sequences(value=values(hf), **before())).backward()
        assert_gradient(gradient, hf, make_critic())
