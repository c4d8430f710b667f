"""Metric names, sources and tests of causes that several rules share."""

from __future__ import annotations

import math

from hone.doctor.history import History
from hone.doctor.rule import Cause

OURS = "ours"
VERL_FAQ = "verl docs/faq/faq.rst"
VERL_CORRECTION = "verl docs/algo/rollout_corr.md"
MILES = "miles advisory.py"
TINKER = "tinker-cookbook hyperparams.md"
OPENCLAW = "OpenClaw-RL issue 69"
PRIME = "prime-rl docs/training.md"
TRL = "TRL docs/source/ppo_trainer.md"
USUAL = "usual ranges in common guides: policy loss within 0.5, value loss to 10, KL to 0.5, clip fraction to 0.3"

GAP, KL_UPDATE = "train/mismatch_gap", "train/update_kl"
PASS, REWARD, EVAL = "rollout/pass_rate", "rollout/reward_mean", "eval/accuracy"
WRONG, RIGHT, SILENT = "rollout/all_wrong_group_frac", "rollout/all_right_group_frac", "rollout/zero_std_group_frac"
LENGTH, TRUNCATED, CORRELATION = (
    "rollout/response_tokens_mean",
    "rollout/truncated_frac",
    "rollout/length_reward_corr",
)
EMPTY, SHARED = "rollout/empty_frac", "rollout/shared_response_frac"
OF_COMPONENTS = "reward/<component>_length_corr"
ENTROPY, NORM = "train/entropy", "train/grad_norm"
SURPRISE, OWN_SURPRISE, ANSWERS_PASS, ANSWER_TOKENS = (
    "rollout/answer_surprise",
    "rollout/response_surprise",
    "rollout/answer_pass_rate",
    "rollout/answer_tokens_mean",
)
NOISE_METRICS, NOISE_STEPS = ("train/gradient_signal", "train/gradient_noise"), 50
"""What the noise scale is made of, and the steps that both are averaged over."""


def moves_far(h: History) -> bool:
    """An update moves the policy more than is stable. The first ten count less: Adam's first steps are large."""
    limit = 0.3 if h.count(KL_UPDATE) > 12 else 1
    return h.now(KL_UPDATE) > 2 or (h.count(KL_UPDATE) >= 3 and h.mean(KL_UPDATE, 3) > limit)


def is_stale(h: History) -> bool:
    return h.mean("rollout/staleness_mean", 10) >= 0.5


def is_sampling_truncated(h: History) -> bool:
    """By the settings; or, where the engine truncates on its own, because hardly a token is likelier to the trainer.

    Of what remains after truncation every probability is larger than before. k3 is r - 1 - log(r) of the ratio r of
    trainer to sampler, so the mean of -log(r) is the KL + 1 - the mean ratio. It is nearly the mean of |log(r)| only
    where nearly all ratios are below 1. Another temperature makes some tokens less likely.
    """
    is_set = h.number("rollout.top_p") < 1 or h.number("rollout.top_k") > 0 or h.number("rollout.min_p") > 0
    signed = h.mean("train/mismatch_kl", 3) + 1 - h.mean("train/mismatch_ratio_mean", 3)
    return is_set or signed > 0.95 * h.mean(GAP, 3)


def was_above_from_the_start(h: History, metric: str, limit: float) -> bool:
    base = h.base(metric)
    return h.mean(metric, 100) > limit if math.isnan(base) else base > limit


LOWER_LR = "train.optimizer.lr: a tenth of it"
LESS_JUDGE_MEMORY = (
    "services.<name>.engine, in this order: a smaller max_num_seqs, a smaller max_num_batched_tokens, enforce_eager: "
    "true, a shorter max_model_len, a larger tensor_parallel_size; or devices of its own"
)
READ_SAMPLES = "Read samples/ (or the report): the response, the answer and each component's score."

TOO_FAST = Cause(
    name="learning_rate_too_high",
    what="the learning rate is too high: one update moves the policy further than is stable.",
    change=LOWER_LR,
    confirm="With a tenth of the learning rate for 20 steps train/update_kl falls about a hundredfold and the pattern "
    "does not return. If it does return, look at the batch of its first step in samples/.",
    applies=lambda h: moves_far(h) or h.mean("train/clip_high_frac", 5) > 0.3,  # or many tokens are clipped
    reads=(KL_UPDATE, "train.optimizer.lr"),
)


TOO_MANY_STEPS = Cause(
    name="too_many_steps_per_batch",
    what="each batch is used for many optimizer steps.",
    change="train.passes_per_batch: 1; train.samples_per_optimizer_step: larger",
    confirm="With one pass train/update_kl falls in proportion. If it stays high, lower the learning rate.",
    applies=lambda h: h.now("train/optimizer_steps") > 8,
    reads=("train/optimizer_steps", "train.passes_per_batch"),
)


