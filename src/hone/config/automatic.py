"""What `auto` in a run file stands for on given devices: precision, kernels, backend and engine. Pure; the same for a
plan, a check and a run.

A key that says something itself is left as it is. What does not work there (a rule of the run file refuses it) is not
chosen, and the reason is kept for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hone.config.cluster import PoolSection, Role
from hone.config.engine import EngineSection
from hone.config.rules.engines import ENGINE_RULES
from hone.config.rules.placement import CLUSTER_RULES
from hone.config.run import RunConfig
from hone.config.topology import ROLES, needed_roles, service_devices
from hone.devices import FoundDevices

COMPILERS = {"triton": "Triton", "cc": "C compiler"}
"""What fused kernels on GPUs are compiled with, in `installed`."""
EXTRA = "pip install 'hone-rl[gpu]'"


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """What one `auto` stands for."""

    key: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value}; {self.why}"


@dataclass(frozen=True, slots=True)
class Settled:
    """A configuration without `auto`, and why it is what it is."""

    config: RunConfig
    choices: tuple[AutoChoice, ...] = ()


def settled(
    config: RunConfig,
    found: FoundDevices,
    *,
    installed: frozenset[str],
    shape: Mapping[str, Any] | None = None,
) -> Settled:
    """The configuration as it runs on machines with these devices.

    Args:
        installed: of `ray`, `vllm`, `triton` and `cc` (a C compiler), those that are there.
        shape: the model's config.json, where it is known.
    """
    choices: list[AutoChoice] = []
    if config.run.precision == "auto":
        is_gpu = found.device_type != "cpu"
        why = "the devices compute in it" if found.bfloat16 else "the CPU is best at it"
        if is_gpu and not found.bfloat16:
            why = "the GPUs have no bfloat16"
        value = "bfloat16" if found.bfloat16 else "float32"
        choices.append(AutoChoice("run.precision", value, why))
        config = config.model_copy(update={"run": config.run.model_copy(update={"precision": value})})
    if config.run.precision == "float32" and found.device_type == "cuda":
        choices.append(
            AutoChoice("float32 on GPUs", "TF32", "products round their factors to 10 bits; bfloat16 keeps 7")
        )
    if config.run.fused_kernels is None:
        missing = [name for tool, name in COMPILERS.items() if tool not in installed]
        is_on = found.device_type == "cuda" and not missing
        if found.device_type == "cuda":
            why = "norms, rotations, SwiGLU and passes over logits are compiled in the first step"
            if missing:
                why = f"no {' and no '.join(missing)} to compile norms and passes over logits with; slower"
            choices.append(AutoChoice("run.fused_kernels", str(is_on).lower(), why))
        config = config.model_copy(update={"run": config.run.model_copy(update={"fused_kernels": is_on})})
    if config.cluster.backend != "auto" and config.cluster.engines.use != "auto":
        return Settled(config, tuple(choices))
    placed, more = _placed(config, found, installed, shape or {})
    return Settled(placed, (*choices, *more))


def on_devices(config: RunConfig, use: str, devices: int) -> RunConfig:
    """The run on a cluster of `devices` devices: all of them in turn, or in two pools if sampling runs ahead."""
    pools: dict[str, PoolSection] = dict(config.cluster.pools)
    if not pools and config.rollout.max_staleness and "rl" in config.stages:
        others: tuple[Role, ...] = tuple(role for role in ROLES if role != "rollout" and role in needed_roles(config))
        own = devices - len(service_devices(config))
        pools = {
            "train": PoolSection(devices=max(own - own // 2, 1), roles=others),
            "sample": PoolSection(devices=max(own // 2, 1), roles=("rollout",)),
        }
    return _with(config, "ray", use, pools=pools)


def _placed(
    config: RunConfig, found: FoundDevices, installed: frozenset[str], shape: Mapping[str, Any]
) -> tuple[RunConfig, list[AutoChoice]]:
    """Backend and engine: the first of the candidates that no rule refuses."""
    cluster, gpus = config.cluster, found.per_node if found.device_type != "cpu" else 0
    is_open = cluster.backend == "auto"
    refused = ""
    if not gpus:
        backend = "local" if is_open else cluster.backend
        chosen = _with(config, backend, cluster.engines.name)
        return chosen, []  # as without `auto`: nothing to say
    for backend, use in _candidates(config, found, installed, shape):
        if backend == "local":
            candidate = _with(config, "local", cluster.engines.name)
        else:
            candidate = on_devices(config, use, gpus * cluster.nodes)
        why_not = "" if backend == "local" else _broken(config, candidate, gpus)
        if not why_not:
            return candidate, _choices(config, candidate, gpus, found.resource, installed, refused, shape)
        refused = refused or why_not
    candidate = on_devices(config, cluster.engines.name, gpus * cluster.nodes)  # the rules say what is wrong
    return candidate, []


def _candidates(
    config: RunConfig, found: FoundDevices, installed: frozenset[str], shape: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """(backend, engine), best first."""
    cluster, gpus, is_cuda = config.cluster, found.per_node, found.device_type == "cuda"
    has_vllm = "vllm" in installed and is_cuda and not _unseen(shape)
    uses = [cluster.engines.use] if cluster.engines.use != "auto" else ["vllm"] * has_vllm + ["hone"]
    if cluster.backend == "ray":
        yield from (("ray", use) for use in uses)
        return
    if cluster.backend == "auto" and "ray" in installed:
        yield from (("ray", use) for use in uses if use != "hone" or gpus > 1)
    yield "local", "hone"


def _choices(
    config: RunConfig,
    chosen: RunConfig,
    gpus: int,
    resource: str,
    installed: frozenset[str],
    refused: str,
    shape: Mapping[str, Any],
) -> list[AutoChoice]:
    """Why backend and engine are what they are."""
    devices, cluster = f"{gpus} {resource}{'s' if gpus > 1 else ''}", chosen.cluster
    samples = "rl" in config.stages
    choices = []
    if config.cluster.backend == "auto":
        if cluster.backend == "ray":
            turns = "in two pools, because sampling runs ahead" if cluster.pools else "trainer and engines take turns"
            why = f"all {devices} of each machine, {turns}" if samples else f"all {devices} of each machine"
        elif "ray" not in installed:
            why = f"Ray is not installed ({EXTRA}); one process on one of {devices}"
        else:
            why = f"one process on one of {devices}{f', because {refused}' if refused else ''}"
        choices.append(AutoChoice("cluster.backend", cluster.backend, why))
    if config.cluster.engines.use == "auto" and samples:
        if cluster.engines.use == "vllm":
            why = "vLLM is installed"
        elif _unseen(shape):
            why = "models with such a vision tower are sampled by it alone"
        elif "vllm" not in installed:
            why = f"vLLM is not installed, which samples several times as fast and pages its cache ({EXTRA})"
        else:
            why = refused or "the run is one process"
        choices.append(AutoChoice("cluster.engines.use", cluster.engines.use, why))
    return choices


def _unseen(shape: Mapping[str, Any]) -> bool:
    """Whether the model has a vision tower that vLLM is not used for."""
    return "vision_config" in shape and bool(EngineSection(use="vllm").vision_problem(str(shape.get("model_type"))))


def _broken(written: RunConfig, config: RunConfig, gpus: int) -> str:
    """The first rule that a placement breaks; "" if it breaks none."""
    cluster = config.cluster
    if not written.cluster.pools and len(cluster.pools) > gpus * cluster.nodes - len(service_devices(config)):
        return f"rollout.max_staleness = {config.rollout.max_staleness} samples on devices of its own"
    sized = cluster.model_copy(update={"devices_per_node": cluster.devices_per_node or gpus})
    config = config.model_copy(update={"cluster": sized})
    breaches = (breach for rule in (*CLUSTER_RULES, *ENGINE_RULES) for breach in rule(config))
    return next((f"{breach.keys[0]} {breach.message}" for breach in breaches), "")


def _with(config: RunConfig, backend: str, use: str, pools: Mapping[str, PoolSection] | None = None) -> RunConfig:
    cluster = config.cluster
    update: dict[str, Any] = {"backend": backend, "engines": cluster.engines.model_copy(update={"use": use})}
    if pools is not None:
        update["pools"] = dict(pools)
    return config.model_copy(update={"cluster": cluster.model_copy(update=update)})
