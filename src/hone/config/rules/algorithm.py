"""Rules of `algorithm`, `critic` and `lora`: what a choice needs, and what contradicts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from hone.config.derived import needs_critic, samples_per_update, trains_adapter
from hone.config.engine import VLLM_RANKS
from hone.config.rules import Breach
from hone.config.run import RunConfig
from hone.config.topology import topology_of
from hone.errors import ConfigError

NO_SIBLINGS = ("remax", "reinforce_pp", "gae")
"""Credits that judge a sample by itself; the others against the prompt's other samples."""


def several_optimizer_steps_need_a_ratio(config: RunConfig) -> Iterator[Breach]:
    if "rl" not in config.stages or config.algorithm.ratio != "none":
        return
    cure = "needs algorithm.ratio = token: after the first optimizer step the samples are no longer the policy's own"
    if config.train.passes_per_batch > 1:
        yield Breach(("train.passes_per_batch", "algorithm.ratio"), f"= {config.train.passes_per_batch} {cure}")
    wanted, total = config.train.samples_per_optimizer_step, samples_per_update(config)
    if wanted is not None and wanted < total:
        yield Breach(
            ("train.samples_per_optimizer_step", "algorithm.ratio", "train.prompts_per_step", "rollout.group_size"),
            f"= {wanted} of {total} makes {total // wanted} optimizer steps of an update, which {cure}",
        )


def clip_has_a_ratio_and_its_settings(config: RunConfig) -> Iterator[Breach]:
    algorithm = config.algorithm
    if algorithm.ratio == "none" and algorithm.clip != "none":
        yield Breach(
            ("algorithm.clip", "algorithm.ratio"),
            f"= {algorithm.clip} bounds a ratio, but algorithm.ratio = none. Set this to none too, or ratio to token",
        )
    if algorithm.dual_clip is not None and algorithm.clip not in ("ppo", "clip_cov", "tv_mask"):
        keys = ("algorithm.dual_clip", "algorithm.clip")
        yield Breach(
            keys, f"is only used by clip = ppo, clip_cov and tv_mask (got clip = {algorithm.clip}). Set it to null"
        )
    if algorithm.clip == "geo_mean" and algorithm.ratio == "sequence":
        keys = ("algorithm.ratio", "algorithm.clip")
        yield Breach(keys, "must be token for clip = geo_mean (got sequence): the clip itself takes the mean")
    if min(algorithm.sapo_tau) <= 0:
        yield Breach(("algorithm.sapo_tau",), f"must be above 0 each (got {list(algorithm.sapo_tau)})")


def bounds_are_ranges(config: RunConfig) -> Iterator[Breach]:
    low, high = config.algorithm.correction_low, config.algorithm.correction_high
    if low >= high:
        keys = ("algorithm.correction_low", "algorithm.correction_high")
        yield Breach(keys, f"must be below algorithm.correction_high = {high} (got {low})")
    share, low, high = config.algorithm.clip_cov
    if not 0 < share < 1 or low >= high:
        yield Breach(
            ("algorithm.clip_cov",),
            f"must be [share, low, high] with a share between 0 and 1 and low below high (got {[share, low, high]})",
        )
    share, coef = config.algorithm.kl_cov
    if not 0 < share < 1 or coef < 0:
        yield Breach(
            ("algorithm.kl_cov",),
            f"must be [share, coefficient] with a share between 0 and 1 and a coefficient of 0 or more (got "
            f"{[share, coef]})",
        )
    clip = config.algorithm.reward_clip
    if clip is not None and clip[0] >= clip[1]:
        yield Breach(("algorithm.reward_clip",), f"must be [low, high] with low below high (got {list(clip)})")


def group_credit_has_a_group(config: RunConfig) -> Iterator[Breach]:
    size = config.rollout.group_size
    if "rl" in config.stages and size < 2 and config.algorithm.credit not in NO_SIBLINGS:
        yield Breach(
            ("rollout.group_size", "algorithm.credit"),
            f"must be at least 2 for algorithm.credit = {config.algorithm.credit} (got {size}): a sample is compared "
            "with the others of its prompt",
        )
    if config.reward.min_valid_per_group > size >= 2:
        yield Breach(
            ("reward.min_valid_per_group", "rollout.group_size"),
            f"must be at most rollout.group_size = {size} (got {config.reward.min_valid_per_group}), "
            "or every group is dropped",
        )
    if config.algorithm.drop_uninformative and size < 2:
        yield Breach(
            ("algorithm.drop_uninformative", "rollout.group_size"),
            "needs rollout.group_size of at least 2 (got 1): the one reward of a group always equals itself, so every "
            "group would be dropped",
        )


