"""FSDP2 training: weights sharded over the ranks of a mesh, and AdamW on this rank's shards.

Every rank gets the same whole batch and takes its own share of the samples, balanced by tokens. Each layer is a unit
that is gathered while it computes; everything outside the layers (embedding, final norm, output layer, head) is one
more, gathered through the loss, for `output_weight` is used after the model's own forward pass. Each rank keeps its
shard of master weights (at least float32), gradients and moments. Gradients are summed over ranks, not averaged:
losses are divided by the counts of the whole optimizer step already.

Not here: what a trainer asks of ranks (`fsdp_ranks.py`), which weight is which part of a parameter (`weight_map.py`),
and files (`checkpoint.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from hone.config.run import OptimizerSection
from hone.devices import is_accelerator
from hone.model.base import CausalModel
from hone.model.decoder import Decoder
from hone.model.heads import ScalarModel
from hone.model.hf import TransformersModel
from hone.model.parallel import divide_layers, divide_tokens
from hone.model.vision import Vision
from hone.sizes import divided_dimension
from hone.train.agreement import REPLICAS, CountedComm
from hone.train.mesh import SHARD, Mesh
from hone.train.optim import MASTER, MOMENTS, AdamW, Segments, trained_weights
from hone.train.tensor_files import Share
from hone.train.weight_map import WeightMap, WeightPart, fill, sharded_parameters, share_of

T = TypeVar("T")

VISIT_BYTES = 256 << 20
"""Bytes of master weights whose moments are on the device at one time."""


def divide(model: CausalModel | ScalarModel, mesh: Mesh) -> None:
    """Divides a model's layers and sequences over ranks of the mesh, in place, where it has such dimensions."""
    body = model.body if isinstance(model, ScalarModel) else model
    if mesh.tensor is not None:
        divide_layers(body, mesh.tensor)
    if mesh.sequence is not None:
        divide_tokens(body, mesh.sequence, mesh.rings, tensor_parallel=mesh.tensor.size() if mesh.tensor else 1)


