"""Ranks of a mesh that train with FSDP2 (`fsdp.py`): what a trainer asks of them, as of one process (`ranks.py`).

Measurements are exchanged, so that each rank returns what a single process would: whole columns, and the same metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hone.config.run import OptimizerSection
from hone.data.pack import Shape, divide_over_ranks
from hone.errors import DataError
from hone.model.base import CausalModel
from hone.model.decoder import Decoder
from hone.model.heads import ScalarModel
from hone.model.lora import AdapterOff
from hone.ragged import Ints
from hone.train.fsdp import ShardedAdamW, ShardedWeights, divide, layers_of, shard, vision_of
from hone.train.mesh import DATA, Mesh
from hone.train.ranks import Ranks
from hone.train.tensor_files import Share
from hone.train.weight_map import WeightMap, WeightPart, fill, shares_of

T = TypeVar("T")


def compile_layers(model: CausalModel | ScalarModel) -> None:
    """Lets layers of Transformers' classes be compiled when they first compute, each kind of layer once.

    Raises DataError for Hone's own decoder.
    """
    body = model.body if isinstance(model, ScalarModel) else model
    if isinstance(body, Decoder):
        raise DataError(
            f"cluster.trainer.compile = true: {body.hf_config.model_type} runs in Hone's own decoder, where "
            "run.fused_kernels compiles what is not a matrix product or attention. Set cluster.trainer.compile=false."
        )
    for layer in layers_of(body):
        layer.compile(dynamic=True)


def _forget_pictures(model: CausalModel) -> None:
    if (vision := vision_of(model)) is not None:
        vision.forget()


class FsdpRanks(Ranks):
    """The ranks of a mesh.

    Args:
        offload: what waits in host memory while it is not used: `parameters` (master weights with their gradients and
            moments, and the optimizer works there), `optimizer` (moments, which visit the device), `reference`.
        compile: whether layers are compiled, in the first passes.
    """

    def __init__(self, mesh: Mesh, *, offload: Sequence[str] = (), compile: bool = False) -> None:
        self.mesh = mesh
        self._compile = compile
        self._offload = frozenset(offload)
        self._data = mesh.samples[DATA].get_group()
        self._places: WeakKeyDictionary[nn.Module, Mapping[str, WeightPart]] = WeakKeyDictionary()

    def reset(self) -> None:
        """Bring all models back to before a pass that failed on this rank."""
        for root in cast(Iterable[Any], self._places):
            if root._get_fsdp_state()._is_root is not None:  # else no pass has begun
                root.reset_iter_state()

    def optimizer(
        self, model: CausalModel | ScalarModel, dtype: torch.dtype, *, settings: OptimizerSection, total_steps: int
    ) -> ShardedAdamW:
        if self._compile:
            compile_layers(model)
        weights = ShardedWeights(model, self.mesh, dtype, on_host="parameters" in self._offload)
        self._places[model] = weights.places
        return ShardedAdamW(weights, settings, total_steps=total_steps, visiting="optimizer" in self._offload)

    def freeze(self, model: CausalModel, dtype: torch.dtype) -> None:
        if not list(model.requires_grad_(False).parameters()):
            return  # the base model of the policy, which is sharded already
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        if self._compile:
            compile_layers(model)
        divide(model, self.mesh)
        self._places[model] = WeightMap(model).weights
        on_host = "reference" in self._offload
        shard(model, self.mesh, dtype, on_host=on_host)
        fill(model, self._places[model], self.mesh, on_host=on_host)

    @contextmanager
    def computing(self, model: CausalModel | ScalarModel) -> Iterator[None]:
        yield
        root: Any = model.policy if isinstance(model, AdapterOff) else model
        root.reshard()

    def tensors(self, model: CausalModel) -> dict[str, Tensor | Share]:
        return dict(shares_of(model, self._places[model], self.mesh))

    def load(self, model: CausalModel, tensors: Mapping[str, Tensor | Share]) -> None:
        for name, share in shares_of(model, self._places[model], self.mesh):
            share.take(tensors, name)
        _forget_pictures(model)

    @torch.no_grad()
    def take(self, model: CausalModel, weights: Iterable[tuple[str, Tensor]]) -> None:
        shares = dict(shares_of(model, self._places[model], self.mesh))
        for name, whole in weights:
            if name in shares:  # not a buffer, which no rank divides and no training changes
                shares[name].take({name: whole}, name)
        _forget_pictures(model)

    def device(self, model: CausalModel) -> torch.device:
        return self.mesh.device

    def microbatches(
        self, shape: Shape, samples: Ints, tokens_per_microbatch: int, *, whole_groups: bool = False
    ) -> list[Ints]:
        ranks = self.mesh.data_parallel
        shares = divide_over_ranks(shape, samples, ranks, tokens_per_microbatch, whole_groups=whole_groups)
        own = shares[self.mesh.samples[DATA].get_local_rank()]
        return [part[:0] for part in own] if self.mesh.collectives.is_standing_in else own

    def column(self, value_T: Tensor) -> Tensor:
        self.mesh.collectives.run(lambda: dist.all_reduce(value_T, group=self._data))
        return value_T

    def rows(self, measured: Sequence[Tensor]) -> list[list[float]]:
        if not measured:
            return []
        own = torch.stack(list(measured))
        every = [torch.empty_like(own) for _ in range(self.mesh.data_parallel)]
        dist.all_gather(every, own, group=self._data)
        return torch.cat(every).tolist()
