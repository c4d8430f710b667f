"""Memory runs out at every allocation of training: what is learnt stays the same, and nothing is learnt twice."""

from collections import Counter

import pytest
import torch
from cases import algorithm_of, make_batch, make_groups, make_model, make_trainer
from measuring import FakeGauge
from pair_cases import make_trainer as make_pair_trainer
from test_critic import make_critic
from test_reward_model_loss import PAIRS
from torch.utils._python_dispatch import TorchDispatchMode

from hone.errors import MemoryExhausted
from hone.memory.gauges import Meter
from hone.memory.ladder import Ladder
from hone.memory.rungs import CHUNK, RECOMPUTE, TOKENS, Knob
from hone.types import Progress

LOWEST_TOKENS = 24


class Failing(TorchDispatchMode):
    """Fails the allocation number `fails_at` that is made in a phase, once; counts them all."""

    def __init__(self, ladder, fails_at=None):
        super().__init__()
        self.ladder, self.fails_at = ladder, fails_at
        self.count = 0
        self.failed_in = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_read = func is torch.ops.aten._local_scalar_dense.default
        makes_new = (
            not is_read and not func._schema.is_mutable and all(r.alias_info is None for r in func._schema.returns)
        )
        if makes_new and func.namespace == "aten" and (phase := self.ladder.meter.open_phase):
            self.count += 1
            if self.count == self.fails_at:
                self.failed_in = phase
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


def guarded(trainer, *, critic=None, settings=None):
    """The trainer under a ladder that may change its settings, as `assemble.memory` binds them."""
    learner = getattr(trainer, "policy", trainer)
    settings = settings or {TOKENS: learner.passes.tokens_per_microbatch, CHUNK: 64, RECOMPUTE: "none"}
    ladder = Ladder(Meter(FakeGauge()), settings=settings)
    ladder.begin(Progress())
    body = getattr(learner.model, "body", learner.model)
    others = [critic] if critic else []

    def tokens(value):
        for one in (learner, *others):
            one.passes.tokens_per_microbatch = value

    ladder.bind(
        Knob(TOKENS, tokens, lowest=LOWEST_TOKENS),
        Knob(CHUNK, lambda value: setattr(learner.passes, "logprob_chunk_tokens", value), lowest=4),
        Knob(RECOMPUTE, lambda value: setattr(body, "checkpointing", value)),
    )
    for one in (learner, *others):
        one.passes.guard = ladder
    return ladder


def policy(**options):
    reference = make_model(seed=5)
    return make_trainer(reference=reference, samples_per_optimizer_step=8, passes_per_batch=2, **options)


def train_policy(trainer):
    """Reference and old logprobs, and updates of several optimizer steps each."""
    algorithm = algorithm_of("kl_and_entropy")
    for seed in range(2):
        batch = make_batch(make_groups(seed), algorithm, moved=False)
        batch = batch.with_column("ref_logprobs_T", trainer.logprobs(batch, reference=True))
        trainer.update(batch, algorithm)


def actor_critic():
    critic = make_critic()
    trainer = make_trainer(samples_per_optimizer_step=8, critic=critic)
    return trainer


def train_actor_critic(trainer):
    algorithm = algorithm_of("ppo")
    for seed in range(2):
        batch = make_batch(make_groups(seed), algorithm)
        batch, _ = algorithm.assign(batch.with_column("value_T", trainer.values(batch)))
        trainer.update(batch, algorithm)


def train_pairs(trainer):
    for _ in range(2):
        trainer.update(PAIRS)
        trainer.measure(PAIRS)


KINDS = {
    "policy with reference": (policy, train_policy),
    "policy and critic": (actor_critic, train_actor_critic),
    "reward model": (make_pair_trainer, train_pairs),
}


def state_of(learner):
    tensors, rest = learner.state()
    return {name: tensor.clone() for name, tensor in tensors.items()}, rest


