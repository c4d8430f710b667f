"""Pairwise loss of a reward model (Bradley-Terry)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def pairwise_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor) -> Tensor:
    """(P,) -log sigmoid(chosen - rejected - margin), in nats.

    Without a margin the negative log-likelihood of the preferences under Bradley and Terry's model (1952), as in
    InstructGPT (arXiv:2203.02155, equation 1); the margin is Llama 2's (arXiv:2307.09288, section 3.2.2). Equal scores
    and no margin give log 2.
    """
    return -F.logsigmoid(chosen_P - rejected_P - margin_P)
