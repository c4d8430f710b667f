import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from hone.reward.signature import Range, check_scores, declared_range, reward
from hone.types import Fault, Score

UNIT = Range(0.0, 1.0)


@pytest.mark.parametrize("value", [1.0, 1, True, np.float32(1.0), np.int64(1), Fraction(1), Score(1.0)])
def test_whatever_is_a_number_is_a_score(make_group, value):
    (score,) = check_scores([value], make_group("a"), UNIT)
    assert score == Score(1.0)
    assert type(score.value) is float


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (math.nan, "gave nan, not a finite number"),
        (math.inf, "gave inf, not a finite number"),
        (None, "returned None"),
        ("1.0", "gave str, not a number"),
        ([1.0, 0.0], "gave list, not a number"),
        (1 + 0j, "gave complex, not a number"),
        (1.5, "gave 1.5, above its declared maximum 1"),
        (-0.5, "gave -0.5, below its declared minimum 0"),
        (Score(1.5), "gave 1.5, above its declared maximum 1"),
    ],
)
def test_whatever_is_not_is_a_fault_of_that_sample_alone(make_group, value, cause):
    good, bad = check_scores([0.5, value], make_group("a", "b"), UNIT)
    assert good == Score(0.5)
    assert bad == Score(None, Fault.INFRA, cause)


@pytest.mark.parametrize(
    ("returned", "cause"),
    [
        ([1.0], "returned 1 scores for 2 samples"),
        ([1.0, 1.0, 1.0], "returned 3 scores for 2 samples"),
        (torch.tensor(1.0), "returned Tensor, not one score per sample"),
        (torch.ones(3), "returned 3 scores for 2 samples"),
        (1.0, "returned float, not one score per sample"),
        (None, "returned NoneType, not one score per sample"),
        ("ab", "returned str, not one score per sample"),
        ({0: 1.0, 1: 0.0}, "returned dict, not one score per sample"),
        ({1.0, 0.0}, "returned set, not one score per sample"),
        (bytearray(b"ab"), "returned bytearray, not one score per sample"),
        ((x for x in (1.0, 0.0)), "returned generator, not one score per sample"),
    ],
)
def test_a_wrong_shape_is_a_fault_of_the_whole_group(make_group, returned, cause):
    assert check_scores(returned, make_group("a", "b"), UNIT) == (Score(None, Fault.INFRA, cause),) * 2


@pytest.mark.parametrize(
    "returned",
    [
        [0.0, 1.0],
        (0, True),
        np.array([0.0, 1.0]),
        np.array([0.0, 1.0], dtype=object),
        torch.tensor([0.0, 1.0]),
        torch.tensor([[0.0], [1.0]], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(0.0), torch.tensor([1.0])],
        [Score(0.0), torch.tensor(1)],
    ],
)
def test_lists_tuples_arrays_and_tensors_hold_scores(make_group, returned):
    scores = check_scores(returned, make_group("a", "b"), UNIT)
    assert scores == (Score(0.0), Score(1.0))
    assert [type(score.value) for score in scores] == [float, float]


def test_a_fault_of_the_model_earns_the_declared_minimum_whatever_it_claims(make_group):
    (score,) = check_scores([Score(0.9, Fault.MODEL, "broke the parser")], make_group("a"), Range(-1.0, 1.0))
    assert score == Score(-1.0, Fault.MODEL, "broke the parser")


def test_a_fault_of_the_data_stays_one(make_group):
    (score,) = check_scores([Score(None, Fault.DATA, "no gold")], make_group("a"), UNIT)
    assert score == Score(None, Fault.DATA, "no gold")


def test_range_is_declared_on_the_function():
    @reward(minimum=-1.0, maximum=2.0)
    def f(group):
        return []

    assert declared_range(f) == Range(-1.0, 2.0)
    assert declared_range(lambda group: []) == Range(None, None)


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (float("nan"), None), (None, float("nan")), ("0", "1")])
def test_a_range_that_is_none_is_refused_where_it_is_declared(bounds):
    with pytest.raises(ValueError, match="must be numbers, the minimum not above the maximum"):
        reward(minimum=bounds[0], maximum=bounds[1])
    reward(minimum=0, maximum=float("inf"))
