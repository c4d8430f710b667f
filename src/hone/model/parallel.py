"""Tensor parallelism; sequence parallelism is in `sequence.py`.

Each layer's matrices are divided over ranks, and every rank sees all tokens.

Attention heads and feed-forward widths are divided: q, k, v, gate and up by output, o and down by input, so that a
layer adds up two times over the ranks, forward and backward alike. The vocabulary is divided too, in the embedding and
in the output layer (`logprobs.py` adds up what a softmax needs), where the ranks divide its size; else both are whole
on every rank, as norms are. Weights become DTensors, which FSDP2 shards further and checkpoints know the place of.

Hone's own decoder, and Transformers' classes by the plan that they bring. Not here: who the ranks are
(`train/mesh.py`), and what else is divided between them (`train/fsdp.py`).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hone.config.rules.division import trained_layers_divide
from hone.errors import DataError
from hone.model.base import CausalModel
from hone.model.decoder import Decoder, DecoderLayer, SplitLinear, parts_of, qkv_sizes
from hone.model.hf import TransformersModel, has_tower
from hone.model.lora import PEFT_NAME, DecoderAdapter
from hone.model.low_rank import FusedLinear
from hone.model.sequence import SequenceGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedConfig, PreTrainedModel


def divide_layers(model: CausalModel, mesh: DeviceMesh) -> None:
    """Divide a model's layers over the ranks of a mesh of one dimension, in place.

    Every rank has the same whole model before, and calls this; afterwards it holds its part.

    Raises:
        DataError: heads or widths that the ranks do not divide, or an architecture without a plan.
    """
    refuse_indivisible(model.hf_config, tensor_parallel=mesh.size())
    if isinstance(model, Decoder):
        _divide_decoder(model, mesh)
    elif isinstance(model, TransformersModel):
        divide_class(model.hf, mesh)
    else:
        raise TypeError(f"no tensor-parallel plan for a {type(model).__name__}")


def divide_tokens(
    model: CausalModel, mesh: DeviceMesh, rings: Callable[[int], DeviceMesh], *, tensor_parallel: int = 1
) -> None:
    """Divide the tokens of a model's microbatches over the ranks of a mesh of one dimension; weights stay whole.

    Args:
        rings: makes `SequenceGroup.rings` of the mesh, by how many of its ranks exchange heads.
        tensor_parallel: ranks that the layers are divided over besides: both divide the heads.
    Raises:
        DataError: heads that the ranks do not divide, or a class of Transformers' that computes padded rows.
    """
    has_ring = isinstance(model, Decoder)
    refuse_indivisible(
        model.hf_config, tensor_parallel=tensor_parallel, sequence_parallel=mesh.size(), has_ring=has_ring
    )
    if isinstance(model, TransformersModel):
        why = "its pictures are whole on every rank" if has_tower(model.hf_config) else model.why_rows
        if why:
            raise DataError(
                f"cluster.trainer.sequence_parallel > 1: the tokens of Transformers' class for "
                f"{model.hf_config.model_type} cannot be divided: {why}. Set it to 1."
            )
    kv_heads = getattr(model.hf_config, "num_key_value_heads", None) or model.hf_config.num_attention_heads
    heads = math.gcd(mesh.size(), kv_heads // tensor_parallel)
    is_ring = has_ring and heads < mesh.size()
    model.sequences = SequenceGroup(mesh.get_group(), rings(heads) if is_ring else None)


def refuse_indivisible(
    config: PreTrainedConfig, *, tensor_parallel: int = 1, sequence_parallel: int = 1, has_ring: bool = False
) -> None:
    """Raises DataError where heads or widths cannot be divided over these numbers of ranks.

    Args:
        has_ring: whether sequences may be divided further than heads.
    """
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    shape = {name: getattr(config, name, None) for name in names}  # by these names whatever its config.json calls them
    for breach in trained_layers_divide(shape, tensor_parallel, 1 if has_ring else sequence_parallel):
        raise DataError(f"{breach.keys[0]} {breach.message}")


def _divide_decoder(model: Decoder, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {}
    if model.vocab_size % mesh.size() == 0:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate())
        if not model.tied:
            plan["lm_head"] = ColwiseParallel()
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        inner = layer.down_proj.weight.shape[1]
        layer.qkv_proj = _split(model, layer.qkv_proj, qkv_sizes(layer))
        layer.gate_up_proj = _split(model, layer.gate_up_proj, (inner, inner))
        layer.num_heads //= mesh.size()
        layer.num_kv_heads //= mesh.size()
        layer.tensor_group = mesh.get_group()
        for name, child in layer.named_children():
            path = f"layers.{layer.index}.{name}"
            if isinstance(child, SplitLinear):
                # Gradients of the one input are added up on each rank before over the ranks.
                plan[path] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
                for number, part in enumerate(child.parts):
                    plan[_base_of(f"{path}.parts.{number}", part)] = ColwiseParallel()
            elif name in ("o_proj", "down_proj"):
                plan[_base_of(path, child)] = RowwiseParallel()
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for path, module in model.named_modules():
        if isinstance(module, FusedLinear):
            module.divide(mesh, by="outputs" if ".parts." in path else "inputs")


def _split(model: Decoder, fused: nn.Module, sizes: Sequence[int]) -> SplitLinear:
    """A fused layer, with an adapter or without, as its parts."""
    if not isinstance(fused, FusedLinear):
        assert isinstance(fused, nn.Linear)
        return SplitLinear(parts_of(fused, sizes))
    parts = fused.split()
    assert isinstance(model.adapter, DecoderAdapter)
    model.adapter.replace(fused, parts)
    return SplitLinear(parts)


def _base_of(path: str, layer: nn.Module) -> str:
    """Where a layer's own weight is, which an adapter wraps."""
    return f"{path}.base_layer" if isinstance(layer, FusedLinear) else path


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
"""What Transformers' plans call a layer's part. The last is of norms of q and k, whose input is (B, L, heads, D)."""


