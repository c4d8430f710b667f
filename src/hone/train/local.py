"""The policy's trainer for one process and one device: flat float32 master weights, fused AdamW."""

from __future__ import annotations

from hone.train.policy import PolicyTrainer


class LocalTrainer(PolicyTrainer):
    """A `PolicyTrainer` that is alone."""
