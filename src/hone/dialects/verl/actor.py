"""verl's `actor_rollout_ref.actor`, `.ref` and `.model`, and the optimizers."""

from __future__ import annotations

from typing import Any

from hone.config.derived import overridden
from hone.dialects import shared
from hone.dialects.foreign import version_key
from hone.dialects.rows import automatic, by, each, missing, placement, table, to, under, when, where
from hone.dialects.shared import EXPERTS, MEMORY, PIPELINE, PROFILER
from hone.dialects.values import number, positive, text, truth, whole
from hone.dialects.verdict import ForeignJob, KeyVerdict, Row, nothing, put, refused
from hone.dialects.verl.job import (
    ACTOR,
    MODEL,
    ROLLOUT,
    has_adapter,
    in_loss,
    loss_mode,
    optimizer_steps_per_update,
    prompts_per_step,
)

ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}

LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gspo": {"algorithm.ratio": "sequence"},
    "sapo": {"algorithm.clip": "sapo"},
    "cispo": {"algorithm.clip": "cispo"},
    "clip_cov": {"algorithm.clip": "clip_cov"},
    "kl_cov": {"algorithm.clip": "kl_cov"},
    "dppo_tv": {"algorithm.clip": "tv_mask"},
    "geo_mean": {"algorithm.clip": "geo_mean"},
    "gpg": {"algorithm.ratio": "none", "algorithm.clip": "none"},
}

SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear", "None": None}

AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sample_mean",
    "seq-mean-token-sum-norm": "fixed_length",
    "token-sum": "token_sum",
}


def of_loss(row: Row, *losses: str) -> Row:
    """A row that only some losses read."""
    return when(lambda job: loss_mode(job) in losses, f"only read by {', '.join(losses)}", row)


def override(job: ForeignJob, value: Any) -> KeyVerdict:
    """All of `override_config` as one mapping; verl has two spellings of it."""
    prefix = f"{MODEL}.override_config"
    found: dict[str, Any] = {}
    for key, given in job.values.items():
        if key == prefix or key.startswith(f"{prefix}."):
            plain, parts = job.plain(given), [part for part in key.removeprefix(prefix).split(".") if part]
            for part in reversed(parts):
                plain = {part: plain}
            found = overridden(found, plain if isinstance(plain, dict) else {})
    found = overridden(found, found.pop("model_config", {}))
    ours = ("attn_implementation", "moe_config")
    return put({"model.override": kept} if (kept := {k: v for k, v in found.items() if k not in ours}) else {})


def mini_batch(job: ForeignJob, value: Any) -> KeyVerdict:
    group = whole(job.get(f"{ROLLOUT}.n", 1))
    note = f"prompts x n = {group}: "
    return shared.samples_per_step(prompts_per_step(job), group, whole(value) * group, note)


def loss(job: ForeignJob, value: Any) -> KeyVerdict:
    if value not in LOSSES:
        return refused("no such loss here; nearest: algorithm.clip = ppo, clip_cov, sapo or cispo")
    if value == "gpg" and whole(job.get(f"{ACTOR}.ppo_mini_batch_size", 256)) < prompts_per_step(job):
        return refused("a loss without a ratio is biased after the first optimizer step; nearest: one step per update")
    return put(LOSSES[value])


def clip(job: ForeignJob, value: Any) -> KeyVerdict:
    open_sides = [side for side in ("low", "high") if job.get(f"{ACTOR}.clip_ratio_{side}") is None]
    if not open_sides:
        return nothing("no effect in verl at this version: clip_ratio_low and clip_ratio_high are set and win")
    return put({f"algorithm.clip_{side}": number(value) for side in open_sides})


def side(key: str) -> Row:
    return when(lambda job: loss_mode(job) not in ("sapo", "gpg", "kl_cov"), "not read by this loss", to(key, number))


def aggregate(job: ForeignJob, value: Any) -> KeyVerdict:
    if loss_mode(job) in ("sapo", "geo_mean") or (loss_mode(job) == "gspo" and version_key(job.version) < (0, 9, 1)):
        return put({"algorithm.aggregate": "sample_mean"}, f"{loss_mode(job)} averages per sample at this version")
    if value == "seq-mean-token-sum":
        return refused("a sum per sample is fixed_length x rollout.max_response_tokens: scale the learning rate by it")
    if value not in AGGREGATES:
        return refused(f"must be one of {', '.join(AGGREGATES)}")
    return put({"algorithm.aggregate": AGGREGATES[value]})


def kl_loss(job: ForeignJob, value: Any) -> KeyVerdict:
    if not truth(value):
        return put({"algorithm.kl_loss_coef": 0.0}, "no KL in the loss")
    return put({"algorithm.kl_loss_coef": number(job.get(f"{ACTOR}.kl_loss_coef", 0.001))})


