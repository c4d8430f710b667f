"""`plan(config, hardware)`: the ledgers of a run and the verdict on them, from the run file and a device's name.

The Python API of this package; `hone plan` prints what it returns. Closed forms only: a plan takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hone.config.run import RunConfig
from hone.config.topology import topology_of
from hone.errors import DataError
from hone.plan import cluster, local
from hone.plan.architecture import GIB
from hone.plan.balance import balanced, equal_thirds, slower_side_s
from hone.plan.cures import best_cure
from hone.plan.hardware import Hardware
from hone.plan.inputs import Inputs, implementation_of, microbatch, resolve
from hone.plan.ledger import Ledger
from hone.plan.placement import Placement, placement_of, sizes_given
from hone.plan.pools import places_of, pools_of
from hone.plan.rules import misfits
from hone.plan.schedule import step_time
from hone.plan.time import StepTime
from hone.plan.verdict import Verdict, judge
from hone.plan.workload import workload_of

FORMAT = 1
"""Of `Plan.as_dict()`; raised when a reader would have to change."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run on a machine: what it takes, and whether that is there."""

    inputs: Inputs
    ledgers: tuple[Ledger, ...]
    """One per kind of device, the host last."""
    verdict: Verdict
    time: StepTime
    notes: tuple[str, ...] = field(default=())
    """What is worth knowing besides: assumptions, waste."""

    @property
    def memory_utilisation(self) -> float:
        """Peak over capacity, of the device that is fullest; the host does not count."""
        devices = [ledger for ledger in self.ledgers if ledger.device != "host"]
        return max(ledger.peak.bytes / ledger.capacity_bytes for ledger in devices)

    def impossible(self, margin: float) -> float:
        """How far from possible: rules broken, and the share of each device that lacks to a head-room of `margin`."""
        lacking = (ledger.peak.bytes / ledger.capacity_bytes - (1 - margin) for ledger in self.ledgers)
        return len(self.verdict.problems) + sum(max(0.0, share) for share in lacking)

    def as_dict(self) -> dict[str, Any]:
        """For `--json` and for whoever compares a plan with a run."""
        inputs, arch = self.inputs, self.inputs.architecture
        counts = arch.parameters
        return {
            "format": FORMAT,
            "hardware": {
                "name": inputs.hardware.name,
                "kind": inputs.hardware.kind,
                "devices": inputs.hardware.devices,
                "memory_bytes": inputs.hardware.memory_bytes,
                "host_bytes": inputs.hardware.host_bytes,
            },
            "placement": inputs.placement.model_dump(mode="json"),
            "pools": [
                {"name": place.name, "devices": place.devices, "roles": sorted(place.roles)}
                for place in (places_of(inputs) if inputs.placement.mode != "local" else ())
            ],
            "model": {
                "model_type": arch.model_type,
                "parameters": counts.total,
                "active_parameters": arch.active_parameters,
                "parameters_by_component": {
                    name: getattr(counts, name)
                    for name in ("embedding", "attention", "feed_forward", "experts", "router", "norms", "output")
                },
                "kv_bytes_per_token": arch.kv_bytes_per_token(),
                "implementation": implementation_of(inputs),
            },
            "workload": inputs.workload.as_dict(),
            "verdict": self.verdict.as_dict(),
            "ledgers": [ledger.as_dict() for ledger in self.ledgers],
            "time": {**self.time.as_dict(), "memory_utilisation": self.memory_utilisation},
            "notes": list(self.notes),
        }


def plan(
    config: RunConfig,
    hardware: Hardware,
    *,
    folder: Path = Path(),
    placement: Placement | None = None,
    mean_prompt_tokens: float | None = None,
    mean_response_tokens: float | None = None,
) -> Plan:
    """What the RL stage of a run file takes on a machine, or on what `plan.memory_budget_gib` leaves it of each device.

    Args:
        folder: the run file's, where relative paths start.
        placement: how models are spread over devices, where it is not as the run file's `cluster` section says; without
            that either, one process on one device, or all devices in turn.
        mean_prompt_tokens, mean_response_tokens: as measured; None assumes half the limits.
    Raises:
        DataError: a model whose shape is not known, or a run file without stage rl.
    """
    if "rl" not in config.stages:
        raise DataError(f"stages: {', '.join(config.stages)} has no rl, the stage that hone plan plans.")
    budget = config.plan.memory_budget_gib
    if budget is not None:
        hardware = replace(hardware, memory_bytes=min(hardware.memory_bytes, int(budget * GIB)))
    workload = workload_of(config, mean_prompt_tokens=mean_prompt_tokens, mean_response_tokens=mean_response_tokens)
    placement, topology = placement or Placement(), None
    if config.cluster.backend != "local" and not sizes_given(placement):
        topology = topology_of(config, hardware.per_node)
        placement = placement_of(config, topology, placement)
    inputs = resolve(config, hardware, placement, workload, folder, topology)
    if topology is None and inputs.placement.mode == "separate" and inputs.placement.engine_devices is None:
        inputs = balanced(inputs, _judged)
    found = plan_inputs(inputs)
    thirds = compare_with_thirds(found)
    if thirds:
        found = replace(found, notes=(*found.notes, thirds))
    cure = best_cure(found.inputs, found.ledgers, lambda inputs: plan_inputs(inputs).ledgers)
    if cure is None:
        return found
    return replace(found, verdict=replace(found.verdict, sentence=f"{found.verdict.sentence}. {cure}"))


