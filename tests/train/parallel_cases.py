"""What a model makes of a microbatch, as numbers to compare: alone, and divided over the ranks of a gang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from hone.config.run import LoraSection
from hone.model.base import CausalModel
from hone.model.layout import Layout
from hone.model.load import init_model
from hone.model.logprobs import token_logprobs
from hone.model.lora import add_adapter
from hone.model.parallel import divide_layers, divide_tokens
from hone.model.sequence import HEADS, RING

SIZES = {
    "vocab_size": 62,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
RAGGED = (
    ((5, 6, 7), tuple(range(40)), (9,)),
    (0, 0, 1, 1, 2, 0, 1),
    ((1, 2, 3), (4,), (7, 8, 9, 10), tuple(range(50, 20, -1)), (), (1, 2, 3), (3, 2)),
)
"""Prompts, which of them each sample answers, and with what: one response is empty, one comes twice."""


@dataclass(frozen=True)
class Case:
    """A model and a microbatch."""

    model_type: str = "qwen3"
    keys: Mapping[str, Any] = field(default_factory=dict)
    implementation: Literal["hone", "transformers"] = "hone"
    samples: tuple[Sequence[Any], ...] = RAGGED
    checkpointing: Literal["none", "selective", "full"] = "none"
    lora: bool = False
    targets: tuple[str, ...] | None = None


@dataclass
class Found:
    """What was made of it."""

    logprobs_U: Tensor
    entropy_U: Tensor
    gradients: dict[str, Tensor]
    """Whole, under Hugging Face names, or those of an adapter's factors."""
    saved_bytes: int
    """Kept on this rank for the backward pass, by everything but the logits."""
    weight_numbers: int
    """On this rank."""


def found(case: Case, divided: Mapping[str, int] = MappingProxyType({})) -> Found:
    """The same seed, weights and loss everywhere; divided over all ranks of the process group."""
    tensor, sequence = divided.get("tensor", 1), divided.get("sequence", 1)
    model, summing = make(case), None
    if divided:
        mesh = init_device_mesh("cpu", (sequence, tensor), mesh_dim_names=("sequence", "tensor"))
        if tensor > 1:
            divide_layers(model, mesh["tensor"])
        if sequence > 1:
            divide_tokens(model, mesh["sequence"], partial(rings, sequence, tensor), tensor_parallel=tensor)
            summing = mesh["sequence"].get_group()
    weight_numbers = sum(local(p).numel() for p in model.parameters())
    layout = Layout.build(*case.samples)
    kept = SavedBytes(model)
    with kept.counting():
        hidden = model.hidden(layout)
    parts = token_logprobs(
        hidden,
        model.output_weight,
        model.sequences.share(layout.target_U),
        temperature=0.8,
        chunk_tokens=7,
        entropy_grad=True,
    )
    logprobs_U, entropy_U = (model.sequences.whole(part, len(layout.target_U)) for part in parts)
    slope_U = torch.linspace(-1, 2, len(layout.target_U), dtype=logprobs_U.dtype)
    (slope_U * logprobs_U + 0.3 * slope_U.flip(0) * entropy_U).sum().backward()
    gradients = whole_gradients(model, summing)
    return Found(logprobs_U.detach(), entropy_U.detach(), gradients, kept.total, weight_numbers)


def rings(sequence: int, tensor: int, heads: int) -> DeviceMesh:
    """See `Mesh.rings`; the ranks are one share of the samples."""
    return init_device_mesh("cpu", (sequence // heads, heads, tensor), mesh_dim_names=(RING, HEADS, "tensor"))[
        RING, HEADS
    ]


def sums_in_layers(case: Case, tensor: int) -> int:
    """How often divided layers add up over the ranks, forward and backward."""
    with CommDebugMode() as sent:
        found(case, {"tensor": tensor})
    return sum(n for op, n in sent.get_comm_counts().items() if op is torch.ops.c10d_functional.all_reduce)


def make(case: Case) -> CausalModel:
    architecture = {**SIZES, "model_type": case.model_type, **case.keys}
    model = init_model(
        architecture, vocab_size=None, seed=0, dtype=torch.float64, device="cpu", implementation=case.implementation
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, weight in model.own_weights():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    if case.lora:
        add_adapter(model, LoraSection(rank=2, targets=case.targets), seed=1, dtype=torch.float64)
        for name in model.adapter.names:
            model.adapter.factors(name)[1].fill_(0.01)
    model.checkpointing = case.checkpointing
    return model


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole_gradients(model: CausalModel, summing: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Puts gradients, summed over the ranks of a group, where weights are, and asks for the weights."""
    for parameter in model.parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        if summing is not None and parameter.requires_grad:
            dist.all_reduce(local(gradient), group=summing)
        parameter.copy_(gradient)
    named = model.adapter.weights() if model.adapter else model.own_weights()
    return {name: weight.full_tensor() if isinstance(weight, DTensor) else weight for name, weight in named}


class SavedBytes:
    """Counts the memory that autograd keeps, each piece once, without a model's weights."""

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        self._seen = {local(p).untyped_storage()._cdata: p for p in model.parameters()}

    def counting(self):
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = tensor
            self.total += storage.nbytes()
        return tensor


def vocabulary(size: int, chunk_tokens: int, divided: bool) -> tuple[Tensor, ...]:
    """Logprobs, entropies and gradients of random hidden states and an output weight of `size` rows."""
    generator = torch.Generator().manual_seed(0)
    hidden_UH = torch.randn(11, 6, generator=generator, dtype=torch.float64).requires_grad_()
    weight_VH = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    target_U = torch.randint(size, (11,), generator=generator)
    if divided:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weight_VH = distribute_tensor(weight_VH, mesh, [Shard(0)], src_data_rank=None)
    weight_VH.requires_grad_()
    logprob_U, entropy_U = token_logprobs(
        hidden_UH, weight_VH, target_U, temperature=0.7, chunk_tokens=chunk_tokens, entropy_grad=True
    )
    slope_U = torch.linspace(-1, 2, 11, dtype=torch.float64)
    (slope_U * logprob_U + slope_U.flip(0) * entropy_U).sum().backward()
    gradient = weight_VH.grad.full_tensor() if divided else weight_VH.grad
    return logprob_U.detach(), entropy_U.detach(), hidden_UH.grad, gradient


def refusal(case: Case, divided: Literal["tensor", "sequence"] = "tensor") -> str:
    """What is said where the model cannot be divided so."""
    divide = (
        divide_layers if divided == "tensor" else partial(divide_tokens, rings=partial(rings, dist.get_world_size(), 1))
    )
    try:
        divide(make(case), init_device_mesh("cpu", (dist.get_world_size(),)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
