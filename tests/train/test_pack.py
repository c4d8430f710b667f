"""Collating groups, and dividing a batch into optimizer steps and microbatches: nothing lost, nothing moved."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_search import examples

from hone.data.pack import (
    Shape,
    collate,
    count_totals,
    divide_over_ranks,
    optimizer_steps,
    plan_microbatches,
)
from hone.errors import DataError
from hone.types import Group, Prompt, Sample, Turn, VersionSpan


def sample(tokens, logprobs=None, mask=None):
    logprobs = tuple(logprobs or [-1.0] * len(tokens))
    return Sample("p", 0, tuple(tokens), logprobs, (VersionSpan(0, len(tokens)),), "stop", "", mask)


def group(prompt, samples, rewards):
    return Group(Prompt("p", 0, "", tuple(prompt)), tuple(samples), {}, tuple(rewards))


def shape_of(prompt_tokens, group_of, lengths):
    lengths = np.array(lengths, np.int64)
    return Shape(np.array(group_of, np.int64), lengths, np.cumsum(lengths) - lengths, np.array(prompt_tokens))


def cost(shape, samples):
    """Tokens computed for a microbatch, the slow way."""
    prompts = {int(shape.prompt_S[s]) for s in samples}
    return sum(int(shape.prompt_tokens_N[p]) for p in prompts) + sum(
        max(int(shape.length_S[s]) - 1, 0) for s in samples
    )


# ---- collate ------------------------------------------------------------------------------------------------------


def test_collate_flattens_in_order():
    batch = collate(
        [
            group([9, 8], [sample([4, 5], [-0.1, -0.2]), sample([6], [-0.3])], [1.0, 0.0]),
            group([7], [sample([], [])], [0.5]),
        ]
    )
    assert [prompt.tolist() for prompt in batch.prompts] == [[9, 8], [7]]
    assert batch.prompt_S.tolist() == [0, 0, 1]
    assert batch.length_S.tolist() == [2, 1, 0]
    assert batch.token_ids_T.tolist() == [4, 5, 6]
    assert batch.loss_mask_T.tolist() == [1, 1, 1]
    assert batch.sampler_logprobs_T.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert batch.reward_S.tolist() == [1, 0, 0.5]


def test_tokens_know_which_engine_drew_them():
    drew = [replace(sample([4, 5]), engine="b"), sample([6]), replace(sample([7, 8]), engine="a")]
    batch = collate([group([1], drew[:2], [1.0, 0.0]), group([2], drew[2:], [1.0])])
    assert batch.engines == ("a", "b")
    assert batch.columns["engine_T"].tolist() == [1, 1, 2, 0, 0]
    assert not collate([group([1], [sample([4])], [1.0])]).engines


def test_an_unscored_sample_has_no_loss_and_no_number_for_a_reward():
    batch = collate([group([1], [sample([4, 5]), sample([6])], [None, 2.0])])
    assert math.isnan(batch.reward_S[0])
    assert batch.loss_mask_T.tolist() == [0, 0, 1]


def test_tool_tokens_are_masked_and_their_logprobs_harmless():
    batch = collate([group([1], [sample([4, 5, 6], [-1.0, math.nan, -math.inf], (True, False, False))], [1.0])])
    assert batch.loss_mask_T.tolist() == [1, 0, 0]
    assert batch.sampler_logprobs_T.tolist() == [-1, 0, 0]


def test_samples_know_where_their_tokens_are():
    shape = shape_of([3], [0, 0, 0], [2, 0, 3])
    assert shape.tokens_of(np.array([2, 0])).tolist() == [2, 3, 4, 0, 1]
    assert shape.tokens_of(np.array([1])).tolist() == []
    assert shape.count(np.array([True, True, False, True, True])).tolist() == [2, 0, 2]


def test_totals_count_only_samples_that_have_loss():
    totals = count_totals(np.array([3, 0, 2]))
    assert (totals.loss_tokens, totals.samples) == (5, 2)


# ---- optimizer steps ----------------------------------------------------------------------------------------------


def steps_of(num_samples, samples_per_step, passes=1, seed=0, update=0):
    steps = optimizer_steps(num_samples, samples_per_step=samples_per_step, passes=passes, seed=seed, update=update)
    return [step.tolist() for step in steps]


def test_an_update_is_one_optimizer_step_unless_said_otherwise():
    assert steps_of(4, None) == [[0, 1, 2, 3]]
    assert steps_of(4, None, passes=2) == [[0, 1, 2, 3]] * 2
    assert steps_of(4, 8) == [[0, 1, 2, 3]]


def test_each_pass_divides_all_samples_anew():
    first, second, third, fourth = steps_of(12, 6, passes=2)
    assert sorted(first + second) == sorted(third + fourth) == list(range(12))
    assert first != third
    assert all(step == sorted(step) for step in (first, second, third, fourth))


def test_steps_are_a_function_of_seed_update_and_pass():
    assert steps_of(12, 4, seed=1, update=5) == steps_of(12, 4, seed=1, update=5)
    assert steps_of(12, 4, seed=1, update=5) != steps_of(12, 4, seed=1, update=6)
    assert steps_of(12, 4, seed=1, update=5) != steps_of(12, 4, seed=2, update=5)


def test_a_batch_that_does_not_divide_gives_steps_of_nearly_equal_size():
    assert sorted(map(len, steps_of(10, 4))) == [3, 3, 4]


# ---- microbatches -------------------------------------------------------------------------------------------------


def test_one_microbatch_where_everything_fits():
    shape = shape_of([5, 5], [0, 0, 1, 1], [3, 3, 3, 3])
    assert [part.tolist() for part in plan_microbatches(shape, np.arange(4), 18)] == [[0, 1, 2, 3]]


def test_groups_stay_together_and_microbatches_are_balanced():
    """Four groups of 9, 3, 3 and 9 computed tokens under a budget of 12: two microbatches of 12, not 3 of 9, 9, 6."""
    shape = shape_of([3] * 4, [0, 0, 1, 1, 2, 2, 3, 3], [4, 4, 1, 1, 1, 1, 4, 4])
    plan = [part.tolist() for part in plan_microbatches(shape, np.arange(8), 12)]
    assert plan == [[0, 1, 2, 3], [4, 5, 6, 7]] or plan == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_group_that_alone_exceeds_the_budget_is_split():
    shape = shape_of([4], [0, 0, 0], [4, 4, 4])
    plan = [part.tolist() for part in plan_microbatches(shape, np.arange(3), 10)]
    assert sorted(map(len, plan)) == [1, 2]
    assert all(cost(shape, part) <= 10 for part in plan)


def test_a_sample_that_alone_exceeds_the_budget_names_the_key_and_the_least_legal_value():
    shape = shape_of([4, 9], [0, 1], [4, 4])
    with pytest.raises(DataError, match=r"train\.tokens_per_microbatch = 10.*at least 12"):
        plan_microbatches(shape, np.arange(2), 10)


def test_no_samples_no_microbatches():
    assert plan_microbatches(shape_of([4], [0], [2]), np.arange(0), 10) == []


@examples(150)
@given(st.data())
def test_any_plan_holds_every_sample_once_within_the_budget(data):
    num_prompts = data.draw(st.integers(1, 8))
    prompt_tokens = data.draw(st.lists(st.integers(1, 20), min_size=num_prompts, max_size=num_prompts))
    group_of = sorted(data.draw(st.lists(st.integers(0, num_prompts - 1), min_size=1, max_size=40)))
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=len(group_of), max_size=len(group_of)))
    shape = shape_of(prompt_tokens, group_of, lengths)
    kept = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(group_of), max_size=len(group_of))))
    budget = data.draw(st.integers(50, 300))  # the largest sample has 20 + 29
    plan = plan_microbatches(shape, kept, budget)
    assert sorted(np.concatenate(plan).tolist()) == kept.tolist() if len(kept) else plan == []
    assert all(cost(shape, part) <= budget for part in plan)
    assert all(part.tolist() == sorted(part.tolist()) for part in plan)
    whole = [n for n in set(group_of) if cost(shape, [s for s in kept if group_of[s] == n]) <= budget]
    for n in whole:
        assert sum(any(group_of[s] == n for s in part) for part in plan) <= 1


def test_columns_are_torch_tensors_on_the_cpu():
    batch = collate([group([1], [sample([4])], [1.0])])
    assert batch.token_ids_T.dtype == torch.int64
    assert batch.reward_S.dtype == batch.loss_mask_T.dtype == batch.sampler_logprobs_T.dtype == torch.float32


def test_rewards_of_turns_are_at_the_turns_last_tokens():
    """Tokens 0-1 and 4 are turns, 2-3 a tool's; a turn without a token is nowhere."""

    def played(index, *turns):
        mask = (True, True, False, False, True)
        return Sample("p", index, (1, 2, 3, 4, 5), (-1.0,) * 5, (VersionSpan(0, 5),), "stop", "", mask, turns=turns)

    first = played(0, Turn(0, 2, reward=0.5), Turn(4, 5, reward=2.0))
    second = played(1, Turn(0, 0, reward=9.0), Turn(0, 2, reward=-1.0), Turn(4, 5))
    prompt = Prompt("p", 0, "", (7,))
    batch = collate([Group(prompt, (first, second), {}, (2.5, 8.0))])
    assert batch.columns["turn_reward_T"].tolist() == [0, 0.5, 0, 0, 2.0, 0, -1.0, 0, 0, 0]
    without = collate([Group(prompt, (played(0, Turn(0, 2), Turn(4, 5)),), {}, (1.0,))])
    assert "turn_reward_T" not in without.columns, "no turn was given anything: the batch is as it is without turns"


