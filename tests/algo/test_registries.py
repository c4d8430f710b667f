"""The names that a run file may use, and the functions there are, are the same; every row states what it needs."""

from typing import get_args

import pytest

from hone.algo.advantage import CREDIT
from hone.algo.algorithm import Algorithm
from hone.algo.correction import CORRECTION, REJECTION
from hone.algo.kl import KL
from hone.algo.loss import AGGREGATE, CLIP, RATIO
from hone.config.algorithm import AlgorithmSection


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("credit", CREDIT),
        ("ratio", RATIO),
        ("clip", CLIP),
        ("aggregate", AGGREGATE),
        ("kl_estimator", KL),
        ("rejection", REJECTION),
    ],
)
def test_config_and_table_name_the_same_choices(key, table):
    assert set(get_args(AlgorithmSection.model_fields[key].annotation)) == set(table)


def test_corrections_are_those_of_the_table_and_auto():
    assert set(get_args(AlgorithmSection.model_fields["correction"].annotation)) == {"auto", *CORRECTION}


def test_a_reference_is_needed_only_for_a_kl_term():
    assert "ref_logprobs" in Algorithm(AlgorithmSection(kl_loss_coef=0.1)).needs
    assert "ref_logprobs" not in Algorithm(AlgorithmSection()).needs


def test_group_credit_needs_siblings_and_a_ratio_needs_old_logprobs():
    assert Algorithm(AlgorithmSection()).needs == {"siblings", "old_logprobs"}
    assert Algorithm(AlgorithmSection(ratio="none", clip="none")).needs == {"siblings"}


def test_a_fixed_length_without_a_length_is_refused():
    with pytest.raises(ValueError, match="max_response_tokens"):
        Algorithm(AlgorithmSection(aggregate="fixed_length"))
