"""Models and trainers of a stage, from what the run file says and what the stage before it left on disk."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch

from hone.assemble.job import Job
from hone.config.cluster import Role
from hone.config.derived import (
    needs_critic,
    optimizer_steps_per_update,
    optimizer_steps_total,
    starts_from_adapter,
    trains_adapter,
)
from hone.config.load import Loaded
from hone.config.run import OptimizerSection, RunConfig
from hone.data.chat import Tokenizer, load_tokenizer, resolve_model
from hone.errors import DataError
from hone.memory.guard import Guard
from hone.model.base import CausalModel
from hone.model.heads import ScalarModel, load_scalar_model, reward_config
from hone.model.hf import has_tower
from hone.model.load import init_model, link_with_config, load_model, model_folder, read_config, save_hf
from hone.model.lora import AdapterOff, add_adapter
from hone.run.folder import RunFolder
from hone.run.refusals import refused_by_names
from hone.train.checkpoint import SavedCheckpoint
from hone.train.critic import Critic
from hone.train.learner import Passes
from hone.train.pairs import PairTrainer
from hone.train.policy import PolicyTrainer
from hone.train.ranks import ALONE, Ranks
from hone.train.roles import Reference, Roles
from hone.train.trainer import Checkpointable


class Source(Protocol):
    """What models and trainers are made from: a `Job`, or what a process of a cluster knows of one."""

    loaded: Loaded
    folder: RunFolder
    tokenizer: Tokenizer
    device: torch.device

    @property
    def guard(self) -> Guard:
        """The memory guard."""
        ...


def tokenizer_of(loaded: Loaded) -> Tokenizer:
    """The run file's."""
    config = loaded.config
    return load_tokenizer(config.model, loaded.run_file.parent, config.data.template_args)


def starting_model(source: Source, stage: str) -> CausalModel:
    """The float32 model that a stage begins with: what the stage before it left, else the run file's."""
    return model_before(stage, source.loaded, source.folder, source.tokenizer, source.device)


def model_before(
    stage: str, loaded: Loaded, folder: RunFolder, tokenizer: Tokenizer, device: torch.device
) -> CausalModel:
    """Like `starting_model`, without a running job."""
    weights, settings = weights_before(stage, loaded.config, folder), loaded.config.model
    if weights is None:
        model = named_model(loaded.config, tokenizer, loaded.run_file.parent, device)
    else:
        model = load_model(weights, dtype=torch.float32, device=device, implementation=settings.implementation)
    if has_tower(model.hf_config) and "vision" not in settings.freeze:
        model.requires_grad_(True)
    return model


def weights_before(stage: str, config: RunConfig, folder: RunFolder) -> Path | None:
    """Where the stage before this one left its weights; None when there is none before it."""
    stages: tuple[str, ...] = config.stages
    before = stages[: stages.index(stage)]
    return stage_weights(folder, config, before[-1]) if before else None


def stage_weights(folder: RunFolder, config: RunConfig, stage: str) -> Path:
    """Where a stage leaves its final weights: hf/ for the last one, hf-<stage>/ for one before it."""
    return folder.hf if stage == config.stages[-1] else folder.path / f"hf-{stage}"


def named_model(config: RunConfig, tokenizer: Tokenizer, base_dir: Path, device: torch.device) -> CausalModel:
    """The float32 model of the run file: from `model.path`, or `model.init` with the seed's random weights."""
    model = config.model
    dtype, implementation = torch.float32, model.implementation
    if model.init is not None:
        return init_model(
            model.init,
            vocab_size=tokenizer.vocab_size,
            seed=config.seed,
            dtype=dtype,
            device=device,
            implementation=implementation,
        )
    return load_model(
        resolve_model(model.path or "", base_dir),
        dtype=dtype,
        device=device,
        implementation=implementation,
        trust_remote_code=model.trust_remote_code,
        override=model.override,
    )


