"""An algorithm: one row of names and numbers, resolved into functions. Credit before the update, the loss during it.

`Algorithm` is blind to the trainer: it sees batches and token tensors, never a model. What it needs from outside it
says in `needs`; what it measured it returns as sums, so that a mean over microbatches is taken once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.algo.advantage import CREDIT, Outcomes
from hone.algo.correction import CORRECTION
from hone.algo.kl import KL, MAX_LOG_RATIO, k3
from hone.algo.loss import AGGREGATE, CLIP, RATIO, Bounds, Objective, Tokens, log_ratio
from hone.algo.shaping import clip_rewards, informative, overlong_penalty
from hone.config.run import AlgorithmSection
from hone.types import Batch, Totals

TOKEN_MEANS = {
    "entropy": "train/entropy",
    "clip_low": "train/clip_low_frac",
    "clip_high": "train/clip_high_frac",
    "clip_dual": "train/clip_dual_frac",
    "dropped": "train/correction_dropped_frac",
    "ratio": "train/ratio_mean",
    "mismatch_gap": "train/mismatch_gap",
    "mismatch_ratio": "train/mismatch_ratio_mean",
    "mismatch_kl": "train/mismatch_kl",
}
"""What is measured as a sum over loss tokens, and the metric that its mean is."""

MEASURES = ("loss", "kl", "tokens", *TOKEN_MEANS, "ratio_max")
"""Order of the values that `Algorithm.loss` measures: `loss` and `kl` are aggregated as the loss is, `ratio_max` is a
maximum, the rest are sums over loss tokens."""


class Algorithm:
    """A row of choices (`AlgorithmSection`), assembled.

    Args:
        section: names and numbers.
        max_response_tokens: the rollout's limit; only `fixed_length` and the overlong penalty need it.
    """

    def __init__(self, section: AlgorithmSection, *, max_response_tokens: int | None = None) -> None:
        if max_response_tokens is None and (section.aggregate == "fixed_length" or section.overlong_buffer_tokens):
            raise ValueError("fixed_length and the overlong penalty need max_response_tokens")
        self.section = section
        self.max_response_tokens = max_response_tokens or 0
        self._credit = CREDIT[section.credit]
        self._ratio = RATIO[section.ratio]
        self._clip = CLIP[section.clip]
        self._aggregate = AGGREGATE[section.aggregate]
        self._kl = KL[section.kl_estimator] if section.kl_loss_coef else None
        self._correction = CORRECTION[section.correction]
        self._bounds = Bounds(section.clip_low, section.clip_high, section.dual_clip, section.sapo_tau)
        entries = (self._credit, self._ratio, self._clip, self._aggregate, self._kl, self._correction)
        self.needs: frozenset[str] = frozenset().union(*(entry.needs for entry in entries if entry))
        """What a run must provide: see `registry.Entry.needs`."""

    @property
    def _token_means(self) -> dict[str, str]:
        """Measure -> metric, for the measures that mean something for this row."""
        means = dict(TOKEN_MEANS)
        if self.section.dual_clip is None:
            del means["clip_dual"]
        if self.section.correction == "none":
            del means["dropped"]
        return means

    @property
    def only_advantage_has_gradient(self) -> bool:
        """Whether a sample with advantage 0 adds nothing to the gradient, so that no pass need be spent on it."""
        return self._kl is None and self.section.entropy_coef == 0

    @property
    def entropy_has_gradient(self) -> bool:
        """Whether the entropies handed to `loss` must carry gradient."""
        return self.section.entropy_coef != 0

    def informative(self, rewards: Sequence[float | None]) -> bool:
        """Whether a group with these rewards has anything to say to a group baseline."""
        return informative(rewards, self.section.reward_clip)

    def assign(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Shape the rewards and give every token its advantage, as column `advantages_T` (float32).

        Order: clip of the raw reward, overlong penalty, baseline. Returns the batch and what was shaped.
        """
        section, metrics, reward_S = self.section, {}, batch.reward_S
        scored_S = ~reward_S.isnan()
        num_scored = max(int(scored_S.sum()), 1)
        if section.reward_clip is not None:
            raw_S, reward_S = reward_S, clip_rewards(reward_S, section.reward_clip)
            metrics["train/reward_clipped_frac"] = int((raw_S[scored_S] != reward_S[scored_S]).sum()) / num_scored
        if section.overlong_buffer_tokens:
            penalty_S = overlong_penalty(
                batch.length_S,
                max_tokens=self.max_response_tokens,
                buffer_tokens=section.overlong_buffer_tokens,
                factor=section.overlong_penalty,
            ).to(reward_S.dtype)
            reward_S = reward_S + penalty_S
            metrics["train/overlong_penalty_mean"] = float(penalty_S[scored_S].sum()) / num_scored
        num_samples = len(batch.length_S)
        sample_T = torch.arange(num_samples, device=reward_S.device).repeat_interleave(batch.length_S)
        outcomes = Outcomes(reward_S, batch.prompt_S, len(batch.prompts), sample_T, batch.loss_mask_T)
        return batch.with_column("advantages_T", self._credit.function(outcomes) * batch.loss_mask_T), metrics

    def loss(self, tokens: Tokens, totals: Totals) -> tuple[Tensor, Tensor]:
        """The loss of one microbatch, to be summed over the microbatches of an optimizer step.

        Args:
            totals: counts over the whole optimizer step, all microbatches and ranks.
        Returns:
            A scalar with gradient, and (len(MEASURES),) what was measured, without; see `summarize`.
        """
        section = self.section
        weight_T = self._aggregate.function(tokens, totals, self.max_response_tokens)
        objective = self._clip.function(self._ratio.function(tokens), tokens, self._bounds)
        correction_T = self._correction.function(tokens, section.correction_low, section.correction_high)
        loss_T = -objective.value_T * correction_T
        kl_T = torch.zeros_like(weight_T)
        if self._kl is not None:
            assert tokens.ref_logprobs_T is not None, "the row has a KL term but the batch no ref_logprobs_T"
            kl_T = self._kl.function(tokens.logprobs_T - tokens.ref_logprobs_T)
            loss_T = loss_T + section.kl_loss_coef * kl_T
        if section.entropy_coef:
            loss_T = loss_T - section.entropy_coef * tokens.entropy_T
        loss = (weight_T * loss_T).sum()
        with torch.no_grad():
            measured = _measure(tokens, weight_T, loss, kl_T, objective, correction_T)
        return loss, measured

    def summarize(self, measured: Sequence[Sequence[float]], optimizer_steps: int) -> dict[str, float]:
        """Metrics of one update from what each of its microbatches measured.

        Loss and KL are means over optimizer steps of the quantity optimised; the others are means over loss tokens of
        the samples that were trained on (those without advantage cost no pass, so nothing is known of them). Without
        any such token only the loss is known.
        """
        sums = {name: sum(row[i] for row in measured) for i, name in enumerate(MEASURES)}
        metrics = {"train/loss": sums["loss"] / optimizer_steps, "train/tokens": sums["tokens"]}
        if self._kl is not None:
            metrics["train/kl_ref"] = sums["kl"] / optimizer_steps
        if sums["tokens"]:
            metrics |= {name: sums[measure] / sums["tokens"] for measure, name in self._token_means.items()}
            metrics["train/ratio_max"] = max(row[-1] for row in measured)
        return metrics


