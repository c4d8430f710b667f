"""Decoder-only architectures without a decoder of Hone's own, through Transformers' classes.

A class of plain attention computes a microbatch as Hone's decoder does, in one row of tokens with each prompt once
(`layout_attention.py`). For any other, `why_rows` says why its samples are right-padded rows of prompt + response; then
a prompt is computed once per distinct sample of it. The model runs without dropout.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from hone.config.run import Checkpointing
from hone.errors import DataError
from hone.model.base import CausalModel
from hone.model.layout import Layout
from hone.model.layout_attention import asks_registry, attend_around, over_layout, why_rows
from hone.model.logprobs import LogitMap
from hone.model.recompute import GROUPED_PRODUCT, contexts, is_recomputed
from hone.model.routing import LoadBalance, Routing, no_balance
from hone.model.towers import TOWERS
from hone.model.vision import Vision, with_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A weight of the repository: some consecutive numbers of a parameter, or all of them."""

    name: str
    size: torch.Size
    first: int
    """Its first number, counted from the parameter's first."""

    def of(self, parameter: Tensor) -> Tensor:
        """It, as a view of the parameter."""
        if self.size == parameter.shape:
            return parameter
        return parameter.reshape(-1)[self.first : self.first + self.size.numel()].view(self.size)


def repository_parts(hf: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, list[NamedPart]]:
    """What each weight of a module is in the repository, in the order of its numbers.

    Transformers fuses some weights when it loads a directory: the experts of a layer become one parameter, which
    computes faster. Repositories, vLLM and other readers have them one by one. The library can convert them back, by
    copies (`revert_weight_conversion`, which `save_pretrained` uses). Here it converts weights on device `meta`, once,
    which shows where in the parameters each weight of the repository is; from then on they are views.

    A weight of which the repository has no consecutive numbers (transposed, interleaved, or part of a larger one there)
    keeps the module's name.

    Args:
        state: the module's weights under its own names, on any device; they are not read.
    """
    from transformers.core_model_loading import revert_weight_conversion  # brings modelling code and SciPy: 0.7 s

    stand_ins = {name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for name, weight in state.items()}
    owners = {_storage(tensor): name for name, tensor in stand_ins.items()}
    found: dict[str, list[NamedPart]] = {name: [] for name in state}
    with _WithoutCopies():
        named: Mapping[str, Any] = revert_weight_conversion(hf, dict(stand_ins))
    for name, tensor in named.items():
        owner = owners.get(_storage(tensor))
        if owner is not None and tensor.is_contiguous():
            found[owner].append(NamedPart(name, tensor.shape, int(tensor.storage_offset())))
    for name, parts in found.items():
        parts.sort(key=lambda part: part.first)
        if sum(part.size.numel() for part in parts) != state[name].numel():
            found[name] = [NamedPart(name, state[name].shape, 0)]
    return found