def starting_folder(source: Source) -> Path:
    """The Hugging Face directory of the model that the RL stage begins with. Random weights, and a config with
    `model.override`, are first written to one in the run's folder, so this is for one process to ask before the engines
    start. It computes on the CPU: a driver may have no accelerator, and a rank wants all of the one it has. Raises
    DataError where an engine that starts from it would refuse the trainer's weights."""
    loaded, model, start = source.loaded, source.loaded.config.model, source.folder.path / "hf-start"
    if (folder := weights_before("rl", loaded.config, source.folder)) is not None:
        return folder
    if model.init is None:
        path = resolve_model(model.path or "", loaded.run_file.parent)
        found = model_folder(path, trust_remote_code=model.trust_remote_code)
        config = read_config(found, trust_remote_code=model.trust_remote_code, override=model.override)
        if refused := refused_by_names(loaded.config, config, found):
            raise DataError(loaded.located(refused))
        if not model.override:
            return found
        link_with_config(found, start, config)
        return start
    random = named_model(loaded.config, source.tokenizer, loaded.run_file.parent, torch.device("cpu"))
    tokenizer = source.tokenizer
    save_hf(
        start,
        random.hf_config,
        random.named_weights(),
        tokenizer.hf,
        eos_ids=tokenizer.eos_ids,
        processor=tokenizer.processor,
    )
    return start


def with_adapter(config: RunConfig, model: CausalModel, stage: str, start: Path | None = None) -> CausalModel:
    """The model, frozen and with an adapter in it, if the stage trains one: a new one, or that of `start`."""
    if trains_adapter(config, stage):
        add_adapter(model, config.lora, seed=config.seed, dtype=getattr(torch, config.run.compute_dtype), start=start)
    return model


def starting_adapter(source: Source, stage: str) -> Path | None:
    """The directory of `lora.start`, if the stage begins with it."""
    start = source.loaded.config.lora.start
    if start is None or not starts_from_adapter(source.loaded.config, stage):
        return None
    return model_folder(resolve_model(start, source.loaded.run_file.parent))


def scalar_model(config: RunConfig, tokenizer: Tokenizer, body: CausalModel) -> ScalarModel:
    """A reward model on a policy's body, described so that Transformers loads it as a sequence classifier."""
    # Transformers scores the last token that is not padding, so the end of a response must not look like padding.
    pad_id = None if tokenizer.pad_id in tokenizer.eos_ids else tokenizer.pad_id
    body.checkpointing = config.train.activation_checkpointing
    model = ScalarModel(body)
    model.hf_config = reward_config(model.hf_config, pad_id=pad_id, form="chat" if config.data.chat else "text")
    return model


def roles_of_needs(needs: Collection[str]) -> set[Role]:
    """Training roles that an algorithm with these needs has; see `Algorithm.needs`."""
    needs_of: dict[Role, bool] = {"policy": True, "critic": "values" in needs, "reference": "ref_logprobs" in needs}
    return {role for role, is_needed in needs_of.items() if is_needed}


def rl_roles(source: Source, ranks: Ranks = ALONE, *, held: Collection[Role]) -> Roles:
    """The trainer of an RL stage at its start, or the part of it on these `ranks`."""
    config, train = source.loaded.config, source.loaded.config.train
    passes, model = make_passes(source, ranks), starting_model(source, "rl")
    is_shared = "policy" in held or "reference" in held
    critic = make_critic(source, passes, model, takes_policy_over=not is_shared) if "critic" in held else None
    policy, frozen = None, model
    if "policy" in held:
        model = with_adapter(config, model, "rl", starting_adapter(source, "rl"))
        if "reference" in held:  # the policy as it is now; an adapter's base never changes
            frozen = AdapterOff(model) if model.adapter else copy.deepcopy(model)
        policy = make_policy(source, passes, model, train.optimizer, optimizer_steps_total(config))
    return Roles(
        policy=policy,
        critic=critic,
        reference=Reference(frozen, passes) if "reference" in held else None,
        samples_per_optimizer_step=train.samples_per_optimizer_step,
        passes_per_batch=train.passes_per_batch,
        seed=config.seed,
        critic_warmup_updates=config.critic.warmup_updates if needs_critic(config) else 0,
        reference_refresh_every=config.algorithm.reference_refresh_every,
    )