def _measure(
    tokens: Tokens, weight_T: Tensor, loss: Tensor, kl_T: Tensor, objective: Objective, correction_T: Tensor
) -> Tensor:
    """(len(MEASURES),) values in that order. One product with the mask instead of one reduction per metric."""
    mask_T, dtype = tokens.loss_mask_T, tokens.logprobs_T.dtype
    ratio_T = log_ratio(tokens.logprobs_T, tokens.old_logprobs_T).exp()
    mismatch_T = (tokens.old_logprobs_T - tokens.sampler_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    per_token = torch.stack(
        [
            torch.ones_like(mask_T),
            tokens.entropy_T,
            objective.clipped_low_T.to(dtype),
            objective.clipped_high_T.to(dtype),
            objective.clipped_dual_T.to(dtype),
            (correction_T == 0).to(dtype),
            ratio_T,
            mismatch_T.abs(),
            mismatch_T.exp(),
            k3(-mismatch_T),  # tokens were drawn from the sampler, so its KL to the trainer is what can be estimated
        ]
    )
    kl = (weight_T * kl_T).sum()
    ratio_max = (ratio_T * mask_T).amax() if len(mask_T) else torch.zeros_like(kl)
    return torch.cat([torch.stack([loss, kl]), per_token @ mask_T, ratio_max[None]])
