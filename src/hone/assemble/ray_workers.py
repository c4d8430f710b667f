"""Ray processes of a run: trainer ranks, engines, judges and reward models. What they make is in `processes.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hone.assemble.job import Job
from hone.assemble.models import pair_trainer, restore, rl_roles, roles_of_needs, sft_trainer, starting_folder
from hone.assemble.processes import ActorSpec, MakeHeld, engine, rank
from hone.assemble.scoring import Scoring
from hone.cluster.actors import EngineActor, TrainerRank
from hone.cluster.calls import kill
from hone.cluster.engine import RemoteEngine
from hone.cluster.ranks import RankGroup
from hone.cluster.ray import RayCluster
from hone.cluster.trainer import RemoteLearner, RemotePairTrainer, RemoteTrainer
from hone.config.cluster import Role
from hone.config.topology import TRAINED, in_words, transport_of
from hone.errors import PlacementError
from hone.loop.run import Offloadable
from hone.rollout.engine import Engine
from hone.rollout.router import Router
from hone.runtime.processes import together
from hone.train.checkpoint import SavedCheckpoint
from hone.weights.buckets import bucket_bytes
from hone.weights.routes import Routes
from hone.weights.transports import TransportName

L = TypeVar("L", bound=RemoteLearner)


class RayWorkers:
    """The Ray processes of a run: trainer ranks, engines, judges and reward models."""

    def __init__(self, job: Job, cluster: RayCluster, spec: ActorSpec) -> None:
        self._job, self.cluster, self._spec = job, cluster, spec
        self._settings = job.config.cluster
        self.processes: dict[str, Any] = {}
        """Handles of the processes started last, by name."""
        self._trainer: RemoteLearner | None = None
        self._engines: dict[str, RemoteEngine] = {}
        self._replicas = {replica.name: replica for replica in job.topology.engines}
        self._model_folder: Path | None = None  # for engines that start from one
        self._scores = False  # whether judges and reward models are there
        self.scoring = Scoring(
            job, spec.loaded, spawn=self._spawn, processes=self._processes, is_one_machine=cluster.is_own
        )

    async def sft_trainer(self, steps: int, saved: SavedCheckpoint | None) -> RemoteTrainer:
        """Start the ranks of a supervised stage's trainer, and nothing else."""
        group = self._trainer_group(partial(sft_trainer, steps=steps))
        timeout_s, bucket = self._settings.call_timeout_s, bucket_bytes(self._settings.bucket_mib)
        return await self._begun(
            RemoteTrainer(group, timeout_s=timeout_s, bucket_size=bucket, adopt=self._job.memory.ladder.adopt), saved
        )

    async def pair_learner(self, steps: int, saved: SavedCheckpoint | None) -> RemotePairTrainer:
        """Like `sft_trainer`, for a reward model."""
        group = self._trainer_group(partial(pair_trainer, steps=steps))
        return await self._begun(
            RemotePairTrainer([group], timeout_s=self._settings.call_timeout_s, adopt=self._job.memory.ladder.adopt),
            saved,
        )

    async def assemble(self, needs: frozenset[str], saved: SavedCheckpoint | None) -> tuple[RemoteTrainer, Router]:
        """Start all missing processes, and wait until each has made its part.

        At once, unless trainer and engines have the same devices: then the engines come first and are offloaded, for
        vLLM measures how much memory of a device is free, and nothing else may take or give back any meanwhile.
        """
        started = time.monotonic()
        if self._settings.engines.kind.needs_folder and self._model_folder is None:
            self._model_folder = await asyncio.to_thread(starting_folder, self._job)
        kept = await self._healthy_engines()
        trainer = self._trainer = self._new_trainer(needs)
        if self.scoring.shares_devices:
            await self._prepare_scoring()
            first = [self._start_engines(kept)]
        else:
            first = [self._prepare_scoring(), self._start_engines(kept)]

        async def start_trainer() -> dict[str, int]:
            return await asyncio.to_thread(self._start_trainer, trainer, saved)

        if self._job.topology.sleeps("rollout"):
            await together(first)
            router = self._new_router()
            await router.sleep()  # the first publish wakes them
            pids = await start_trainer()
        else:
            *_, pids = await together([*first, start_trainer()])
            router = self._new_router()
        observer, topology = self._job.observer, self._job.topology
        num_ranks = len(topology.trainer.devices)
        seconds = time.monotonic() - started
        others = "".join(f", of {' and '.join(roles)}: {len(devices)}" for roles, devices in self._apart())
        engines = f"{len(self._engines)}{f', {len(kept)} of them as they were' if kept else ''}"
        observer.say(f"trainer ranks: {num_ranks}{others}, engines: {engines}; ready after {seconds:.1f} s")
        observer.event("trainer_up", ranks=num_ranks, pids=pids)
        return trainer, router

    async def _start_engines(self, kept: set[str]) -> None:
        """Start the engines that are not there."""
        await together([self.start_engine(name) for name in self._replicas.keys() - kept])

    def _new_router(self) -> Router:
        settings = self._settings
        return Router(
            self._engines,
            self._job.observer,
            # Half of what a group may take, so that another engine can still draw what this one has left.
            silence_s=min(settings.call_timeout_s, self._job.config.rollout.timeout_s / 2),
            call_s=3 * settings.call_timeout_s,  # publishing itself takes up to twice that: `RemoteTrainer.publish`
            patience_s=settings.start_timeout_s,
            restart=self.start_engine,
            restarts=settings.restarts,
            start_s=settings.start_timeout_s,
            ends_replicas=False,
        )

    def colocated(self, engine: Engine) -> tuple[Offloadable, ...]:
        """See `PolicyRun.colocated`."""
        engines = (engine,) if self._job.topology.sleeps("rollout") else ()
        return (*engines, self.scoring) if self.scoring.sleeps else engines

    def end_silent(self, name: str, actor: Any) -> None:
        """Kill a process that answers no heartbeat; its supervisor restarts it."""
        bound = f"cluster.heartbeat_timeout_s = {self._settings.heartbeat_timeout_s:g}"
        kill(actor, f"It was killed because it answered no heartbeat ({bound}): it was stopped or deadlocked.")

    async def end_trainer(self) -> None:
        """Stop the trainer's ranks only."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            await asyncio.to_thread(trainer.close)

    async def dismiss(self) -> None:
        """End all processes."""
        await self.scoring.close()
        await self.end_trainer()
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    async def _healthy_engines(self) -> set[str]:
        """Names of the previous attempt's engines that can be published to; the others are ended."""
        engines = list(self._engines.values())
        are_well = await asyncio.gather(*(engine.is_well() for engine in engines))
        ill = [engine for engine, is_well in zip(engines, are_well, strict=True) if not is_well]
        await asyncio.gather(*(engine.close() for engine in ill))
        return {engine.name for engine in engines} - {engine.name for engine in ill}

    async def _prepare_scoring(self) -> None:
        """Start judges and reward models, or offload those of the previous attempt."""
        if self._scores:
            await self.scoring.sleep()
        else:
            await self.scoring.start()
            self._scores = True

    async def _begun(self, trainer: L, saved: SavedCheckpoint | None) -> L:
        """A started trainer of a stage without engines."""
        self._trainer, started = trainer, time.monotonic()
        pids = await asyncio.to_thread(self._start_trainer, trainer, saved)
        seconds, num_ranks = time.monotonic() - started, len(self._job.topology.trainer.devices)
        self._job.observer.say(f"trainer ranks: {num_ranks}; ready after {seconds:.1f} s")
        self._job.observer.event("trainer_up", ranks=num_ranks, pids=pids)
        return trainer

    def _trainer_group(self, make: MakeHeld) -> RankGroup:
        """The trainer's ranks, without other processes on their machines' cores."""
        topology = self._job.topology
        machines = [device // topology.devices_per_node for device in topology.trainer.devices]
        return self._policy_group(make, processes=machines.count(machines[0]), takes_turns=False)

    def _policy_group(self, make: MakeHeld, *, processes: int, takes_turns: bool) -> RankGroup:
        ranks = self._spawn_ranks("rank", self._job.topology.trainer.devices)
        return RankGroup("trainer", ranks, partial(rank, self._spec, processes, make), takes_turns=takes_turns)

    def _new_trainer(self, needs: frozenset[str]) -> RemoteTrainer:
        devices, timeout_s = self._job.topology.trainer.devices, self._settings.call_timeout_s
        groups: dict[Role, RankGroup] = {}
        for roles, others in self._apart():
            ranks = self._spawn_ranks(roles[0], others)
            make = partial(rank, self._spec, self._processes(roles[0], others), partial(rl_roles, held=roles))
            group = RankGroup(" and ".join(roles), ranks, make, takes_turns=self._sharers(others) > 1)
            groups |= dict.fromkeys(roles, group)
        return RemoteTrainer(
            self._policy_group(
                partial(rl_roles, held=roles_of_needs(needs) - groups.keys()),
                processes=self._processes("policy", devices),
                takes_turns=self._sharers(devices) > 1,
            ),
            critic=groups.get("critic"),
            reference=groups.get("reference"),
            reference_refresh_every=self._job.config.algorithm.reference_refresh_every,
            routes=self._routes(),
            timeout_s=timeout_s,
            bucket_size=bucket_bytes(self._settings.bucket_mib),
            adopt=self._job.memory.ladder.adopt,
            warn=self._job.observer.warn,
        )

    def _routes(self) -> Routes:
        """How weights get to the engines: with CUDA IPC from the rank on the same GPU, else from rank 0."""
        job, trainer, engines = self._job, self._job.topology.trainer, self._job.topology.engines
        on_gpu = job.device.type == "cuda"  # on Ascend NPUs weights go through Ray's object store
        transport = transport_of(job.config, job.topology, on_gpu=on_gpu)
        if transport == "ipc" and not on_gpu:
            raise PlacementError("cluster.transport = ipc shares a GPU's memory, and no GPU was found. Nearest: auto.")
        if job.config.lora.publish == "adapter":  # small, and read by vLLM from a directory
            transport = "ray"
        job.observer.say(f"new weights go through {in_words(transport, on_gpu=on_gpu)}")
        if transport == "ipc":
            ranks = {engine.name: tuple(map(trainer.devices.index, engine.devices)) for engine in engines}
        elif transport == "group":  # each rank has all tensors for a moment, so each sends to its share of the engines
            ranks = {engine.name: (number % len(trainer.devices),) for number, engine in enumerate(engines)}
        else:
            ranks = {}
        name: TransportName = ("nccl" if on_gpu else "gloo") if transport == "group" else transport
        machines = {engine.name: engine.nodes[0] for engine in engines}
        workers = self._settings.engines.tensor_parallel_size
        return Routes(name, ranks, workers, machines, sender_machine=trainer.nodes[0])

    def _spawn_ranks(self, name: str, devices: Sequence[int]) -> list[Any]:
        timeout_s = self._settings.call_timeout_s
        return [self._spawn(f"{name}-{n}", TrainerRank, (device,), timeout_s) for n, device in enumerate(devices)]

    def _apart(self) -> list[tuple[tuple[Role, ...], tuple[int, ...]]]:
        """Roles outside the policy's ranks, with their devices."""
        topology = self._job.topology
        return [(roles, pool.devices) for pool in topology.pools if (roles := topology.apart.get(pool.name))]

    def _start_trainer(self, trainer: RemoteLearner, saved: SavedCheckpoint | None) -> dict[str, int]:
        pids = trainer.start(is_one_machine=self.cluster.is_own, timeout_s=self._settings.start_timeout_s)
        restore(trainer, saved)
        return pids

    async def start_engine(self, name: str) -> RemoteEngine:
        """Start an engine, or start it again after its process has ended."""
        devices, topology = self._replicas[name].devices, self._job.topology
        started = RemoteEngine(name, self._spawn(name, EngineActor, devices), timeout_s=self._settings.call_timeout_s)
        self._engines[name] = started
        make = partial(
            engine,
            self._spec,
            self._processes("rollout", devices),
            self._model_folder,
            takes_turns=topology.sleeps("rollout"),
            among=(len(topology.engines), topology.devices_per_node),
        )
        try:
            await started.build(make, timeout_s=self._settings.start_timeout_s)
        except BaseException:
            await started.close()
            raise
        return started

    def _spawn(self, name: str, actor: type, devices: Sequence[int], *args: Any) -> Any:
        """An actor on devices that it may share with others that take turns."""
        topology = self._job.topology
        numbers = sorted(device for pool in topology.pools for device in pool.devices)
        process = self.cluster.spawn(
            actor,
            *args,
            devices=[numbers.index(device) for device in devices],
            shared_by=self._sharers(devices),
            env=self._settings.env,
        )
        if hasattr(actor, "ping"):
            self.processes[name] = process
        return process

    def _sharers(self, devices: Sequence[int]) -> int:
        """Largest number of processes on one of these devices, colocated ones included."""
        return max(self._job.topology.processes_on(device) for device in devices)

    def _processes(self, role: Role, devices: Sequence[int]) -> int:
        """How many processes compute on the same machine at the same time, if its cores are what they compute with."""
        topology = self._job.topology
        machine = devices[0] // topology.devices_per_node
        pools = {pool.name: pool for pool in topology.pools}
        learning = [topology.trainer.devices]
        learning += [pools[name].devices for name, roles in topology.apart.items() if "critic" in roles]
        sampling = [one.devices for one in (*topology.engines, *topology.judges, *topology.reward_models)]
        beside = {"reference": [devices]}.get(role, learning if role in TRAINED else sampling)
        if self._job.config.rollout.max_staleness:  # all work at the same time
            beside = [*learning, *sampling]
        return sum(device // topology.devices_per_node == machine for devices in beside for device in devices)
