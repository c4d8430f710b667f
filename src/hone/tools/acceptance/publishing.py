"""The part on publishing: weights go to an engine in another process by each transport, as in a run on Ray."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hone.config.cluster import ClusterSection
from hone.devices import devices_here
from hone.errors import ClusterError
from hone.memory.gauges import GIB, MIB
from hone.model.fingerprint import weights_fingerprint
from hone.model.load import init_model
from hone.rollout.local import LocalEngine
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import RUN_TIMEOUT_S, TINY, PartSetting, shape_of, timed
from hone.weights.buckets import bucket_bytes
from hone.weights.publish import Published, Transport, Update, publish
from hone.weights.routes import Routes
from hone.weights.transports import RayPeer, TransportName, make_transport

ENGINE, TIMEOUT_S, VERSIONS = "engine", 120.0, 3


def publishing(setting: PartSetting) -> Iterator[Figure]:
    """An engine on the trainer's device, and one on another where there are two, by each transport that runs have."""
    if importlib.util.find_spec("ray") is None:
        yield Figure("publishing", "left_out", 1.0, note="Ray is not installed")
        return
    import ray

    from hone.cluster.actors import EngineActor
    from hone.cluster.ray import RayCluster

    found = devices_here("auto" if setting.is_gpu else "cpu")
    shape = TINY if setting.tiny else shape_of("0.6b")
    dtype = torch.bfloat16 if found.bfloat16 else torch.float32
    others, left_out = transports_on(setting.device.type, found.per_node)
    yield from left_out
    num_devices = 1 + max(others.values())
    cluster = RayCluster(
        ClusterSection(backend="ray"), name="acceptance", resource=found.resource, num_devices=num_devices, say=print
    )
    took: dict[TransportName, float] = {}
    with cluster:
        cluster.start()
        made = shape, dtype, setting.device
        sender = cluster.spawn(WeightsSender, *made, devices=[0], shared_by=2)
        engines: dict[int, Any] = {}
        for name, device in others.items():
            if device not in engines:
                engines[device] = cluster.spawn(EngineActor, devices=[device], shared_by=2)
                building = engines[device].build.remote(partial(waiting_engine, *made), timeout_s=TIMEOUT_S)
                ray.get(building, timeout=RUN_TIMEOUT_S)
            sent: SentVersions = ray.get(sender.send.remote(name, engines[device]), timeout=RUN_TIMEOUT_S)
            took[name] = sent.seconds
            case = f"{name}, {sent.num_bytes / MIB:.4g} MiB"
            yield Figure("publishing", "held_versions", sent.held_frac, case)
            yield Figure("publishing", "transport_s", sent.seconds, case)
            yield Figure("publishing", "transport_gib_per_s", sent.num_bytes / GIB / sent.seconds, case)
            yield Figure("publishing", "fingerprint_s", sent.fingerprint_s, case)
            yield Figure("publishing", "moved_over_least", sent.over_least, case)
            if name in ("ipc", "nccl"):
                yield Figure("publishing", "transport_over_ray", sent.seconds / took["ray"], case)


def transports_on(device_type: str, num_devices: int) -> tuple[dict[TransportName, int], list[Figure]]:
    """Transports that runs have on such devices, each with the number of the engine's (the trainer has 0), and what
    cannot be run here."""
    if device_type != "cuda":
        return {"ray": 0, "gloo": 0}, []
    on_one: dict[TransportName, int] = {"ray": 0, "ipc": 0}
    if num_devices < 2:
        return on_one, [Figure("publishing", "left_out", 1.0, "nccl", "it needs two devices, and one is visible")]
    return {**on_one, "nccl": 1}, []


@dataclass(frozen=True, slots=True)
class SentVersions:
    """What became of the versions that went by one transport."""

    seconds: float
    """Median of a version, from the first byte until its fingerprint came back."""
    fingerprint_s: float
    """Of a fingerprint alone."""
    held_frac: float
    """Versions of which the engine holds what the sender has, to the last bit."""
    over_least: float
    """Bytes moved over those of the weights."""
    num_bytes: int
    """Of the weights."""


class WeightsSender:
    """A trainer's rank in an actor, as far as weights go."""

    def __init__(self, shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        from hone.cluster.ray import end_with_ray

        end_with_ray()
        self._model = init_model(shape, vocab_size=None, seed=0, dtype=dtype, device=device)
        self._version = 0

    def send(self, name: TransportName, actor: Any) -> SentVersions:
        """Publish versions to an engine's actor, each with other weights than the one before."""
        transport, size = make_transport(name, host="127.0.0.1"), bucket_bytes(ClusterSection().bucket_mib)
        seconds, held, over_least = list[float](), list[bool](), list[float]()
        sizes = list[int]()
        for _ in range(1 + VERSIONS):
            started = time.perf_counter()
            found = self._publish(name, actor, transport, size)
            seconds.append(time.perf_counter() - started)
            if found.failed:
                raise ClusterError(f"publishing by {name}: {found.failed[ENGINE]}")
            held.append(found.held_by == (ENGINE,) and found.manifest.fingerprint == self._fingerprint())
            over_least.append(Routes(name, {ENGINE: (0,)}).moved_over_least([found], [ENGINE]))
            sizes.append(found.manifest.num_bytes)
            self._change()
        transport.drop(ENGINE)
        fingerprint_s, _ = timed(self._fingerprint)
        median_s = statistics.median(seconds[1:])  # the first joins a group
        return SentVersions(median_s, fingerprint_s, sum(held) / len(held), max(over_least), max(sizes))

    def _publish(self, name: TransportName, actor: Any, transport: Transport, size: int) -> Published:
        self._version += 1
        return publish(
            self._model.named_weights(),
            {ENGINE: RayPeer(actor)},
            transport,
            updates={ENGINE: Update(f"{name} {self._version}", self._version)},
            bucket_size=size,
            timeout_s=TIMEOUT_S,
        )

    def _fingerprint(self) -> str:
        return weights_fingerprint(self._model.named_weights())

    @torch.no_grad()
    def _change(self) -> None:
        """As an update would: every weight."""
        for parameter in self._model.parameters():
            parameter.mul_(1.25)


async def waiting_engine(shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> LocalEngine:
    """Hone's engine with weights of its own."""
    model = init_model(shape, vocab_size=None, seed=1, dtype=dtype, device=device)
    return LocalEngine(model, decode=str, eos_ids=(), max_concurrent=1, timeout_s=TIMEOUT_S)
