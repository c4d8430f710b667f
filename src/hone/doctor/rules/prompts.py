"""Rules about prompts and their responses: whether a group teaches anything; responses cut, empty, all the same."""

from __future__ import annotations

from dataclasses import replace

from hone.doctor.history import History
from hone.doctor.rule import AlarmRule, Cause, Limit, above, when
from hone.doctor.rules.common import (
    ANSWER_TOKENS,
    ANSWERS_PASS,
    CORRELATION,
    EMPTY,
    ENTROPY,
    ENTROPY_BONUS_TOO_LARGE,
    EVAL,
    LENGTH,
    LOWER_LR,
    MILES,
    OF_COMPONENTS,
    OURS,
    OWN_SURPRISE,
    PASS,
    POLICY_UNTRAINED,
    PROMPTS_UNLIKE_TRAINING,
    READ_SAMPLES,
    REWARD,
    RIGHT,
    SHARED,
    SILENT,
    SURPRISE,
    TEMPERATURE_TOO_HIGH,
    TRUNCATED,
    WEIGHT_DECAY_TOO_LARGE,
    WRONG,
    pays_length,
    was_above_from_the_start,
)

EASIER_PROMPTS = (
    "data.order: ascending, by a column with the difficulty; rollout.group_size: larger; or a supervised stage (sft)"
)
REPAIR_REWARD = "reward.components: make hone check RUN.yaml score the gold answers 1"


def _was_never_right(h: History) -> bool:
    return not h.first(PASS) > 0.05 and (h.best(PASS) < 0.02 or h.count(PASS) < 20)