def critic_settings_have_a_critic(config: RunConfig) -> Iterator[Breach]:
    critic = config.critic
    if not needs_critic(config):
        for name, value in (("path", critic.path), ("warmup_updates", critic.warmup_updates)):
            if value:
                yield Breach(
                    (f"critic.{name}", "algorithm.credit", "stages"),
                    f"= {value}, but only algorithm.credit = gae in stage rl has a critic "
                    f"(got {config.algorithm.credit}). Leave it out",
                )
    elif critic.warmup_updates >= config.run.steps > 0:
        yield Breach(
            ("critic.warmup_updates", "run.steps", "algorithm.credit", "stages"),
            f"must be below run.steps = {config.run.steps} (got {critic.warmup_updates}), or the policy never learns",
        )


def kl_has_a_gradient(config: RunConfig) -> Iterator[Breach]:
    algorithm = config.algorithm
    if algorithm.kl_loss_coef > 0 and algorithm.kl_estimator == "k1":
        yield Breach(
            ("algorithm.kl_estimator", "algorithm.kl_loss_coef"),
            "= k1 has no gradient on average in a loss: it would only add noise. Take k2 or k3, or put the KL into the "
            "reward with algorithm.kl_reward_coef",
        )
    if algorithm.kl_estimator == "weighted_k3" and (algorithm.ratio == "none" or algorithm.kl_reward_coef > 0):
        yield Breach(
            ("algorithm.kl_estimator", "algorithm.ratio", "algorithm.kl_reward_coef"),
            f"= weighted_k3 is the KL in the loss times the policy ratio (got ratio = {algorithm.ratio}, "
            f"kl_reward_coef = {algorithm.kl_reward_coef:g}). Take k3",
        )


def kl_control_has_one_coefficient(config: RunConfig) -> Iterator[Breach]:
    algorithm = config.algorithm
    coefs = {"kl_loss_coef": algorithm.kl_loss_coef, "kl_reward_coef": algorithm.kl_reward_coef}
    keys = ("algorithm.kl_loss_coef", "algorithm.kl_reward_coef")
    given = [name for name, coef in coefs.items() if coef > 0]
    if algorithm.kl_target is not None and len(given) != 1:
        yield Breach(
            ("algorithm.kl_target", *keys),
            f"steers one KL coefficient; set one of kl_loss_coef and kl_reward_coef above 0, where it starts "
            f"(got {' and '.join(given) or 'neither'})",
        )
    elif len(given) == 2:
        yield Breach(keys, "is set, and kl_reward_coef too: set one of them to 0")
    if algorithm.reference_refresh_every > 0 and not given:
        yield Breach(
            ("algorithm.reference_refresh_every", *keys),
            f"= {algorithm.reference_refresh_every}, but both KL coefficients are 0: there is no reference",
        )


def correction_has_a_difference_to_correct(config: RunConfig) -> Iterator[Breach]:
    algorithm = config.algorithm
    if algorithm.old_logprobs == "sampler" and algorithm.correction not in ("auto", "none"):
        yield Breach(
            ("algorithm.correction", "algorithm.old_logprobs"),
            f"= {algorithm.correction} weighs the trainer's old logprobs against the sampler's, but "
            "algorithm.old_logprobs = sampler makes them the same: the ratio does it all. Set this to none",
        )
    if algorithm.old_logprobs == "sampler" and algorithm.ratio == "none":
        keys = ("algorithm.old_logprobs", "algorithm.ratio")
        yield Breach(keys, "= sampler is what the ratio is taken to, but algorithm.ratio = none. Leave it out")


def rejection_has_a_difference(config: RunConfig) -> Iterator[Breach]:
    algorithm = config.algorithm
    if algorithm.rejection == "none":
        return
    if algorithm.old_logprobs == "sampler":
        yield Breach(
            ("algorithm.rejection", "algorithm.old_logprobs"),
            f"= {algorithm.rejection} compares the trainer's old logprobs with the sampler's, but "
            "algorithm.old_logprobs = sampler makes them the same. Set it to none",
        )
    low, high = algorithm.rejection_low, algorithm.rejection_high
    if algorithm.rejection.endswith("k1") and (1 / high if low is None else low) >= high:
        keys = ("algorithm.rejection_high", "algorithm.rejection_low")
        yield Breach(keys, f"must be above the lower bound, which is 1 / rejection_high by default (got {high})")
    if low is not None and not algorithm.rejection.endswith("k1"):
        keys = ("algorithm.rejection_low", "algorithm.rejection")
        yield Breach(keys, f"is only used with k1 (got {algorithm.rejection}): leave it out")


