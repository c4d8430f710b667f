"""One compact decoder for the Llama family: Llama, Mistral, Qwen2 and Qwen3, dense, with grouped-query attention.

It differs from Transformers' classes in two ways that make Hone fast: tokens are a flat list in any packing (no batch
or padding dimension), and attention is a strategy that the caller hands in, so that prefill, decode and shared-prompt
training are one forward. q, k and v are one matrix product, and so are gate and up. Weights are read and written under
their Hugging Face names; logits equal Transformers' to float rounding.

Not here: sliding windows, mixtures of experts, long-context rope variants whose frequencies depend on the length.
`unsupported` says whether a config needs one of them; such a model goes through hf.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hone.errors import DataError
from hone.model.base import CausalModel
from hone.model.collectives import with_summed_gradient
from hone.model.fused import rms_norm, rotation, split_and_rotate, swiglu
from hone.model.recompute import again, is_recomputed
from hone.model.routing import LoadBalance, no_balance
from hone.sizes import OWN_FAMILIES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedConfig

    from hone.model.layout import Layout

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q (X, Hq, D), k (X, Hkv, D), v (X, Hkv, D)), positions already applied -> (X, Hq, D).

Scores are scaled by D ** -0.5; the strategy decides which token sees which."""

Halves = tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., Tensor]]
"""`DecoderLayer.before_attention` and `DecoderLayer.after_attention`, or the same compiled."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def unsupported(config: PreTrainedConfig) -> str | None:
    """Why this decoder cannot run the architecture, or None if it can."""
    if config.model_type not in OWN_FAMILIES:
        return f"model_type {config.model_type} is not one of {', '.join(OWN_FAMILIES)}"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act} is not silu"
    if config.rope_parameters["rope_type"] not in ROPE_TYPES:
        return f"rope_type {config.rope_parameters['rope_type']} is not one of {', '.join(ROPE_TYPES)}"
    window = getattr(config, "sliding_window", None)
    slides = config.model_type == "mistral" or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if slides and window is not None and window < config.max_position_embeddings:
        return f"sliding_window {window} is shorter than the context of {config.max_position_embeddings}"
    return None


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SplitLinear(nn.Module):
    """Several linear layers of one input, their outputs side by side: a fused one that `parallel.py` has divided."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def parts_of(fused: nn.Linear, sizes: Sequence[int]) -> list[nn.Linear]:
    """The layers that a fused one consists of, by their outputs."""
    with torch.device("meta"):
        layers = [nn.Linear(fused.in_features, size, bias=fused.bias is not None) for size in sizes]
    for name, whole in fused.named_parameters():
        for layer, part in zip(layers, whole.split(tuple(sizes)), strict=True):
            layer.register_parameter(name, nn.Parameter(part.detach(), requires_grad=part.requires_grad))
    return layers


