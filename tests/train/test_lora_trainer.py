"""The trainer with an adapter: what it keeps in memory, what its reference is, and that it learns the same as peft."""

import copy

import pytest
import torch
from cases import algorithm_of, assert_same_state, make_batch, make_groups, make_model, make_trainer

from hone.config.run import LoraSection
from hone.errors import CheckpointError
from hone.model.lora import AdapterOff, add_adapter

LORA = LoraSection(rank=2, alpha=4.0)
TRAINED = 2 * 2 * ((16 + 32) + 2 * (16 + 16) + (32 + 16) + 2 * (16 + 24) + (24 + 16))
"""Layers x rank x (in + out) of q, k and v, o, gate and up, down of the small model."""


def adapted(implementation="hone", dtype=torch.float64, seed=3):
    model = make_model(dtype=dtype, implementation=implementation)
    model.load_weights(make_model(dtype=dtype).named_weights())
    add_adapter(model, LORA, seed=seed, dtype=dtype)
    return model


def batch_of(name, trainer, seed=0):
    algorithm = algorithm_of(name)
    return make_batch(make_groups(seed), algorithm), algorithm


def test_only_the_adapter_has_master_weights_gradients_and_moments():
    model = adapted()
    base = {name: weight.clone() for name, weight in model.own_weights()}
    trainer = make_trainer(model)
    tensors, rest = trainer.state()
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert sum(tensor.numel() for name, tensor in tensors.items() if name.startswith(f"{kind}/")) == TRAINED
    assert trainer.policy.held.grad.numel() == TRAINED
    assert sum(weight.numel() for weight in base.values()) > 2 * TRAINED, "though the model is tiny"
    assert {name.rpartition(".lora_")[2] for name, _ in rest["weights"]} == {"A.weight", "B.weight"}
    trainer.update(*batch_of("grpo", trainer))
    assert all(torch.equal(weight, base[name]) for name, weight in model.own_weights())
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
    moved = {name for name, weight in trainer.weights() if not torch.equal(weight, base[name])}
    assert moved == {name for name in base if "_proj" in name}


@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_the_reference_is_the_policy_with_its_adapter_off(implementation):
    model = adapted(implementation)
    plain = make_model(implementation=implementation)
    plain.load_weights(model.own_weights())
    with_copy = make_trainer(copy.deepcopy(model), reference=plain)
    shared = make_trainer(model, reference=AdapterOff(model))
    assert not list(shared.reference.model.parameters())
    batch, algorithm = batch_of("kl_and_entropy", shared)
    for _ in range(3):
        for trainer in (shared, with_copy):
            with_ref = batch.with_column("ref_logprobs_T", trainer.logprobs(batch, reference=True))
            trainer.update(with_ref, algorithm)
    assert torch.equal(shared.logprobs(batch, reference=True), with_copy.logprobs(batch, reference=True))
    assert (shared.logprobs(batch) - shared.logprobs(batch, reference=True)).abs().max() > 1e-3
    assert_same_state(shared, with_copy)


def test_hones_adapter_learns_what_pefts_learns():
    trainers = [make_trainer(adapted(implementation)) for implementation in ("hone", "transformers")]
    for seed in range(3):
        for trainer in trainers:
            trainer.update(*batch_of("dapo", trainer, seed))
    ours, theirs = (dict(trainer.weights()) for trainer in trainers)
    start = dict(make_model().named_weights())
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5, msg=name)
        assert ("_proj" in name) == bool((weight - start[name]).abs().max() > 1e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_restored_trainer_continues_bit_for_bit(precision):
    dtype = getattr(torch, precision)

    def make(seed):
        model = make_model(dtype=torch.float32)
        add_adapter(model, LORA, seed=seed, dtype=dtype)
        return make_trainer(model, precision=precision)

    first, second = make(3), make(4)
    first.update(*batch_of("grpo", first))
    tensors, rest = first.state()
    second.restore({name: tensor.clone() for name, tensor in tensors.items()}, rest)
    for trainer in (first, second):
        trainer.update(*batch_of("grpo", trainer, 1))
    assert_same_state(first, second)
    assert {weight.dtype for _, weight in first.master_weights()} == {torch.float32}
    assert {weight.dtype for _, weight in first.weights()} == {dtype}


def test_an_adapter_of_another_model_is_not_restored():
    tensors, rest = make_trainer(adapted()).state()
    other = make_model(seed=1)
    add_adapter(other, LORA, seed=3, dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"an adapter of weights that hash to .*, this run trains an adapter of"):
        make_trainer(other).restore(tensors, rest)
    with pytest.raises(CheckpointError, match="this run trains a model without an adapter"):
        make_trainer().restore(tensors, rest)
