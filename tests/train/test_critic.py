"""The critic: values of states whatever is shared, the plain formula's gradient, the policy's waiting, resuming."""

from dataclasses import asdict, replace

import pytest
import torch
from cases import VOCAB, assert_same_state, caught_gradient, make_groups, make_model, make_passes, make_trainer

from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.run import OptimizerSection
from hone.data.pack import collate
from hone.model.heads import ScalarModel
from hone.train.critic import Critic
from hone.train.trainer import PreparedBatch
from hone.types import Progress

PPO = AlgorithmSection(credit="gae", aggregate="token_mean")


def make_critic(*, precision="float64", seed=3, tokens_per_microbatch=10_000, value_clip=0.2, lr=1e-2) -> Critic:
    model = ScalarModel(make_model(seed=seed, dtype=getattr(torch, precision)))
    with torch.no_grad():  # a head of zeros would know nothing of the body
        model.score.weight.copy_(torch.linspace(-1, 1, model.score.weight.numel()).reshape(1, -1))
    return Critic(
        model,
        make_passes(precision, tokens_per_microbatch=tokens_per_microbatch),
        optimizer=OptimizerSection(lr=lr, weight_decay=0.1),
        total_optimizer_steps=10,
        value_clip=value_clip,
    )


def with_targets(groups, *, section=PPO, old_values=None):
    """A batch with values, returns and advantages; old values are functions of the token alone, if not given."""
    batch = collate(groups)
    values = 0.1 * batch.token_ids_T.double() if old_values is None else old_values
    return Algorithm(section, max_response_tokens=6).assign(batch.with_column("value_T", values))[0]


def everything(batch):
    return [torch.arange(len(batch.length_S)).numpy()]


def gradient(critic, batch, section=PPO):
    """The gradient of one update."""
    algorithm = Algorithm(section, max_response_tokens=6)
    return caught_gradient(critic, lambda: critic.update(batch, algorithm, everything(batch)))[1]


def assert_close(a, b, rtol=1e-6):
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))


# ---- values -------------------------------------------------------------------------------------------------------


def test_values_are_of_the_states_before_each_token_one_sample_at_a_time():
    critic, batch = make_critic(), collate(make_groups())
    value_T = critic.values(batch)
    start = 0
    for n, length in zip(batch.prompt_S.tolist(), batch.length_S.tolist(), strict=True):
        alone = replace(
            batch,
            prompts=(batch.prompts[n],),
            prompt_S=torch.tensor([0]),
            length_S=torch.tensor([length]),
            token_ids_T=batch.token_ids_T[start : start + length],
            loss_mask_T=batch.loss_mask_T[start : start + length],
        )
        torch.testing.assert_close(critic.values(alone), value_T[start : start + length], rtol=1e-9, atol=1e-9)
        # The last token is the end: nobody sees it before its own value is given.
        changed = replace(alone, token_ids_T=torch.cat([alone.token_ids_T[:-1], (alone.token_ids_T[-1:] + 1) % VOCAB]))
        torch.testing.assert_close(critic.values(changed), critic.values(alone), rtol=1e-9, atol=1e-9)
        start += length
    assert float(value_T.std()) > 0.1


def test_a_trainer_without_a_critic_says_so():
    with pytest.raises(ValueError, match="without a critic"):
        make_trainer().values(collate(make_groups()))


# ---- gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["token_mean", "sample_mean", "fixed_length", "token_sum"])
def test_gradient_ignores_microbatches_order_and_sharing(aggregate):
    section = AlgorithmSection(credit="gae", aggregate=aggregate)
    groups = make_groups()
    batch = with_targets(groups, section=section)
    whole = gradient(make_critic(), batch, section)
    assert float(whole.abs().max()) > 1e-3
    for budget in (12, 25):
        assert_close(gradient(make_critic(tokens_per_microbatch=budget), batch, section), whole)
    reordered = [
        replace(group, samples=group.samples[::-1], rewards=group.rewards[::-1]) for group in (*groups[2:], *groups[:2])
    ]
    assert_close(gradient(make_critic(), with_targets(reordered, section=section), section), whole)
    alone = replace(
        batch,
        prompts=tuple(batch.prompts[n] for n in batch.prompt_S.tolist()),
        prompt_S=torch.arange(len(batch.prompt_S)),
    )
    assert_close(gradient(make_critic(), alone, section), whole)


@pytest.mark.parametrize("clip", [0.2, None])
def test_gradient_is_autograds_of_the_plain_formula(clip):
    """0.5 mean max((V - R)^2, (V_old + clip(V - V_old) - R)^2) over unmasked tokens, on the whole batch at once."""
    batch, critic, plain = with_targets(make_groups()), make_critic(value_clip=clip), make_critic(value_clip=clip)
    caught = gradient(critic, batch)
    index = everything(batch)[0]
    prepared = PreparedBatch.of(batch, (), torch.float64, plain.device)
    value_T, _ = plain._forward(prepared, index)
    old_T, return_T = batch.columns["value_T"], batch.columns["return_T"]
    loss_T = (value_T - return_T) ** 2
    if clip is not None:
        bounded_T = torch.clamp(value_T, old_T - clip, old_T + clip)
        loss_T = torch.maximum(loss_T, (bounded_T - return_T) ** 2)
    mask_T = batch.loss_mask_T.double()
    (0.5 * (loss_T * mask_T).sum() / mask_T.sum()).backward()
    assert_close(caught, plain.held.grad, rtol=1e-9)