@pytest.mark.parametrize(
    "points", [3, pytest.param(40, marks=pytest.mark.slow("an update for each failing allocation"))]
)
@pytest.mark.parametrize(
    "kind",
    [
        "policy and critic",
        "reward model",
        pytest.param("policy with reference", marks=pytest.mark.slow("an update for each failing allocation")),
    ],
)
def test_a_failure_at_any_allocation_leaves_the_same_weights(kind, points):
    """`points` allocations, spread evenly over all of them, fail one at a time."""
    make, train = KINDS[kind]
    unfailed = make()
    with Failing(guarded(unfailed, critic=getattr(unfailed, "critic", None))) as counting:
        train(unfailed)
    expected, expected_rest = state_of(unfailed)
    failed_in = Counter()
    for fails_at in sorted({1 + i * (counting.count - 1) // (points - 1) for i in range(points)}):
        learner = make()
        ladder = guarded(learner, critic=getattr(learner, "critic", None))
        with Failing(ladder, fails_at) as failing:
            train(learner)
        assert failing.failed_in, f"allocation {fails_at} of {counting.count} did not fail"
        assert [change.phase for change in ladder.changes] == [failing.failed_in]
        assert ladder.redone == 1
        failed_in[failing.failed_in] += 1
        tensors, rest = state_of(learner)
        assert rest == expected_rest
        for name, tensor in expected.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-9)
    assert set(failed_in) >= {"update", "logprobs"}


@pytest.mark.parametrize("fails_at", [1, 2])
def test_an_optimizer_step_is_never_applied_twice(fails_at):
    """Every allocation of the optimizer's own, which are few: applying it makes none."""
    expected, trainer = make_trainer(), make_trainer()
    algorithm = algorithm_of("grpo")
    batch = make_batch(make_groups(), algorithm)
    expected.update(batch, algorithm)
    ladder = guarded(trainer)
    step, begun = trainer.policy.optimizer.step, []

    def failing_step(*agree):
        begun.append(trainer.policy.held.grad.clone())
        if len(begun) <= fails_at:
            with Failing(ladder, 1):
                return step(*agree)
        return step(*agree)

    trainer.policy.optimizer.step = failing_step
    trainer.update(batch, algorithm)
    assert len(begun) == fails_at + 1
    assert torch.allclose(begun[0], begun[-1], rtol=1e-9)
    assert trainer.policy.optimizer.step_count == 1
    torch.testing.assert_close(trainer.policy.held.master, expected.policy.held.master, rtol=1e-9, atol=1e-12)
    with Failing(ladder) as counting, ladder.phase("optimizer", final=True):
        trainer.policy.optimizer._adam.step()
    assert counting.count == 0


def test_a_step_that_failed_inside_adam_counts_once():
    """Its own count of steps may be one ahead when it fails; the bias correction would be wrong ever after."""
    expected, trainer = make_trainer(), make_trainer()
    algorithm = algorithm_of("grpo")
    batch = make_batch(make_groups(), algorithm)
    guarded(trainer)
    adam_step, failures = trainer.policy.optimizer._adam.step, []

    def ahead_then_fails():
        if failures:
            return adam_step()
        failures.append(1)
        for state in trainer.policy.optimizer._adam.state.values():
            state["step"] += 1
        raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer.policy.optimizer._adam.step = ahead_then_fails
    for one in (expected, trainer):
        one.update(batch, algorithm)
        one.update(batch, algorithm)
    assert failures
    torch.testing.assert_close(trainer.policy.held.master, expected.policy.held.master, rtol=1e-9, atol=1e-12)


def test_gradients_do_not_depend_on_any_rung():
    algorithm = algorithm_of("kl_and_entropy")
    batch = make_batch(make_groups(), algorithm)
    expected = make_trainer()
    expected.update(batch, algorithm)
    for settings in (
        {TOKENS: LOWEST_TOKENS, CHUNK: 64, RECOMPUTE: "none"},
        {TOKENS: 10_000, CHUNK: 4, RECOMPUTE: "none"},
        {TOKENS: 10_000, CHUNK: 64, RECOMPUTE: "full"},
        {TOKENS: LOWEST_TOKENS, CHUNK: 4, RECOMPUTE: "full"},
    ):
        trainer = make_trainer()
        guarded(trainer, settings=settings)
        trainer.update(batch, algorithm)
        torch.testing.assert_close(trainer.policy.held.master, expected.policy.held.master, rtol=1e-6, atol=1e-9)


def test_memory_that_never_suffices_ends_and_harms_no_weights():
    trainer = make_trainer()
    ladder = guarded(trainer)
    before = trainer.policy.held.master.clone()
    algorithm = algorithm_of("grpo")
    batch = make_batch(make_groups(), algorithm)
    trainer.policy.accumulate = lambda *arguments: (_ for _ in ()).throw(MemoryError("always"))
    with pytest.raises(MemoryExhausted, match="out of memory in update"):
        trainer.update(batch, algorithm)
    assert torch.equal(trainer.policy.held.master, before)
    assert trainer.policy.optimizer.step_count == 0
    assert ladder.settings == {TOKENS: LOWEST_TOKENS, CHUNK: 4, RECOMPUTE: "full"}
