"""The `algorithm` section of a run file: credit, ratio, clip, aggregation, KL, and their numbers."""

from __future__ import annotations

from typing import Literal

from hone.config.section import Section, key


class AlgorithmSection(Section):
    credit: Literal[
        "group_norm",
        "group_mean",
        "leave_one_out",
        "group_mean_whitened",
        "length_weighted",
        "best_of_group",
        "gdpo",
        "remax",
        "reinforce_pp",
        "gae",
    ] = key("group_norm")
    """Advantage estimator. gdpo normalises each reward component by itself; remax adds a greedy sample per prompt; gae
    trains a `critic`."""
    gamma: float = key(1.0, unit="per token", gt=0, le=1)
    """Discount factor per sampled token; environment tokens do not count as steps."""
    gae_lambda: float = key(0.95, unit="per token", ge=0, le=1)
    """With `credit: gae`: 0 is one-step temporal difference, 1 the full return."""
    std_floor: float = key(1e-6, gt=0)
    """Added to the standard deviation of rewards, or of advantages, before it divides."""
    ratio: Literal["token", "sequence", "none"] = key("token")
    """Level of the policy ratio: per token, or geometric mean over the sequence."""
    clip: Literal["ppo", "cispo", "geo_mean", "sapo", "clip_cov", "kl_cov", "tv_mask", "none"] = key("ppo")
    """Clipping of the policy ratio."""
    clip_low: float = key(0.2, ge=0, lt=1)
    """Lower bound of the ratio: 1 - clip_low. With `clip: tv_mask` of the token's probability: old - clip_low."""
    clip_high: float = key(0.2, ge=0)
    """Upper bound of the ratio: 1 + clip_high. With `clip: tv_mask` of the token's probability: old + clip_high."""
    dual_clip: float | None = key(None, gt=1)
    """With `clip: ppo`: maximum ratio of tokens with a negative advantage; with `tv_mask`: of all; null: off."""
    sapo_tau: tuple[float, float] = key((1.0, 1.05))
    """With `clip: sapo`: temperatures of the soft gate for positive and negative advantages."""
    clip_cov: tuple[float, float, float] = key((2e-4, 1.0, 5.0))
    """With `clip: clip_cov`: share of tokens to remove, and the range of their covariance of logprob and advantage."""
    kl_cov: tuple[float, float] = key((2e-4, 1.0))
    """With `clip: kl_cov`: share of tokens, those with the largest covariance, and the coefficient of their KL to the
    policy before the update."""
    top_entropy_frac: float = key(1.0, unit="fraction of the update's tokens", gt=0, le=1)
    """Only the tokens with the highest entropy get their advantage, this share of them; 1: all."""
    old_logprobs: Literal["trainer", "sampler"] = key("trainer")
    """Denominator of the ratio: the trainer's policy before the update, or the sampling policy, which saves a forward
    pass and lets the clip also bound staleness and mismatch."""
    correction: Literal["auto", "none", "tis", "sequence_tis", "icepop", "sequence_mask"] = key("auto")
    """Importance sampling correction between trainer and sampler: truncated, or masked outside the bounds. auto: tis if
    the engine has weights of its own (a cluster, or `rollout.max_staleness` > 0) and `old_logprobs: trainer`."""
    correction_low: float = key(0.5, ge=0)
    """Lower bound: tokens (icepop) or samples (sequence_mask) with a smaller weight are masked."""
    correction_high: float = key(2.0, gt=0)
    """Upper bound: larger weights are truncated (tis, sequence_tis, sequence_mask) or masked (icepop; sequence_mask:
    whole samples)."""
    rejection: Literal[
        "none",
        "token_k1",
        "token_k2",
        "token_k3",
        "sample_sum_k1",
        "sample_sum_k2",
        "sample_sum_k3",
        "sample_mean_k1",
        "sample_mean_k2",
        "sample_mean_k3",
        "sample_max_k2",
        "sample_max_k3",
    ] = key("none")
    """Tokens or whole samples that leave the loss because sampler and trainer differ, by an estimate of their KL."""
    rejection_low: float | None = key(None, unit="ratio", ge=0)
    """Lower bound of the ratio sampler / trainer, with k1; null: 1 / rejection_high."""
    rejection_high: float = key(2.0, unit="ratio, or nats", gt=0)
    """Upper bound: of the ratio sampler / trainer with k1, of the estimate in nats with k2 and k3."""
    replay_routing: bool = key(False)
    """Mixtures of experts: the engine records which experts each token is sent to, and forward passes of the policy and
    its reference send it to the same ones (R3); gate weights are computed anew."""
    load_balancing_coef: float = key(0.0, ge=0)
    """Mixtures of experts: coefficient of the auxiliary loss that balances the load of experts, as the architecture
    defines it; `router_aux_loss_coef` of its config.json is not read. 0: off."""
    aggregate: Literal["token_mean", "sample_mean", "fixed_length", "token_sum"] = key("sample_mean")
    """Aggregation of token losses, with counts over the whole optimizer step."""
    kl_loss_coef: float = key(0.0, ge=0)
    """Coefficient of the KL to the frozen reference in the loss; 0: no reference needed."""
    kl_reward_coef: float = key(0.0, unit="reward per nat", ge=0)
    """Coefficient of each token's KL to the frozen reference in its reward; 0: no reference needed."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "weighted_k3"] = key("k3")
    """Per-token KL estimator; k1 has zero expected gradient in a loss and is refused there."""
    kl_clip: float | None = key(10.0, unit="nats", gt=0)
    """Clips each token's KL estimate to +- this, in loss and reward; null: off."""
    kl_target: float | None = key(None, unit="nats, by kl_target_unit", gt=0)
    """Adaptive KL control: adjusts the KL coefficient to keep the KL at this value; null: fixed coefficient."""
    kl_target_unit: Literal["per_token", "per_sequence"] = key("per_token")
    """Whether `kl_target` is per token or per response."""
    kl_horizon_samples: int = key(10_000, unit="samples", ge=1)
    """Horizon of the adaptive control: over this many samples, a KL 20% or more off target changes the coefficient by
    about 20%."""
    reference_refresh_every: int = key(0, unit="policy updates", ge=0)
    """Updates between replacing the reference by the current policy; 0: never."""
    entropy_coef: float = key(0.0)
    """Coefficient of the entropy bonus; with `entropy_target` the first one."""
    entropy_target: float | None = key(None, unit="nats", gt=0)
    """Adaptive entropy control: after each update the coefficient goes up by `entropy_coef_step` if the entropy is at
    most this, else down; the bonus is on only while it is. null: fixed coefficient."""
    entropy_coef_step: float = key(0.005, gt=0)
    """With `entropy_target`: change of the coefficient after an update."""
    entropy_coef_max: float = key(1.0, gt=0)
    """With `entropy_target`: largest coefficient; the smallest is 0."""
    reward_clip: tuple[float, float] | None = key(None)
    """Clips raw rewards to [low, high], before the baseline."""
    advantage_clip: float | None = key(None, unit="as the credit's", gt=0)
    """Clips final advantages to +- this; null: off."""
    truncated_reward_factor: float = key(1.0, ge=0, le=1)
    """Factor on the positive reward of a truncated response; 1: off."""
    normalize_rewards: bool = key(False)
    """Normalise rewards by their running mean and standard deviation."""
    overlong_buffer_frac: float = key(0.0, unit="fraction of rollout.max_response_tokens", ge=0, le=1)
    """Share of the length limit over which DAPO's soft length penalty grows; 0: off."""
    overlong_penalty: float = key(1.0, unit="reward", ge=0)
    """Penalty at the length limit; grows linearly over the buffer."""
    mask_truncated: bool = key(False)
    """Leave truncated responses out of the loss; their rewards still count in the baseline."""
    drop_uninformative: bool = key(False)
    """Dynamic sampling (DAPO): replace groups with equal rewards by new prompts."""
    max_dropped_per_kept: float = key(10.0, unit="groups", gt=0)
    """With `drop_uninformative`: the run ends when a step drops more groups than this per group needed."""