def test_metrics_are_those_of_the_whole_whatever_the_split():
    batch = with_targets(make_groups())
    whole = make_critic().update(batch, Algorithm(PPO), everything(batch))
    split = make_critic(tokens_per_microbatch=12).update(batch, Algorithm(PPO), everything(batch))
    assert split == pytest.approx(whole, rel=1e-9)
    mask_T = batch.loss_mask_T.double()
    assert whole["critic/value_mean"] == pytest.approx(float((batch.columns["value_T"] * mask_T).sum() / mask_T.sum()))
    assert 0 < whole["critic/clip_frac"] < 1


# ---- learning, and the policy's part ------------------------------------------------------------------------------


def test_a_critic_learns_what_returns_to_expect():
    critic, groups = make_critic(value_clip=None), make_groups()
    explained = []
    for _ in range(40):
        batch = collate(groups)
        batch, metrics = Algorithm(PPO).assign(batch.with_column("value_T", critic.values(batch)))
        explained.append(metrics["critic/explained_variance"])
        critic.update(batch, Algorithm(PPO), everything(batch))
    assert explained[-1] > 0.5 > explained[0]


def update_of(trainer, groups, algorithm):
    batch = collate(groups)
    reference = trainer.logprobs(batch, reference=True)
    batch = batch.with_column("ref_logprobs_T", reference).with_column("value_T", trainer.values(batch))
    batch = batch.with_column("old_logprobs_T", trainer.logprobs(batch))
    batch, metrics = algorithm.assign(batch)
    metrics |= trainer.update(batch, algorithm)
    return metrics | algorithm.after_update(batch, metrics)[0]


def ppo_trainer(*, precision="float32", seed=0, **changes):
    dtype = getattr(torch, precision)
    return make_trainer(
        make_model(seed=seed, dtype=dtype),
        precision=precision,
        reference=make_model(dtype=dtype),
        critic=make_critic(precision=precision, seed=3 + seed),
        passes_per_batch=2,
        samples_per_optimizer_step=10,
        **changes,
    )


STEERED = AlgorithmSection(
    credit="gae",
    aggregate="token_mean",
    kl_reward_coef=0.1,
    kl_estimator="k1",
    kl_target=0.01,
    kl_horizon_samples=100,
    normalize_rewards=True,
)


def test_while_the_critic_warms_up_the_policy_waits():
    trainer, algorithm = ppo_trainer(critic_warmup_updates=2), Algorithm(STEERED)
    policy, critic = trainer.policy.held.master.clone(), trainer.critic.held.master.clone()
    for _ in range(2):
        metrics = update_of(trainer, make_groups(), algorithm)
        assert "train/loss" not in metrics
    assert torch.equal(trainer.policy.held.master, policy)
    assert not torch.equal(trainer.critic.held.master, critic)
    assert trainer.policy.optimizer.step_count == 0, "the policy's schedule has not begun"
    assert "train/loss" in update_of(trainer, make_groups(), algorithm)
    assert not torch.equal(trainer.policy.held.master, policy)


def test_the_policy_becomes_its_own_reference_when_it_is_due():
    trainer, algorithm, batch = ppo_trainer(reference_refresh_every=2), Algorithm(STEERED), collate(make_groups())
    start = trainer.logprobs(batch, reference=True)
    update_of(trainer, make_groups(), algorithm)
    assert torch.equal(trainer.logprobs(batch, reference=True), start)
    update_of(trainer, make_groups(), algorithm)
    assert torch.equal(trainer.logprobs(batch, reference=True), trainer.logprobs(batch))
    assert not torch.equal(trainer.logprobs(batch), start)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_critic_reference_and_controllers_continue_bit_for_bit(precision):
    """Stopped after update 3: between two refreshes, the KL coefficient moved, rewards observed."""
    options = {"precision": precision, "reference_refresh_every": 2, "critic_warmup_updates": 1}
    trainer, progress = ppo_trainer(**options), Progress()
    algorithm = Algorithm(STEERED, control=progress.control)
    for seed in range(3):
        update_of(trainer, make_groups(seed), algorithm)
    tensors, rest = trainer.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    kinds = {"critic", "reference", "master", "exp_avg", "exp_avg_sq"}
    assert {name.partition("/")[0] for name in tensors} == kinds
    resumed, again = ppo_trainer(seed=5, **options), Progress.from_dict(asdict(progress))
    resumed.restore(tensors, rest)
    assert again == progress
    assert again.control.kl_coef not in (None, 0.1), "witness: the controller moved it"
    resumed_algorithm = Algorithm(STEERED, control=again.control)
    for seed in range(3, 6):
        ours = update_of(trainer, make_groups(seed), algorithm)
        assert update_of(resumed, make_groups(seed), resumed_algorithm) == ours
    assert_same_state(resumed, trainer)
    assert again == progress