def is_surprised(h: History) -> bool:
    """Right answers are hardly likelier than random tokens to the policy that the run starts from."""
    return h.first(SURPRISE) > 0.6


def is_untrained(h: History) -> bool:
    """The policy began with random weights, no supervised stage goes before, and nothing says that it knows answers:
    neither their likelihood, where it was measured, nor the pass rate."""
    has_random_weights = h.key("model.init") is not None and "sft" not in (h.key("stages") or ("sft",))
    return has_random_weights and not h.first(SURPRISE) <= 0.6 and not h.mean(PASS, 10) > 0.1


POLICY_UNTRAINED = Cause(
    name="policy_untrained",
    what="the policy begins with random weights (model.init) and no supervised stage: what it writes is chance.",
    change="stages: [sft, rl], with rows that have right answers; or model.path: a trained model",
    confirm="After a supervised stage rollout/answer_surprise is far below 1 and some first samples are right. If not, "
    "the supervised rows have another form than the prompts.",
    applies=is_untrained,
    reads=("stages", SURPRISE),
)
PROMPTS_UNLIKE_TRAINING = Cause(
    name="prompts_unlike_training",
    what="to the policy, right answers are hardly likelier than random tokens: prompts reach it in a form that it was "
    "not trained on.",
    change="model.tokenizer, model.chat_template, data.chat, data.template: as the model was trained with",
    confirm="Read three prompts in samples/, token by token, beside what the model was trained on. If they agree, a "
    "supervised stage (sft) teaches the form.",
    applies=is_surprised,
    reads=(SURPRISE,),
)
TEMPERATURE_TOO_HIGH = Cause(
    name="temperature_too_high",
    what="at a high temperature what is sampled is nearly random.",
    change="rollout.temperature: 1.0",
    confirm="eval/accuracy with eval.temperature 1 is far above rollout/pass_rate. If it is as low, the temperature is "
    "not why.",
    applies=lambda h: h.number("rollout.temperature") > 1.5 and not is_surprised(h),
    reads=("rollout.temperature", SURPRISE, EVAL),
)
ENTROPY_BONUS_TOO_LARGE = Cause(
    name="entropy_bonus_too_large",
    what="the entropy bonus outweighs the reward and makes responses random.",
    change="algorithm.entropy_coef: 0 or 0.001",
    confirm="train/entropy rose before; without the bonus it does not. If it does, the learning rate is too high.",
    applies=lambda h: h.number("algorithm.entropy_coef") >= 0.01 and h.mean(ENTROPY, 5) > 1.2 * h.first(ENTROPY),
    reads=("algorithm.entropy_coef", ENTROPY),
)
WEIGHT_DECAY_TOO_LARGE = Cause(
    name="weight_decay_too_large",
    what="weight decay removes what the model knew.",
    change="train.optimizer.weight_decay: 0",
    confirm="learning rate x weight decay x steps is the share of the weights removed; it must be far below 1.",
    applies=lambda h: h.number("train.optimizer.weight_decay") * h.number("train.optimizer.lr") > 1e-3,
    reads=("train.optimizer.weight_decay", "train.optimizer.lr"),
)


def pays_length(h: History, limit: float) -> bool:
    """Longer responses earn more, on average of ten: a correlation above `limit` over all samples, or above 0.5 for one
    component of several, which prompts with short answers can hide in the whole."""
    components = h.names(OF_COMPONENTS)
    of_one = len(components) > 1 and any(h.mean(name, 10) > 0.5 for name in components)
    return h.mean(CORRELATION, 10) > limit or of_one


def is_rising_by_std(h: History) -> bool:
    """The reward of the last ten steps is above its baseline by a fifth of the samples' standard deviation."""
    return h.mean(REWARD, 10) > h.base(REWARD) + 0.2 * h.base("rollout/reward_std")


def noise_scale(h: History) -> float:
    """Samples per step at which noise and signal of the gradient are equal (arXiv:1812.06162, appendix A.1)."""
    signal, noise = (h.mean(name, NOISE_STEPS) for name in NOISE_METRICS)
    return noise / signal if signal > 0 and noise > 0 else math.nan


def samples_per_step(h: History) -> float:
    """Samples of an optimizer step."""
    update, own = (
        h.number("train.prompts_per_step") * h.number("rollout.group_size"),
        "train.samples_per_optimizer_step",
    )
    return h.number(own) if h.number(own) < update else update


def is_flat(h: History, steps: int) -> bool:
    """The reward of the last `steps` is where it was in steps 5 to 20, though groups have signal."""
    distance = abs(h.mean(REWARD, steps) - h.base(REWARD))
    has_signal = h.mean(SILENT, 30) < 0.6 and h.mean(PASS, 30) < 0.9
    return distance < 0.05 * h.base("rollout/reward_std") and has_signal