class _WithoutCopies(TorchFunctionMode):
    """Inside, `contiguous` leaves a view as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class TransformersModel(CausalModel):
    """Wraps a model of `auto_class`; `.hf` is the module itself, for the engine's generic decoding.

    What is neither the language model nor its output layer, such as a vision tower, is frozen.
    """

    def __init__(self, hf: PreTrainedModel, hf_config: PreTrainedConfig) -> None:
        super().__init__()
        self.hf = hf.eval()
        # What reading this directory took; without it Transformers converts names as its repository has them.
        self.hf._weight_conversions = None  # type: ignore[assignment]
        self.hf_config = hf_config
        self.logit_map = LogitMap.of(hf_config.get_text_config(decoder=True))
        self.vocab_size = self.output_weight.shape[0]
        self.hidden_size = self.output_weight.shape[1]
        text_config = hf_config.get_text_config(decoder=True)
        self.max_positions = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
        self._enabled: Checkpointing = "none"
        """The checkpointing last set on the module."""
        self.vision: Vision | None = None
        """Reads pictures; None: this class's prompts cannot have any."""
        self.why_rows = why_rows(self.hf, self.body)
        """Why samples are padded rows; None: they are a layout's one row."""
        if asks_registry(self.hf):
            attend_around(self.body)
        tower = TOWERS.get(hf_config.model_type)
        if tower is not None and self.why_rows is None:
            self.vision = Vision(tower(self.hf.base_model, hf_config))
        if has_tower(hf_config):
            learning = {id(weight) for weight in (*self.body.parameters(), self.output_weight)}
            for weight in self.hf.parameters():
                weight.requires_grad_(id(weight) in learning)
        if not self.output_weight.is_meta:
            self._check_logits()

    @property
    def output_weight(self) -> Tensor:
        head = self.hf.get_output_embeddings()
        assert head is not None, "AutoModelForCausalLM always has an output layer"
        return head.weight

    @property
    def body(self) -> Any:
        """The module that gives hidden states of text. Llama 4 has it under another name than it says: its `base_model`
        is the whole, and beside a tower its decoder has the output layer too."""
        whole: Any = self.hf
        if has_tower(self.hf_config):
            decoder = whole.get_decoder()
            return decoder if decoder.get_output_embeddings() is None else decoder.model
        return whole.model if whole.base_model is whole else whole.base_model

    def hidden(self, layout: Layout, balance: LoadBalance | None = None) -> Tensor:
        recompute = self.checkpointing != "none" and torch.is_grad_enabled()
        if recompute and self.checkpointing != self._enabled:
            from transformers.modeling_layers import GradientCheckpointingLayer  # brings SciPy

            # Transformers adds experts' biases to their products in place.
            added_to = [GROUPED_PRODUCT] * any(getattr(module, "has_bias", False) for module in self.body.modules())
            how = {"context_fn": partial(contexts, *added_to)} if self.checkpointing == "selective" else {}
            self.hf.gradient_checkpointing_enable({"use_reentrant": False, **how})
            layers = (module for module in self.body.modules() if isinstance(module, GradientCheckpointingLayer))
            for number, layer in enumerate(layers):
                layer.gradient_checkpointing = is_recomputed(self.checkpointing, number)
            self._enabled = self.checkpointing
        self.hf.train(recompute)  # Transformers recomputes only in training mode; dropout is 0 in either
        return self._hidden_of_rows(layout, balance) if self.why_rows else self._hidden_of_layout(layout, balance)

    def _hidden_of_layout(self, layout: Layout, balance: LoadBalance | None) -> Tensor:
        """Like `hidden`, each prompt and its pictures computed once."""
        part = self.sequences.part_of(layout)
        self._replay(part.routing_X)
        given: dict[str, Any] = {"input_ids": part.token_ids_X[None], "position_ids": part.position_X[None]}
        if self.vision is not None:
            embedded_XH = self.hf.get_input_embeddings()(part.token_ids_X)
            embedded_1XH, deeper = with_pictures(embedded_XH[None], [layout.pictures], self.vision)
            given = {"inputs_embeds": embedded_1XH, "position_ids": self.vision.positions(layout), **deeper}
        elif layout.pictures:
            raise DataError(no_pictures(self.hf_config.model_type))
        all_1X = torch.ones_like(part.token_ids_X)[None]  # without it the class would look for packed samples by itself
        with over_layout(part.attend):
            out = self.body(attention_mask=all_1X, use_cache=False, **given, **_asked(balance))
        if balance is not None:
            balance.loss = self._balancing_loss(out, layout.samples_X()[None])
        return part.dealt(self.last_hidden(out)[0].index_select(0, part.needed_W))

    def _hidden_of_rows(self, layout: Layout, balance: LoadBalance | None) -> Tensor:
        """Like `hidden`, each distinct sample alone."""
        if layout.pictures:
            raise DataError(no_pictures(self.hf_config.model_type))
        rows = layout.rows()
        self._replay(None if layout.routing_X is None else layout.routing_X[rows.index_RL.flatten()])
        mask_RL = rows.real_RL.long()
        out = self.body(
            input_ids=layout.token_ids_X[rows.index_RL], attention_mask=mask_RL, use_cache=False, **_asked(balance)
        )
        if balance is not None:
            balance.loss = self._balancing_loss(out, rows.real_RL)
        return self.last_hidden(out).flatten(0, 1).index_select(0, rows.predict_U)

    def last_hidden(self, out: Any) -> Tensor:
        """(rows, columns, h) what `body` returned, in the precision of the output layer: Mamba's classes compute the
        residual stream in float32 whatever the weights are (`residual_in_fp32`), and convert it there."""
        return out.last_hidden_state.to(self.output_weight.dtype)

    def _balancing_loss(self, out: Any, weight_RL: Tensor) -> Tensor:
        """The class's own (Switch Transformer, arXiv:2101.03961, eq. 4 to 6), of tokens that count so often."""
        hf: Any = self.hf
        function = getattr(sys.modules[type(hf).__module__], "load_balancing_loss_func", None)
        logits = getattr(out, "router_logits", None)
        if function is None or not logits:
            raise DataError(no_balance(self.hf_config.model_type))
        return function(logits, hf.num_experts, hf.num_experts_per_tok, weight_RL)

    @cached_property
    def routing(self) -> Routing:
        """Of the mixture-of-experts layers. Raises DataError for a model without any, or whose are not known."""
        return Routing(self.body, self.hf_config.model_type)

    def _replay(self, routing_N: Tensor | None) -> None:
        """Let the next forward pass send its tokens there; None: where routers choose."""
        if routing_N is not None or "routing" in vars(self):
            self.routing.replay(routing_N)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `CausalModel.load_weights`."""
        super().load_weights(weights)
        if self.vision is not None:
            self.vision.forget()

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._distinct().items():
            for part in self._parts[name]:
                yield part.name, part.of(weight.detach())

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the module's weights that are each one weight of the repository, under its name there."""
        for name, weight in self._distinct().items():
            (first, *others) = self._parts[name]
            if not others and first.size == weight.shape:
                yield first.name, weight

    @property
    def aliases(self) -> set[str]:
        return self._state().keys() - self._distinct().keys()

    def buffers_by_name(self) -> dict[str, Tensor]:
        """The module's buffers; one that `own_weights` has too under the same name."""
        own = {id(weight): self._parts[name][0].name for name, weight in self._distinct().items()}
        return {own.get(id(buffer), name): buffer for name, buffer in self.hf.named_buffers()}

    @cached_property
    def _parts(self) -> dict[str, list[NamedPart]]:
        """What the module's weights are in the model's repository."""
        return repository_parts(self.hf, self._distinct())

    def _distinct(self) -> dict[str, Tensor]:
        """The module's weights without aliases."""
        first: dict[int, str] = {}
        state = self._state()
        for name, weight in state.items():
            first.setdefault(id(weight), name)
        return {name: state[name] for name in first.values()}

    def _state(self) -> dict[str, Tensor]:
        """The module's own weights and their aliases, under the names that they had before peft wrapped layers."""
        state = self.hf.state_dict(keep_vars=True)
        if self.adapter is None:
            return state
        return {name.replace(".base_layer.", "."): weight for name, weight in state.items() if ".lora_" not in name}

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Refuses architectures that do something to their logits that `logprobs.py` would not do."""
        bias = getattr(self.hf.get_output_embeddings(), "bias", None) is not None
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.output_weight.device)
        hidden = self.last_hidden(self.body(input_ids=ids, use_cache=False))
        logits = self.hf(input_ids=ids, use_cache=False).logits.float()
        differs = (logits - self.logits(hidden).float()).norm() > 0.02 * logits.norm()
        if bias or differs:
            what = "a bias of the output layer" if bias else "a change of its logits"
            raise DataError(
                f"model: {self.hf_config.model_type} has {what}, which Hone cannot train yet. Choose another model."
            )


def _asked(balance: LoadBalance | None) -> dict[str, bool]:
    return {} if balance is None else {"output_router_logits": True}


def no_pictures(model_type: str) -> str:
    """That prompts of this architecture cannot have pictures."""
    return (
        f"data.image_columns: prompts of {model_type} cannot have pictures; those of {', '.join(TOWERS)} can (with "
        "full attention in every layer). Take one of them, or leave the pictures out."
    )


def has_tower(config: PreTrainedConfig) -> bool:
    """Whether the model has a vision tower beside its language model."""
    return getattr(config, "vision_config", None) is not None


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of Transformers' that makes models of this config, vision tower included."""
    sees = has_tower(config) and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def as_computed(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy as engine and trainer compute it, also of its parts: dropout rates are 0, for the trainer must see the
    distribution that was sampled from; attention whose scores are capped is the class's own code, for PyTorch's
    attention has no cap and Transformers leaves it out there."""
    config = copy.deepcopy(config)
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        keys = part.to_dict()
        for key, value in keys.items():
            if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                setattr(part, key, 0.0)
        if keys.get("attn_logit_softcapping"):
            part._attn_implementation = "eager"
    return config