def shard(model: CausalModel | ScalarModel, mesh: Mesh, dtype: torch.dtype, *, on_host: bool) -> None:
    """Divides a model's parameters over the ranks, in place; they become `DTensor`s between passes.

    Args:
        dtype: of the gathered weights, so of the arithmetic; gradients are reduced in float32 at least.
        on_host: shares wait in host memory, where the optimizer works on them too.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))
    offload = CPUOffloadPolicy(pin_memory=is_accelerator(mesh.device)) if on_host else OffloadPolicy()
    placed = placement_over(mesh.sharding[SHARD].size())
    vision = vision_of(model)
    seeing = {module for part in vision.tower.parts() for module in part.modules()} if vision else set[nn.Module]()
    if vision is not None:
        vision.most_passes = partial(_largest, mesh=mesh)
    for module in (*layers_of(model), model):
        own = replace(policy, cast_forward_inputs=False) if module in seeing else policy  # its rotations are float32
        fully_shard(module, mesh=mesh.sharding, mp_policy=own, offload_policy=offload, shard_placement_fn=placed)
        assert isinstance(module, FSDPModule)
        if mesh.collectives.never is None:
            module.set_custom_all_gather(CountedComm(dist.all_gather_single, mesh.collectives))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(CountedComm(dist.reduce_scatter_single, mesh.collectives))  # type: ignore[arg-type]
        module.set_gradient_divide_factor(1.0)  # a sum over ranks ...
        module.set_force_sum_reduction_for_comms(True)  # ... and none that gloo does not know
        if hasattr(module, "set_reduce_scatter_unused_params"):  # not in PyTorch 2.11
            module.set_reduce_scatter_unused_params(True)  # an expert that no token of this rank was sent to
    if isinstance(model, TransformersModel):
        register_fsdp_forward_method(model, "hidden")  # it has no forward


def placement_over(ranks: int) -> Callable[[nn.Parameter], Shard]:
    """How FSDP2 is to divide each parameter over `ranks` ranks."""
    return lambda parameter: Shard(divided_dimension(parameter.shape, ranks))


def vision_of(model: CausalModel | ScalarModel) -> Vision | None:
    """What reads pictures for a model; None: nothing does."""
    body = model.body if isinstance(model, ScalarModel) else model
    return body.vision if isinstance(body, TransformersModel) else None


def _largest(number: int, *, mesh: Mesh) -> int:
    """Of those that all ranks have."""
    found = torch.tensor(number, device=mesh.device)
    mesh.collectives.run(lambda: dist.all_reduce(found, op=dist.ReduceOp.MAX))
    return int(found)


def layers_of(model: CausalModel | ScalarModel) -> list[nn.Module]:
    """The modules that repeat, in order."""
    body = model.body if isinstance(model, ScalarModel) else model
    if isinstance(body, Decoder):
        return list(body.layers)
    assert isinstance(body, TransformersModel)
    names = body.hf._no_split_modules or ()
    return [module for module in body.hf.modules() if type(module).__name__ in names]


class ShardedWeights:
    """The parameters of a model, each rank's share of them; see `optim.Weights`."""

    def __init__(self, model: CausalModel | ScalarModel, mesh: Mesh, dtype: torch.dtype, *, on_host: bool) -> None:
        self.mesh, self.device = mesh, mesh.device
        self.dtype = torch.promote_types(dtype, torch.float32)
        self._model, self._compute_dtype = model, dtype
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype if parameter.requires_grad else dtype)
        divide(model, mesh)
        places = WeightMap(model)
        self.places = places.weights
        """Of each weight, by its Hugging Face name."""
        self._buffers = places.buffers
        self._adapter = None if isinstance(model, ScalarModel) else model.adapter
        self._factors: dict[str, list[WeightPart]] = {}
        """Of the two factors of an adapter beside a weight."""
        if self._adapter is not None:
            for name, layer in self._adapter.layer_of.items():
                self._factors[name] = [places.of(factor) for factor in self._adapter.factors(layer)]
        trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        own = ((name, weight) for name, weight in trained_weights(model) if name not in places.buffers)
        of_own = {name: places.of(weight) for name, weight in own}
        self.trained_places = {name: place for name, place in of_own.items() if place.parameter in trained}
        """Of what a checkpoint has, by the name that it has there."""
        self.num_trained = sum(trained.values())
        shard(model, mesh, dtype, on_host=on_host)
        fill(model, {**places.weights, **of_own}, mesh, on_host=on_host)
        self.parameters: dict[str, DTensor] = dict(sharded_parameters(model))
        """Every parameter, trained or not."""
        self.trained: dict[str, DTensor] = {name: self.parameters[name] for name in trained}

    def passes(self, microbatches: Iterable[T]) -> Iterator[T]:
        """See `Weights.passes`: each sums gradients over shards, only the last one over replicas too."""
        parts = list(microbatches)
        root: Any = self._model
        for number, part in enumerate(parts, 1):
            root.set_requires_all_reduce(number == len(parts))
            if number == len(parts) and self.mesh.sharding.ndim > 1:
                self.mesh.collectives.apart = REPLICAS  # FSDP2 lets no one count these sums
            yield part

    def refresh(self) -> None:
        """See `Weights.refresh`: lets go of what is gathered."""
        root: Any = self._model
        root.reshard()

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """See `Weights.named`; one parameter at a time is gathered, by all ranks together."""
        return self._gathered(self._compute_dtype)

    def named_trained(self) -> Iterator[tuple[str, Tensor]]:
        """See `Weights.named_trained`; gathered as `named` does."""
        whole: dict[str, Tensor] = {}
        for name, place in self.trained_places.items():
            if place.parameter not in whole:
                whole.clear()
            yield name, self._part(place, self._compute_dtype, whole)

    def named_master(self) -> Iterator[tuple[str, Tensor]]:
        """See `Weights.named_master`; gathered as `named` does."""
        return self._gathered(self.dtype)

    def _gathered(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        whole: dict[str, Tensor] = {}
        for name, place in self.places.items():
            if place.parameter not in whole:
                whole.clear()
            weight = self._part(place, dtype, whole)
            if self._adapter is not None and name in self._factors:
                factors = [self._part(factor, dtype, whole) for factor in self._factors[name]]
                weight = self._adapter.merge(weight, *factors)
            yield name, weight
        yield from self._buffers.items()

    def _part(self, place: WeightPart, dtype: torch.dtype, whole: dict[str, Tensor]) -> Tensor:
        """A matrix or vector out of the whole parameters, to which its own is added if it is missing."""
        if place.parameter not in whole:
            parameter = self.parameters[place.parameter]
            with torch.no_grad():
                share = DTensor.from_local(
                    parameter.to_local().to(self.device, dtype),  # here, so that only those bytes travel
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                whole[place.parameter] = share.full_tensor().contiguous()
        return place.of(whole[place.parameter])


class ShardedAdamW(AdamW):
    """On a `ShardedWeights`: this rank's share of moments and work.

    Args:
        visiting: moments wait in host memory, and come to the device for their part of a step, `VISIT_BYTES` at a time.
    """

    def __init__(
        self, weights: ShardedWeights, settings: OptimizerSection, *, total_steps: int, visiting: bool = False
    ) -> None:
        super().__init__(settings, total_steps=total_steps)
        self._weights = weights
        self._local = {name: nn.Parameter(p.to_local().detach()) for name, p in weights.trained.items()}
        decayed = [self._local[name] for name, p in weights.trained.items() if p.dim() >= 2]
        rest = [self._local[name] for name, p in weights.trained.items() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self._visits = list(_parts(self._local, VISIT_BYTES)) if visiting else [list(self._local)]
        self._moments = {
            name: {moment: _zeros_like(p, on_host=visiting) for moment in MOMENTS}
            for name, p in weights.trained.items()
        }
        shares = {
            local: {moment: divided.to_local() for moment, divided in self._moments[name].items()}
            for name, local in self._local.items()
        }
        self._begin_adam(groups, shares)

    @property
    def weights(self) -> ShardedWeights:
        return self._weights

    def _gradients(self) -> Iterator[tuple[DTensor, Tensor]]:
        """Each trained parameter and this rank's share of its gradient; none where no pass was made."""
        for parameter in self._weights.trained.values():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                yield parameter, parameter.grad.to_local()

    def _gradient_norm(self) -> float:
        device = self._weights.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if gradients := list(self._gradients()):
            # Every rank adds its share of what is divided, and its part of what several have: one sum over all.
            norms = torch.stack(torch._foreach_norm([gradient for _, gradient in gradients]))  # type: ignore[arg-type]
            copies = torch.tensor([_copies(parameter) for parameter, _ in gradients], dtype=torch.float64)
            total += (norms.to(device, torch.float64).square() / copies.to(device)).sum()
        self._weights.mesh.collectives.run(lambda: dist.all_reduce(total))
        return math.sqrt(float(total))

    def _scale_gradient(self, factor: float) -> None:
        if gradients := [gradient for _, gradient in self._gradients()]:
            torch._foreach_mul_(gradients, factor)  # type: ignore[attr-defined]

    def _apply(self) -> None:
        for names in self._visits:
            for name in names:
                local, gradient = self._local[name], self._weights.trained[name].grad
                assert gradient is None or isinstance(gradient, DTensor), name
                local.grad = torch.zeros_like(local) if gradient is None else gradient.to_local()
                state = self._adam.state[local]
                for moment in MOMENTS:
                    state[moment] = state[moment].to(local.device, non_blocking=True)
            self._adam.step()
            for name in names:
                local = self._local[name]
                local.grad = None  # the next visit is of others
                state = self._adam.state[local]
                for moment, divided in self._moments[name].items():
                    waiting = divided.to_local()
                    if waiting.device != local.device:
                        waiting.copy_(state[moment])
                    state[moment] = waiting

    def _clear_gradient(self) -> None:
        for parameter in self._weights.trained.values():
            parameter.grad = None

    def _sizes(self) -> Segments:
        return [(name, place.size) for name, place in self._weights.trained_places.items()]

    def _tensors(self) -> Iterator[tuple[str, Share]]:
        for name, place in self._weights.trained_places.items():
            parameter = place.parameter
            of_place = partial(share_of, place, self._weights.trained[parameter], self._weights.mesh)
            yield f"{MASTER}/{name}", of_place(self._local[parameter])
            for moment, divided in self._moments[parameter].items():
                yield f"{moment}/{name}", of_place(divided.to_local())


def _zeros_like(parameter: DTensor, *, on_host: bool) -> DTensor:
    """Divided as a parameter is, with each rank's share on the host if it is to wait there."""
    if on_host and is_accelerator(parameter.to_local().device):
        host = torch.zeros_like(parameter, device="cpu", pin_memory=True, requires_grad=False)
    else:
        host = torch.zeros_like(parameter, requires_grad=False)
    assert isinstance(host, DTensor)
    return host


def _parts(tensors: Mapping[str, Tensor], most_bytes: int) -> Iterator[list[str]]:
    """Names, as many at a time as tensors have `most_bytes` together, or one."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > most_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names


def _copies(parameter: DTensor) -> int:
    """How many ranks have each number of a parameter, also ones that it knows nothing of."""
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return dist.get_world_size() // math.prod(size for placement, size in sizes if not placement.is_replicate())
