"""Models and trainers of a stage, from what the run file says and what the stage before it left on disk."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from hone.assemble.job import Job
from hone.config.cluster import Role
from hone.config.derived import critic_steps_total, needs_critic, optimizer_steps_total, trains_adapter
from hone.config.load import Loaded
from hone.config.run import OptimizerSection, RunConfig, Stage
from hone.data.chat import Tokenizer, resolve_model
from hone.errors import DataError
from hone.memory.guard import Guard
from hone.model.base import CausalModel
from hone.model.heads import ScalarModel, load_scalar_model, reward_config
from hone.model.load import init_model, load_model, model_folder, read_config, save_hf
from hone.model.lora import AdapterOff, add_adapter
from hone.run.folder import RunFolder
from hone.train.apart import Apart
from hone.train.checkpoint import Loaded as Saved
from hone.train.critic import Critic
from hone.train.pairs import PairTrainer
from hone.train.policy import PolicyTrainer
from hone.train.ranks import ALONE, Ranks
from hone.train.reference import Reference
from hone.train.trainer import Keepable


class Source(Protocol):
    """What models and trainers are made from: a `Job`, or what a process of a cluster knows of one."""

    loaded: Loaded
    folder: RunFolder
    tokenizer: Tokenizer
    device: torch.device

    @property
    def guard(self) -> Guard:
        """Watches over memory."""
        ...


def starting_model(source: Source, stage: str) -> CausalModel:
    """The float32 model that a stage begins with: what the stage before it left, else the run file's."""
    return model_before(stage, source.loaded, source.folder, source.tokenizer, source.device)


def model_before(
    stage: str, loaded: Loaded, folder: RunFolder, tokenizer: Tokenizer, device: torch.device
) -> CausalModel:
    """As `starting_model`, where no job is running."""
    weights = weights_before(stage, loaded.config, folder)
    if weights is None:
        return named_model(loaded.config, tokenizer, loaded.run_file.parent, device)
    return load_model(weights, dtype=torch.float32, device=device, implementation=loaded.config.model.implementation)


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
    )


def starting_folder(source: Source) -> Path:
    """The Hugging Face directory of the model that the RL stage begins with. Random weights are first written to one,
    in the run's folder, so this is for one process to ask before the engines start."""
    loaded, model = source.loaded, source.loaded.config.model
    if (folder := weights_before("rl", loaded.config, source.folder)) is not None:
        return folder
    if model.init is None:
        path = resolve_model(model.path or "", loaded.run_file.parent)
        return model_folder(path, trust_remote_code=model.trust_remote_code)
    folder = source.folder.path / "hf-start"
    random = named_model(loaded.config, source.tokenizer, loaded.run_file.parent, source.device)
    tokenizer = source.tokenizer
    save_hf(folder, random.hf_config, random.named_weights(), tokenizer.hf, eos_ids=tokenizer.eos_ids)
    return folder


def with_adapter(config: RunConfig, model: CausalModel, stage: str) -> CausalModel:
    """The model, frozen and with a new adapter in it, if the stage trains one."""
    if trains_adapter(config, stage):
        add_adapter(model, config.lora, seed=config.seed, dtype=getattr(torch, config.run.precision))
    return model


def make_reference(model: CausalModel) -> CausalModel:
    """The policy as it is now, which will not change: beneath its adapter it never does."""
    return AdapterOff(model) if model.adapter else copy.deepcopy(model)


def scalar_model(config: RunConfig, tokenizer: Tokenizer, body: CausalModel) -> ScalarModel:
    """A reward model on a policy's body, described so that Transformers loads it as a sequence classifier."""
    # Transformers scores the last token that is no padding, so the end of a response must not look like padding.
    pad_id = None if tokenizer.pad_id in tokenizer.eos_ids else tokenizer.pad_id
    body.checkpointing = config.train.activation_checkpointing
    model = ScalarModel(body)
    model.hf_config = reward_config(model.hf_config, pad_id=pad_id, form="chat" if config.data.chat else "text")
    return model


def policy_trainer(
    source: Source, ranks: Ranks = ALONE, *, needs: frozenset[str], elsewhere: Sequence[Role] = ()
) -> PolicyTrainer:
    """The trainer of an RL stage, at its beginning.

    Args:
        ranks: who trains it together.
        needs: of the algorithm; see `Algorithm.needs`.
        elsewhere: what it has not beside the policy, though it is needed; see `apart`.
    """
    config = source.loaded.config
    model = starting_model(source, "rl")
    critic = make_critic(source, model, ranks) if "values" in needs and "critic" not in elsewhere else None
    model = with_adapter(config, model, "rl")
    reference = make_reference(model) if "ref_logprobs" in needs and "reference" not in elsewhere else None
    steps = optimizer_steps_total(config)
    return make_trainer(source, "rl", model, config.train.optimizer, steps, reference, critic, ranks)


