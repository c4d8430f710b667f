"""The registry of metrics: every name that a run may log, with unit, meaning and, where known, healthy range.

Names are `area/name[_unit]`; `<word>` in a name stands for any text without a slash. A name that is not here
cannot be logged: one place says what a number means, and `docs/reference/metrics.md` is generated from it. What this file
does not do: compute anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Metric:
    """What one number is. `healthy` is (low, high) with None for an open end; None where nothing is known."""

    unit: str
    meaning: str
    healthy: tuple[float | None, float | None] | None = None


_FRACTION = (0.0, 1.0)

METRICS: dict[str, Metric] = {
    "rollout/reward_mean": Metric("reward", "Mean reward of the scored samples of the step."),
    "rollout/reward_std": Metric("reward", "Standard deviation of those rewards; 0 leaves nothing to learn from."),
    "rollout/accuracy": Metric("fraction", "Scored samples whose reward reaches eval.threshold.", _FRACTION),
    "rollout/pass_rate": Metric(
        "fraction", "The same of all scored samples, of dropped groups too: what the policy can do.", _FRACTION
    ),
    "rollout/response_tokens_mean": Metric(
        "tokens", "Mean tokens after the prompt: the policy's, stop tokens included, and those of tools."
    ),
    "rollout/response_tokens_max": Metric("tokens", "The same of the longest sample of the step."),
    "rollout/tool_tokens_mean": Metric("tokens", "Mean tokens per sample that the environment wrote."),
    "rollout/turns_mean": Metric("turns", "Mean turns per sample, with an environment."),
    "rollout/env_<metric>_mean": Metric(
        "the environment's", "A number that the environment gives: summed over a sample's turns, averaged over samples."
    ),
    "rollout/truncated_frac": Metric("fraction", "Samples cut at rollout.max_response_tokens.", (0.0, 0.2)),
    "rollout/groups_dropped": Metric("groups", "Groups replaced: too few scores, or uninformative when asked for."),
    "rollout/unscored_frac": Metric(
        "fraction", "Samples without a reward through data or infrastructure.", (0.0, 0.05)
    ),
    "rollout/zero_std_group_frac": Metric("fraction", "Groups whose rewards are all equal: no gradient.", (0.0, 0.8)),
    "rollout/staleness_mean": Metric("policy updates", "Mean age of the trained tokens' policy version."),
    "rollout/staleness_max": Metric("policy updates", "Largest such age; never above rollout.max_staleness."),
    "rollout/staleness_<age>_frac": Metric(
        "fraction", "Trained samples whose first token is so many policy updates old; with rollout.max_staleness > 0."
    ),
    "rollout/groups_ready": Metric("groups", "Scored and waiting when an update began; high: the trainer is late."),
    "rollout/groups_in_flight": Metric("groups", "Being sampled or scored when an update began; 0 when synchronous."),
    "rollout/tokens_per_s": Metric("tokens/s", "Tokens that the policy wrote, per second of the whole step."),
    "rollout/samples_per_s": Metric("samples/s", "Samples per second of the whole step."),
    "engine/replicas_up": Metric("engines", "Replicas that are up; below cluster's number one is being started again."),
    "engine/requeued": Metric("requests", "Drawn by another replica because theirs was lost, since the previous line."),
    "engine/published_mib": Metric("MiB", "Weights of the last publish, as each engine got them."),
    "engine/published_over_least": Metric(
        "ratio",
        "Bytes that the last publish moved over the least possible: the weights once for each engine, or with Ray's "
        "object store once for each machine that has engines.",
    ),
    "engine/<replica>_samples": Metric("samples", "That this replica has drawn since the previous line."),
    "engine/<replica>_queue_peak": Metric(
        "samples", "Most that were being drawn by this replica, or waited there, at one time since the previous line."
    ),
    "engine/<replica>_prefix_hit_frac": Metric(
        "fraction",
        "vLLM: tokens of prompts that were found in its prefix cache, since the previous line, about.",
        _FRACTION,
    ),
    "reward/<component>_mean": Metric("score", "Mean score of one reward component, before its weight."),
    "reward/<component>_std": Metric("score", "Standard deviation of that component's scores."),
    "reward/<component>_min": Metric("score", "Smallest score of that component."),
    "reward/<component>_max": Metric("score", "Largest score of that component."),
    "reward/<component>_zero_std_group_frac": Metric(
        "fraction", "Groups in which that component gives one score to all."
    ),
    "reward/<component>_variance_share": Metric(
        "fraction",
        "Share of the rewards' variance over the step that comes of that component times its weight. All sum to 1; "
        "below 0 it works against the others.",
    ),
    "reward/<component>_fault_frac": Metric("fraction", "Samples for which that component had a fault.", (0.0, 0.05)),
    "reward/<component>_not_applied_frac": Metric("fraction", "Samples of prompts that it does not apply to, if any."),
    "reward/<component>_http_failed": Metric(
        "HTTP requests", "Of that component, without a valid answer; tried again until their deadline.", (0.0, 0.0)
    ),
    "reward/<component>_http_given_up": Metric(
        "HTTP requests", "Of that component, refused or without a valid answer by their deadline.", (0.0, 0.0)
    ),
    "train/loss": Metric("loss", "The quantity optimised, over the whole update.", (-0.5, 0.5)),
    "train/grad_norm": Metric("norm", "Global gradient norm before clipping."),
    "train/lr": Metric("learning rate", "Learning rate of the update's last optimizer step."),
    "train/entropy": Metric(
        "nats", "Mean entropy of the policy at the trained tokens; near 0 it no longer explores.", (0.01, None)
    ),
    "train/kl_ref": Metric("nats per token", "KL to the frozen reference, by algorithm.kl_estimator.", (0.0, 0.5)),
    "train/kl_clipped_frac": Metric(
        "fraction", "Tokens whose estimate of that KL was bounded by algorithm.kl_clip.", (0.0, 0.01)
    ),
    "train/kl_ref_sequence": Metric("nats per sequence", "The same summed over a response, mean over responses."),
    "train/kl_coef": Metric("reward or loss per nat", "KL coefficient of the update; moves with algorithm.kl_target."),
    "train/clip_low_frac": Metric("fraction", "Tokens whose ratio was clipped from below.", (0.0, 0.3)),
    "train/clip_high_frac": Metric("fraction", "Tokens whose ratio was clipped from above.", (0.0, 0.3)),
    "train/clip_dual_frac": Metric("fraction", "Tokens whose negative advantage was bounded by algorithm.dual_clip."),
    "train/clip_cov_frac": Metric("fraction", "Tokens whose gradient clip_cov took away.", (0.0, 0.1)),
    "train/correction_mean": Metric(
        "ratio", "Mean weight by algorithm.correction, bounded; mismatch_ratio_mean is before the bound.", (0.5, 1.1)
    ),
    "train/correction_dropped_frac": Metric("fraction", "Tokens that algorithm.correction gave weight 0.", (0.0, 0.1)),
    "train/ratio_mean": Metric("ratio", "Mean policy ratio, unclipped; 1 on the first optimizer step.", (0.9, 1.1)),
    "train/ratio_clipped_mean": Metric("ratio", "Mean policy ratio as the clip bounds it.", (0.9, 1.1)),
    "train/ratio_max": Metric("ratio", "Largest policy ratio, unclipped."),
    "train/mismatch_gap": Metric("nats", "Mean |trainer - sampler| logprob of the trained tokens.", (0.0, 0.03)),
    "train/mismatch_ratio_mean": Metric(
        "ratio", "Mean trainer / sampler probability ratio; 1 when all is well.", (0.98, 1.02)
    ),
    "train/mismatch_kl": Metric("nats per token", "KL of the sampler to the trainer, k3 estimate.", (0.0, 0.01)),
    "train/tokens": Metric("tokens", "Response tokens that the update trained on."),
    "train/samples_trained_frac": Metric(
        "fraction", "Samples that had a gradient; the rest cost no backward pass.", _FRACTION
    ),
    "train/masked_frac": Metric("fraction", "Response tokens without loss: of tools, or of unscored samples."),
    "train/reward_clipped_frac": Metric("fraction", "Scored samples with a raw reward outside reward_clip."),
    "train/advantage_clipped_frac": Metric("fraction", "Trained tokens with an advantage beyond advantage_clip."),
    "train/reward_running_mean": Metric("reward", "Mean of all rewards so far, with normalize_rewards."),
    "train/reward_running_std": Metric("reward", "Their standard deviation; what rewards are divided by."),
    "train/overlong_penalty_mean": Metric("reward", "Mean length penalty added to scored rewards; 0 or less."),
    "train/microbatches": Metric("microbatches", "Forward and backward passes of the update, on each rank."),
    "train/optimizer_steps": Metric("optimizer steps", "Optimizer steps of the update."),
    "train/skipped_steps": Metric("optimizer steps", "Optimizer steps skipped for a non-finite gradient.", (0.0, 0.0)),
    "critic/loss": Metric("reward^2", "Half the squared error of the values, clipped; the critic's loss."),
    "critic/explained_variance": Metric(
        "fraction",
        "Share of the returns' variance that the values explain, before the update; 1 is all.",
        (0.0, 1.0),
    ),
    "critic/value_mean": Metric("reward", "Mean value of the trained tokens, before the update."),
    "critic/clip_frac": Metric("fraction", "Tokens whose value was clipped by critic.value_clip.", (0.0, 0.3)),
    "critic/grad_norm": Metric("norm", "Global norm of the critic's gradient before clipping."),
    "critic/lr": Metric("learning rate", "Critic's learning rate of the update's last optimizer step."),
    "critic/skipped_steps": Metric(
        "optimizer steps", "The critic's steps skipped for a non-finite gradient.", (0.0, 0.0)
    ),
    "sft/loss": Metric("nats per token", "Mean negative logprob of the tokens to imitate."),
    "sft/lr": Metric("learning rate", "Learning rate of the step."),
    "sft/grad_norm": Metric("norm", "Global gradient norm before clipping."),
    "sft/tokens_per_s": Metric("tokens/s", "Tokens to imitate per second of the step."),
    "rm/loss": Metric("nats", "Mean loss of the step's pairs; log 2 = 0.693 when nothing is known."),
    "rm/accuracy": Metric("fraction", "Pairs whose better answer has the higher score; a tie counts half.", _FRACTION),
    "rm/lr": Metric("learning rate", "Learning rate of the step."),
    "rm/grad_norm": Metric("norm", "Global gradient norm before clipping."),
    "rm/pairs_per_s": Metric("pairs/s", "Pairs per second of the step."),
    "rm/eval_loss": Metric("nats", "Mean loss of the pairs held out."),
    "rm/eval_accuracy": Metric("fraction", "The same accuracy on the pairs held out; 0.5 is chance.", _FRACTION),
    "rm/eval_score_mean": Metric("score", "Mean score of the answers held out; what `normalize` subtracts."),
    "rm/eval_score_std": Metric("score", "Their standard deviation; what `normalize` divides by."),
    "eval/accuracy": Metric("fraction", "Evaluation samples whose reward reaches eval.threshold.", _FRACTION),
    "eval/accuracy[<column>=<value>]": Metric(
        "fraction", "The same over the rows with that value (eval.by).", _FRACTION
    ),
    "eval/unscored_frac": Metric("fraction", "Evaluation samples without a reward.", (0.0, 0.05)),
    "eval/pass@<k>": Metric("fraction", "Unbiased chance that one of k samples is correct.", _FRACTION),
    "eval/reward_mean": Metric("reward", "Mean reward of the scored evaluation samples."),
    "eval/response_tokens_mean": Metric("tokens", "Mean response length in evaluation."),
    "eval/tool_tokens_mean": Metric("tokens", "Mean tokens per evaluation sample that the environment wrote."),
    "eval/turns_mean": Metric("turns", "Mean turns per evaluation sample, with an environment."),
    "eval/env_<metric>_mean": Metric("the environment's", "As rollout/env_<metric>_mean, of the evaluation samples."),
    "eval/truncated_frac": Metric("fraction", "Evaluation samples cut at the length limit.", (0.0, 0.2)),
    "gate/logprob_gap": Metric(
        "nats", "First-step gate: mean |trainer - sampler| logprob before anything was learned."
    ),
    "gate/ratio_mean": Metric("ratio", "First-step gate: mean trainer / sampler probability ratio.", (0.98, 1.02)),
    "gate/reference_gap": Metric("nats", "First-step gate: mean |policy - reference| logprob at step 0."),
    "time/step_s": Metric("s", "The whole step, by the clock."),
    "time/<span>_s": Metric("s", "Time since the previous line in which at least one such span was open."),
    "memory/rss_gib": Metric("GiB", "Resident memory of this process."),
    "memory/peak_rss_gib": Metric("GiB", "Largest resident memory of this process so far."),
    "memory/<process>_process_rss_gib": Metric(
        "GiB", "Resident memory of a process of the cluster, a rank of the trainer or an engine, a moment ago."
    ),
    "memory/<engine>_cache_tokens": Metric(
        "tokens", "In an engine's cache of keys and values when it was fullest since the previous line, about."
    ),
    "memory/<engine>_cache_room_tokens": Metric("tokens", "That the cache had room for then."),
    "memory/<engine>_cache_mib": Metric("MiB", "That its room took of the device's memory."),
    "memory/<process>_process_cuda_peak_gib": Metric("GiB", "Largest GPU memory that its tensors held so far."),
    "memory/cuda_peak_gib": Metric("GiB", "Largest GPU memory that tensors held during the step."),
    "memory/<phase>_peak_mib": Metric(
        "MiB", "Largest memory of the device while that phase went on: tensors on a GPU, resident memory on a CPU."
    ),
    "memory/device_frac": Metric(
        "fraction",
        "Largest memory used, of the GPU's or of plan.memory_budget_gib; not on a CPU without.",
        (0.75, 0.85),
    ),
    "memory/device_busy_frac": Metric("fraction", "How much of the time the GPU computed, by NVML.", (0.8, None)),
    "memory/rungs": Metric("settings", "Settings that the ladder has lowered in this run, resumed or not.", (0.0, 0.0)),
    "memory/redone": Metric("times", "Work done again since the process started because memory ran out.", (0.0, 0.0)),
    "memory/samples_mib": Metric("MiB", "Size of samples/ on disk; stops at observe.samples_max_mib."),
}


PHASES = ("generate", "reward", "train", "publish", "evaluate", "checkpoint")
"""Spans that divide a step among them, in order: the time split of console and report. Others are seen in the trace."""


@lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric:
    """The registry's entry for a logged name; an exact entry wins over a pattern.

    Raises:
        ValueError: the name is not registered. That is a mistake in Hone, never in a run file.
    """
    if name in METRICS:
        return METRICS[name]
    for pattern, regex in _patterns():
        if regex.fullmatch(name):
            return METRICS[pattern]
    raise ValueError(f"metric {name!r} is not registered: add one line for it to METRICS in hone/observe/metrics.py")


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Registry names with a `<word>`, longest first so that `<component>_zero_std_group_frac` wins."""
    names = sorted((name for name in METRICS if "<" in name), key=len, reverse=True)
    return tuple((name, re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(name)))) for name in names)