# ---- ranks ----------------------------------------------------------------------------------------------------------


@examples(60)
@given(st.data())
def test_ranks_divide_all_samples_in_step_and_within_budget(data):
    prompt_tokens = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    group_of = sorted(data.draw(st.lists(st.integers(0, len(prompt_tokens) - 1), min_size=1, max_size=40)))
    lengths = [data.draw(st.integers(0, 20)) for _ in group_of]
    shape = shape_of(prompt_tokens, group_of, lengths)
    ranks, budget = data.draw(st.integers(1, 5)), data.draw(st.integers(50, 200))
    samples = np.flatnonzero([data.draw(st.booleans()) for _ in group_of])
    plans = divide_over_ranks(shape, samples, ranks, budget)
    assert len(plans) == ranks and len({len(plan) for plan in plans}) == 1  # as many microbatches on each
    taken = [sample for plan in plans for part in plan for sample in part.tolist()]
    assert sorted(taken) == samples.tolist()
    assert all(cost(shape, part) <= budget for plan in plans for part in plan)


def test_one_rank_has_the_plan_of_a_single_process():
    shape = shape_of([3, 4, 5], [0, 0, 1, 2, 2, 2], [5, 6, 7, 2, 3, 4])
    (plan,) = divide_over_ranks(shape, np.arange(6), 1, 20)
    expected = plan_microbatches(shape, np.arange(6), 20)
    assert [part.tolist() for part in plan] == [part.tolist() for part in expected]