def imitation_trainer(source: Source, ranks: Ranks = ALONE, *, steps: int) -> PolicyTrainer:
    """The trainer of a supervised stage of so many optimizer steps, at its beginning."""
    config = source.loaded.config
    model = with_adapter(config, starting_model(source, "sft"), "sft")
    return make_trainer(source, "sft", model, config.sft.optimizer, steps, ranks=ranks)


def pair_trainer(source: Source, ranks: Ranks = ALONE, *, steps: int) -> PairTrainer:
    """The trainer of a reward-model stage of so many optimizer steps, at its beginning."""
    config = source.loaded.config
    return PairTrainer(
        scalar_model(config, source.tokenizer, starting_model(source, "reward_model")),
        optimizer=config.train.optimizer,
        total_optimizer_steps=steps,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        precision=config.run.precision,
        guard=source.guard,
        ranks=ranks,
    )


def apart(source: Source, ranks: Ranks = ALONE, *, roles: Sequence[Role]) -> Apart:
    """What ranks hold that have critic, reference or both, and not the policy."""
    config, train = source.loaded.config, source.loaded.config.train
    critic, reference = None, None
    if "critic" in roles:
        critic = make_critic(source, starting_model(source, "rl"), ranks, takes_policy_over=True)
    if "reference" in roles:
        reference = Reference(
            starting_model(source, "rl"),
            temperature=config.rollout.temperature,
            tokens_per_microbatch=train.tokens_per_microbatch,
            logprob_chunk_tokens=train.logprob_chunk_tokens,
            precision=config.run.precision,
            guard=source.guard,
            ranks=ranks,
        )
    return Apart(
        critic=critic,
        reference=reference,
        samples_per_optimizer_step=train.samples_per_optimizer_step,
        passes_per_batch=train.passes_per_batch,
        seed=config.seed,
        keeps_reference=config.algorithm.reference_refresh_every > 0,
    )


def make_trainer(
    source: Source,
    stage: Stage,
    model: CausalModel,
    optimizer: OptimizerSection,
    steps: int,
    reference: CausalModel | None = None,
    critic: Critic | None = None,
    ranks: Ranks = ALONE,
) -> PolicyTrainer:
    """The trainer of one stage. How an update is divided and repeated is only of RL; a step of imitation is one."""
    config, train = source.loaded.config, source.loaded.config.train
    divided = stage == "rl"
    model.checkpointing = train.activation_checkpointing
    return PolicyTrainer(
        model,
        optimizer=optimizer,
        total_optimizer_steps=steps,
        temperature=config.rollout.temperature,
        tokens_per_microbatch=train.tokens_per_microbatch,
        logprob_chunk_tokens=train.logprob_chunk_tokens,
        precision=config.run.precision,
        reference=reference,
        samples_per_optimizer_step=train.samples_per_optimizer_step if divided else None,
        passes_per_batch=train.passes_per_batch if divided else 1,
        seed=config.seed,
        critic=critic,
        critic_warmup_updates=config.critic.warmup_updates if divided and needs_critic(config) else 0,
        reference_refresh_every=config.algorithm.reference_refresh_every if reference else 0,
        guard=source.guard,
        ranks=ranks,
    )


def tell_of_adapter(job: Job, trainer: PolicyTrainer) -> None:
    """Say how little is trained, where it is an adapter."""
    if trainer.model.adapter is not None:
        job.observer.say(
            f"training an adapter of {trainer.held.num_trained:,} parameters; the weights beneath it stay as they are"
        )


def make_critic(
    source: Source, policy: CausalModel, ranks: Ranks = ALONE, *, takes_policy_over: bool = False
) -> Critic:
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
        optimizer=config.critic.optimizer,
        total_optimizer_steps=critic_steps_total(config),
        precision=config.run.precision,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        value_clip=config.critic.value_clip,
        guard=source.guard,
        ranks=ranks,
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


def restore(trainer: Keepable, saved: Saved | None) -> None:
    """Put a checkpoint into the trainer, if there is one."""
    if saved is not None:
        trainer.restore(saved.tensors, saved.rest)
