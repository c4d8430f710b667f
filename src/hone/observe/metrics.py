"""Metric registry: every name that a run may log, with unit and meaning. What is abnormal is in `hone.doctor.rules`.

Names are `area/name[_unit]`; `<word>` in a name stands for any text without a slash. Only registered names can be
logged, and `docs/reference/metrics.md` is generated from the registry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Metric:
    """Description of a metric."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "rollout/reward_mean": Metric("reward", "Mean reward of the scored samples of the step."),
    "rollout/reward_std": Metric(
        "reward", "Standard deviation of the rewards of the step's scored samples; at 0 there is no gradient."
    ),
    "rollout/accuracy": Metric("fraction", "Scored samples whose reward reaches eval.threshold."),
    "rollout/pass_rate": Metric(
        "fraction", "Scored samples whose reward reaches eval.threshold, dropped groups included."
    ),
    "rollout/pass_rate[source=<source>]": Metric(
        "fraction", "`rollout/pass_rate` of the prompts of one source, where data.train has several."
    ),
    "rollout/prompts_frac[source=<source>]": Metric(
        "fraction", "Prompts of the step from this source, dropped groups included; weights in data.train decide it."
    ),
    "rollout/response_tokens_mean": Metric(
        "tokens", "Mean tokens after the prompt, stop tokens and environment tokens included."
    ),
    "rollout/response_tokens_max": Metric("tokens", "Tokens after the prompt of the step's longest sample."),
    "rollout/tool_tokens_mean": Metric("tokens", "Mean environment tokens per sample."),
    "rollout/turns_mean": Metric("turns", "Mean turns per sample; only with an environment."),
    "rollout/env_<metric>_mean": Metric(
        "the environment's", "A metric of the environment: summed over a sample's turns, averaged over samples."
    ),
    "rollout/truncated_frac": Metric("fraction", "Samples cut at rollout.max_response_tokens."),
    "rollout/truncation_cost": Metric(
        "reward",
        "Mean reward that is missed because truncated samples earn less than others: their share times the difference "
        "of the means. Not logged where all or none are truncated.",
    ),
    "rollout/groups_dropped": Metric(
        "groups", "Groups replaced: too few scored samples, or equal rewards (algorithm.drop_uninformative)."
    ),
    "rollout/unscored_frac": Metric("fraction", "Samples without a reward because of data or infrastructure faults."),
    "rollout/zero_std_group_frac": Metric("fraction", "Groups whose rewards are all equal; they have no gradient."),
    "rollout/all_right_group_frac": Metric(
        "fraction", "Groups with equal rewards that reach eval.threshold, dropped groups included."
    ),
    "rollout/all_wrong_group_frac": Metric(
        "fraction", "Groups with equal rewards below eval.threshold, dropped groups included."
    ),
    "rollout/reward_prompt_frac": Metric(
        "fraction",
        "Share of the reward's variance that lies between prompts (intraclass correlation), dropped groups included; "
        "near 0 where no prompt is harder than another, as with a random reward.",
    ),
    "rollout/answer_surprise": Metric(
        "ratio",
        "Negative logprob per token, at temperature 1, of the data's answers, as responses of the policy before its "
        "first update, over the logarithm of the vocabulary's size: 1 is a guess. First step only.",
    ),
    "rollout/response_surprise": Metric(
        "ratio",
        "Negative logprob per token, at rollout.temperature, of the step's samples over the logarithm of the "
        "vocabulary's size: how sure the policy is of what it writes. First step only.",
    ),
    "rollout/answer_tokens_mean": Metric(
        "tokens", "Mean length of the data's answers as responses, end token included. First step only."
    ),
    "rollout/answer_pass_rate": Metric(
        "fraction",
        "The data's answers, as responses, whose reward reaches eval.threshold. First step only; not logged where a "
        "service, the form of a response, an environment or a function of a Python program is part of the reward.",
    ),
    "rollout/repeated_prompt_frac": Metric(
        "fraction", "Groups whose prompt, pictures included, is also another group's of the step."
    ),
    "rollout/empty_frac": Metric("fraction", "Samples without any text but white space."),
    "rollout/shared_response_frac": Metric(
        "fraction",
        "Different prompts of the step that one and the same response, the most widespread, is given to; not logged "
        "where all prompts are equal. Near 1 is usual where there are few answers, such as yes and no.",
    ),
    "rollout/length_reward_corr": Metric(
        "correlation", "Correlation of response length and reward over scored samples; without spread not logged."
    ),
    "rollout/right_tokens_mean": Metric("tokens", "Mean response length of samples that reach eval.threshold."),
    "rollout/wrong_tokens_mean": Metric("tokens", "Mean response length of scored samples below eval.threshold."),
    "rollout/staleness_mean": Metric(
        "policy updates", "Mean age of the trained tokens: updates between sampling and training."
    ),
    "rollout/staleness_max": Metric("policy updates", "Largest age of a trained token; at most rollout.max_staleness."),
    "rollout/staleness_<age>_frac": Metric(
        "fraction", "Trained samples whose first token has this age in policy updates; with rollout.max_staleness > 0."
    ),
    "rollout/groups_ready": Metric(
        "groups", "Scored groups waiting for training when an update began; high: training is the bottleneck."
    ),
    "rollout/groups_in_flight": Metric(
        "groups", "Groups being sampled or scored when an update began; 0 in synchronous runs."
    ),
    "rollout/tokens_per_s": Metric("tokens/s", "Sampled tokens per second of the whole step."),
    "rollout/samples_per_s": Metric("samples/s", "Samples per second of the whole step."),
    "engine/replicas_up": Metric("engines", "Engine replicas running; fewer than configured means one is restarting."),
    "engine/requeued": Metric(
        "requests", "Requests re-sent to another replica after theirs failed, since the last log line."
    ),
    "engine/published_mib": Metric("MiB", "Size of the weights in the last publish, per engine."),
    "engine/published_over_least": Metric(
        "ratio",
        "Bytes moved by the last publish over the minimum: the weights once per engine, with Ray's object store once "
        "per machine with engines.",
    ),
    "engine/<engine>_samples": Metric("samples", "Samples finished by this engine since the last log line."),
    "engine/<engine>_queue_peak": Metric(
        "samples", "Most samples running or queued at this engine since the last log line."
    ),
    "engine/canary_gap": Metric("nats", "Mean |trainer - sampler| logprob of a few tokens, over all engines."),
    "engine/<engine>_logprob_gap": Metric("nats", "Mean |trainer - sampler| logprob of a few tokens of one engine."),
    "engine/<engine>_prefix_hit_frac": Metric(
        "fraction", "Prompt tokens found in vLLM's prefix cache since the last log line; approximate."
    ),
    "reward/<component>_mean": Metric("score", "Mean score of one reward component, before its weight."),
    "reward/<component>_std": Metric("score", "Standard deviation of the scores of one reward component."),
    "reward/<component>_min": Metric("score", "Smallest score of one reward component."),
    "reward/<component>_max": Metric("score", "Largest score of one reward component."),
    "reward/<component>_zero_std_group_frac": Metric(
        "fraction", "Groups in which all samples have the same score from the component."
    ),
    "reward/<component>_length_corr": Metric(
        "correlation",
        "Correlation of the weighted score and the response's length in tokens; without a weight or spread not logged.",
    ),
    "reward/<component>_variance_share": Metric(
        "fraction",
        "Share of the reward variance of the step due to the weighted component. Shares sum to 1; a negative one works "
        "against the others.",
    ),
    "reward/<component>_fault_frac": Metric(
        "fraction", "Samples that the component could not score, by a fault of its own, of its service or of the data."
    ),
    "reward/<component>_broken_response_frac": Metric(
        "fraction",
        "Samples whose response broke the scorer, as one that cannot be parsed, and earned the least score; not logged "
        "without any.",
    ),
    "reward/<component>_not_applied_frac": Metric(
        "fraction", "Samples of prompts that the component does not apply to."
    ),
    "reward/<component>_canary_<name>_mean": Metric(
        "score", "What a judge gave worthless responses of this kind, from 0 to 1; in steps that had any."
    ),
    "reward/<component>_flag_<name>_mean": Metric(
        "fraction", "Responses with this sign of being written for a judge: docs/rewards-judge.md has the signs."
    ),
    "reward/<component>_prefix_hit_frac_mean": Metric(
        "fraction", "Prompt tokens that a judge's engine had in its prefix cache, since its last log line."
    ),
    "reward/<component>_cache_used_frac_mean": Metric(
        "fraction", "KV cache of a judge's engine that is used, at its last log line."
    ),
    "reward/<component>_device_used_gib_mean": Metric(
        "GiB", "Memory of a judge's devices that all processes use, at its last log line; with NVIDIA's driver."
    ),
    "reward/<component>_device_total_gib_mean": Metric("GiB", "Total memory of a judge's devices."),
    "reward/<component>_http_failed": Metric(
        "HTTP requests", "Requests of the component that failed and were retried."
    ),
    "reward/<component>_http_given_up": Metric(
        "HTTP requests", "Requests of the component that were rejected, or had no valid response by their deadline."
    ),
    "train/loss": Metric("loss", "Loss over the whole update."),
    "train/grad_norm": Metric("norm", "Global gradient norm before clipping."),
    "train/lr": Metric("learning rate", "Learning rate of the update's last optimizer step."),
    "train/entropy": Metric(
        "nats", "Mean entropy of the policy at the trained tokens; near 0 there is no exploration."
    ),
    "train/entropy_coef": Metric(
        "loss per nat", "Entropy coefficient of the update; moves with algorithm.entropy_target."
    ),
    "train/kl_ref": Metric("nats per token", "KL to the frozen reference, by algorithm.kl_estimator."),
    "train/kl_clipped_frac": Metric(
        "fraction", "Tokens whose estimate of train/kl_ref was clipped by algorithm.kl_clip."
    ),
    "train/kl_ref_sequence": Metric("nats per sequence", "train/kl_ref summed over a response, mean over responses."),
    "train/kl_coef": Metric("reward or loss per nat", "KL coefficient of the update; moves with algorithm.kl_target."),
    "train/clip_low_frac": Metric(
        "fraction", "Tokens whose ratio was clipped from below; 0 with one optimizer step per update."
    ),
    "train/clip_high_frac": Metric(
        "fraction", "Tokens whose ratio was clipped from above; 0 with one optimizer step per update."
    ),
    "train/clip_dual_frac": Metric("fraction", "Tokens with a negative advantage clipped by algorithm.dual_clip."),
    "train/clip_cov_frac": Metric("fraction", "Tokens that clip_cov or kl_cov took by their covariance."),
    "train/rejected_frac": Metric("fraction", "Tokens that algorithm.rejection took out of the loss."),
    "train/correction_mean": Metric("ratio", "Mean importance weight of algorithm.correction, after truncation."),
    "train/correction_dropped_frac": Metric("fraction", "Tokens with weight 0 from algorithm.correction."),
    "train/ratio_mean": Metric("ratio", "Mean policy ratio before clipping; 1 on the first optimizer step."),
    "train/ratio_clipped_mean": Metric("ratio", "Mean policy ratio after clipping."),
    "train/ratio_max": Metric("ratio", "Largest policy ratio before clipping."),
    "train/mismatch_gap": Metric("nats", "Mean |trainer - sampler| logprob of the trained tokens."),
    "train/mismatch_ratio_mean": Metric("ratio", "Mean trainer / sampler probability ratio; ideally 1."),
    "train/mismatch_max": Metric("nats", "Largest |trainer - sampler| logprob of a trained token."),
    "train/mismatch_outside_frac": Metric(
        "fraction", "Trained tokens whose trainer / sampler ratio is outside [0.9, 1.1]."
    ),
    "engine/<engine>_mismatch_gap": Metric("nats", "`train/mismatch_gap` of the tokens that this engine drew."),
    "engine/<engine>_mismatch_kl": Metric("nats per token", "`train/mismatch_kl` of the tokens that this engine drew."),
    "engine/<engine>_mismatch_max": Metric("nats", "`train/mismatch_max` of the tokens that this engine drew."),
    "engine/<engine>_mismatch_outside_frac": Metric(
        "fraction", "`train/mismatch_outside_frac` of the tokens that this engine drew."
    ),
    "train/mismatch_kl": Metric("nats per token", "KL(sampler || trainer), k3 estimate."),
    "train/importance_ess_frac": Metric(
        "fraction", "Effective sample size of the importance weights trainer / sampler, as a fraction of the tokens."
    ),
    "train/importance_std": Metric("ratio", "Standard deviation of the importance weights trainer / sampler."),
    "train/importance_chi2": Metric(
        "chi-square", "Chi-square divergence of trainer from sampler: E[w^2] - 1, w = trainer / sampler."
    ),
    "train/update_kl": Metric(
        "nats per token",
        "KL(before || after) of the update on a sixteenth of its prompts, k3 estimate; first ten updates, then every "
        "tenth.",
    ),
    "train/advantage_std": Metric("as the credit's", "Root mean square of the loss tokens' advantages."),
    "train/advantage_positive_frac": Metric("fraction", "Loss tokens with an advantage above 0."),
    "train/gradient_signal": Metric(
        "norm^2",
        "Estimated squared norm of the true gradient, from one microbatch and the whole step; negative by chance. In "
        "one process, with two microbatches or more.",
    ),
    "train/gradient_noise": Metric(
        "norm^2",
        "Estimated variance of one sample's gradient over all weights; over train/gradient_signal, both averaged over "
        "tens of steps, the gradient noise scale in samples (arXiv:1812.06162).",
    ),
    "train/tokens": Metric("tokens", "Response tokens trained on."),
    "train/mfu": Metric(
        "fraction",
        "Share of the devices' peak that an update's passes reached (model FLOPs utilisation: a forward and a backward "
        "pass over each prompt once and its responses, recomputation not counted); on known GPUs, without a critic.",
    ),
    "train/load_balancing_loss": Metric(
        "none", "Auxiliary loss of a mixture of experts without its coefficient; with an even load, experts per token."
    ),
    "train/samples_trained_frac": Metric("fraction", "Samples with a gradient; the others need no backward pass."),
    "train/masked_frac": Metric(
        "fraction", "Response tokens masked from the loss: environment tokens and unscored samples."
    ),
    "train/reward_clipped_frac": Metric("fraction", "Scored samples with a raw reward outside algorithm.reward_clip."),
    "train/advantage_clipped_frac": Metric(
        "fraction", "Trained tokens with an advantage beyond algorithm.advantage_clip."
    ),
    "train/reward_running_mean": Metric("reward", "Running mean of all rewards; with algorithm.normalize_rewards."),
    "train/reward_running_std": Metric(
        "reward", "Running standard deviation of all rewards, the divisor of algorithm.normalize_rewards."
    ),
    "train/overlong_penalty_mean": Metric("reward", "Mean length penalty of scored samples; 0 or less."),
    "train/microbatches": Metric("microbatches", "Forward and backward passes of the update, on each rank."),
    "train/optimizer_steps": Metric("optimizer steps", "Optimizer steps of the update."),
    "train/skipped_steps": Metric("optimizer steps", "Optimizer steps skipped because of a non-finite gradient."),
    "critic/loss": Metric("reward^2", "Critic loss: half the squared error of the values, with value clipping."),
    "critic/explained_variance": Metric(
        "fraction", "Share of the return variance explained by the values, before the update."
    ),
    "critic/value_mean": Metric("reward", "Mean value of the trained tokens, before the update."),
    "critic/clip_frac": Metric("fraction", "Tokens whose value was clipped by critic.value_clip."),
    "critic/grad_norm": Metric("norm", "Global norm of the critic's gradient before clipping."),
    "critic/lr": Metric("learning rate", "Critic's learning rate of the update's last optimizer step."),
    "critic/skipped_steps": Metric("optimizer steps", "Critic steps skipped because of a non-finite gradient."),
    "sft/loss": Metric("nats per token", "Mean negative logprob of the target tokens."),
    "sft/lr": Metric("learning rate", "Learning rate of the step."),
    "sft/grad_norm": Metric("norm", "Global gradient norm before clipping."),
    "sft/tokens_per_s": Metric("tokens/s", "Target tokens per second of the step."),
    "rm/loss": Metric("nats", "Mean loss of the step's pairs; log 2 = 0.693 for a model that knows nothing."),
    "rm/accuracy": Metric("fraction", "Pairs whose chosen response has the higher score; a tie counts half."),
    "rm/lr": Metric("learning rate", "Learning rate of the step."),
    "rm/grad_norm": Metric("norm", "Global gradient norm before clipping."),
    "rm/pairs_per_s": Metric("pairs/s", "Pairs per second of the step."),
    "rm/eval_loss": Metric("nats", "Mean loss of the held-out pairs."),
    "rm/eval_accuracy": Metric("fraction", "Accuracy on the held-out pairs; 0.5 is chance."),
    "rm/eval_score_mean": Metric("score", "Mean score of the held-out responses; subtracted by `normalize`."),
    "rm/eval_score_std": Metric(
        "score", "Standard deviation of the held-out responses' scores; the divisor of `normalize`."
    ),
    "eval/accuracy": Metric("fraction", "Evaluation samples whose reward reaches eval.threshold."),
    "eval/accuracy_se": Metric(
        "fraction", "Standard error of eval/accuracy over prompts; 1.96 of it each way hold 95 %."
    ),
    "eval/accuracy_se[<column>=<value>]": Metric(
        "fraction", "Standard error, over prompts, of the accuracy over them."
    ),
    "eval/accuracy[<column>=<value>]": Metric(
        "fraction", "Accuracy over the rows with this value (eval.by); `source`: of one source of data.eval."
    ),
    "eval/seen_frac": Metric("fraction", "Evaluation prompts that are prompts of data.train too."),
    "eval/unscored_frac": Metric("fraction", "Evaluation samples without a reward."),
    "eval/pass@<k>": Metric("fraction", "Unbiased estimate of the probability that one of k samples is correct."),
    "eval/pass@<k>_se": Metric("fraction", "Standard error of eval/pass@<k> over prompts."),
    "eval/reward_mean_se": Metric("reward", "Standard error of eval/reward_mean over prompts."),
    "eval/reward_mean": Metric("reward", "Mean reward of the scored evaluation samples."),
    "eval/response_tokens_mean": Metric("tokens", "Mean response length in evaluation."),
    "eval/tool_tokens_mean": Metric("tokens", "Mean environment tokens per evaluation sample."),
    "eval/turns_mean": Metric("turns", "Mean turns per evaluation sample; only with an environment."),
    "eval/env_<metric>_mean": Metric(
        "the environment's",
        "A metric of the environment: summed over a sample's turns, averaged over evaluation samples.",
    ),
    "eval/truncated_frac": Metric("fraction", "Evaluation samples cut at the length limit."),
    "gate/logprob_gap": Metric("nats", "First-step gate: mean |trainer - sampler| logprob before the first update."),
    "gate/logprob_gap_p99": Metric(
        "nats", "First-step gate: 99th percentile of |trainer - sampler| logprob over the tokens."
    ),
    "gate/logprob_gap_max": Metric("nats", "First-step gate: largest |trainer - sampler| logprob of a token."),
    "gate/ratio_mean": Metric("ratio", "First-step gate: mean trainer / sampler probability ratio."),
    "gate/reference_gap": Metric("nats", "First-step gate: mean |policy - reference| logprob at step 0."),
    "time/step_s": Metric("s", "Elapsed time of the step."),
    "time/<span>_s": Metric("s", "Time since the last log line in which at least one span of this name was open."),
    "memory/rss_gib": Metric("GiB", "Resident memory of this process."),
    "memory/peak_rss_gib": Metric("GiB", "Peak resident memory of this process."),
    "memory/<process>_process_rss_gib": Metric(
        "GiB",
        "Resident memory of a cluster process (a trainer rank or an engine), sampled in the background; of all "
        "processes with user code together (`reward_workers`, `environments`).",
    ),
    "memory/<engine>_cache_tokens": Metric(
        "tokens", "Peak tokens in an engine's KV cache since the last log line; approximate."
    ),
    "memory/<engine>_cache_room_tokens": Metric(
        "tokens", "Capacity of an engine's KV cache when memory/<engine>_cache_tokens peaked."
    ),
    "memory/<engine>_cache_mib": Metric("MiB", "Device memory taken by an engine's KV cache."),
    "memory/<process>_process_cuda_peak_gib": Metric("GiB", "Peak GPU memory of the process's tensors."),
    "memory/<process>_device_used_gib": Metric(
        "GiB", "Memory in use on the process's accelerator, by all processes on it, sampled in the background."
    ),
    "memory/<process>_device_total_gib": Metric("GiB", "Total memory of the process's accelerator."),
    "memory/cuda_peak_gib": Metric("GiB", "Peak GPU memory of tensors during the step."),
    "memory/<phase>_peak_mib": Metric(
        "MiB", "Peak memory during the phase: tensors on a GPU, resident memory on a CPU."
    ),
    "memory/device_frac": Metric(
        "fraction", "Peak memory over the GPU's memory or plan.memory_budget_gib; on a CPU only with a budget."
    ),
    "memory/device_busy_frac": Metric("fraction", "Share of time in which the GPU computed, by NVML."),
    "memory/rungs": Metric(
        "settings", "Settings lowered after running out of memory, in this run and the runs that it resumes."
    ),
    "memory/redone": Metric("times", "Retries after running out of memory, since the process started."),
    "memory/disk_free_gib": Metric("GiB", "Free space on the disk of the run's folder."),
    "memory/disk_checkpoint_gib": Metric("GiB", "Size of the last checkpoint's tensors."),
    "memory/samples_mib": Metric("MiB", "Size of samples/ on disk; stops at observe.samples_max_mib."),
}


PHASES = ("generate", "reward", "train", "publish", "evaluate", "checkpoint")
"""Spans of the time split in console and report, in order; the trace has all spans."""


@lru_cache(maxsize=4096)
def error_name(name: str) -> str:
    """What the standard error of an evaluation metric is called: `eval/accuracy_se[a=b]` for `eval/accuracy[a=b]`."""
    whole, bracket, part = name.partition("[")
    return f"{whole}_se{bracket}{part}"


def find_metric(name: str) -> Metric:
    """Registry entry of a logged name; an exact entry wins over a pattern.

    Raises:
        ValueError: the name is not registered, a bug in Hone.
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
