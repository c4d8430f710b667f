"""The page of common practices: its figures, and that it is what the arithmetic gives today."""

from __future__ import annotations

import pytest
from practices import PAGE, page, practice_a, practice_e


def test_the_page_is_todays():
    assert PAGE.read_text("utf-8") == page()


def test_a_judge_of_16b_needs_more_than_0_3_of_80_gb():
    """23.7 GiB are less than 29.26 GiB of weights; two devices each would do, or 0.45 of one and more."""
    share, weights, cache, lengths, trainer, workspace, lower = practice_a()
    asked, taken, least, sequences_of_two = share.values
    assert (asked, taken) == (pytest.approx(23.7, abs=0.05), pytest.approx(29.26, abs=0.005))
    assert 0.41 < least <= 0.5 and sequences_of_two >= 1
    assert weights.values[0] == 15_706_484_224
    assert cache.values == pytest.approx((7.6, 15.2, 78.2, 31_104), abs=0.1)
    assert lengths.values == (17_524,)
    assert trainer.values == pytest.approx((23.7, 11.4, 22.3, 46.9), abs=0.1)
    assert workspace.values[0] > 2 and lower.values[0] > 0


@pytest.mark.parametrize(
    ("vocab", "times", "states", "totals"),
    [(32_768, 35.4, (1.44, 2.12), (7.9, 10.4, 12.9)), (65_536, 43.9, (2.13, 3.5), (11.8, 15.3, 18.7))],
)
def test_e_is_what_a_trace_of_nanochat_found(vocab, times, states, totals):
    cache, activations, _, static, total, updates, shares, step = practice_e(vocab)
    assert cache.values == (256,)
    assert activations.values[0] == 0.125 and activations.values[2] == pytest.approx(times, abs=0.5)
    assert static.values == pytest.approx(states, abs=0.05)
    assert total.values == pytest.approx(totals, abs=0.06)
    assert updates.values == (233, 116)
    assert [round(value) for value in shares.values] == [31, 47, 56, 78]
    assert step.values == (30,)
