"""Training on the ranks of a mesh: one of many that train one model together.

Every rank is given the same whole batch and takes its own share of the samples, balanced by tokens. Weights are
gathered layer by layer while they compute (`sharded_weights.py`), gradients are sums over ranks, and what was found is
exchanged, so that each rank returns what a single process would: whole columns, and the same metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hone.config.run import OptimizerSection
from hone.data.pack import Indices, Shape, divide_over_ranks
from hone.model.base import CausalModel
from hone.model.heads import ScalarModel
from hone.model.lora import AdapterOff
from hone.train.materialize import fill
from hone.train.mesh import DATA, Mesh
from hone.train.places import Place, Places, shares_of
from hone.train.ranks import Ranks
from hone.train.sharded_weights import ShardedAdamW, ShardedWeights, compile_layers, divide, shard
from hone.train.tensor_files import Share, box_of


class Sharded(Ranks):
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
        self._places: WeakKeyDictionary[nn.Module, Mapping[str, Place]] = WeakKeyDictionary()

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
            return  # the policy beneath its adapter, which is sharded already
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        if self._compile:
            compile_layers(model)
        divide(model, self.mesh)
        self._places[model] = Places(model).weights
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
            share.tensor.copy_(box_of(tensors, name, share.offset, share.tensor.shape))

    @torch.no_grad()
    def take(self, model: CausalModel, weights: Iterable[tuple[str, Tensor]]) -> None:
        shares = dict(shares_of(model, self._places[model], self.mesh))
        for name, whole in weights:
            if name in shares:  # not a buffer, which no rank divides and no training changes
                share = shares[name]
                share.tensor.copy_(box_of({name: whole}, name, share.offset, share.tensor.shape))

    def device(self, model: CausalModel) -> torch.device:
        return self.mesh.device

    def microbatches(
        self, shape: Shape, samples: Indices, tokens_per_microbatch: int, *, whole_groups: bool = False
    ) -> list[Indices]:
        ranks = self.mesh.data_parallel
        shares = divide_over_ranks(shape, samples, ranks, tokens_per_microbatch, whole_groups=whole_groups)
        return shares[self.mesh.data_index]

    def column(self, value_T: Tensor) -> Tensor:
        dist.all_reduce(value_T, group=self._data)
        return value_T

    def rows(self, measured: Sequence[Tensor]) -> list[list[float]]:
        if not measured:
            return []
        own = torch.stack(list(measured))
        every = [torch.empty_like(own) for _ in range(self.mesh.data_parallel)]
        dist.all_gather(every, own, group=self._data)
        return torch.cat(every).tolist()