def divide_class(hf: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide a model of Transformers' own class, by its plan; see `divide_layers`."""
    embedding, output = hf.get_input_embeddings(), hf.get_output_embeddings()
    assert embedding is not None and output is not None
    tied = output.weight is embedding.weight
    plan = _own_plan(hf)
    if len(output.weight) % mesh.size() == 0:
        path_of = {module: path for path, module in hf.named_modules()}
        plan[path_of[embedding]] = RowwiseParallel(input_layouts=Replicate())
        if not tied:
            plan[path_of[output]] = ColwiseParallel()
    is_trained = {name: parameter.requires_grad for name, parameter in hf.named_parameters()}
    parallelize_module(hf, mesh, plan, src_data_rank=None)
    if tied:
        output.weight = embedding.weight
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(is_trained[name])  # `SequenceParallel` forgets it


def _own_plan(hf: PreTrainedModel) -> dict[str, ParallelStyle]:
    """The plan that a class brings, without embedding and output layer."""
    places = [name for name, _ in (*hf.named_modules(), *hf.named_parameters())]
    ends = (hf.get_input_embeddings(), hf.get_output_embeddings())
    at_ends = {path for path, module in hf.named_modules() if module in ends}
    plan: dict[str, str] = hf.tp_plan or {}
    words = {path: word for path, word in plan.items() if path not in at_ends and fnmatch.filter(places, path)}
    unknown = sorted({word for word in words.values() if word not in STYLES})
    if unknown or not words:
        why = f"its plan asks for {', '.join(unknown)}, which Hone does not do" if unknown else "it has no plan"
        raise DataError(
            f"cluster.trainer.tensor_parallel > 1: Transformers' class for {hf.config.model_type} cannot be "
            f"divided: {why}. Set it to 1: `shard` divides the weights of every model."
        )
    styles: dict[str, ParallelStyle] = {}
    for path, word in words.items():
        if not fnmatch.filter(places, f"{path}.base_layer"):
            styles[path] = STYLES[word]()
            continue
        # peft's layer: of its two thin ones that is divided which has the divided outputs or inputs.
        thin = "lora_B" if word.startswith("colwise") else "lora_A"
        styles[f"{path}.base_layer"], styles[f"{path}.{thin}.{PEFT_NAME}"] = STYLES[word](), STYLES[word]()
    return styles
