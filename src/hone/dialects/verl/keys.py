"""verl's dialect: the tables of its sections. A key that is in no table falls to its section's last pattern."""

from __future__ import annotations

from typing import Any

from hone.dialects import shared
from hone.dialects.rows import automatic, by, each, listed, missing, rewritten, to, under
from hone.dialects.shared import ENVIRONMENT
from hone.dialects.values import text, truth, whole
from hone.dialects.verdict import Dialect, ForeignJob, KeyVerdict, Row, nothing, put, refused
from hone.dialects.verl.actor import ACTOR_ROWS, MODEL_ROWS, REFERENCE, optimizer
from hone.dialects.verl.algorithm import ALGORITHM, CRITIC, correction_rows
from hone.dialects.verl.job import ACTOR, MODEL, ROLLOUT, prompts_per_step, uses_critic
from hone.dialects.verl.reward import REWARDS
from hone.dialects.verl.rollout import ROLLOUT_ROWS
from hone.dialects.verl.trainer import OTHERS, TRAINER, program, whole_command


def files(key: str) -> Row:
    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        listed = [str(file) for file in (value if isinstance(value, list) else [value]) if file is not None]
        if not listed:
            return nothing("none")
        return put({key: listed[0]}) if len(listed) == 1 else put({key: listed}, "rows of all files, one after another")

    return by(read, key)


def truncation(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in ("error", "left", "right", "middle"):
        return refused("must be error, left, right or middle")
    if value == "error" or job.get("data.filter_overlong_prompts", False):
        return nothing("longer prompts are dropped and counted before anything is cut")
    if value == "right":
        return refused("cutting the end of a prompt removes the question; nearest: data.too_long: left")
    return put({"data.too_long": value})


def template_args(job: ForeignJob, value: Any) -> KeyVerdict:
    prefix = "data.apply_chat_template_kwargs."
    found = dict(value) if isinstance(value, dict) else {}
    found |= {key.removeprefix(prefix): job.plain(v) for key, v in job.values.items() if key.startswith(prefix)}
    return put({"data.template_args": found} if found else {})


def batch(job: ForeignJob, value: Any) -> KeyVerdict:
    steps = "ppo_mini_batch_size x require_batches x trigger_parameter_sync_step: prompts between two sets of weights"
    return put({"train.prompts_per_step": prompts_per_step(job)}, "prompts, as in verl" if whole(value) else steps)


_PROCESSOR = automatic("the model's own processor; data.max_image_pixels bounds a picture")
_NO_VIDEO = "prompts have text and pictures; a column of video or sound is not read"
_TEMPLATE_ARGS = by(template_args, "data.template_args")

DATA: dict[str, Row] = {
    "train_files": files("data.train"),
    "val_files": files("data.eval"),
    "prompt_key": to("data.prompt_column", text),
    "max_prompt_length": to("data.max_prompt_tokens", whole),
    "max_response_length": to("rollout.max_response_tokens", whole),
    "train_batch_size": by(batch, "train.prompts_per_step", note="prompts"),
    "gen_batch_size": automatic("dropped groups are replaced as they are found"),
    "val_batch_size": automatic("evaluation is batched by the engine"),
    "truncation": by(truncation, "data.too_long"),
    "filter_overlong_prompts": automatic("longer prompts are dropped and counted"),
    **each("filter_overlong_prompts_workers dataloader_num_workers", automatic(shared.AS_READ)),
    "shuffle": shared.shuffled(),
    "validation_shuffle": automatic("evaluation uses every row"),
    "seed": to("seed", whole),
    "train_max_samples": shared.slice_of_rows("data.train_rows"),
    "val_max_samples": shared.slice_of_rows("data.eval_rows"),
    "trust_remote_code": to("model.trust_remote_code", truth),
    "tokenizer": to("model.tokenizer", text),
    **each("return_raw_chat return_raw_input_ids return_full_prompt", automatic("rewards see prompt and messages")),
    "reward_fn_key": automatic("one reward for all rows; data.eval and eval.by report by column"),
    "use_shm": automatic("data is read once"),
    "continuous_token.**": automatic("turns of a conversation keep the tokens that were sampled"),
    "image_key": shared.pictures(),
    "video_key": missing(_NO_VIDEO, off=("videos", None)),
    "audio_key": missing(_NO_VIDEO, off=("audios", None)),
    **each("return_multi_modal_inputs image_patch_size mm_processor_kwargs", _PROCESSOR),
    "apply_chat_template_kwargs": _TEMPLATE_ARGS,
    "apply_chat_template_kwargs.*": _TEMPLATE_ARGS,
    "custom_cls.**": rewritten("a data set class: write its rows to JSONL or Parquet and name it", "data.train"),
    "sampler.**": rewritten(
        "a sampler of yours: data.order is source, shuffled, column (easy first, by data.order_column) or pass_rate",
        "data.order",
        "data.order_column",
    ),
    "datagen.**": missing("generated rows: write them to a file", "data.train"),
    **each("tool_config_path function_tool_path", rewritten(ENVIRONMENT, "rollout.environment.use")),
}


ROWS: dict[str, Row] = {
    **under("data", DATA),
    **under(ACTOR, ACTOR_ROWS),
    **optimizer(f"{ACTOR}.optim", "train.optimizer"),
    **under("actor_rollout_ref.ref", REFERENCE),
    **under(ROLLOUT, ROLLOUT_ROWS),
    **under(MODEL, MODEL_ROWS),
    **REWARDS,
    **shared.critic_rows(uses_critic, under("critic", CRITIC) | optimizer("critic.optim", "critic.optimizer")),
    **under("algorithm", ALGORITHM),
    **correction_rows("algorithm", "algorithm.rollout_is"),
    **correction_rows("algorithm.rollout_correction", "algorithm.rollout_correction.rollout_is"),
    **under("trainer", TRAINER),
    **OTHERS,
}

ALIASES = {
    "custom_reward_function.overlong_buffer_cfg": "reward_model.overlong_buffer_cfg",
    f"{ROLLOUT}.max_tokens": "data.max_response_length",
}

WRITTEN = listed(
    {
        "data": "prompt_key max_prompt_length max_response_length train_batch_size",
        ROLLOUT: "n temperature val_kwargs.do_sample name",
        "algorithm": "adv_estimator lam use_kl_in_reward kl_penalty rollout_correction.rollout_is "
        "rollout_correction.bypass_mode",
        ACTOR: "use_kl_loss kl_loss_type policy_loss.loss_mode clip_ratio_low clip_ratio_high clip_ratio_c "
        "loss_agg_mode entropy_coeff ppo_mini_batch_size optim.lr optim.weight_decay optim.betas grad_clip "
        "freeze_vision_tower",
        MODEL: "lora_alpha",
        "critic": "cliprange_value optim.lr optim.weight_decay optim.betas",
        "trainer": "total_epochs save_freq val_before_train",
    }
)

DIALECT = Dialect(ROWS, WRITTEN, program, whole_command, ALIASES)
