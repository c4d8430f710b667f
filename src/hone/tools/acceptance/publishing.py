"""The part on publishing: weights go to an engine in another process by each transport, as in a run on Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hone.config.cluster import ClusterSection
from hone.devices import devices_here
from hone.sizes import GIB, MIB
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import RUN_TIMEOUT_S, PartSetting

if TYPE_CHECKING:
    from hone.tools.acceptance.weights_sender import SentVersions
    from hone.weights.transports import TransportName


def publishing(setting: PartSetting) -> Iterator[Figure]:
    """An engine on the trainer's device, and one on another where there are two, by each transport that runs have."""
    if importlib.util.find_spec("ray") is None:
        yield Figure("publishing", "left_out", 1.0, note="Ray is not installed")
        return
    import ray

    from hone.cluster.actors import EngineActor
    from hone.cluster.ray import RayCluster
    from hone.tools.acceptance.weights_sender import TIMEOUT_S, WeightsSender, waiting_engine

    found = devices_here("auto" if setting.is_gpu else "cpu")
    dtype = torch.bfloat16 if found.bfloat16 else torch.float32
    # Transports that runs have on such devices, each with the number of the engine's; the trainer has 0.
    others: dict[TransportName, int] = {"ray": 0, "gloo": 0}
    if setting.device.type == "cuda":
        others = {"ray": 0, "ipc": 0}
        if found.per_node > 1:
            others["nccl"] = 1
        else:
            yield Figure("publishing", "left_out", 1.0, "nccl", "it needs two devices, and one is visible")
    num_devices = 1 + max(others.values())
    cluster = RayCluster(
        ClusterSection(backend="ray"), name="acceptance", resource=found.resource, num_devices=num_devices, say=print
    )
    took: dict[TransportName, float] = {}
    with cluster:
        cluster.start()
        made = setting.shape(), dtype, setting.device
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