def kl_kind(value: Any, *, in_loss: bool) -> KeyVerdict:
    kind = ESTIMATORS.get(str(value).removesuffix("+"))
    if kind is None:
        return refused("no such estimator; nearest: algorithm.kl_estimator = k3")
    if in_loss and kind == "k1":
        return refused(shared.NO_K1)
    if str(value).endswith("+"):
        return refused("a gradient of k2 with the value of another estimator; nearest: algorithm.kl_estimator = k2")
    return put({"algorithm.kl_estimator": kind})


def warmup(job: ForeignJob, value: Any, key: str) -> KeyVerdict:
    """verl's schedule advances once per policy update, however many optimizer steps that has."""
    updates = positive(value)
    if updates is None:
        return nothing("none set")
    return put({key: updates * optimizer_steps_per_update(job)}, "policy updates to optimizer steps")


def optimizer(prefix: str, ours: str) -> dict[str, Row]:
    """Rows of an `optim` section."""

    def decays(job: ForeignJob) -> bool:
        kinds = ("lr_scheduler_type", "warmup_style", "lr_decay_style", "decay_type")
        return any(job.get(f"{prefix}.{name}") in ("cosine", "linear") for name in kinds)

    adamw = ["adamw", "adam", "none", "torch.optim", "anyprecision_adamw", "adamw_bf16", "distributed"]
    kind = by(
        lambda job, v: nothing("AdamW, with float32 moments") if str(v).lower() in adamw else refused(shared.ADAMW),
        f"{ours}.lr",
    )
    schedule = table(SCHEDULES, f"{ours}.schedule", nearest="schedule = cosine")

    decay = missing("a schedule ends with the run; nearest: leave it out", f"{ours}.schedule", off=(None, -1, 0))
    state = placement("where the optimizer's state is: cluster.trainer.offload")
    rows = {
        "lr": to(f"{ours}.lr", number),
        "weight_decay": to(f"{ours}.weight_decay", number),
        "betas": to(f"{ours}.betas", lambda value: [number(beta) for beta in value]),
        "eps": to(f"{ours}.eps", number),
        "clip_grad": to(f"{ours}.grad_clip", number),
        **each("optimizer optimizer_impl name", kind),
        "lr_warmup_steps": by(
            lambda job, v: warmup(job, v, f"{ours}.warmup_steps"), f"{ours}.warmup_steps", note="updates to steps"
        ),
        "lr_warmup_steps_ratio": when(
            lambda job: positive(job.get(f"{prefix}.lr_warmup_steps", -1)) is None,
            "lr_warmup_steps wins",
            to(f"{ours}.warmup_frac", lambda value: number(value) or None, "of the optimizer steps"),
        ),
        **each("lr_scheduler_type warmup_style lr_decay_style decay_type", schedule),
        **each("min_lr_ratio min_lr_factor", when(decays, shared.CONSTANT, to(f"{ours}.final_lr_frac", number))),
        **each("min_lr lr_min", when(decays, shared.CONSTANT, shared.floor(f"{prefix}.lr", f"{ours}.final_lr_frac"))),
        "lr_decay_steps": when(decays, shared.CONSTANT, decay),
        "num_cycles": missing("half a cosine only", off=(0.5, None)),
        **each("lr_warmup_init lr_start", missing("warm-up starts at 0")),
        "lr_decay_ratio": missing("a schedule ends with the run; nearest: 1", off=(1, None)),
        **each("use_precision_aware_optimizer *_dtype", placement("the optimizer's state is float32")),
        "total_training_steps": automatic("the run's own length"),
        "zero_indexed_step": automatic("the first step is step 0 of the schedule"),
        "override_optimizer_config": state,
        "override_optimizer_config.**": state,
        "muon_*": when(where(f"{prefix}.optimizer", "muon"), "only read by muon", missing(shared.ADAMW, off=())),
        "use_layer_wise_distributed_optimizer": placement(),
        "use_checkpoint_opt_param_scheduler": automatic("a resumed run keeps its schedule"),
        "lr_wsd_*": automatic("only read by the WSD schedule"),
        "weight_decay_incr_style": missing("weight decay is constant", off=("constant", None)),
    }
    return under(prefix, rows)


_MICROBATCHES = automatic("sequences of a pass: train.tokens_per_microbatch counts tokens")
_NEVER_PADDED = automatic("never padded")
_CHUNKED = automatic("logits are made in chunks")
_FSDP = placement("the trainer is FSDP2")
_ROUTER = table(
    {"disabled": None, "R3": True, "None": None},
    "algorithm.replay_routing",
    nearest="algorithm.replay_routing=true, which is R3: the engine's routing, not that of the trainer's first pass",
)
_OVERRIDE = by(override, "model.override")
_PREDICTS = missing("multi-token prediction is not supported")
_MTP = {
    "mtp.enable": _PREDICTS,
    "mtp.**": when(where(f"{MODEL}.mtp.enable"), "only read with model.mtp.enable", _PREDICTS),
}