def sft_trainer(source: Source, ranks: Ranks = ALONE, *, steps: int) -> Roles:
    """The trainer of a supervised stage of `steps` optimizer steps, at its start."""
    config = source.loaded.config
    model = with_adapter(config, starting_model(source, "sft"), "sft", starting_adapter(source, "sft"))
    return Roles(
        policy=make_policy(source, make_passes(source, ranks), model, config.sft.optimizer, steps), seed=config.seed
    )


def pair_trainer(source: Source, ranks: Ranks = ALONE, *, steps: int) -> PairTrainer:
    """The trainer of a reward-model stage of `steps` optimizer steps, at its beginning."""
    config = source.loaded.config
    model = scalar_model(config, source.tokenizer, starting_model(source, "reward_model"))
    passes = make_passes(source, ranks)
    return PairTrainer(model, passes, optimizer=config.train.optimizer, total_optimizer_steps=steps)


def make_passes(source: Source, ranks: Ranks) -> Passes:
    """How the models of a stage compute in this process."""
    config = source.loaded.config
    return Passes(
        precision=config.run.compute_dtype,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        logprob_chunk_tokens=config.train.logprob_chunk_tokens,
        temperature=config.rollout.temperature,
        guard=source.guard,
        ranks=ranks,
        deterministic=config.run.deterministic,
    )


def make_policy(
    source: Source, passes: Passes, model: CausalModel, optimizer: OptimizerSection, steps: int
) -> PolicyTrainer:
    model.checkpointing = source.loaded.config.train.activation_checkpointing
    return PolicyTrainer(model, passes, optimizer=optimizer, total_optimizer_steps=steps)


def report_adapter(job: Job, policy: PolicyTrainer) -> None:
    """Print how many parameters are trained, where it is an adapter."""
    if policy.model.adapter is not None:
        job.observer.say(
            f"training an adapter of {policy.held.num_trained:,} parameters; its base weights stay as they are"
        )


def make_critic(source: Source, passes: Passes, policy: CausalModel, *, takes_policy_over: bool = False) -> Critic:
    """A critic that starts from `critic.path`, or from a copy of the policy.

    Args:
        takes_policy_over: the policy is not used elsewhere: no copy is made.
    Raises:
        DataError: a model with other tokens than the policy's, whose ids it is given.
    """
    config = source.loaded.config
    if config.critic.path is None:
        model = ScalarModel(policy if takes_policy_over else copy.deepcopy(policy))
    else:
        model = critic_from(resolve_model(config.critic.path, source.loaded.run_file.parent), config, source.device)
    if model.body.vocab_size != policy.vocab_size:
        raise DataError(
            f"critic.path = {config.critic.path}: a vocabulary of {model.body.vocab_size} tokens, the policy's has "
            f"{policy.vocab_size}. The critic reads the policy's token ids: take a model with the same tokenizer."
        )
    model.body.checkpointing = config.train.activation_checkpointing
    return Critic(
        model,
        passes,
        optimizer=config.critic.optimizer,
        total_optimizer_steps=config.run.steps * optimizer_steps_per_update(config),
        value_clip=config.critic.value_clip,
    )


def critic_from(place: str, config: RunConfig, device: torch.device) -> ScalarModel:
    """A reward model with its head, or a language model with a new one."""
    folder = Path(place)
    classes = (read_config(folder).architectures or []) if folder.is_dir() else []
    if any(name.endswith("ForSequenceClassification") for name in classes):
        return load_scalar_model(folder, dtype=torch.float32, device=device)
    body = load_model(
        place,
        dtype=torch.float32,
        device=device,
        implementation=config.model.implementation,
        trust_remote_code=config.model.trust_remote_code,
    )
    return ScalarModel(body)


def restore(trainer: Checkpointable, saved: SavedCheckpoint | None) -> None:
    """Put a checkpoint into the trainer, if there is one."""
    if saved is not None:
        trainer.restore(saved.tensors, saved.rest)
