"""Algorithm assembled from a row of names and numbers: advantages before the update, the loss during it.

`Algorithm` sees batches and token tensors, never a model. `needs` lists what it requires from a run. Measurements
(`measures.py`) are returned as sums, so that the mean over microbatches is taken once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from hone.algo.advantage import CREDIT, Outcomes, critic_advantage
from hone.algo.correction import CORRECTION, REJECTION
from hone.algo.kl import KL
from hone.algo.loss import (
    AGGREGATE,
    CLIP,
    RATIO,
    Bounds,
    LossTokens,
    Ragged,
    covariance_outliers,
    explained_variance,
)
from hone.algo.measures import MEASURES, TOKEN_MAXIMA, TOKEN_MEANS, importance, measure, mismatch_of_engines, spread
from hone.algo.segments import segment_index, segment_sum
from hone.algo.shaping import ALARM_STEPS, Shaping, informative, steer_entropy, steer_kl
from hone.config.algorithm import AlgorithmSection
from hone.types import Batch, Control, Totals


class Algorithm:
    """A row of choices (`AlgorithmSection`), assembled.

    Args:
        section: names and numbers.
        max_response_tokens: the rollout's limit; only `fixed_length` and the overlong penalty need it.
        correction: the resolved `algorithm.correction`, None for none.
        control: state carried between updates; `assign` and `after_update` change it.
        weights: of the reward's components, by name; only `gdpo` needs them.
    """

    def __init__(
        self,
        section: AlgorithmSection,
        *,
        max_response_tokens: int | None = None,
        correction: str | None = None,
        control: Control | None = None,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        if max_response_tokens is None and (section.aggregate == "fixed_length" or section.overlong_buffer_frac):
            raise ValueError("fixed_length and the overlong penalty need max_response_tokens")
        self.section = section
        self.max_response_tokens = max_response_tokens or 0
        self.control = control or Control()
        self._shaping = Shaping(section, self.control, self.max_response_tokens)
        self._credit = CREDIT[section.credit]
        self._ratio = RATIO[section.ratio]
        self._clip = CLIP[section.clip]
        self._aggregate = AGGREGATE[section.aggregate]
        self._kl = KL[section.kl_estimator] if section.kl_loss_coef or section.kl_reward_coef else None
        chosen = section.correction if section.correction != "auto" else correction
        self._correction = CORRECTION[chosen or "none"]
        self._rejection = REJECTION[section.rejection]
        self._weights = dict(weights)
        self._bounds = Bounds(
            section.clip_low, section.clip_high, section.dual_clip, section.sapo_tau, kl_coef=section.kl_cov[1]
        )
        entries = (
            *(self._credit, self._ratio, self._clip, self._aggregate),
            *(self._kl, self._correction, self._rejection),
        )
        self.needs: frozenset[str] = frozenset().union(*(entry.needs for entry in entries if entry))
        """What a run must provide: see `registry.Entry.needs`."""
        if section.kl_reward_coef and section.old_logprobs == "trainer":
            self.needs |= {"policy_logprobs"}

    @property
    def _token_means(self) -> dict[str, str]:
        """Measure -> metric, for the measures that mean something for this row."""
        section, means = self.section, dict(TOKEN_MEANS)
        meaningless = {
            "kl": not section.kl_loss_coef,
            "kl_clipped": not section.kl_loss_coef,
            "clip_dual": section.dual_clip is None,
            "dropped": self._correction is CORRECTION["none"],
            "correction": self._correction is CORRECTION["none"],
            "ratio_clipped": section.clip not in ("ppo", "clip_cov"),
        }
        return {measure: name for measure, name in means.items() if not meaningless.get(measure)}

    @property
    def kl_coef(self) -> float:
        """The KL coefficient of this update: the configured one, until a controller moved it."""
        configured = self.section.kl_loss_coef or self.section.kl_reward_coef
        return configured if self.control.kl_coef is None else self.control.kl_coef

    @property
    def entropy_coef(self) -> float:
        """The entropy coefficient of this update: the configured one, or what a controller made of it."""
        if self.section.entropy_target is None:
            return self.section.entropy_coef
        if not self.control.entropy_is_low:
            return 0.0
        return self.section.entropy_coef if self.control.entropy_coef is None else self.control.entropy_coef

    @property
    def only_advantage_has_gradient(self) -> bool:
        """Whether a sample with advantage 0 has no gradient, so that its passes can be skipped; a controller needs the
        entropy of all samples."""
        section = self.section
        is_plain = section.kl_loss_coef == 0 and section.entropy_coef == 0 and section.entropy_target is None
        return is_plain and section.clip != "kl_cov"

    @property
    def entropy_has_gradient(self) -> bool:
        """Whether the entropies handed to `loss` must carry gradient."""
        return self.entropy_coef != 0

    @property
    def picks_by_entropy(self) -> bool:
        """Whether a batch needs `keep_uncertain` before its loss."""
        return self.section.top_entropy_frac < 1

    def informative(self, rewards: Sequence[float | None]) -> bool:
        """Whether a group with these rewards has a gradient under a group baseline."""
        return informative(rewards, self.section.reward_clip)

    def assign(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Shape the rewards and give every token its advantage, as column `advantages_T` (float32).

        Order: shaping, baseline, KL in the reward, clipping of the advantage. With a critic also its targets, as
        `return_T`. Returns the batch and what was measured.
        """
        section = self.section
        if section.old_logprobs == "sampler":
            batch = batch.with_column("old_logprobs_T", batch.sampler_logprobs_T)
        if section.mask_truncated:
            kept_S = 1 - batch.columns["truncated_S"]
            mask_T = batch.loss_mask_T * kept_S.to(batch.loss_mask_T).repeat_interleave(batch.length_S)
            batch = replace(batch, loss_mask_T=mask_T)
        batch, rejected = self._rejected(batch)
        reward_S, metrics = self._shaping.of_samples(batch)
        metrics |= rejected
        penalty_T, kl_metrics = self._penalties(batch)
        outcomes = Outcomes(
            reward_S,
            batch.prompt_S,
            len(batch.prompts),
            batch.length_S,
            batch.loss_mask_T,
            penalty_T=penalty_T,
            turn_reward_T=self._shaping.of_turns(batch),
            value_T=batch.columns.get("value_T"),
            scores_CS=self._scores(batch),
            weight_C=tuple(self._weights.values()),
            greedy_reward_N=self._shaping.of_greedy(batch),
            gamma=self.section.gamma,
            gae_lambda=self.section.gae_lambda,
            std_floor=self.section.std_floor,
        )
        advantages_T = self._credit.function(outcomes).mul_(batch.loss_mask_T)
        if (bound := section.advantage_clip) is not None:
            outside = (advantages_T.abs() > bound).sum() / batch.loss_mask_T.sum().clamp(min=1)
            metrics["train/advantage_clipped_frac"] = float(outside)
            advantages_T = advantages_T.clamp(-bound, bound)
        metrics |= spread(advantages_T, batch.loss_mask_T)
        batch = batch.with_column("advantages_T", advantages_T)
        if "values" in self.needs:
            value_T, mask_T = batch.columns["value_T"], batch.loss_mask_T
            return_T = (critic_advantage(outcomes) + value_T) * mask_T
            batch = batch.with_column("return_T", return_T)
            explained = explained_variance(value_T, return_T, mask_T)
            metrics |= {} if explained is None else {"critic/explained_variance": explained}
        if self.section.clip in ("clip_cov", "kl_cov"):
            of_clip = self.section.clip == "clip_cov"
            share, low, high = self.section.clip_cov if of_clip else (self.section.kl_cov[0], -math.inf, math.inf)
            logprobs_T = batch.columns.get("old_logprobs_T", batch.sampler_logprobs_T)
            outlier_T = covariance_outliers(
                logprobs_T, advantages_T, batch.loss_mask_T, share=share, low=low, high=high
            )
            batch = batch.with_column("outlier_T", outlier_T)
            metrics["train/clip_cov_frac"] = float(outlier_T.sum() / batch.loss_mask_T.sum().clamp(min=1))
        return batch, metrics | kl_metrics

    def _rejected(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch without the tokens that sampler and trainer differ on, and the share of them."""
        if self.section.rejection == "none":
            return batch, {}
        mask_T, num_samples = batch.loss_mask_T, len(batch.length_S)
        sample_T = segment_index(batch.length_S)
        columns = batch.columns["old_logprobs_T"].to(mask_T), batch.sampler_logprobs_T.to(mask_T), mask_T
        bounds = self.section.rejection_low, self.section.rejection_high
        kept_T = mask_T * self._rejection.function(*columns, sample_T, num_samples, *bounds)
        frac = 1 - float(kept_T.sum() / mask_T.sum().clamp(min=1)) if mask_T.any() else 0.0
        return replace(batch, loss_mask_T=kept_T), {"train/rejected_frac": frac}

    def _scores(self, batch: Batch) -> Tensor | None:
        """(C, S) scores of the reward's components."""
        if "scores" not in self.needs:
            return None
        return torch.stack([batch.columns[f"score/{name}_S"] for name in self._weights])

    def keep_uncertain(self, batch: Batch, entropy_T: Tensor) -> Batch:
        """The batch with advantages at the tokens of the highest entropy only, `top_entropy_frac` of its loss tokens
        (arXiv:2506.01939); tokens equal to the last one are kept too.

        Args:
            entropy_T: (T,) of the policy before the update, nats.
        """
        mask_T = batch.loss_mask_T > 0
        entropy_T = entropy_T.to(mask_T.device)
        count = int(mask_T.sum())
        if not count:
            return batch
        below = math.ceil(round((1 - self.section.top_entropy_frac) * (count - 1), 9))
        least = entropy_T[mask_T].kthvalue(below + 1).values
        kept_T = mask_T & (entropy_T >= least)
        return batch.with_column("advantages_T", batch.columns["advantages_T"] * kept_T)

    def after_update(self, batch: Batch, metrics: dict[str, float]) -> tuple[dict[str, float], str | None]:
        """Adapt the coefficients of KL and entropy. Returns further metrics, and a warning to log if any.

        Args:
            batch: the batch of the update.
            metrics: of `assign` and of the update.
        """
        of_entropy: dict[str, float] = {}
        section, entropy = self.section, metrics.get("train/entropy")
        if section.entropy_target is not None and entropy is not None:
            of_entropy = {"train/entropy_coef": self.entropy_coef}
            steer_entropy(
                self.control,
                coef=section.entropy_coef if self.control.entropy_coef is None else self.control.entropy_coef,
                entropy=entropy,
                target=section.entropy_target,
                step=section.entropy_coef_step,
                most=section.entropy_coef_max,
            )
        more, alarm = self._steer_kl(batch, metrics)
        return of_entropy | more, alarm

    def _steer_kl(self, batch: Batch, metrics: dict[str, float]) -> tuple[dict[str, float], str | None]:
        kl, section = metrics.get("train/kl_ref"), self.section
        if self._kl is None or kl is None:
            return {}, None
        has_loss_T = (batch.loss_mask_T > 0).double()
        count_S = segment_sum(has_loss_T, segment_index(batch.length_S), len(batch.length_S))
        per_sequence = kl * float(count_S.sum() / (count_S > 0).sum().clamp(min=1))
        more = {"train/kl_coef": self.kl_coef, "train/kl_ref_sequence": per_sequence}
        if (
            section.kl_target is None or "train/loss" not in metrics
        ):  # while a critic warms up, the policy does not change
            return more, None
        alarm = steer_kl(
            self.control,
            coef=self.kl_coef,
            kl=kl if section.kl_target_unit == "per_token" else per_sequence,
            target=section.kl_target,
            samples=len(batch.length_S),
            horizon_samples=section.kl_horizon_samples,
        )
        return more, self._kl_alarm(more, kl) if alarm else None

    def _kl_alarm(self, metrics: dict[str, float], per_token: float) -> str:
        section, missed = self.section, self.control.kl_missed_steps
        got = per_token if section.kl_target_unit == "per_token" else metrics["train/kl_ref_sequence"]
        unit = section.kl_target_unit.replace("_", " ")
        return (
            f"the KL to the reference has been {'above' if missed > 0 else 'below'} algorithm.kl_target = "
            f"{section.kl_target:g} nats {unit} for {abs(missed)} updates (now {got:.3g}; the alarm comes every "
            f"{ALARM_STEPS}), and the coefficient, now {self.kl_coef:.3g}, does not bring it there. Check the target "
            "and its unit (algorithm.kl_target_unit), or lower algorithm.kl_horizon_samples."
        )

    def _penalties(self, batch: Batch) -> tuple[Tensor | None, dict[str, float]]:
        """(T,) minus the weighted KL of each token, or None without KL in the reward; and the mean KL."""
        if self._kl is None or not self.section.kl_reward_coef:
            return None, {}
        mask_T = batch.loss_mask_T
        kl_T, clipped_T = self._kl_of(batch.columns["old_logprobs_T"], batch.columns["ref_logprobs_T"])
        means = torch.stack([kl_T, clipped_T.to(kl_T.dtype)]) @ mask_T.to(kl_T.dtype) / mask_T.sum().clamp(min=1)
        kl, clipped_frac = means.tolist()
        return -self.kl_coef * kl_T * mask_T, {"train/kl_ref": kl, "train/kl_clipped_frac": clipped_frac}

    def _kl_of(self, logprobs_T: Tensor, ref_logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) estimates of the KL to the reference within +-`kl_clip`, and (T,) bool: which were outside."""
        assert self._kl is not None
        kl_T = self._kl.function(logprobs_T - ref_logprobs_T)
        bound = math.inf if self.section.kl_clip is None else self.section.kl_clip
        return kl_T.clamp(-bound, bound), kl_T.abs() > bound

    def weigh(self, tokens: Ragged, totals: Totals) -> Tensor:
        """(T,) weights of the token losses."""
        return self._aggregate.function(tokens, totals, self.max_response_tokens)

    def loss(self, tokens: LossTokens, totals: Totals) -> tuple[Tensor, Tensor]:
        """The loss of one microbatch, to be summed over the microbatches of an optimizer step.

        Args:
            totals: counts over the whole optimizer step, all microbatches and ranks.
        Returns:
            A scalar with gradient, and (len(MEASURES),) what was measured, without; see `summarize`.
        """
        section = self.section
        weight_T = self.weigh(tokens, totals)
        ratio_T = self._ratio.function(tokens)
        objective = self._clip.function(ratio_T, tokens, self._bounds)
        correction_T = self._correction.function(tokens, section.correction_low, section.correction_high)
        loss_T = -objective.value_T * correction_T
        kl_T = kl_clipped_T = torch.zeros_like(weight_T)
        if section.kl_loss_coef:
            assert tokens.ref_logprobs_T is not None, "the row has a KL term but the batch no ref_logprobs_T"
            kl_T, kl_clipped_T = self._kl_of(tokens.logprobs_T, tokens.ref_logprobs_T)
            loss_T = loss_T + self.kl_coef * (kl_T * ratio_T if section.kl_estimator == "weighted_k3" else kl_T)
        if entropy_coef := self.entropy_coef:
            loss_T = loss_T - entropy_coef * tokens.entropy_T
        loss = (weight_T * loss_T).sum()
        with torch.no_grad():
            bounded_T = ratio_T.clamp(1 - section.clip_low, 1 + section.clip_high)
            measured = measure(tokens, loss, kl_T, kl_clipped_T, objective, correction_T, bounded_T)
        return loss, measured

    def summarize(
        self, measured: Sequence[Sequence[float]], optimizer_steps: int, engines: Sequence[str] = ()
    ) -> dict[str, float]:
        """Metrics of one update from what each of its microbatches measured.

        The loss is a mean over optimizer steps of the quantity optimised; the others are means over loss tokens of
        the samples that were trained on (those without advantage cost no pass, so nothing is known of them). Without
        any such token only the loss is known.
        """
        sums = {name: sum(row[i] for row in measured) for i, name in enumerate(MEASURES)}
        metrics = {"train/loss": sums["loss"] / optimizer_steps, "train/tokens": sums["tokens"]}
        if sums["tokens"]:
            metrics |= {name: sums[measure] / sums["tokens"] for measure, name in self._token_means.items()}
            places = {name: MEASURES.index(measure) for measure, name in TOKEN_MAXIMA.items()}
            metrics |= {name: max(row[place] for row in measured) for name, place in places.items()}
            metrics |= importance(sums["mismatch_ratio"] / sums["tokens"], sums["mismatch_square"] / sums["tokens"])
        return metrics | mismatch_of_engines([row[len(MEASURES) :] for row in measured], engines)
