"""How far an update moves the policy: KL of the policy before to the one after, on a few of the update's own prompts.

Measured apart from the loss, since with one optimizer step per update the policy ratio is 1 and says nothing. Costs two
passes without gradient over a sixteenth of the batch, in the first updates and in every tenth.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hone.algo.kl import k3
from hone.data.pack import first_prompts
from hone.train.trainer import Trainer
from hone.types import Batch

FIRST, EVERY = 10, 10
SHARE = 16


def is_measured(step: int) -> bool:
    """Whether the update after `step` is one of those measured."""
    return step < FIRST or (step + 1) % EVERY == 0


@dataclass(frozen=True, slots=True)
class Movement:
    """One update that is being measured."""

    trainer: Trainer
    batch: Batch
    before_T: Tensor
    """(T,) logprobs of the batch's tokens before the update."""

    @classmethod
    def begin(cls, trainer: Trainer, batch: Batch) -> Movement:
        """Before the update: keep the logprobs of the first prompts' samples."""
        few = first_prompts(batch, max(1, len(batch.prompts) // SHARE))
        return cls(trainer, few, trainer.logprobs(few))

    def end(self) -> dict[str, float]:
        """After the update: `train/update_kl`, the k3 estimate of KL(before || after) in nats per token."""
        mask_T = self.batch.loss_mask_T.to(self.before_T)
        if not mask_T.any():
            return {}
        kl_T = k3(self.before_T - self.trainer.logprobs(self.batch))
        return {"train/update_kl": float((kl_T * mask_T).sum() / mask_T.sum())}