def routing_is_recorded(config: RunConfig) -> Iterator[Breach]:
    """The engine must report the experts of each token, and the trainer's layers must be able to use them."""
    if not config.algorithm.replay_routing or config.cluster.backend != "ray":
        return
    engines, this = config.cluster.engines, "algorithm.replay_routing"
    with suppress(ConfigError):  # no such engine: another rule says it
        if not engines.kind.records_routing:
            yield Breach(
                (this, "cluster.engines.use"),
                f"= true needs an engine that records routing, which {engines.name} does not do. Set "
                "cluster.engines.use=hone or vllm, or this to false",
            )
    if engines.name == "vllm" and not engines.enable_prefix_caching:
        yield Breach(
            (this, "cluster.engines.enable_prefix_caching"),
            "= true with vLLM needs its prefix cache, beside which it keeps routing. Set "
            "cluster.engines.enable_prefix_caching=true",
        )
    if config.cluster.trainer.compile:
        yield Breach(
            (this, "cluster.trainer.compile"),
            "= true replaces the choice of experts inside of layers, which cluster.trainer.compile compiles. Set "
            "cluster.trainer.compile=false",
        )


def load_is_of_whole_sequences(config: RunConfig) -> Iterator[Breach]:
    trainer = config.cluster.trainer
    if config.algorithm.load_balancing_coef and config.cluster.backend == "ray" and trainer.sequence_parallel > 1:
        yield Breach(
            ("algorithm.load_balancing_coef", "cluster.trainer.sequence_parallel"),
            f"= {config.algorithm.load_balancing_coef:g} needs the load of whole sequences, of which sequence parallel "
            f"ranks see parts (got cluster.trainer.sequence_parallel = {trainer.sequence_parallel}). Set that to 1, or "
            "this to 0",
        )


def components_are_not_shaped_as_a_sum(config: RunConfig) -> Iterator[Breach]:
    """gdpo reads the scores themselves, and what shapes their sum would not be seen."""
    algorithm = config.algorithm
    if algorithm.credit != "gdpo":
        return
    for name, is_on in (
        ("reward_clip", algorithm.reward_clip is not None),
        ("normalize_rewards", algorithm.normalize_rewards),
        ("overlong_buffer_frac", algorithm.overlong_buffer_frac > 0),
        ("truncated_reward_factor", algorithm.truncated_reward_factor < 1),
    ):
        if is_on:
            keys = (f"algorithm.{name}", "algorithm.credit")
            yield Breach(
                keys, "shapes the sum of the reward's components, which credit = gdpo does not read: leave it out"
            )


def entropy_control_has_room(config: RunConfig) -> Iterator[Breach]:
    algorithm = config.algorithm
    if algorithm.entropy_target is not None and not 0 <= algorithm.entropy_coef <= algorithm.entropy_coef_max:
        keys = ("algorithm.entropy_coef", "algorithm.entropy_coef_max", "algorithm.entropy_target")
        yield Breach(
            keys,
            f"must be from 0 to algorithm.entropy_coef_max = {algorithm.entropy_coef_max:g} with an entropy_target "
            f"(got {algorithm.entropy_coef:g})",
        )


def truncated_sampling_is_correctable(config: RunConfig) -> Iterator[Breach]:
    """The trainer's logprobs are of the full softmax, so those of a truncated sampler can never agree with them."""
    rollout = config.rollout
    truncations = {
        "top_k": (rollout.top_k, rollout.top_k > 0, "0"),
        "top_p": (rollout.top_p, rollout.top_p < 1, "1"),
        "min_p": (rollout.min_p, rollout.min_p > 0, "0"),
    }
    if "rl" not in config.stages or (config.algorithm.ratio == "none" and not config.gate.enabled):
        return
    for name, (value, truncates, off) in truncations.items():
        if truncates:
            yield Breach(
                (f"rollout.{name}", "algorithm.ratio", "gate.enabled"),
                f"= {value} samples from a truncated distribution, while the trainer's logprobs are of the whole one: "
                f"ratios would be biased. Set it to {off} (off); or accept the bias with algorithm.ratio = none and "
                "gate.enabled = false",
            )


# ---- adapters


NOT_HIDDEN = ("lm_head", "embed_out", "embed_tokens", "wte")
"""Usual names of output layers and embeddings."""