ANSWERS_LEAK = Cause(
    name="answers_leak",
    what="training prompts were almost solved from the first steps and evaluation prompts are not: training prompts "
    "contain their answer, or the evaluation asks something else.",
    change="data.template and data.prompt_column: the prompt without the answer",
    confirm="Read three training prompts in samples/. If no answer is in them, compare how evaluation rows differ.",
    applies=lambda h: was_above_from_the_start(h, PASS, 0.5) and h.mean(PASS, 10) - h.now(EVAL) > 0.3,
    reads=(EVAL,),
)
PROMPTS = (
    AlarmRule(
        name="all_wrong",
        level="data",
        pattern="most groups have only wrong responses",
        metrics=(WRONG, PASS),
        when=above(WRONG, 0.8, mean=10),
        of=(4, 5),
        after=4,
        silenced_by=(
            "truncation",
            "mismatch",
            "update_too_large",
            "reward_collapse",
            "accuracy_lost",
            "entropy_explosion",
            "reward_sign",
            "reward_constant",
            "answers_fail",
        ),
        causes=(
            TEMPERATURE_TOO_HIGH,
            Cause(
                name="answers_wrong",
                what="the policy is right on evaluation rows and finds the answers of training rows much less likely "
                "than its own: they are wrong, or those of other prompts (shuffled rows, another column).",
                change="data.train, data.answer_column: answers that belong to their prompts",
                confirm="Solve three training rows by hand. If their answers are right, the prompts are too hard.",
                applies=lambda h: h.now(EVAL) > 0.1 and 0.3 < h.first(SURPRISE) > 2 * h.first(OWN_SURPRISE),
                reads=(EVAL, SURPRISE, OWN_SURPRISE),
            ),
            Cause(
                name="prompts_too_hard",
                what="the policy is right on evaluation rows but almost never on training prompts: they are too hard, "
                "or not in the form that the model knows.",
                change=EASIER_PROMPTS,
                confirm="hone eval on a few training rows with a stronger model scores above 0. If it scores 0 as "
                "well, the reward or the answers are wrong.",
                applies=lambda h: h.now(EVAL) > max(0.1, 2 * h.mean(PASS, 10), 2 * h.first(PASS)),
                reads=(EVAL,),
            ),
            Cause(
                name="reward_broken",
                what="the data's own answers do not earn the reward either: the reward, its parser or the answers are "
                "wrong, or a right response has more than the answer.",
                change=REPAIR_REWARD,
                confirm="hone check RUN.yaml names rows whose gold answer scores below 1.",
                applies=lambda h: h.first(ANSWERS_PASS) < 0.1,
                reads=(ANSWERS_PASS,),
            ),
            POLICY_UNTRAINED,
            PROMPTS_UNLIKE_TRAINING,
            WEIGHT_DECAY_TOO_LARGE,
            Cause(
                name="responses_end_early",
                what="responses end before an answer is written: a stop string or token matches within it.",
                change="rollout.stop, rollout.stop_token_ids: none that an answer can contain",
                confirm="Responses in samples/ are beginnings of answers. If they are whole, the prompts are too hard.",
                applies=lambda h: h.mean(LENGTH, 10) < 0.7 * h.first(ANSWER_TOKENS),
                reads=(LENGTH, ANSWER_TOKENS, "rollout.stop", "rollout.stop_token_ids"),
            ),
            Cause(
                name="prompts_too_hard",
                what="the data's own answers earn the reward and the policy's responses do not: the prompts are too "
                "hard for it.",
                change=EASIER_PROMPTS,
                confirm="hone eval on a few training rows with a stronger model scores above 0. If it does not, "
                + READ_SAMPLES,
                applies=lambda h: h.first(ANSWERS_PASS) > 0.9 and _was_never_right(h),
                reads=(ANSWERS_PASS, EVAL),
            ),
            Cause(
                name="reward_broken",
                what="nothing earns the reward, on training prompts or in evaluation: the reward, its parser or the "
                "answers are wrong, or the policy cannot do the task at all.",
                change=REPAIR_REWARD,
                confirm="hone check RUN.yaml: gold answers score below 1 if the reward is wrong. If they score 1, the "
                "task is too hard: " + READ_SAMPLES,
                applies=_was_never_right,
                reads=(EVAL,),
            ),
            Cause(
                name="policy_lost_the_task",
                what="the policy solved some prompts before and does not any more.",
                change=LOWER_LR + "; resume from the best checkpoint",
                confirm="Sort the alarms by their first step: the first of grad_norm, entropy, length and mismatch to "
                "deviate is where it began.",
            ),
        ),
        source="80 % ours",
    ),
    AlarmRule(
        name="all_right",
        level="data",
        pattern="most groups have only right responses, which teach nothing",
        metrics=(RIGHT, PASS),
        when=above(RIGHT, 0.5, mean=10),
        of=(4, 5),
        after=4,
        silenced_by=("train_eval_gap", "prompts_repeat", "reward_constant"),
        causes=(
            ANSWERS_LEAK,
            Cause(
                name="prompts_too_easy",
                what="the policy solved most prompts before training began.",
                change="data.train_rows: harder rows; algorithm.drop_uninformative: true",
                confirm="rollout/pass_rate was as high in the first steps. If it rose during the run, the data are "
                "learnt and training may end.",
                applies=lambda h: was_above_from_the_start(h, RIGHT, 0.5),
            ),
            Cause(
                name="prompts_learnt",
                what="the policy has learnt most prompts; the rest of the data teaches little.",
                change="data.order: pass_rate; data.train: harder rows; algorithm.drop_uninformative: true; or end "
                "the run",
                confirm="eval/accuracy is as high as rollout/pass_rate. If it is much lower, the prompts were "
                "memorised.",
                reads=(EVAL,),
            ),
        ),
        source=f"half of the groups without spread: {MILES}",
    ),
    AlarmRule(
        name="no_signal",
        level="data",
        pattern="most groups have equal rewards, so they have no gradient",
        metrics=(SILENT, WRONG, RIGHT),
        when=above(SILENT, 0.75, mean=10),
        of=(4, 5),
        after=4,
        silenced_by=(
            "all_wrong",
            "all_right",
            "truncation",
            "mismatch",
            "entropy_collapse",
            "entropy_explosion",
            "update_too_large",
            "reward_collapse",
            "accuracy_lost",
            "reward_sign",
            "reward_constant",
        ),
        causes=(
            POLICY_UNTRAINED,
            PROMPTS_UNLIKE_TRAINING,
            WEIGHT_DECAY_TOO_LARGE,
            TEMPERATURE_TOO_HIGH,
            Cause(
                name="temperature_too_low",
                what="the samples of a group are nearly the same: the temperature is low.",
                change="rollout.temperature: 1.0",
                confirm="At temperature 1 the share of silent groups falls. If not, the reward is too coarse.",
                applies=lambda h: h.number("rollout.temperature") < 0.7,
                reads=("rollout.temperature", ENTROPY),
            ),
            Cause(
                name="group_too_small",
                what="groups are too small to hold both right and wrong responses.",
                change="rollout.group_size: 8 or more",
                confirm="A share p right gives p^n + (1-p)^n silent groups of n samples; compare with pass_rate.",
                applies=lambda h: h.number("rollout.group_size") < 6 and 0.1 < h.mean(PASS, 10) < 0.9,
                reads=("rollout.group_size", PASS),
            ),
            Cause(
                name="reward_too_coarse",
                what="prompts are either always solved or never: difficulty is split, or the reward has few levels.",
                change="algorithm.drop_uninformative: true; rollout.group_size: larger; a finer reward",
                confirm="reward/<component>_zero_std_group_frac names the component that never varies.",
                reads=("reward/<component>_zero_std_group_frac",),
            ),
        ),
        source=f"half of the groups: {MILES}; 0.75 ours, because a mixture of solved and unsolved prompts is usual",
    ),
    AlarmRule(
        name="prompts_repeat",
        level="data",
        pattern="the same prompt occurs several times in a step",
        metrics=("rollout/repeated_prompt_frac",),
        when=above("rollout/repeated_prompt_frac", 0.2, mean=5),
        causes=(
            Cause(
                name="data_duplicated",
                what="the training data hold the same prompts many times, or fewer prompts than a step takes.",
                change="data.train: remove duplicates",
                confirm="Count distinct prompts in the data. If there are more than train.prompts_per_step of them, "
                "duplicates are the cause.",
                reads=("train.prompts_per_step",),
            ),
        ),
        source=OURS,
    ),
    AlarmRule(
        name="train_eval_gap",
        level="data",
        pattern="accuracy in training is far above accuracy in evaluation",
        metrics=(EVAL, PASS),
        when=when("0.3 below rollout/pass_rate", lambda h: h.mean(PASS, 10) - h.now(EVAL) > 0.3),
        of=(2, 2),
        after=1,
        causes=(
            Cause(
                name="data_memorised",
                what="few distinct prompts are repeated so often that the policy memorises their answers.",
                change="data.train: more distinct prompts",
                confirm="rollout/repeated_prompt_frac is above 0, or the run has passed over the data many times.",
                applies=lambda h: h.mean("rollout/repeated_prompt_frac", 20) > 0.1,
                reads=("rollout/repeated_prompt_frac",),
            ),
            ANSWERS_LEAK,
            Cause(
                name="reward_exploited",
                what="the policy has learnt what the reward pays for and not the task, or it memorises the prompts.",
                change="reward.components: add the true measure with weight 0 and watch it; more distinct prompts",
                confirm="The component whose reward/<component>_variance_share grows while eval/accuracy stalls is "
                "the one exploited. " + READ_SAMPLES,
                reads=("reward/<component>_variance_share",),
            ),
        ),
        source="0.3 ours; no usable early warning is published (pytorch/rl issue 3984)",
    ),
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
            POLICY_UNTRAINED,
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
            POLICY_UNTRAINED,
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
