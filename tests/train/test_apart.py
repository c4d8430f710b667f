"""A critic and a reference that are not where the policy is learn and measure what they would beside it, to the bit."""

import pytest
import torch
from cases import assert_same_state, make_groups, make_model, make_passes
from cases import make_trainer as make_policy_trainer
from test_critic import STEERED, make_critic, ppo_trainer, update_of

from hone.algo.algorithm import Algorithm
from hone.data.pack import collate
from hone.train.roles import Reference, Roles

STEPS = {"passes_per_batch": 2, "samples_per_optimizer_step": 10}
REFRESHED = {"reference_refresh_every": 2, "critic_warmup_updates": 1}


class InTwoPlaces:
    """A policy, and beside it what is apart: what `cluster.trainer` does with processes."""

    def __init__(self, seed: int = 0) -> None:
        float32 = torch.float32
        self.policy = make_policy_trainer(
            make_model(seed=seed, dtype=float32), precision="float32", critic_warmup_updates=1, **STEPS
        )
        reference = Reference(make_model(dtype=float32), make_passes("float32"))
        critic = make_critic(precision="float32", seed=3 + seed)
        self.apart = Roles(critic=critic, reference=reference, reference_refresh_every=2, **STEPS)
        self.updates = 0

    def logprobs(self, batch, *, reference=False):
        return (self.apart if reference else self.policy).logprobs(batch, reference=reference)

    def values(self, batch):
        return self.apart.values(batch)

    def update(self, batch, algorithm):
        metrics = self.policy.update(batch, algorithm) | self.apart.update(batch, algorithm)
        self.updates += 1
        if self.updates % 2 == 0:
            self.apart.refresh(self.policy.weights())
        return metrics

    def state(self):
        (mine, rest), (others, other_rest) = self.policy.state(), self.apart.state()
        return {**mine, **others}, {**rest, **other_rest}

    def restore(self, tensors, rest):
        self.policy.restore(tensors, rest)
        self.apart.restore(tensors, rest)
        self.updates = rest["updates"]


def learn(trainer, seeds):
    algorithm = Algorithm(STEERED)
    return [update_of(trainer, make_groups(seed), algorithm) for seed in seeds]


def test_apart_is_as_together_to_the_last_bit():
    apart, together = InTwoPlaces(), ppo_trainer(**REFRESHED)
    assert learn(apart, range(4)) == learn(together, range(4))
    assert_same_state(apart, together)
    batch = collate(make_groups(9))
    assert torch.equal(apart.logprobs(batch, reference=True), together.logprobs(batch, reference=True))
    assert torch.equal(apart.values(batch), together.values(batch))


@pytest.mark.parametrize("kinds", [(InTwoPlaces, ppo_trainer), (ppo_trainer, InTwoPlaces)], ids=["joined", "parted"])
def test_a_run_continues_in_the_other_layout(kinds):
    """Stopped after update 3: between two refreshes."""
    options = {ppo_trainer: REFRESHED, InTwoPlaces: {}}
    first, second = kinds[0](**options[kinds[0]]), kinds[1](seed=5, **options[kinds[1]])
    learn(first, range(3))
    tensors, rest = first.state()
    second.restore({name: tensor.clone() for name, tensor in tensors.items()}, rest)
    assert learn(second, range(3, 5)) == learn(first, range(3, 5))
    assert_same_state(second, first)


def test_a_reference_that_stays_is_in_no_checkpoint():
    apart = Roles(reference=Reference(make_model(), make_passes()))
    assert apart.state() == ({}, {})
    apart.restore({}, {"updates": 7})
