"""Factories that run inside Ray actors: a rank of the trainer, of a critic or a reference, or an engine.

Each makes its model itself, from the run file and from the weights that the stage before left on the shared disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name

import torch

from hone.assemble.job import set_up_arithmetic
from hone.assemble.memory import pair_knobs, rank_ladder, rank_predictor, trainer_knobs
from hone.assemble.models import starting_model, tokenizer_of
from hone.assemble.sampling import embedded_engine
from hone.cluster.actors import Seat
from hone.config.load import Loaded
from hone.config.topology import is_sharded
from hone.data.chat import Tokenizer
from hone.devices import is_accelerator
from hone.memory.guard import UNGUARDED, Guard
from hone.model.base import CausalModel
from hone.rollout.engine import Engine
from hone.run.folder import RunFolder
from hone.train.fsdp_ranks import FsdpRanks
from hone.train.mesh import make_mesh, process_group
from hone.train.pairs import PairTrainer
from hone.train.ranks import ALONE, Ranks
from hone.train.roles import Roles
from hone.types import Progress


@dataclass(frozen=True)
class ActorSpec:
    """What an actor needs to make its part; pickled to it."""

    loaded: Loaded
    """Its paths hold wherever the process starts."""
    run_dir: Path
    device_type: str
    """torch's name of the devices that the run has."""


@dataclass
class ActorContext:
    """A `models.Source` in a Ray actor."""

    loaded: Loaded
    folder: RunFolder
    tokenizer: Tokenizer
    device: torch.device
    guard: Guard = UNGUARDED
    model_folder: Path | None = None
    """`models.starting_folder`, for an engine that needs it."""
    takes_turns: bool = False
    """Whether engines share devices with the trainer and sleep while it works."""
    among: tuple[int, int] = (1, 1)
    """Engines of the run that share its samples, and devices of a machine: those of a CPU share its memory."""

    @classmethod
    def of(cls, spec: ActorSpec, processes: int) -> ActorContext:
        """Set the process up. `processes`: how many of them compute on this machine at a time."""
        loaded = spec.loaded
        # What the driver found, or a failure: a rank on a CPU among others on GPUs would be no replacement.
        device = set_up_arithmetic(loaded.config.run.model_copy(update={"device": spec.device_type}), processes)
        if is_accelerator(device):
            device = torch.device(device.type, 0)  # Ray shows each process its own alone
        return cls(loaded, RunFolder(spec.run_dir), tokenizer_of(loaded), device)


MakeHeld = Callable[[ActorContext, Ranks], Roles | PairTrainer]
"""Makes what a rank holds, such as `models.rl_roles`."""


@contextmanager
def rank(spec: ActorSpec, processes: int, make: MakeHeld, seat: Seat) -> Iterator[Roles | PairTrainer]:
    """One rank with what `make` makes, among the others if there are any."""
    with rank_among_others(spec, processes, seat) as (context, ranks):
        ladder = rank_ladder(spec.loaded, spec.run_dir, context.device, ranks)
        if isinstance(ranks, FsdpRanks):
            # No rank ever has a whole model: it is made on device meta, and filled when each rank's shares are known.
            context = replace(context, device=torch.device("meta"))
        held = make(replace(context, guard=ladder), ranks)
        ladder.begin(Progress(), rank_predictor(spec.loaded, ladder))
        config = spec.loaded.config
        ladder.bind(*(pair_knobs(held, config) if isinstance(held, PairTrainer) else trainer_knobs(held, config)))
        yield held


@contextmanager
def rank_among_others(spec: ActorSpec, processes: int, seat: Seat) -> Iterator[tuple[ActorContext, Ranks]]:
    """Where a rank makes what it holds, and the ranks that it computes with."""
    context = ActorContext.of(spec, processes)
    cluster, layout = spec.loaded.config.cluster, spec.loaded.config.cluster.trainer
    if not is_sharded(layout, seat.world_size):
        yield context, ALONE
        return
    with process_group(
        context.device,
        rank=seat.rank,
        world_size=seat.world_size,
        address=seat.address,
        timeout_s=2 * cluster.call_timeout_s,  # others wait for one that sends weights, which waits for an engine
    ):
        mesh = make_mesh(
            context.device,
            shard=layout.shard,
            tensor_parallel=layout.tensor_parallel,
            sequence_parallel=layout.sequence_parallel,
        )
        yield context, FsdpRanks(mesh, offload=layout.offload, compile=layout.compile)


async def engine(
    spec: ActorSpec, processes: int, model_folder: Path | None, *, takes_turns: bool, among: tuple[int, int] = (1, 1)
) -> Engine:
    """One engine of the kind that the run file names, which waits for weights."""
    context = ActorContext.of(spec, processes)
    context = replace(context, model_folder=model_folder, takes_turns=takes_turns, among=among)
    return await resolve_name(spec.loaded.config.cluster.engines.kind.start)(context)


async def start_own(context: ActorContext) -> Engine:
    """Hone's own engine, with a model of its own."""
    config = context.loaded.config

    def make() -> CausalModel:
        model = starting_model(context, "rl").requires_grad_(False)
        for parameter in model.parameters():  # buffers stay as the trainer has them
            parameter.data = parameter.data.to(getattr(torch, config.run.compute_dtype))
        return model

    # Every thread that computes has OpenMP threads of its own; where they are more than cores, all wait for each other
    # in the kernel, and sampling took twice as long. So these end before the engine's thread begins.
    with ThreadPoolExecutor(1) as passing:
        model = await asyncio.get_running_loop().run_in_executor(passing, make)
    return embedded_engine(config, context.tokenizer, model, among=context.among)
