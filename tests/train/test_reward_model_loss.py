"""The pairwise loss by hand and by autograd, and the trainer that packs pairs: nothing depends on the packing."""

import math

import pytest
import torch
from cases import caught_gradient
from pair_cases import PAIRS, make_trainer

from hone.algo.loss import pairwise_loss
from hone.errors import DataError
from hone.model.layout import Layout


def test_golden_losses():
    chosen, rejected = torch.tensor([1.0, 0.0, 2.0, -1.0, 90.0]), torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0])
    margin = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    losses = pairwise_loss(chosen, rejected, margin)
    assert losses.tolist() == pytest.approx([0.3132617, math.log(2), 0.3132617, 2.1269280, 0.0], abs=1e-6)


def test_extreme_differences_stay_finite():
    loss = pairwise_loss(torch.tensor([-500.0]), torch.tensor([500.0]), torch.zeros(1))
    assert loss.tolist() == [1000.0]


def gradient(trainer, pairs):
    return caught_gradient(trainer, lambda: trainer.update(pairs))


def test_the_gradient_is_autograds_of_the_plain_formula():
    metrics, found = gradient(make_trainer(), PAIRS)
    plain = make_trainer()

    def score(tokens):
        return plain.model(Layout.build([tokens], [0], [[0]]))[0]

    losses = [torch.log1p(torch.exp(-(score(p.chosen) - score(p.rejected) - p.margin))) for p in PAIRS]
    loss = torch.stack(losses).mean()
    loss.backward()
    assert metrics["rm/loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(found, plain.held.grad, rtol=1e-9, atol=1e-12)
    correct = [(score(p.chosen) > score(p.rejected)).item() for p in PAIRS]
    assert metrics["rm/accuracy"] == sum(correct) / len(PAIRS)


@pytest.mark.parametrize("tokens_per_microbatch", [6, 8, 12])
def test_microbatches_change_nothing(tokens_per_microbatch):
    metrics, whole = gradient(make_trainer(), PAIRS)
    parts, split = gradient(make_trainer(tokens_per_microbatch), PAIRS)
    assert torch.allclose(whole, split, rtol=1e-9, atol=1e-12)
    assert parts["rm/loss"] == pytest.approx(metrics["rm/loss"], rel=1e-12)
    one, other = make_trainer().measure(PAIRS), make_trainer(tokens_per_microbatch).measure(PAIRS)
    assert (one.loss, one.score_mean, one.score_std) == pytest.approx((other.loss, other.score_mean, other.score_std))


def test_the_order_of_pairs_changes_nothing():
    _, found = gradient(make_trainer(), PAIRS)
    _, turned = gradient(make_trainer(), PAIRS[::-1])
    assert torch.allclose(found, turned, rtol=1e-9, atol=1e-12)


def test_a_pair_that_does_not_fit_is_named():
    with pytest.raises(DataError, match=r"a pair does not fit into train.tokens_per_microbatch = 4.*at least 7"):
        make_trainer(4).update(PAIRS[:1])


def test_measured_is_by_hand():
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.score.weight.zero_()
    measured = trainer.measure(PAIRS)
    margins = [0.0, 0.5, 1.0, 0.0, 2.0]
    assert measured.loss == pytest.approx(sum(math.log1p(math.exp(m)) for m in margins) / 5)
    assert (measured.accuracy, measured.score_mean, measured.score_std) == (0.5, 0.0, 0.0)


def test_a_restored_trainer_continues_bit_for_bit():
    straight, first = make_trainer(), make_trainer()
    straight.update(PAIRS)
    first.update(PAIRS)
    tensors, rest = first.state()
    second = make_trainer()
    second.restore({name: tensor.clone() for name, tensor in tensors.items()}, rest)
    assert straight.update(PAIRS[:3]) == second.update(PAIRS[:3])
    assert torch.equal(straight.held.master, second.held.master)
