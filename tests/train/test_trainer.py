"""The trainer: the same gradient however an update is divided, equal to the plain formula on a plain model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import (
    ROWS,
    algorithm_of,
    gradient,
    make_batch,
    make_groups,
    make_model,
    make_trainer,
)
from torch.utils._python_dispatch import TorchDispatchMode

from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.run import OptimizerSection
from hone.data.pack import collate
from hone.train.trainer import lay_out, samples_of_tokens
from hone.types import Batch


def assert_close(a, b, rtol=1e-6):
    scale = float(b.abs().max())
    assert scale > 0
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * scale)


# ---- invariance of the gradient, float64 --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_gradient_ignores_microbatch_split(name):
    algorithm = algorithm_of(name)
    batch = make_batch(make_groups(), algorithm)
    whole = gradient(make_trainer(), batch, algorithm)
    for budget in (12, 25, 60):
        trainer = make_trainer(tokens_per_microbatch=budget)
        assert_close(gradient(trainer, batch, algorithm), whole)


@pytest.mark.parametrize("name", ROWS)
def test_gradient_ignores_the_order_of_groups_and_of_samples(name):
    algorithm = algorithm_of(name)
    groups = make_groups()
    reordered = [
        replace(group, samples=group.samples[::-1], rewards=group.rewards[::-1]) for group in (*groups[3:], *groups[:3])
    ]
    plain = gradient(make_trainer(), make_batch(groups, algorithm), algorithm)
    assert_close(gradient(make_trainer(), make_batch(reordered, algorithm), algorithm), plain)


@pytest.mark.parametrize("name", ROWS)
def test_gradient_ignores_sharing_of_prompts_and_merging_of_identical_samples(name):
    """Every sample as if it had a prompt of its own: the same tokens, nothing shared, nothing merged."""
    algorithm = algorithm_of(name)
    batch = make_batch(make_groups(), algorithm)
    alone = replace(
        batch,
        prompts=tuple(batch.prompts[n] for n in batch.prompt_S.tolist()),
        prompt_S=torch.arange(len(batch.prompt_S)),
    )
    assert_close(gradient(make_trainer(), alone, algorithm), gradient(make_trainer(), batch, algorithm))


@pytest.mark.parametrize("name", ROWS)
def test_gradient_ignores_the_chunks_in_which_logits_exist(name):
    algorithm = algorithm_of(name)
    batch = make_batch(make_groups(), algorithm)
    assert_close(
        gradient(make_trainer(logprob_chunk_tokens=3), batch, algorithm), gradient(make_trainer(), batch, algorithm)
    )


# ---- against the plain formula ------------------------------------------------------------------------------------


def plain_gradient(batch: Batch, row: AlgorithmSection, temperature: float, hf) -> dict[str, torch.Tensor]:
    """Transformers' own model, one sample at a time, full logits, no shared code; sample mean or token mean."""
    start, total = 0, torch.zeros((), dtype=torch.float64)
    mask_T, lengths = batch.loss_mask_T.double(), batch.length_S.tolist()
    num_samples = sum(bool(part.any()) for part in mask_T.split(lengths))
    for n, length in zip(batch.prompt_S.tolist(), lengths, strict=True):
        here = slice(start, start + length)
        start += length
        prompt, response = batch.prompts[n], batch.token_ids_T[here]
        ids = torch.cat([torch.tensor(prompt), response])[None]
        log_probs = (hf(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        now = log_probs.gather(1, response[:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        advantage, mask = batch.columns["advantages_T"][here].double(), mask_T[here]
        ratio = (now - batch.columns["old_logprobs_T"][here]).exp()
        value = now * advantage if row.ratio == "none" else ratio * advantage
        if row.clip == "ppo":
            value = torch.min(value, ratio.clamp(1 - row.clip_low, 1 + row.clip_high) * advantage)
        difference = now - batch.columns["ref_logprobs_T"][here]
        kl = difference**2 / 2 if row.kl_estimator == "k2" else (-difference).exp() - 1 + difference
        kl = kl.clamp(max=row.kl_clip)
        loss = ((-value + row.kl_loss_coef * kl - row.entropy_coef * entropy) * mask).sum()
        denominator = {
            "token_mean": mask_T.sum(),
            "sample_mean": mask.sum().clamp(min=1) * num_samples,
            "fixed_length": torch.tensor(6.0 * num_samples),
        }[row.aggregate]
        total = total + loss / denominator
    total.backward()
    return {name: weight.grad for name, weight in hf.named_parameters()}


PLAIN_ROWS = [
    name
    for name, row in ROWS.items()
    if row.ratio != "sequence" and row.clip in ("ppo", "none") and row.top_entropy_frac == 1
]
"""The others are held against a plain formula in tests/algo; here it is the path through the model that counts."""


@pytest.mark.parametrize("name", PLAIN_ROWS)
def test_gradient_equals_the_plain_formula_on_transformers_own_model(name):
    from transformers import Qwen3ForCausalLM

    algorithm, temperature = algorithm_of(name), 0.7
    batch = make_batch(make_groups(), algorithm)
    trainer = make_trainer(temperature=temperature)
    hf = Qwen3ForCausalLM(trainer.policy.model.hf_config).double().eval()
    hf.load_state_dict({**dict(trainer.weights()), "lm_head.weight": trainer.policy.model.output_weight.detach()})
    expected = plain_gradient(batch, ROWS[name], temperature, hf)

    holder = make_trainer()  # the gradient, put where weights are, comes out under Hugging Face names
    holder.policy.held.master.copy_(gradient(trainer, batch, algorithm))
    ours = dict(holder.weights())
    assert set(ours) == set(expected)
    for weight_name, grad in expected.items():
        # Rotary tables and norms are float32 inside Transformers' model: 1e-5 is what that leaves.
        assert_close(ours[weight_name], grad, rtol=2e-5)


def test_transformers_own_class_trains_to_the_same_weights():
    """The fallback for other architectures: no sharing, no merging, the same update."""
    algorithm = algorithm_of("grpo")
    batch = make_batch(make_groups(), algorithm)
    optimizer = OptimizerSection(lr=1e-2, eps=1e-4)  # Adam's first step would make rounding of a gradient of 0 a step
    ours = make_trainer(optimizer=optimizer)
    theirs = make_trainer(make_model(implementation="transformers"), optimizer=optimizer)
    theirs.policy.model.load_weights(ours.weights())
    theirs.policy.held.master.copy_(theirs.policy.held.compute)
    for trainer in (ours, theirs):
        trainer.update(batch, algorithm)
    updated = dict(theirs.weights())
    for name, weight in ours.weights():
        torch.testing.assert_close(weight, updated[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_recomputing_activations_changes_nothing(implementation, kind):
    algorithm = algorithm_of("grpo")
    batch = make_batch(make_groups(), algorithm)
    plain, recomputing = (make_trainer(make_model(implementation=implementation)) for _ in range(2))
    recomputing.policy.model.checkpointing = kind
    assert_close(gradient(recomputing, batch, algorithm), gradient(plain, batch, algorithm))


# ---- old logprobs, reference, samples without advantage -----------------------------------------------------------


def test_logprobs_ignore_microbatches_and_measure_the_temperature_asked_for():
    batch = collate(make_groups())
    whole = make_trainer().logprobs(batch)
    torch.testing.assert_close(make_trainer(tokens_per_microbatch=12).logprobs(batch), whole, rtol=1e-9, atol=1e-9)
    hot = make_trainer(temperature=2.0).logprobs(batch)
    torch.testing.assert_close(make_trainer().logprobs(batch, temperature=2.0), hot)
    assert (hot - whole).abs().max() > 0.1


def test_reference_logprobs_are_those_of_the_frozen_model():
    batch, algorithm = collate(make_groups()), algorithm_of("reinforce")
    trainer = make_trainer(reference=make_model())
    before = trainer.logprobs(batch)
    torch.testing.assert_close(trainer.logprobs(batch, reference=True), before)
    trainer.update(make_batch(make_groups(), algorithm), algorithm)
    torch.testing.assert_close(trainer.logprobs(batch, reference=True), before)
    assert (trainer.logprobs(batch) - before).abs().max() > 1e-3


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_policy_that_has_not_moved_equals_its_reference_exactly(precision):
    trainer = make_trainer(
        make_model(dtype=torch.float32), precision=precision, reference=make_model(dtype=torch.float32)
    )
    batch = collate(make_groups())
    assert torch.equal(trainer.logprobs(batch, reference=True), trainer.logprobs(batch))


def test_reference_logprobs_without_a_reference_are_refused():
    with pytest.raises(ValueError, match="without a reference"):
        make_trainer().logprobs(collate(make_groups()), reference=True)


WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "unique_consecutive"}
"""Operators whose result or its size the host waits for."""


class Waiting(TorchDispatchMode):
    """Counts operators that make the host wait for a GPU, and copies between devices that do."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        moves = func is torch.ops.aten._to_copy.default and result.device != args[0].device
        masks = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        waits = moves and not (kwargs or {}).get("non_blocking")
        self.count += waits or masks or func._schema.name.removeprefix("aten::") in WAITS
        return result


@pytest.mark.parametrize("name", ["dr_grpo", "gspo", "kl_and_entropy"])
def test_no_microbatch_makes_the_host_wait_for_the_device(name):
    """The first of several measures its gradient's norm, for the noise scale; the others nothing. What a microbatch
    takes to the device, here `meta`, goes there without waiting."""
    algorithm = algorithm_of(name)
    batch = make_batch(make_groups(), algorithm)
    loss_tokens_S = batch.length_S.numpy()
    counts, microbatches = [], []
    for budget in (60, 12):
        trainer = make_trainer(tokens_per_microbatch=budget).policy
        prepared = trainer._prepare(batch, algorithm)
        every = np.arange(len(batch.length_S))
        with Waiting() as waiting:
            done = trainer.accumulate(prepared, every, algorithm, loss_tokens_S)
        counts.append(waiting.count)
        microbatches.append(len(done.measured))
    assert microbatches[1] >= microbatches[0] + 3 and counts == [1, 1]
    elsewhere = replace(prepared, columns_CT=prepared.columns_CT.to("meta"))
    with Waiting() as waiting:
        layout, _ = lay_out(elsewhere, every)
        rows = layout.rows()
        samples_of_tokens(elsewhere, every)
    assert waiting.count == 0 and rows.index_RL.is_meta and layout.needed_W.is_meta


def test_in_a_single_optimizer_step_old_is_now():
    algorithm = algorithm_of("dapo")
    batch = make_batch(make_groups(), algorithm, moved=False)
    metrics = make_trainer().update(batch, algorithm)
    assert metrics["train/ratio_mean"] == metrics["train/ratio_max"] == 1
    with_column = batch.with_column("old_logprobs_T", make_trainer().logprobs(batch))
    assert_close(gradient(make_trainer(), batch, algorithm), gradient(make_trainer(), with_column, algorithm))


def test_in_several_optimizer_steps_old_is_from_before_the_first():
    algorithm = algorithm_of("dapo")
    batch = make_batch(make_groups(), algorithm, moved=False)
    several = make_trainer(passes_per_batch=3, samples_per_optimizer_step=10)
    explicit = make_trainer(passes_per_batch=3, samples_per_optimizer_step=10)
    metrics = several.update(batch, algorithm)
    explicit.update(batch.with_column("old_logprobs_T", make_trainer().logprobs(batch)), algorithm)
    assert torch.equal(several.policy.held.master, explicit.policy.held.master)
    assert metrics["train/optimizer_steps"] == 6
    assert metrics["train/ratio_max"] > 1.001


def test_samples_without_advantage_cost_no_pass_and_change_nothing():
    algorithm = algorithm_of("dr_grpo")
    groups = make_groups()
    mute = [replace(group, rewards=(1.0,) * 4) for group in make_groups(seed=9)]
    budget = 40
    alone = make_trainer(tokens_per_microbatch=budget).update(make_batch(groups, algorithm), algorithm)
    trainer = make_trainer(tokens_per_microbatch=budget)
    batch = make_batch(groups + mute, algorithm)
    metrics = trainer.update(batch, algorithm)
    assert metrics["train/microbatches"] == alone["train/microbatches"]
    assert metrics["train/tokens"] == alone["train/tokens"]
    assert metrics["train/samples_trained_frac"] == pytest.approx(alone["train/samples_trained_frac"] / 2)
    # They count in the denominators all the same.
    assert metrics["train/loss"] == pytest.approx(alone["train/loss"] * 19 / 39)  # one of 40 samples is unscored


def test_samples_without_advantage_are_computed_where_another_term_needs_them():
    algorithm = algorithm_of("kl_and_entropy")
    metrics = make_trainer().update(make_batch(make_groups(), algorithm), algorithm)
    assert metrics["train/samples_trained_frac"] == 19 / 20  # all but the unscored one


def test_an_update_in_which_no_sample_has_an_advantage_still_ends():
    algorithm = algorithm_of("dr_grpo")
    groups = [replace(group, rewards=(1.0,) * 4) for group in make_groups()]
    metrics = make_trainer().update(make_batch(groups, algorithm, moved=False), algorithm)
    assert metrics["train/microbatches"] == metrics["train/loss"] == metrics["train/grad_norm"] == 0


# ---- supervised training is the same routine ----------------------------------------------------------------------


SFT_ALGORITHM = Algorithm(AlgorithmSection(ratio="none", clip="none", aggregate="token_mean"))


def sft_batch() -> Batch:
    batch = collate(make_groups())
    return replace(batch, loss_mask_T=torch.ones_like(batch.loss_mask_T)).with_column(
        "advantages_T", torch.ones_like(batch.loss_mask_T)
    )


def test_sft_minimises_the_mean_negative_logprob():
    trainer, batch = make_trainer(), sft_batch()
    before = float(-trainer.logprobs(batch).mean())
    metrics = trainer.update(batch, SFT_ALGORITHM)
    assert metrics["train/loss"] == pytest.approx(before, rel=1e-6)
    for _ in range(5):
        trainer.update(batch, SFT_ALGORITHM)
    assert float(-trainer.logprobs(batch).mean()) < before - 0.1


# ---- learning, metrics, faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROWS)
def test_good_samples_become_likelier_than_bad_ones(name, precision):
    algorithm, groups = algorithm_of(name), make_groups()
    trainer = make_trainer(precision=precision, reference=make_model(dtype=torch.float32))
    batch = make_batch(groups, algorithm, moved=False)
    if "ref_logprobs" in algorithm.needs:
        batch = batch.with_column("ref_logprobs_T", trainer.logprobs(batch, reference=True))

    def preference() -> float:
        return float((trainer.logprobs(batch) * batch.columns["advantages_T"]).sum())

    before = preference()
    for _ in range(5):
        metrics = trainer.update(batch, algorithm)
    assert preference() > before + 1
    assert metrics["train/skipped_steps"] == 0


def test_metrics_of_an_update_are_registered_names_and_plain_numbers():
    from hone.observe.metrics import find_metric

    algorithm = algorithm_of("kl_and_entropy")
    metrics = make_trainer().update(make_batch(make_groups(), algorithm), algorithm)
    assert all(isinstance(value, float | int) for value in metrics.values())
    assert all(find_metric(name) for name in metrics)


def test_loss_reported_is_the_quantity_optimised_whatever_the_split():
    algorithm = algorithm_of("kl_and_entropy")
    batch = make_batch(make_groups(), algorithm)
    whole = make_trainer().update(batch, algorithm)
    split = make_trainer(tokens_per_microbatch=12).update(batch, algorithm)
    assert split["train/microbatches"] > whole["train/microbatches"] == 1
    for name in set(whole) - {"train/microbatches"}:
        assert split[name] == pytest.approx(whole[name], rel=1e-6), name


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_reported():
    algorithm = algorithm_of("dapo")
    batch = make_batch(make_groups(), algorithm)
    broken = batch.with_column("advantages_T", torch.full_like(batch.loss_mask_T, float("inf")))
    trainer = make_trainer()
    before = trainer.policy.held.master.clone()
    assert trainer.update(broken, algorithm)["train/skipped_steps"] == 1
    assert torch.equal(trainer.policy.held.master, before)
    assert trainer.update(batch, algorithm)["train/skipped_steps"] == 0
    assert not torch.equal(trainer.policy.held.master, before)


# ---- interrupted or not -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_restored_trainer_continues_bit_for_bit(precision):
    algorithm = algorithm_of("dapo")
    batches = [make_batch(make_groups(seed), algorithm, moved=False) for seed in range(4)]
    options = {"precision": precision, "passes_per_batch": 2, "samples_per_optimizer_step": 10}
    options["optimizer"] = OptimizerSection(lr=1e-2, weight_decay=0.1, schedule="cosine", warmup_steps=3)
    uninterrupted = make_trainer(**options)
    for batch in batches[:2]:
        uninterrupted.update(batch, algorithm)
    tensors, rest = uninterrupted.state()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    resumed = make_trainer(make_model(seed=5, dtype=getattr(torch, precision)), **options)
    resumed.restore(saved, rest)
    for batch in batches[2:]:
        assert uninterrupted.update(batch, algorithm) == resumed.update(batch, algorithm)
    for ours, theirs in zip(uninterrupted.weights(), resumed.weights(), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
    for name, tensor in resumed.state()[0].items():
        assert torch.equal(tensor, uninterrupted.state()[0][name])


def test_two_trainers_of_one_seed_make_the_same_weights():
    algorithm = algorithm_of("grpo")
    batch = make_batch(make_groups(), algorithm)
    first, second = make_trainer(precision="float32"), make_trainer(precision="float32")
    first.update(batch, algorithm)
    second.update(batch, algorithm)
    assert torch.equal(first.policy.held.master, second.policy.held.master)


def test_each_engine_has_the_mismatch_of_its_tokens_over_all_microbatches():
    algorithm = Algorithm(AlgorithmSection(kl_loss_coef=0.1))  # which trains on samples without advantage too
    groups = [
        replace(group, samples=tuple(replace(s, engine="ab"[(n + s.index) % 2]) for s in group.samples))
        for n, group in enumerate(make_groups())
    ]
    batch = make_batch(groups, algorithm)
    metrics = make_trainer(tokens_per_microbatch=30).update(batch, algorithm)
    assert metrics["train/microbatches"] > 1
    gap_T = (batch.columns["old_logprobs_T"] - batch.sampler_logprobs_T).abs()
    for place, name in enumerate("ab"):
        own_T = (batch.columns["engine_T"] == place) & (batch.loss_mask_T > 0)
        assert metrics[f"engine/{name}_mismatch_gap"] == pytest.approx(float(gap_T[own_T].mean()), rel=1e-6)
        assert metrics[f"engine/{name}_mismatch_max"] == pytest.approx(float(gap_T[own_T].max()), rel=1e-6)