def _judged(inputs: Inputs) -> tuple[float, StepTime]:
    """What is impossible about inputs, rules broken and shares of memory that lack, and their times."""
    found = plan_inputs(inputs)
    return found.impossible(0.0), found.time


def plan_inputs(inputs: Inputs) -> Plan:
    """The plan of resolved inputs; what a search calls many times."""
    if inputs.placement.mode == "local":
        return _local_plan(inputs)
    return _cluster_plan(inputs)


# ---- one process


def _local_plan(inputs: Inputs) -> Plan:
    hardware, workload, config = inputs.hardware, inputs.workload, inputs.config
    settings = local.LocalSettings(
        architecture=inputs.architecture,
        critic=inputs.critic,
        reward_models=inputs.reward_models,
        work=microbatch(inputs, bytes_each=2 if config.run.precision == "bfloat16" else 4),
        max_concurrent=config.rollout.max_concurrent_samples,
        prefill_tokens=config.rollout.prefill_tokens,
        is_gpu=hardware.kind == "gpu",
        max_positions=inputs.architecture.max_positions,
        has_computed=config.stages.index("rl") > 0,
    )
    device, host = local.local_moments(settings, workload)
    budget = config.plan.memory_budget_gib
    capacity = hardware.memory_bytes if budget is None else min(hardware.memory_bytes, round(budget * GIB))
    ledgers = [Ledger(hardware.name, 1, capacity, tuple(device))]
    if host:
        ledgers.append(Ledger("host", 1, hardware.host_bytes, tuple(host)))
    verdict = judge(ledgers, misfits(inputs, []))
    return Plan(inputs, tuple(ledgers), verdict, step_time(inputs, []), tuple(_notes(inputs)))


# ---- many devices


def _cluster_plan(inputs: Inputs) -> Plan:
    hardware, pools = inputs.hardware, pools_of(inputs)
    ledgers = [
        Ledger(
            f"{hardware.name} ({pool.name})",
            pool.devices,
            hardware.memory_bytes,
            tuple(cluster.pool_moments(pool, inputs.workload)),
        )
        for pool in pools
    ]
    if hardware.kind == "gpu":
        host = cluster.host_moments(pools, per_node=hardware.per_node)
        ledgers.append(Ledger("host", hardware.nodes, hardware.host_bytes, tuple(host)))
    verdict = judge(ledgers, misfits(inputs, pools))
    return Plan(inputs, tuple(ledgers), verdict, step_time(inputs, pools), tuple(_notes(inputs)))


def _notes(inputs: Inputs) -> list[str]:
    notes: list[str] = []
    workload, config, placement = inputs.workload, inputs.config, inputs.placement
    in_flight = workload.samples * (workload.max_staleness + 1)
    concurrent = config.rollout.max_concurrent_samples
    if placement.mode == "local" and concurrent > in_flight and not workload.evaluates:
        notes.append(
            f"rollout.max_concurrent_samples = {concurrent}, but only {in_flight} samples are ever in flight: the "
            f"cache is made for all {concurrent}"
        )
    if inputs.topology is not None and inputs.hardware.devices > inputs.topology.num_devices:
        idle = inputs.hardware.devices - inputs.topology.num_devices
        notes.append(f"{idle} of {inputs.hardware.devices} devices are in no pool")
    if placement.mode == "local" and inputs.hardware.devices > 1:
        notes.append(f"one process computes on one device: {inputs.hardware.devices - 1} of them have nothing to do")
    if len(config.stages) > 1:
        others = ", ".join(stage for stage in config.stages if stage != "rl")
        notes.append(f"planned is stage rl; {others} trains the same model without engine, reference and critic")
    return notes


def compare_with_thirds(found: Plan) -> str | None:
    """Practice's split of rollout, policy and critic against this one; None where the critic has no own devices."""
    placement = found.inputs.placement
    if placement.mode != "separate" or not placement.critic_devices or found.inputs.critic is None:
        return None
    thirds = plan_inputs(equal_thirds(found.inputs))
    trainers = found.inputs.hardware.devices - (placement.engine_devices or 0) - placement.critic_devices
    return (
        f"rollout : policy : critic = {placement.engine_devices} : {trainers} : {placement.critic_devices} takes "
        f"{slower_side_s(found.time):.3g} s on its slower side, 1 : 1 : 1 {slower_side_s(thirds.time):.3g} s"
    )
