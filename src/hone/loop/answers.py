"""The rows' own answers as responses, before the first update: how unlikely the policy finds them, and their rewards.

Where nothing earns the reward, this distinguishes a broken reward, which the answers do not earn either, from prompts
that are too hard, and from prompts that the policy cannot read: with a tokenizer or chat template other than its own,
right answers are no likelier than any others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hone.data.pack import collate
from hone.reward.rewards import Rewards
from hone.train.trainer import Trainer
from hone.types import Group, Prompt, Sample, VersionSpan

NUM_PROMPTS = 16


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a run's data as responses.

    Args:
        encode: token ids of the answers of these prompts, EOS included; empty where the tokenizer cannot write one.
        vocab_size: of the tokenizer.
        text: writes an answer as the response that the rewards expect; None where the answer alone does not decide
            its reward.
        limit_tokens: longer answers are not responses of the run; only their length counts.
    """

    encode: Callable[[Sequence[Prompt]], Sequence[Sequence[int]]]
    vocab_size: int
    text: Callable[[Any], str] | None = None
    limit_tokens: float = math.inf

    def surprise(self, trainer: Trainer, groups: Sequence[Group]) -> dict[str, float]:
        """`rollout/answer_surprise` and `rollout/answer_tokens_mean` over the first prompts that have answers, and
        `rollout/response_surprise` over all samples."""
        written = self._written([group.prompt for group in groups])
        if not written:
            return {}
        found = {"rollout/answer_tokens_mean": sum(len(ids) for _, ids in written) / len(written)}
        logprobs = [sample.sampler_logprobs[sample.is_written_T] for group in groups for sample in group.samples]
        if count := sum(map(len, logprobs)):
            total = sum(float(of_one.sum()) for of_one in logprobs)
            found["rollout/response_surprise"] = -total / count / math.log(self.vocab_size)
        if answers := self._within_limit(written):
            batch = collate([_group(prompt, ids) for prompt, ids in answers])
            logprobs_T = trainer.logprobs(batch, temperature=1.0)  # at the run's own, what is unlikely may count more
            found["rollout/answer_surprise"] = -float(logprobs_T.mean()) / math.log(self.vocab_size)
        return found

    async def judged(self, rewards: Rewards, prompts: Sequence[Prompt], *, threshold: float) -> dict[str, float]:
        """`rollout/answer_pass_rate` over the first prompts; nothing where no answer was scored."""
        if self.text is None:
            return {}
        answers = self._within_limit(self._written(prompts))
        groups = [_group(prompt, ids, self.text(prompt.answer)) for prompt, ids in answers]
        scored = [reward for group in await asyncio.gather(*map(rewards.try_on, groups)) for reward in group.rewards]
        passed = [reward >= threshold for reward in scored if reward is not None]
        return {"rollout/answer_pass_rate": sum(passed) / len(passed)} if passed else {}

    def _written(self, prompts: Sequence[Prompt]) -> list[tuple[Prompt, Sequence[int]]]:
        """The first prompts whose answers can be written, with the answers' token ids."""
        few = [prompt for prompt in prompts if prompt.answer is not None][:NUM_PROMPTS]
        return [(prompt, ids) for prompt, ids in zip(few, self.encode(few), strict=True) if len(ids)]

    def _within_limit(self, written: list[tuple[Prompt, Sequence[int]]]) -> list[tuple[Prompt, Sequence[int]]]:
        return [(prompt, ids) for prompt, ids in written if len(ids) <= self.limit_tokens]


def _group(prompt: Prompt, ids: Sequence[int], text: str = "") -> Group:
    """One sample, as if the policy had written the answer."""
    tokens = np.array(ids, np.int32)
    nothing_L = np.zeros(len(ids), np.float32)
    sample = Sample(prompt.id, 0, tokens, nothing_L, (VersionSpan(0, len(ids)),), "stop", text=text)
    return Group(prompt, (sample,), rewards=(0.0,))
