"""Trial of a model's class before a run: what `hone check` proves, and `hone train` refuses before anything starts.

A miniature of the architecture (`model/miniature.py`) with random weights goes through the run's own engine and trainer
in float32 on the CPU, and through Transformers' class, which is the reference. The outcome is kept in the user's state
folder, by everything that it depends on. Not here: the model's files and their weights (`model/load.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import logging

import hone
from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.derived import trains_adapter
from hone.config.run import RunConfig
from hone.data.pack import collate
from hone.errors import DataError, EngineError, first_line
from hone.experts import UNRECORDED
from hone.loop.gate import NOTICEABLE, mean_gap
from hone.model.base import CausalModel
from hone.model.heads import reward_config
from hone.model.hf import TransformersModel, auto_class
from hone.model.load import random_model, save_hf
from hone.model.lora import add_adapter, merged_copy
from hone.model.miniature import miniature
from hone.rollout.engine import Request, Sampling
from hone.rollout.local import LocalEngine, refuse_to_compile
from hone.run.refusals import INSTEAD, refused_by_config, refused_by_run
from hone.runtime.files import state_folder, write_user_state
from hone.train.learner import Passes
from hone.train.policy import PolicyTrainer
from hone.types import Batch, Group, Picture, Prompt, Sample, VersionSpan

PROMPTS = ((3, 1, 4, 1, 5), (2, 7))
REWARDS = (0.0, 1.0, 0.0, 1.0)
RESPONSE_TOKENS = 3
LARGEST_GAP = NOTICEABLE["float32"]
"""Largest mean difference of logprobs, nats: that of the first-step gate."""


@dataclass(frozen=True)
class ModelTrial:
    """What was proven of a class, or why a run of it would fail."""

    proven: str = ""
    refused: str = ""
    untried: str = ""
    """Why the trial was skipped."""


async def try_model(config: RunConfig, architecture: PreTrainedConfig) -> ModelTrial:
    """Whether the run's engine and trainer work with models of this architecture.

    Args:
        architecture: of `model.path` or `model.init`.
    """
    if config.model.trust_remote_code and "AutoModelForCausalLM" in (getattr(architecture, "auto_map", None) or {}):
        return ModelTrial(untried=f"model: {architecture.model_type} brings a class of its own, which was not tried")
    if refused := refused_by_config(architecture) or refused_by_run(config, architecture):
        return ModelTrial(refused=refused)
    kept = state_folder() / "models" / f"{_key(config, architecture)}.json"
    if kept.is_file():
        return ModelTrial(**json.loads(kept.read_text()))
    try:
        with torch.random.fork_rng(devices=[]):
            outcome = await _trial(config, architecture)
    except DataError as error:
        outcome = ModelTrial(refused=str(error))
    write_user_state(kept, json.dumps(vars(outcome)))
    return outcome


def _key(config: RunConfig, architecture: PreTrainedConfig) -> str:
    """Hash of all that an outcome depends on."""
    versions = [hone.__version__, *(version(name) for name in ("torch", "transformers"))]
    keys = architecture.to_dict()
    keys.pop("_name_or_path", None)
    settings = [config.model.implementation, config.lora.model_dump(mode="json")]
    settings += [bool(config.data.image_columns)]
    settings += [config.train.activation_checkpointing, config.rollout.compile, _has_own_engine(config), config.stages]
    settings += [config.algorithm.replay_routing, config.algorithm.load_balancing_coef]
    content = json.dumps([keys, settings, versions, _code_hash()], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


@cache
def _code_hash() -> str:
    """Hash of Hone's own files: between releases the version number does not change."""
    files = sorted(Path(hone.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _has_own_engine(config: RunConfig) -> bool:
    """Whether Hone's engine samples; other engines report what they support when they start."""
    return "rl" in config.stages and config.cluster.engines.name == "hone"


async def _trial(config: RunConfig, architecture: PreTrainedConfig) -> ModelTrial:
    kind = architecture.model_type
    with _step(kind, "built"):
        small = miniature(architecture)
    if small is None:
        return ModelTrial(untried=f"model: no small copy of {kind} could be built, so its class was not tried")
    with _step(kind, "built"):
        model = random_model(
            small, seed=0, dtype=torch.float32, device="cpu", implementation=config.model.implementation
        )
        _draw(weight for _, weight in model.own_weights() if weight.dim() > 1 and weight.is_floating_point())
        words = model.output_weight  # a tied embedding as large as other matrices would predict itself
        words.data.mul_(min(1.0, 4 * words.shape[-1] ** -0.5))
        model.checkpointing = config.train.activation_checkpointing
    if config.rollout.compile:
        refuse_to_compile(model)
    if "reward_model" in config.stages:
        reward_config(small, pad_id=None, form="text")
    has_adapter = any(trains_adapter(config, stage) for stage in config.stages)
    with _step(kind, "given an adapter" if has_adapter else "trained"):
        if has_adapter:
            add_adapter(model, config.lora, seed=0, dtype=torch.float32)
            assert model.adapter is not None
            _draw(factor for name, factor in model.adapter.weights() if ".lora_B." in name)
        passes = Passes("float32", tokens_per_microbatch=64, logprob_chunk_tokens=8, temperature=1.0)
        trainer = PolicyTrainer(model, passes, optimizer=config.train.optimizer, total_optimizer_steps=1)
    with _step(kind, "exported"):
        reference, names = _exported(model)
        merged_copy(model).load_weights(model.named_weights())  # as an engine with weights of its own does
    own_engine = _has_own_engine(config)
    groups = _made_up(model.vocab_size)
    if config.data.image_columns:
        shown = _with_picture(groups[0].prompt, model)
        groups[0] = replace(groups[0], prompt=shown)
    if own_engine or config.algorithm.replay_routing:  # what is replayed must be recorded, by whichever engine
        with _step(kind, "sampled from by Hone's engine"):
            prompts = [group.prompt for group in groups]
            groups = await _sampled(model, prompts, records_routing=config.algorithm.replay_routing)
    batch = collate(groups)
    batch = batch.with_column("advantages_T", (2 * batch.reward_S - 1).repeat_interleave(batch.length_S))
    expected = _reference_logprobs(reference, groups, model)
    with _step(kind, "trained"):
        found_T = trainer.logprobs(batch)
    if own_engine:
        _agree(kind, "Hone's engine", batch.sampler_logprobs_T, expected, has_adapter)
    if batch.routing_T is not None:
        _replays(kind, trainer, batch, found_T)
    _agree(kind, "the trainer", found_T, expected, has_adapter)
    with _step(kind, "trained"):
        section = AlgorithmSection(load_balancing_coef=config.algorithm.load_balancing_coef)
        metrics = trainer.update(batch, Algorithm(section), [np.arange(len(batch.length_S))])
    if not 0 < metrics["train/grad_norm"] < float("inf"):
        raise DataError(f"model: {kind} cannot be trained: its gradient has norm {metrics['train/grad_norm']:g}.")
    who = "engine and trainer compute" if own_engine else "the trainer computes"
    seen = ", of a prompt with a picture too" if config.data.image_columns else ""
    seen += ", routing is replayed" if batch.routing_T is not None else ""
    depth = small.get_text_config(decoder=True).num_hidden_layers
    why_rows = model.why_rows if isinstance(model, TransformersModel) else None
    rows = f". Training computes a prompt once per sample, in padded rows: {why_rows}" if why_rows else ""
    return ModelTrial(
        proven=f"{kind} trains{' with an adapter' if has_adapter else ''}: in a miniature of {depth} "
        f"layers {who} Transformers' logprobs{seen}, gradients are finite, and Transformers loads the {names} "
        f"exported{rows}"
    )


@contextmanager
def _step(kind: str, what: str) -> Iterator[None]:
    """Inside, a class of Transformers' does something; whatever it raises is a reason to refuse it."""
    try:
        yield
    except DataError:
        raise
    except Exception as raised:  # boundary: classes raise anything, here or in the engine's worker
        error = raised.__cause__ if isinstance(raised, EngineError) and raised.__cause__ else raised
        said = first_line(error)[:300].rstrip(".")
        raise DataError(
            f"model: {kind} cannot be {what}: its class raises {type(error).__name__}: {said}. {INSTEAD}."
        ) from raised


@torch.no_grad()
def _draw(weights: Iterator[Tensor]) -> None:
    """Weights so large that what a token sees changes what comes next: the usual start would hide a wrong cache."""
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)


def _exported(model: CausalModel) -> tuple[Any, int]:
    """Transformers' own model from an export, and how many weights that has.

    Raises:
        DataError: it would start some of its weights anew.
    """
    weights = list(model.named_weights())
    with TemporaryDirectory(prefix="hone-trial-") as folder, _without_progress_bars():
        save_hf(Path(folder) / "hf", model.hf_config, weights)
        loaded: Any = auto_class(model.hf_config).from_pretrained(
            Path(folder) / "hf", dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
    reference, report = loaded
    wrong = sorted({*report["missing_keys"], *report["unexpected_keys"]})
    if wrong:
        raise DataError(f"model: {model.hf_config.model_type}: Transformers finds no match for {', '.join(wrong[:3])}.")
    return reference.eval(), len(weights)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


async def _sampled(model: CausalModel, prompts: Sequence[Prompt], *, records_routing: bool) -> list[Group]:
    """A group of each prompt: one prefill, samples that fork from it, and steps of decoding."""
    engine = LocalEngine(
        model, decode=str, eos_ids=(), max_concurrent=8, timeout_s=120.0, records_routing=records_routing
    )
    sampling = Sampling(RESPONSE_TOKENS, 1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=())
    requests = [Request(prompt, len(REWARDS), sampling, seed=0, stream="train") for prompt in prompts]
    try:
        sampled = await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
    return [Group(prompt, samples).scored({}, REWARDS) for prompt, samples in zip(prompts, sampled, strict=True)]


def _replays(kind: str, trainer: PolicyTrainer, batch: Batch, found_T: Tensor) -> None:
    """Raises DataError if tokens are not sent to other experts when the batch says so."""
    assert batch.routing_T is not None
    model: Any = trainer.model
    recorded = [e for e in (batch.routing_T, *batch.prompt_routing) if isinstance(e, np.ndarray)]
    others = [np.where(e == UNRECORDED, e, (e + 1) % model.routing.fewest) for e in recorded]
    other_T = trainer.logprobs(replace(batch, routing_T=others[0], prompt_routing=tuple(others[1:])))
    if torch.equal(other_T, found_T):
        raise DataError(
            f"algorithm.replay_routing = true: {kind} does not send tokens to the experts that were recorded. Set "
            "algorithm.replay_routing=false."
        )


def _made_up(vocab_size: int) -> list[Group]:
    """Groups that no engine has drawn, for runs whose engine is not Hone's."""
    groups = []
    for number, tokens in enumerate(PROMPTS):
        prompt = Prompt(str(number), number, "", np.array(tokens, np.int32) % vocab_size)
        samples = tuple(
            Sample(
                prompt_id=prompt.id,
                index=index,
                token_ids=(11 * index + 5 * np.arange(RESPONSE_TOKENS, dtype=np.int32) + number) % vocab_size,
                sampler_logprobs=np.zeros(RESPONSE_TOKENS, np.float32),
                versions=(VersionSpan(0, RESPONSE_TOKENS),),
                finish_reason="length",
                text="",
            )
            for index in range(len(REWARDS))
        )
        groups.append(Group(prompt, samples).scored({}, REWARDS))
    return groups


def _with_picture(prompt: Prompt, model: CausalModel) -> Prompt:
    """The prompt with a picture of noise behind its first token, larger than the smallest."""
    assert isinstance(model, TransformersModel) and model.vision is not None
    tower, keys = model.vision.tower, cast(Any, model.hf_config)
    rows, columns = tower.sizes()[1]
    size = rows * tower.side, columns * tower.side, 3
    picture = Picture(
        "trial",
        1,
        rows,
        columns,
        (0.5,) * 3,
        (0.25,) * 3,
        lambda **_: np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8),
    )
    first, *others = prompt.token_ids.tolist()
    ids = [first, *[keys.image_token_id] * picture.num_tokens, *others]
    return replace(prompt, token_ids=np.array(ids, np.int32), pictures=(picture,))


@torch.no_grad()
def _reference_logprobs(reference: Any, groups: Sequence[Group], model: CausalModel) -> tuple[Tensor, Tensor]:
    """(T,) of Transformers' forward pass of each sample on its own, and (T,) 1 where there is one: a class refuses a
    prompt with a picture if the response spells the token that stands at pictures."""
    found, is_known = list[Tensor](), list[Tensor]()
    for group in groups:
        prompt, pictures = group.prompt.token_ids, group.prompt.pictures
        for sample in group.samples:
            if pictures and prompt[pictures[0].start] in sample.token_ids:
                found.append(torch.zeros(len(sample.token_ids)))
                is_known.append(torch.zeros(len(sample.token_ids)))
                continue
            ids = torch.tensor([[*prompt, *sample.token_ids]])
            vision = model.vision if isinstance(model, TransformersModel) else None
            shown = vision.tower.whole_inputs(group.prompt.pictures, ids.shape[1]) if vision else {}
            logits = reference(ids, use_cache=False, **shown).logits
            logprobs = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            found.append(logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0])
            is_known.append(torch.ones(len(sample.token_ids)))
    return torch.cat(found), torch.cat(is_known)


def _agree(kind: str, who: str, found_T: Tensor, expected: tuple[Tensor, Tensor], has_adapter: bool) -> None:
    gap = mean_gap(found_T, *expected)
    if not gap <= LARGEST_GAP:
        why = "the class computes otherwise with its cache, or beside other sequences, than alone"
        if has_adapter:
            why += ", or past a layer that has an adapter (lora.targets chooses them)"
        raise DataError(
            f"model: with {kind}, logprobs of {who} and of Transformers' forward pass of exported weights differ by "
            f"{gap:.2g} nats (bound {LARGEST_GAP:g}): {why}. {INSTEAD}."
        )
