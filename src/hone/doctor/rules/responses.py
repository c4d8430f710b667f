"""Rules about responses: cut, empty, all the same."""

from __future__ import annotations

from dataclasses import replace

from hone.doctor.history import History
from hone.doctor.rule import AlarmRule, Cause, Limit, above, when
from hone.doctor.rules.common import (
    ANSWER_TOKENS,
    CORRELATION,
    EMPTY,
    ENTROPY,
    ENTROPY_BONUS_TOO_LARGE,
    LENGTH,
    LOWER_LR,
    MILES,
    OF_COMPONENTS,
    OURS,
    PROMPTS_UNLIKE_TRAINING,
    READ_SAMPLES,
    REWARD,
    SHARED,
    TEMPERATURE_TOO_HIGH,
    TRUNCATED,
    pays_length,
    was_above_from_the_start,
)


def _was_empty(h: History) -> bool:
    return was_above_from_the_start(h, EMPTY, 0.25) and h.first(EMPTY) > 0.1


ENDED_PROMPT = Cause(
    name="prompt_ends_the_response",
    what="responses are empty from the start: the prompt holds its answer or the end of the turn already, "
    "or a stop string or end token matches at once.",
    change="data.template, model.chat_template: the prompt alone, open for an answer; rollout.stop, "
    "rollout.stop_token_ids",
    confirm="Read three prompts in samples/ to their last token. If they are open for an answer, see what "
    "the first token of the responses is. A policy that cannot read its prompts leaves some empty, not almost all.",
    applies=_was_empty,
    reads=("rollout.max_response_tokens",),
)
RESPONSES = (
    AlarmRule(
        name="truncation",
        level="data",
        pattern="many responses are cut at rollout.max_response_tokens",
        metrics=(TRUNCATED, LENGTH, "rollout/truncation_cost"),
        when=above(TRUNCATED, 0.25),
        silenced_by=("entropy_explosion", "update_too_large", "reward_pays_length", "accuracy_lost"),
        causes=(
            PROMPTS_UNLIKE_TRAINING,
            TEMPERATURE_TOO_HIGH,
            Cause(
                name="limit_too_low",
                what="the data's own answers, of the first step's prompts, are longer than the limit.",
                change="rollout.max_response_tokens: larger than the longest answer",
                confirm="rollout/answer_tokens_mean is above rollout.max_response_tokens.",
                applies=lambda h: h.first(ANSWER_TOKENS) > h.number("rollout.max_response_tokens"),
                reads=(ANSWER_TOKENS, "rollout.max_response_tokens"),
            ),
            Cause(
                name="no_end_token",
                what="almost no response ends by itself: the model never writes its end-of-sequence token, or the "
                "engine does not know it.",
                change="model.chat_template or rollout.stop_token_ids; train the end token in the supervised stage",
                confirm="Responses in samples/ continue after the answer. If they stop within the answer, the limit "
                "is too low.",
                applies=lambda h: was_above_from_the_start(h, TRUNCATED, 0.99),
                reads=("rollout.max_response_tokens",),
            ),
            Cause(
                name="reward_pays_length",
                what="responses have grown into the limit, because longer ones earn more.",
                change="reward.components: a lower weight for the component that prefers length",
                confirm="reward/<component>_variance_share names the component. If its correlation with length is 0, "
                "responses grow for another reason.",
                applies=lambda h: h.first(TRUNCATED) < 0.15 and pays_length(h, 0.1),
                reads=(CORRELATION, OF_COMPONENTS, "reward/<component>_variance_share"),
            ),
            ENTROPY_BONUS_TOO_LARGE,
            Cause(
                name="responses_grow",
                what="responses have grown into the limit.",
                change="algorithm.overlong_buffer_frac: 0.2; or rollout.max_response_tokens: larger",
                confirm="rollout/right_tokens_mean and wrong_tokens_mean: if wrong ones grow, the loss rewards length "
                "(algorithm.aggregate: token_mean or fixed_length); if right ones do, they need the room.",
                applies=lambda h: h.first(TRUNCATED) < 0.15,
                reads=("rollout/right_tokens_mean", "rollout/wrong_tokens_mean"),
            ),
            Cause(
                name="limit_too_low",
                what="the limit is shorter than the responses that the task needs.",
                change="rollout.max_response_tokens: larger",
                confirm="Cut responses in samples/ end within the answer, and with twice the limit the share falls.",
                reads=("rollout/response_tokens_max", "rollout.max_response_tokens"),
            ),
        ),
        source=f"25 %: {MILES}; 10 %: verl best_practices.rst",
    ),
    AlarmRule(
        name="responses_empty",
        level="data",
        pattern="many responses are empty",
        metrics=(EMPTY, LENGTH),
        when=above(EMPTY, 0.25),
        silenced_by=("mismatch", "update_too_large", "accuracy_lost"),
        causes=(
            replace(ENDED_PROMPT, applies=lambda h: h.mean(EMPTY, 5) > 0.8 and _was_empty(h)),
            PROMPTS_UNLIKE_TRAINING,
            ENDED_PROMPT,
            Cause(
                name="length_punished",
                what="responses have become empty, because short ones earn more.",
                change="algorithm.overlong_penalty: smaller; the component with a negative correlation",
                confirm="rollout/length_reward_corr is below 0.",
                applies=lambda h: h.mean(CORRELATION, 20) < -0.1,
                reads=(CORRELATION,),
            ),
            Cause(
                name="policy_degenerates",
                what="the policy has learnt to end at once.",
                change=LOWER_LR + "; resume from the best checkpoint",
                confirm=READ_SAMPLES,
                reads=("train.optimizer.lr",),
            ),
        ),
        source="an empty response teaches nothing; a quarter, as for truncation, ours",
    ),
    AlarmRule(
        name="responses_repeat",
        level="data",
        pattern="more and more prompts get the same response",
        metrics=(SHARED, REWARD),
        when=when(
            "above 0.35 and twice its first value, on average of ten",
            lambda h: h.mean(SHARED, 10) > max(0.35, 2 * h.first(SHARED)),
            Limit(SHARED, high=0.35),
        ),
        of=(4, 5),
        after=9,
        silenced_by=("responses_empty", "mismatch", "update_too_large", "accuracy_lost", "prompts_repeat"),
        causes=(
            Cause(
                name="reward_exploited",
                what="one response earns the reward whatever is asked, and the policy has found it.",
                change="reward.components: what that response earns, and from which component; hone check RUN.yaml",
                confirm=READ_SAMPLES + " If that response is right for each prompt, the data have few answers.",
                applies=lambda h: h.mean(REWARD, 5) > h.first(REWARD) + 0.2 * h.first("rollout/reward_std"),
                reads=(REWARD, "rollout/reward_std", "reward/<component>_variance_share"),
            ),
            Cause(
                name="policy_degenerates",
                what="the policy answers whatever is asked in the same way and earns nothing by it.",
                change=LOWER_LR + "; resume from the best checkpoint",
                confirm="train/entropy falls with it. " + READ_SAMPLES,
                reads=(ENTROPY, "train.optimizer.lr"),
            ),
        ),
        source=OURS,
    ),
)