def adapter_has_a_rank_and_linear_layers(config: RunConfig) -> Iterator[Breach]:
    lora = config.lora
    given = sorted(lora.model_fields_set)
    if given and "rank" not in given:
        keys = ("lora.rank", *(f"lora.{name}" for name in given))
        yield Breach(
            keys, f"is required with lora.{given[0]}: without it every weight is trained; 0 says that on purpose"
        )
    # Logits are made from the output layer a chunk at a time, outside the model; often it is the embedding too.
    found = [name for name in lora.targets or () if name in NOT_HIDDEN]
    if found:
        yield Breach(
            ("lora.targets",),
            f"may not name {', '.join(found)}: adapters are for the linear layers between embedding and output layer, "
            "which are often one matrix. Leave it out, or train every weight with lora.rank = 0",
        )


def adapter_has_a_stage_and_a_frozen_base(config: RunConfig) -> Iterator[Breach]:
    lora, stages = config.lora, config.stages
    if lora.rank and not any(trains_adapter(config, stage) for stage in stages):
        yield Breach(
            ("lora.stages", "lora.rank", "stages"),
            f"names {', '.join(lora.stages)}, and this run's stages are {', '.join(stages)}: none would train an "
            "adapter. Name one of them, or set lora.rank to 0",
        )
    if lora.rank and "vision" not in config.model.freeze:
        yield Breach(
            ("model.freeze", "lora.rank"),
            "must name vision with an adapter, which is beside layers of the language model. Leave it at its default",
        )
    if config.model.init is not None and trains_adapter(config, stages[0]):
        yield Breach(
            ("lora.stages", "lora.rank", "model.init", "stages"),
            f"includes {stages[0]}, which starts from random weights (model.init), and an adapter leaves those as they "
            "are. Start from model.path, or train every weight in a stage before",
        )


def adapter_alone_goes_to_vllm(config: RunConfig) -> Iterator[Breach]:
    lora, engines, takes_adapters = config.lora, config.cluster.engines, False
    if lora.publish != "adapter":
        return
    with suppress(ConfigError):  # no such engine: another rule says it
        takes_adapters = engines.kind.takes_adapters
    if not trains_adapter(config, "rl"):
        yield Breach(
            ("lora.publish", "lora.rank", "lora.stages"),
            "= adapter, and the rl stage trains none. Set lora.rank and name rl in lora.stages, or leave it out",
        )
    elif config.cluster.backend != "ray" or not takes_adapters:
        yield Breach(
            ("lora.publish", "cluster.backend", "cluster.engines.use"),
            "= adapter is for cluster.engines.use = vllm on cluster.backend = ray. Nearest: merged",
        )
    elif lora.rank > VLLM_RANKS[-1]:
        yield Breach(
            ("lora.rank", "lora.publish"),
            f"= {lora.rank}, and vLLM takes adapters up to {VLLM_RANKS[-1]}. Nearest: {VLLM_RANKS[-1]}, or "
            "lora.publish = merged",
        )
    elif topology_of(config).sleeps("rollout") and engines.sleep_level == 2:
        yield Breach(
            ("cluster.engines.sleep_level", "lora.publish"),
            "= 2 discards the weights of the model, which lora.publish = adapter does not send again. Set it to 1",
        )


def reference_is_the_adapters_base(config: RunConfig) -> Iterator[Breach]:
    every = config.algorithm.reference_refresh_every
    if every and trains_adapter(config, "rl"):
        yield Breach(
            ("algorithm.reference_refresh_every", "lora.rank", "lora.stages"),
            f"= {every}, but with an adapter the reference is its base model, which never changes. Set it to 0, "
            "or lora.rank to 0",
        )


ALGORITHM_RULES: tuple[Callable[[RunConfig], Iterator[Breach]], ...] = (
    several_optimizer_steps_need_a_ratio,
    clip_has_a_ratio_and_its_settings,
    bounds_are_ranges,
    group_credit_has_a_group,
    critic_settings_have_a_critic,
    kl_has_a_gradient,
    kl_control_has_one_coefficient,
    correction_has_a_difference_to_correct,
    rejection_has_a_difference,
    routing_is_recorded,
    load_is_of_whole_sequences,
    components_are_not_shaped_as_a_sum,
    entropy_control_has_room,
    truncated_sampling_is_correctable,
    adapter_has_a_rank_and_linear_layers,
    adapter_has_a_stage_and_a_frozen_base,
    adapter_alone_goes_to_vllm,
    reference_is_the_adapters_base,
)
