"""Memory trace of one update in one process, on fake tensors: model class, flat buffers, loss, critic, adapter, AdamW.

Not here: the engine beside it, and what a process takes besides tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from hone.algo.algorithm import Algorithm
from hone.config.derived import correction, needs_critic, needs_reference, trains_adapter
from hone.config.run import RunConfig
from hone.memory.guard import Unguarded
from hone.model.base import CausalModel
from hone.model.decoder import Decoder
from hone.model.heads import ScalarModel
from hone.model.hf import TransformersModel, as_computed, auto_class
from hone.model.load import Implementation, init_config, is_ours
from hone.model.lora import AdapterOff, add_adapter
from hone.plan.activations import Pass
from hone.ragged import Ints
from hone.train.critic import Critic
from hone.train.learner import Passes
from hone.train.policy import PolicyTrainer
from hone.train.roles import Reference, Roles
from hone.train.tracing.memory import LiveMemory, Moments, backward_begins, fake_tensors, kernels_of
from hone.types import Batch


def empty_model(architecture: Mapping[str, Any], implementation: Implementation) -> CausalModel:
    """The float32 model that a run would load, among fake tensors; to be called among them.

    Args:
        architecture: keys of a config.json.
    """
    config = init_config(architecture, vocab_size=None)
    with unset_fake_temporarily():  # fake tensors on the meta device cannot become others in place; real ones can
        if is_ours(config, implementation):
            made: Decoder | PreTrainedModel = Decoder(config, dtype=torch.float32, device="meta")
        else:
            with torch.device("meta"):
                made = auto_class(config).from_config(as_computed(config), dtype=torch.float32)
    made.to_empty(device="cpu")
    if isinstance(made, Decoder):
        return made
    made.tie_weights()
    return TransformersModel(made, config)


def with_layers(architecture: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The same architecture with its first `layers` layers only."""
    cut = {**architecture, "num_hidden_layers": layers}
    if "layer_types" in cut:
        cut["layer_types"] = cut["layer_types"][:layers]
    return cut


def trace_local(
    config: RunConfig, policy: Mapping[str, Any], critic: Mapping[str, Any] | None, batch: Batch, work: Pass
) -> Moments:
    """Most bytes of tensors at each moment of one update, from the making of the states on.

    Args:
        policy, critic: keys of a config.json; no critic's: it is a copy of the policy, if there is one.
        batch: one microbatch, of real tensors, for how it is laid out depends on their numbers.
        work: the microbatch as the plan has it, which says by which kernels it is computed.
    """
    memory = LiveMemory()
    with fake_tensors(memory), kernels_of(memory, work):
        trainer = _trainer(config, policy, critic, memory)
        algorithm = Algorithm(
            config.algorithm, correction=correction(config), max_response_tokens=config.rollout.max_response_tokens
        )
        with marked(memory, trainer.policy.model, last="embedding backward"):
            if trainer.reference is not None:
                with marked(memory, trainer.reference.model, last=""):
                    trainer.logprobs(batch, reference=True)
            if "old_logprobs_T" in batch.columns:
                trainer.logprobs(batch)
            trainer.update(batch, algorithm)
    return memory.peaks


def _trainer(
    config: RunConfig, policy: Mapping[str, Any], critic: Mapping[str, Any] | None, memory: LiveMemory
) -> Roles:
    """Like `assemble.models` makes it, without weights."""
    train, implementation = config.train, config.model.implementation
    passes = Passes(
        precision=config.run.compute_dtype,
        tokens_per_microbatch=train.tokens_per_microbatch,
        logprob_chunk_tokens=train.logprob_chunk_tokens,
        temperature=config.rollout.temperature,
        guard=_Phases(memory),
    )
    model = empty_model(policy, implementation)
    learner = None
    if needs_critic(config):
        learner = _TracedCritic(
            ScalarModel(empty_model(critic or policy, implementation)),
            passes,
            optimizer=config.critic.optimizer,
            total_optimizer_steps=1,
            value_clip=config.critic.value_clip,
        )
        learner.memory = memory
        learner.model.body.checkpointing = train.activation_checkpointing
    if trains_adapter(config, "rl"):
        add_adapter(model, config.lora, seed=0, dtype=getattr(torch, config.run.compute_dtype))
    frozen = None
    if needs_reference(config):
        frozen = AdapterOff(model) if model.adapter else copy.deepcopy(model)
    model.checkpointing = train.activation_checkpointing
    trained = PolicyTrainer(model, passes, optimizer=train.optimizer, total_optimizer_steps=1)
    return Roles(policy=trained, critic=learner, reference=Reference(frozen, passes) if frozen else None)


class _TracedCritic(Critic):
    """Its passes are moments of their own."""

    memory: LiveMemory

    def update(self, batch: Batch, algorithm: Algorithm, steps: Sequence[Ints]) -> dict[str, float]:
        with marked(self.memory, self.model.body, last="embedding backward", prefix="critic's "):
            return super().update(batch, algorithm, steps)


class _Phases(Unguarded):
    """Tells which phase the trainer is in."""

    def __init__(self, memory: LiveMemory) -> None:
        self._memory = memory

    @contextmanager
    def phase(self, name: str, **_: Any) -> Iterator[None]:
        if name == "optimizer":
            self._memory.at("optimizer", "step")
        yield


@contextmanager
def marked(memory: LiveMemory, model: nn.Module, *, last: str, prefix: str = "") -> Iterator[None]:
    """Inside, passes of a model report to `memory` which moment it is.

    Args:
        model: has a decoder with `layers` and a final `norm` somewhere in it.
        last: what the ledger calls the moment in which the embedding's gradient arrives.
        prefix: of the moments, where it is not the policy's model.
    """

    def update(moment: str) -> Callable[..., None]:
        return lambda *_: memory.at("update", prefix + moment)

    def begins(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            memory.at("logprobs", "layers")
        elif torch._C._current_graph_task_id() == -1:  # not where the backward pass computes the layer again
            update("layers forward")()
            x = inputs[0] if inputs else named["hidden_states"]
            if x.requires_grad:
                x.register_hook(update(last))

    def ends(_: nn.Module, inputs: Any, hidden: Tensor) -> None:
        if not torch.is_grad_enabled():
            memory.at("logprobs", "logits")
            return
        update("loss forward")()
        hidden.register_hook(update("layer backward"))

    decoder: Any = next(part for part in model.modules() if hasattr(part, "layers") and hasattr(part, "norm"))
    with ExitStack() as stack:
        stack.enter_context(backward_begins(update("loss backward")))
        for handle in (
            decoder.layers[0].register_forward_pre_hook(begins, with_kwargs=True),
            decoder.norm.register_forward_hook(ends),
        ):
            stack.callback(handle.remove)
        yield
