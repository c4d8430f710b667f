"""Judges and reward models on devices of the cluster.

A judge is a service, started on its devices and supervised by the run's `Services`; a reward model is a Ray actor. Both
are offloaded while the trainer works on their devices, and awake while engines sample: a sample is scored when it is
finished.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from hone.assemble.job import Job, set_up_arithmetic
from hone.cluster.calls import START_KEY, wait_for_one
from hone.cluster.scorers import PooledScorer, ScorerActor, ScorerPool
from hone.cluster.service_host import RayServiceHost, ServiceHostActor
from hone.config.cluster import Role
from hone.config.derived import component_name
from hone.config.load import Loaded
from hone.config.topology import PlacedReplica, judge_services, reward_models
from hone.reward.http import Address
from hone.reward.reward_model import RewardModel
from hone.reward.rewards import Scorer
from hone.services.launch import Launch, ReplicaPlace, plan_replica
from hone.services.service import Service


def load_reward_models(loaded: Loaded, processes: int, device_type: str) -> dict[str, RewardModel]:
    """In a process of the cluster: the reward models that score on devices, by their components' names, unloaded.

    Args:
        processes: how many compute on this machine at a time.
        device_type: torch's name of the run's devices.
    """
    set_up_arithmetic(loaded.config.run.model_copy(update={"device": device_type}), processes)
    folder = loaded.run_file.parent
    return {
        component_name(one): RewardModel.from_args(one.args, folder=folder, timeout_s=one.timeout_s)
        for one in reward_models(loaded.config)
    }


class Scoring:
    """The judges and reward models of a run; `Offloadable`.

    Args:
        loaded: of the run, with paths that hold in any process.
        spawn: starts an actor on devices: `spawn(name, actor, devices)`.
        processes: how many processes compute on the machine of such devices at a time.
        is_one_machine: all addresses are loopback.
    """

    def __init__(
        self,
        job: Job,
        loaded: Loaded,
        *,
        spawn: Callable[[str, type, Sequence[int]], Any],
        processes: Callable[[Role, Sequence[int]], int],
        is_one_machine: bool,
    ) -> None:
        self._job, self._loaded, self._topology = job, loaded, job.topology
        self._spawn, self._processes, self._is_one_machine = spawn, processes, is_one_machine
        self._settings = job.config.cluster
        self._token = secrets.token_urlsafe(32)
        self._hosts: list[RayServiceHost] = []
        self._judges: list[Service] = []
        self._pool = ScorerPool(
            [replica.name for replica in job.topology.reward_models],
            self._start_copy,
            observer=job.observer,
            restarts=self._settings.restarts,
            timeout_s=self._settings.call_timeout_s,
            patience_s=self._settings.start_timeout_s,
        )

    @property
    def shares_devices(self) -> bool:
        """Whether another process works on their devices; `start` comes before its start then."""
        replicas = (*self._topology.judges, *self._topology.reward_models)
        return any(self._topology.processes_on(device) > 1 for one in replicas for device in one.devices)

    @property
    def sleeps(self) -> bool:
        """Whether one of them is offloaded while the trainer works."""
        return self._topology.sleeps("judge") or self._topology.sleeps("reward_model")

    @property
    def addresses(self) -> Mapping[str, Address]:
        """The judge's addresses, by the name that rewards use."""
        if not self._judges:
            return {}
        (name,) = judge_services(self._job.config)
        return {name: Address(tuple(judge.launch.url for judge in self._judges), self._token, self._judge_memory)}

    @property
    def scorers(self) -> Mapping[str, Scorer]:
        """Scorers by the names of the components that use reward models."""
        if not self._topology.reward_models:
            return {}
        names = map(component_name, reward_models(self._job.config))
        return {name: PooledScorer(self._pool, name) for name in names}

    async def start(self) -> None:
        """Start them. Where they share devices, one after the other, and each is ready, or asleep again if it has to,
        before the next: each measures the memory that it finds. Else judges may still be starting when this returns.

        Raises:
            ServiceError, ClusterError, DataError: one could not be started.
        """
        planned = await asyncio.gather(*map(self._planned, self._topology.judges))
        self._judges = [self._job.services.add(launch, host.begin) for host, launch in planned]
        if self.shares_devices:
            await self._job.services.ready()
            await self._rest_judges()
        await self._pool.start()
        if self._topology.sleeps("reward_model"):
            await self._pool.sleep()

    async def sleep(self) -> None:
        """Release the devices to the trainer; see `Offloadable`."""
        await self._rest_judges()
        if self._topology.sleeps("reward_model"):
            await self._pool.sleep()

    async def wake(self) -> None:
        """See `Offloadable`."""
        if self._topology.sleeps("judge"):
            await asyncio.gather(*(judge.wake() for judge in self._judges))
        if self._topology.sleeps("reward_model"):
            await self._pool.wake()

    async def close(self) -> None:
        """End all of them."""
        await self._job.services.drop(self._judges)
        for host in self._hosts:
            host.close()
        await self._pool.close()

    async def _judge_memory(self) -> tuple[int, int] | None:
        """Of the devices of all replicas; None unless each says."""
        each = [found for found in await asyncio.gather(*(host.device_memory() for host in self._hosts)) if found]
        if not each or len(each) < len(self._hosts):
            return None
        return sum(used for used, _ in each), sum(total for _, total in each)

    async def _rest_judges(self) -> None:
        if self._topology.sleeps("judge"):
            await asyncio.gather(*(judge.sleep() for judge in self._judges))

    async def _planned(self, replica: PlacedReplica) -> tuple[RayServiceHost, Launch]:
        """Where a replica of the judge will be, and what is started for it there."""
        (name,) = judge_services(self._job.config)
        host = RayServiceHost(
            replica.name,
            partial(self._spawn, replica.name, ServiceHostActor, replica.devices),
            is_one_machine=self._is_one_machine,
            timeout_s=self._settings.start_timeout_s,
        )
        self._hosts.append(host)
        place = ReplicaPlace(
            name=replica.name,
            section=name,
            sleeps=self._topology.sleeps("judge"),
            processes=self._processes("judge", replica.devices),
            token=self._token,
        )
        service, folder = self._loaded.config.services[name], self._loaded.run_file.parent
        logs = self._job.folder.logs.absolute()
        return host, await host.plan(partial(plan_replica, service, place, folder, logs))

    async def _start_copy(self, name: str) -> Any:
        """See `ScorerPool`."""
        replica = next(one for one in self._topology.reward_models if one.name == name)
        processes = self._processes("reward_model", replica.devices)
        actor = await asyncio.to_thread(self._spawn, name, ScorerActor, replica.devices)
        try:
            making = actor.build.remote(partial(load_reward_models, self._loaded, processes, self._job.device.type))
            await wait_for_one(name, making, "starting", self._settings.start_timeout_s, START_KEY)
        except BaseException:
            ray.kill(actor)
            raise
        return actor