def quantised(prefix: str, why: str) -> dict[str, Row]:
    """Rows of a `qat` section."""
    row = missing(why)
    return {
        "qat": row,
        "qat.enable": row,
        "qat.**": when(where(f"{prefix}.qat.enable"), "only read with qat.enable", row),
    }


_POLICY_LOSS = f"{ACTOR}.policy_loss"
_CLIP_COV = shared.several(
    "algorithm.clip_cov",
    *((f"{_POLICY_LOSS}.clip_cov_{name}", other) for name, other in (("ratio", 2e-4), ("lb", 1.0), ("ub", 5.0))),
)
_KL_COV = shared.several(
    "algorithm.kl_cov", (f"{_POLICY_LOSS}.kl_cov_ratio", 2e-4), (f"{_POLICY_LOSS}.ppo_kl_coef", 1.0)
)
_TAUS = shared.several("algorithm.sapo_tau", (f"{ACTOR}.tau_pos", 1.0), (f"{ACTOR}.tau_neg", 1.05))
_LOSS: dict[str, Row] = {
    "clip_ratio": by(clip, "algorithm.clip_low", "algorithm.clip_high"),
    "clip_ratio_low": side("algorithm.clip_low"),
    "clip_ratio_high": side("algorithm.clip_high"),
    "clip_ratio_c": of_loss(to("algorithm.dual_clip", number), "vanilla", "clip_cov", "dppo_tv"),
    "policy_loss.loss_mode": by(loss, "algorithm.ratio", "algorithm.clip"),
    "policy_loss.clip_cov_*": of_loss(_CLIP_COV, "clip_cov"),
    **each("policy_loss.tau_* tau_pos tau_neg", of_loss(_TAUS, "sapo")),
    **each(
        "policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef",
        of_loss(_KL_COV, "kl_cov"),
    ),
    "policy_loss.dro_beta": automatic("only read by dro"),
    "loss_agg_mode": by(aggregate, "algorithm.aggregate"),
    "loss_scale_factor": missing("fixed_length divides by rollout.max_response_tokens", "algorithm.aggregate"),
    "entropy_coeff": to("algorithm.entropy_coef", number),
    "calculate_entropy": automatic("entropy is always measured"),
    "calculate_sum_pi_squared": automatic("only read by optimal_token_baseline"),
    "use_kl_loss": by(kl_loss, "algorithm.kl_loss_coef"),
    "kl_loss_coef": when(
        where(f"{ACTOR}.use_kl_loss"), "unused without use_kl_loss", to("algorithm.kl_loss_coef", number)
    ),
    "kl_loss_type": when(
        in_loss,
        "unused: no KL in the loss",
        by(lambda job, v: kl_kind(v, in_loss=True), "algorithm.kl_estimator"),
    ),
}

_MEGATRON: dict[str, Row] = {
    "tensor_model_parallel_size": shared.width("cluster.trainer.tensor_parallel"),
    "context_parallel_size": shared.width("cluster.trainer.sequence_parallel"),
    **each("pipeline_model_parallel_size virtual_pipeline_model_parallel_size", placement(PIPELINE)),
    "expert_*": placement(EXPERTS),
    "param_offload": shared.offload("parameters"),
    "optimizer_offload": shared.offload("optimizer"),
    "grad_offload": placement(),
    "*dist_checkpointing*": placement(shared.CONVERTED),
    "override_transformer_config.moe_aux_loss_coeff": missing(shared.NO_AUX_LOSS, "algorithm.load_balancing_coef"),
    "override_transformer_config.moe_z_loss_coeff": missing("no router z-loss; nearest: 0"),
    "**": placement("Megatron's setting: Hone's trainer is FSDP2 with its own kernels"),
}