def test_groups_stay_on_one_rank_where_that_balances():
    shape = shape_of([10] * 4, [0, 0, 1, 1, 2, 2, 3, 3], [5] * 8)
    plans = divide_over_ranks(shape, np.arange(8), 2, 1000)
    assert [part.tolist() for (part,) in plans] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_group_is_cut_where_one_rank_would_wait_for_it():
    shape = shape_of([10], [0] * 8, [101] * 8)  # one group of 810 computed tokens: 410 on each of two ranks
    plans = divide_over_ranks(shape, np.arange(8), 2, 1000)
    assert [cost(shape, part) for (part,) in plans] == [410, 410]


def test_a_rank_without_work_has_empty_microbatches():
    shape = shape_of([10], [0], [5])
    plans = divide_over_ranks(shape, np.arange(1), 3, 100)
    assert sorted(len(part) for (part,) in plans) == [0, 0, 1]
    assert divide_over_ranks(shape, np.arange(0), 3, 100) == [[], [], []]


def test_uneven_lengths_are_balanced_by_tokens():
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 2000, 128)
    shape = shape_of([100] * 16, np.repeat(np.arange(16), 8), lengths)
    shares = [sum(cost(shape, part) for part in plan) for plan in divide_over_ranks(shape, np.arange(128), 4, 10_000)]
    assert max(shares) < 1.05 * sum(shares) / 4


def test_a_sample_that_fits_nowhere_is_refused_by_every_rank():
    shape = shape_of([50, 5], [0, 1], [60, 5])
    with pytest.raises(DataError, match="a sample of 109 tokens"):
        divide_over_ranks(shape, np.arange(2), 2, 100)
