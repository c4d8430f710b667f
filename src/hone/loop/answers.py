"""How unlikely the policy finds the rows' own answers before its first update.

Where nothing earns the reward, this tells a broken reward from prompts that the policy cannot read: with a tokenizer or
chat template other than its own, right answers are no likelier than any others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hone.data.pack import collate
from hone.train.trainer import Trainer
from hone.types import Group, Prompt, Sample, VersionSpan

NUM_PROMPTS = 16


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a run's data as responses.

    Args:
        encode: token ids of the answers of these prompts, EOS included; empty where the tokenizer cannot write one.
        vocab_size: of the tokenizer.
    """

    encode: Callable[[Sequence[Prompt]], Sequence[Sequence[int]]]
    vocab_size: int

    def surprise(self, trainer: Trainer, prompts: Sequence[Prompt]) -> dict[str, float]:
        """`rollout/answer_surprise` over the first prompts; nothing where none has an answer."""
        few = [prompt for prompt in prompts if prompt.answer is not None][:NUM_PROMPTS]
        answers = [(prompt, ids) for prompt, ids in zip(few, self.encode(few), strict=True) if len(ids)]
        if not answers:
            return {}
        batch = collate([_group(prompt, ids) for prompt, ids in answers])
        return {"rollout/answer_surprise": -float(trainer.logprobs(batch).mean()) / math.log(self.vocab_size)}


def _group(prompt: Prompt, ids: Sequence[int]) -> Group:
    """One sample, as if the policy had written the answer."""
    tokens = np.array(ids, np.int32)
    nothing_L = np.zeros(len(ids), np.float32)
    sample = Sample(prompt.id, 0, tokens, nothing_L, (VersionSpan(0, len(ids)),), "stop", text="")
    return Group(prompt, (sample,), rewards=(0.0,))