ACTOR_ROWS: dict[str, Row] = {
    "grad_clip": to("train.optimizer.grad_clip", number),
    "ppo_mini_batch_size": by(mini_batch, "train.samples_per_optimizer_step", note="prompts to samples: x rollout.n"),
    **each("ppo_micro_batch_size ppo_micro_batch_size_per_gpu", _MICROBATCHES),
    **each(
        "ppo_infer_micro_batch_size_per_gpu ppo_infer_max_token_len_per_gpu sum_pi_squared_checkpointing",
        automatic(MEMORY),
    ),
    "use_dynamic_bsz": automatic("microbatches are always filled by tokens"),
    "ppo_max_token_len_per_gpu": when(
        where(f"{ACTOR}.use_dynamic_bsz"),
        "unused without use_dynamic_bsz",
        to("train.tokens_per_microbatch", whole, "per device, prompt tokens counted once"),
    ),
    **_LOSS,
    "ppo_epochs": to("train.passes_per_batch", whole),
    "shuffle": automatic(shared.SHUFFLED),
    "data_loader_seed": automatic("order follows `seed`"),
    "use_torch_compile": automatic("kernels of Hone's own; cluster.trainer.compile compiles layers"),
    "strategy": _FSDP,
    **each(
        "ulysses_sequence_parallel_size fsdp_config.ulysses_sequence_parallel_size veomni.ulysses_parallel_size",
        shared.width("cluster.trainer.sequence_parallel"),
    ),
    "fsdp_config.param_offload": shared.offload("parameters"),
    "fsdp_config.optimizer_offload": shared.offload("optimizer"),
    "fsdp_config.fsdp_size": to("cluster.trainer.shard", positive, kind="placement"),
    "fsdp_config.full_determinism": automatic("a synchronous run on one process repeats bit for bit"),
    "fsdp_config.**": placement("of FSDP: placement and memory"),
    **under("megatron", _MEGATRON),
    "veomni.param_offload": shared.offload("parameters"),
    "veomni.optimizer_offload": shared.offload("optimizer"),
    "veomni.router_replay.mode": _ROUTER,
    "veomni.**": placement("of VeOmni: placement and memory"),
    "torchtitan.**": placement("of torchtitan: placement and memory"),
    "engine.**": placement("of the training engine: placement and memory"),
    "router_replay.mode": _ROUTER,
    "router_replay.**": missing("routing is replayed from the engine, not from files"),
    "checkpoint.load_contents": automatic("a resume takes all but what `hone train --resume RUN --without` names"),
    "checkpoint.**": automatic("checkpoints are whole, and written in the background"),
    **each("profiler.** profile.**", automatic(PROFILER)),
    **each("entropy_* use_fused_kernels", _CHUNKED),
    **each("use_remove_padding pad_to_length*", _NEVER_PADDED),
    "use_prefix_grouper": automatic("prompts are computed once per group"),
    "load_weight": automatic("weights are loaded"),
    "rollout_n": automatic("rollout.n"),
    "use_rollout_log_probs": to("algorithm.old_logprobs", lambda value: "sampler" if truth(value) else None),
    "freeze_vision_tower": shared.tower(lambda job: job.given("data.image_key"), has_adapter),
    "self_distillation.**": missing("distillation is not supported", off=()),
    **quantised(ACTOR, shared.QUANTISED),
}

REFERENCE: dict[str, Row] = {
    **each("fsdp_config.param_offload megatron.param_offload veomni.param_offload", shared.offload("reference")),
    "log_prob_*": automatic(MEMORY),
    "profiler.**": automatic(PROFILER),
    "model.path": missing("the reference is the policy at the start", "model.path"),
    "**": placement("of the reference: placement and memory"),
}

_adapter = shared.adapter(has_adapter)

MODEL_ROWS: dict[str, Row] = {
    "path": to("model.path", text),
    "tokenizer_path": to("model.tokenizer", text),
    "hf_config_path": missing("the config is the one beside the weights", "model.path"),
    "trust_remote_code": to("model.trust_remote_code", truth),
    "enable_gradient_checkpointing": shared.checkpointing(),
    "gradient_checkpointing_kwargs.**": automatic("never reentrant; Hone's decoder recomputes whole layers"),
    "enable_activation_offload": placement("activations are recomputed: train.activation_checkpointing"),
    **each("lora_rank lora.rank", to("lora.rank", positive)),
    **each("lora_alpha lora.alpha", _adapter("alpha", number)),
    **each("target_modules lora.target_modules", _adapter("targets", shared.targets)),
    **each("exclude_modules lora.exclude_modules", missing("name the layers to adapt in lora.targets", "lora.targets")),
    **each("lora_adapter_path lora.adapter_path", _adapter("start", text)),
    "lora.dropout": missing("adapters have no dropout"),
    "lora.**": automatic("adapters start as in the paper, and are published merged"),
    "use_*": automatic("Hone's kernels: never padded, logits in chunks"),
    "fused_kernel_options.**": _CHUNKED,
    "tiled_mlp.**": placement(),
    "custom_chat_template": missing(shared.TEMPLATE_FILE, "model.chat_template"),
    "external_lib": missing("install the package; set model.implementation = transformers", "model.implementation"),
    "override_config.attn_implementation": automatic("attention is Hone's own"),
    **each("override_config override_config.**", _OVERRIDE),
    **_MTP,
}
