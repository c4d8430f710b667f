"""Value loss of a critic, and its explained variance. The model is in `train.critic`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.algo.loss import Ragged


@dataclass(frozen=True, kw_only=True)
class Values(Ragged):
    """The T response tokens of one microbatch, as the value loss sees them. Only `value_T` has gradient."""

    value_T: Tensor
    """(T,) of the critic now: the return expected from the state before each token, in reward units."""
    old_value_T: Tensor
    """(T,) of the critic before the update."""
    return_T: Tensor
    """(T,) target: advantage, before whitening, plus old value."""


def value_loss(values: Values, clip: float | None) -> tuple[Tensor, Tensor]:
    """0.5 max((V - R)^2, (clip(V, V_old +- c) - R)^2): pessimistic.

    Returns:
        (T,) loss, and (T,) bool: where clipping removed the gradient.
    """
    error_T = (values.value_T - values.return_T).square()
    if clip is None:
        return 0.5 * error_T, torch.zeros_like(error_T, dtype=torch.bool)
    bounded_T = values.old_value_T + (values.value_T - values.old_value_T).clamp(-clip, clip)
    bounded_error_T = (bounded_T - values.return_T).square()
    return 0.5 * torch.maximum(error_T, bounded_error_T), bounded_error_T > error_T


def explained_variance(value_T: Tensor, return_T: Tensor, mask_T: Tensor) -> float | None:
    """1 - var(R - V) / var(R) over unmasked tokens: 1 is a perfect critic, 0 one that predicts the mean.

    None where all returns are equal.
    """
    own = mask_T > 0
    known_T, error_T = return_T[own].double(), (return_T - value_T)[own].double()
    if len(known_T) == 0 or float(known_T.max() - known_T.min()) == 0:
        return None
    return float(1 - error_T.var(correction=0) / known_T.var(correction=0))


def pairwise_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor) -> Tensor:
    """(P,) -log sigmoid(chosen - rejected - margin), in nats.

    Without a margin the negative log-likelihood of the preferences under Bradley and Terry's model (1952), as in
    InstructGPT (arXiv:2203.02155, equation 1); the margin is Llama 2's (arXiv:2307.09288, section 3.2.2). Equal scores
    and no margin give log 2.
    """
    return -F.logsigmoid(chosen_P - rejected_P - margin_P)