class DecoderLayer(nn.Module):
    """Attention and feed-forward block, both pre-normed, both added to the residual stream."""

    def __init__(self, config: PreTrainedConfig, index: int, head_dim: int) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.index = index
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
        )
        bias = getattr(config, "attention_bias", False)
        mlp_bias = getattr(config, "mlp_bias", False)
        qkv_size = (self.num_heads + 2 * self.num_kv_heads) * head_dim
        self.input_norm = RMSNorm(hidden, eps)
        self.qkv_proj: nn.Linear | SplitLinear = nn.Linear(hidden, qkv_size, bias=bias or config.model_type == "qwen2")
        self.qk_normed = config.model_type == "qwen3"
        if self.qk_normed:
            self.q_norm = RMSNorm(head_dim, eps)
            self.k_norm = RMSNorm(head_dim, eps)
        self.o_proj = nn.Linear(self.num_heads * head_dim, hidden, bias=bias and config.model_type != "qwen2")
        self.post_norm = RMSNorm(hidden, eps)
        self.gate_up_proj: nn.Linear | SplitLinear = nn.Linear(hidden, 2 * inner, bias=mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=mlp_bias)
        self.tensor_group: ProcessGroup | None = None
        """The ranks that have the other heads and widths, where `parallel.py` has divided the layer."""

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend, needed_W: Tensor | None, halves: Halves | None
    ) -> Tensor:
        before, after = halves or (DecoderLayer.before_attention, DecoderLayer.after_attention)
        mixed = attend(self.index, *before(self, x, turn)).flatten(1)
        if needed_W is not None:
            x, mixed = x.index_select(0, needed_W), mixed.index_select(0, needed_W)
        return after(self, x, mixed)

    def before_attention(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv_proj(self.input_norm(x)).unflatten(1, (-1, self.head_dim))
        norms = (self.q_norm.weight, self.k_norm.weight) if self.qk_normed else None
        if norms is not None and self.tensor_group is not None:  # they act on every head, also on other ranks' ones
            q_norm, k_norm = (with_summed_gradient(weight, self.tensor_group) for weight in norms)
            norms = q_norm, k_norm
        return split_and_rotate(qkv, turn, self.num_heads, self.num_kv_heads, norms, self.input_norm.eps)

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.o_proj(mixed)
        return x + self.down_proj(swiglu(self.gate_up_proj(self.post_norm(x))))


class Decoder(CausalModel):
    """The Llama family. Memory is allocated but not set: `load_weights` must follow.

    On device `meta` no weight has memory, and what is computed from the config is on the CPU.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        why = unsupported(config)
        if why:
            raise DataError(f"model: {why}. Set model.implementation to auto or transformers.")
        self.hf_config = config
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_positions: int = config.max_position_embeddings
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or self.hidden_size // self.num_heads
        self.tied: bool = config.tie_word_embeddings
        with torch.device("meta"):  # neither initialised nor in float32 first
            self.embed = nn.Embedding(self.vocab_size, self.hidden_size)
            self.layers = nn.ModuleList(DecoderLayer(config, i, self.head_dim) for i in range(self.num_layers))
            self.norm = RMSNorm(self.hidden_size, config.rms_norm_eps)
            if not self.tied:
                self.lm_head = nn.Linear(self.hidden_size, self.vocab_size, bias=False)
        self.to(dtype).to_empty(device=device)
        self._compiled: Halves | None = None
        self.rope_table: Tensor
        table = rope_table(config, self.head_dim).to(dtype)
        self.register_buffer("rope_table", table if self.embed.weight.is_meta else table.to(device), persistent=False)

    @property
    def output_weight(self) -> Tensor:
        return self.embed.weight if self.tied else self.lm_head.weight

    def drop_output_layer(self) -> None:
        """Do without logits: only `hidden` is wanted. On disk, too, the model then has no output layer of its own."""
        if not self.tied:
            del self.lm_head
            self.tied = True
            self.hf_config = type(self.hf_config).from_dict({**self.hf_config.to_dict(), "tie_word_embeddings": True})

    def compile_inference(self) -> None:
        """Compile what stands between two attentions, for passes without gradient.

        The first passes take some ten seconds each for their compilation; one result serves all layers and all sizes.
        """
        self._compiled = (
            torch.compile(DecoderLayer.before_attention, dynamic=True),
            torch.compile(DecoderLayer.after_attention, dynamic=True),
        )

    def forward(
        self, token_ids_X: Tensor, position_X: Tensor, attend: Attend, needed_W: Tensor | None = None
    ) -> Tensor:
        """Final normed hidden states of a flat list of tokens, (X, h).

        Args:
            token_ids_X, position_X: (X,) int64; positions count from 0 within each sequence.
            attend: which token sees which; called once per layer with all X tokens.
            needed_W: (W,) indices into X; the last layer then skips everything else and the result is (W, h).
        """
        x = self.embed(token_ids_X)
        cos_sin_XD = self.rope_table.index_select(0, position_X).to(x.dtype)  # a trainer may turn weights into bfloat16
        turn = rotation(*cos_sin_XD.chunk(2, dim=-1))
        has_gradient = torch.is_grad_enabled()
        halves = None if has_gradient else self._compiled
        for number, layer in enumerate(self.layers):
            needed = needed_W if number == self.num_layers - 1 else None
            if has_gradient and is_recomputed(self.checkpointing, number):
                x = again(layer, x, turn, attend, needed, halves, selective=self.checkpointing == "selective")
            else:
                x = layer(x, turn, attend, needed, halves)
        return self.norm(x)

    def hidden(self, layout: Layout, balance: LoadBalance | None = None) -> Tensor:
        if balance is not None:
            raise DataError(no_balance(self.hf_config.model_type))
        part = self.sequences.part_of(layout)
        return part.dealt(self(part.token_ids_X, part.position_X, part.attend, part.needed_W))

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", self.embed.weight.detach()
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            for name, weight in layer_weights(layer):
                yield f"model.layers.{layer.index}.{name}", weight.detach()
        yield "model.norm.weight", self.norm.weight.detach()
        if not self.tied:
            yield "lm_head.weight", self.lm_head.weight.detach()

    @property
    def aliases(self) -> tuple[str, ...]:
        return ("lm_head.weight",) if self.tied else ()


def layer_weights(layer: DecoderLayer) -> Iterator[tuple[str, Tensor]]:
    """One layer's weights under their Hugging Face names, the fused ones split into views."""
    yield "input_layernorm.weight", layer.input_norm.weight
    for name, part in _parts(layer.qkv_proj, ("q_proj", "k_proj", "v_proj"), qkv_sizes(layer)):
        yield f"self_attn.{name}", part
    if layer.qk_normed:
        yield "self_attn.q_norm.weight", layer.q_norm.weight
        yield "self_attn.k_norm.weight", layer.k_norm.weight
    for kind, weight in _parameters(layer.o_proj):
        yield f"self_attn.o_proj.{kind}", weight
    yield "post_attention_layernorm.weight", layer.post_norm.weight
    inner = layer.down_proj.weight.shape[1]
    for name, part in _parts(layer.gate_up_proj, ("gate_proj", "up_proj"), (inner, inner)):
        yield f"mlp.{name}", part
    for kind, weight in _parameters(layer.down_proj):
        yield f"mlp.down_proj.{kind}", weight


def qkv_sizes(layer: DecoderLayer) -> tuple[int, int, int]:
    """Outputs of q, k and v, in the heads of this rank."""
    q_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    return q_size, kv_size, kv_size


def _parts(linear: nn.Linear | SplitLinear, names: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Weights and biases of layers side by side, whether they are one matrix or several."""
    if isinstance(linear, SplitLinear):
        divided = [dict(_parameters(part)) for part in linear.parts]
        for kind in divided[0]:
            yield from ((f"{name}.{kind}", part[kind]) for name, part in zip(names, divided, strict=True))
        return
    for kind, fused in _parameters(linear):
        yield from ((f"{name}.{kind}", part) for name, part in zip(names, fused.split(tuple(sizes)), strict=True))


def _parameters(linear: Any) -> Iterator[tuple[str, Tensor]]:
    """Weight and bias; a layer with an adapter (lora.py) has them too, and more parameters besides."""
    yield "weight", linear.weight
    if linear.bias is not None:
        yield "bias", linear.bias


def rope_table(config: PreTrainedConfig, head_dim: int) -> Tensor:
    """(max_positions, D) float32: the cosines of D/2 angles, then their sines, with the rope type's scaling applied."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        inv_freq = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        scaling = 1.0
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float32)[:, None] * inv_freq.float()
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling
