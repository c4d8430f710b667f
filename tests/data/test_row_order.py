"""Which row stands where in the stream: shares, repetition, curricula, pass rates, and going on from any position."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_search import examples

from hone.data.order import REVISIT, RowOrder, SourceRange
from hone.errors import DataError

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=9)


def ranges(sizes):
    ends = np.cumsum([0, *sizes]).tolist()
    return [SourceRange(f"source-{n}", *pair) for n, pair in enumerate(pairwise(ends))]


def mixture(weights, seed=0, sizes=None, **settings):
    sizes = [7 + 5 * n for n in range(len(weights))] if sizes is None else sizes
    return RowOrder(ranges(sizes), seed=seed, weights=weights, **settings), ranges(sizes)


@examples(30)
@given(WEIGHTS, st.integers(0, 2**32), st.integers(0, 10**9), st.integers(1, 3000))
def test_every_stretch_of_the_stream_has_the_shares_of_the_weights(weights, seed, start, count):
    order, sources = mixture(weights, seed)
    places = order.at(start, start + count)
    for source, weight in zip(sources, weights, strict=True):
        got = int(((source.start <= places) & (places < source.stop)).sum())
        wanted = count * weight / sum(weights)
        assert abs(got - wanted) <= 2 * len(weights).bit_length() + 1e-6 * count, "at both ends, one a division"


@examples(30)
@given(WEIGHTS, st.integers(0, 2**32), st.sampled_from(["shuffled", "source"]))
def test_a_source_goes_through_all_of_its_rows_before_it_starts_again(weights, seed, kind):
    order, sources = mixture(weights, seed, order=kind)
    places = order.at(0, 2000)
    for source in sources:
        own = places[(source.start <= places) & (places < source.stop)]
        size = source.stop - source.start
        for begin in range(0, len(own), size):
            epoch = own[begin : begin + size].tolist()
            assert len(set(epoch)) == len(epoch)
            assert kind == "shuffled" or epoch == [*range(source.start, source.start + len(epoch))]


@examples(30)
@given(WEIGHTS, st.integers(0, 2**32), st.integers(0, 1900), st.integers(1, 100))
def test_the_stream_continues_alike_from_any_position(weights, seed, start, count):
    whole = mixture(weights, seed)[0].at(0, 2000)
    assert mixture(weights, seed)[0].at(start, start + count).tolist() == whole[start : start + count].tolist()


def test_each_source_and_each_seed_has_an_order_of_its_own():
    order, other = (mixture([1, 1], seed, sizes=[50, 50])[0].at(0, 100) for seed in (0, 1))
    assert order.tolist() != other.tolist()
    assert order[order < 50].tolist() != (order[order >= 50] - 50).tolist()


def test_a_step_holds_every_source_as_its_weight_says():
    order, _ = mixture([3, 1], sizes=[1000, 10])
    steps = order.at(0, 32 * 100).reshape(100, 32) >= 1000
    assert set(steps.sum(axis=1)) == {8} and order.shares == (0.75, 0.25)


def test_a_source_of_weight_0_is_left_out_and_one_without_rows_may_have_no_other():
    order, _ = mixture([0, 1], sizes=[5, 3])
    assert sorted(order.at(0, 3).tolist()) == [5, 6, 7] and len(order) == 3
    with pytest.raises(DataError, match=r"data.train: no row of source-0 is left. Give it weight 0"):
        mixture([1, 1], sizes=[0, 3])


@examples(30)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(0, 99), st.booleans())
def test_a_curriculum_is_monotone_in_each_epoch_and_shuffles_equals(values, seed, is_descending):
    column, size = np.array(values, np.float64), len(values)
    order = RowOrder(ranges([size]), seed=seed, order="descending" if is_descending else "ascending", values=column)
    for epoch in range(3):
        places = order.at(epoch * size, (epoch + 1) * size)
        assert sorted(places.tolist()) == [*range(size)]
        assert column[places].tolist() == sorted(values, reverse=is_descending)


def test_equals_of_a_curriculum_come_in_another_order_in_each_epoch():
    order = RowOrder(ranges([20]), seed=0, order="ascending", values=np.zeros(20))
    assert order.at(0, 20).tolist() != order.at(20, 40).tolist()


def by_pass_rate(sizes, seed=0, weights=None):
    return RowOrder(ranges(sizes), seed=seed, order="pass_rate", weights=weights, bounds=(0.1, 0.9))


def play(order, rates, start, stop, step=5):
    """Ask for positions as a synchronous run does, and tell the pass rates of each step at its end."""
    seen = []
    for first in range(start, stop, step):
        places = [int(order.at(index, index + 1)[0]) for index in range(first, first + step)]
        order.measure((first + n, rates[place]) for n, place in enumerate(places))
        seen += places
    return seen


@examples(30)
@given(st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.5, 0.8, 0.9, 1.0]), min_size=1, max_size=40), st.integers(0, 99))
def test_rows_within_bounds_come_first_and_no_row_starves(rates, seed):
    rates = [0.5, *rates]
    size = len(rates)
    inside = {row for row, rate in enumerate(rates) if 0.1 < rate < 0.9}
    order = by_pass_rate([size], seed)
    assert sorted(play(order, rates, 0, size, step=1)) == [*range(size)], "none is known, so all are in the first round"
    for number in range(1, 2 * REVISIT + 1):
        others = {row for row in range(len(rates)) if row not in inside and (row + number) % REVISIT == 0}
        assert set(play(order, rates, size, size + len(inside), step=1)) == inside
        size += len(inside)
        assert set(play(order, rates, size, size + len(others), step=1)) == others, "once in four rounds"
        size += len(others)


def test_where_no_row_is_within_bounds_all_are_visited():
    order = by_pass_rate([6])
    for epoch in range(3):
        assert sorted(play(order, [0.0] * 6, epoch * 6, epoch * 6 + 6, step=3)) == [*range(6)]


def test_a_row_that_the_policy_has_learnt_leaves_and_may_come_back():
    order, rates = by_pass_rate([8]), [0.5] * 8
    play(order, rates, 0, 8, step=1)
    rates[3] = 1.0
    play(order, rates, 8, 16, step=1)
    rates[3] = 0.5
    seen = play(order, rates, 16, 16 + 3 * 7 + 2 * 8, step=1)
    assert seen.count(3) == 2, "in one of four rounds, and in the one after"


@examples(10)
@given(st.integers(0, 30), st.integers(0, 99), st.sampled_from([None, (3.0, 1.0)]))
def test_pass_rates_continue_from_a_checkpoint_of_any_step(steps, seed, weights):
    sizes = [23, 9]
    rates = np.random.default_rng(seed).choice([0.0, 0.5, 1.0], sum(sizes)).tolist()
    whole = play(by_pass_rate(sizes, seed, weights), rates, 0, 250)
    order, resumed = by_pass_rate(sizes, seed, weights), by_pass_rate(sizes, seed, weights)
    play(order, rates, 0, 5 * steps)
    resumed.restore(json.loads(json.dumps(order.state(5 * steps))))
    assert play(resumed, rates, 5 * steps, 250) == whole[5 * steps :]


def test_what_was_started_ahead_of_a_checkpoint_is_started_alike_after_it():
    rates = [0.0, 0.5] * 10
    order, resumed = by_pass_rate([20]), by_pass_rate([20])
    play(order, rates, 0, 10)
    ahead = [int(order.at(index, index + 1)[0]) for index in range(10, 50)]  # into the next rounds
    order.measure([(10, 0.0), (15, 1.0)])
    resumed.restore(json.loads(json.dumps(order.state(10))))
    assert resumed.at(10, 50).tolist() == ahead


def test_pass_rates_of_other_rows_are_refused():
    order = by_pass_rate([8])
    with pytest.raises(DataError, match=r"data.order: pass rates of 9 rows are in the checkpoint.*the source has 8"):
        order.restore(by_pass_rate([9]).state(0))


def test_only_measured_orders_have_a_state():
    order, _ = mixture([1, 2])
    order.measure([(0, 1.0)])
    assert order.state(5) == {}
    assert by_pass_rate([3]).is_measured and not order.is_measured


def test_the_state_of_many_rows_is_small():
    order = by_pass_rate([100_000])
    order.measure((index, index % 2) for index in range(200))
    assert len(json.dumps(order.state(200))) < 20_000
