"""`plan(config, hardware)`: the ledgers of a run and the verdict on them, from the run file and a device's name.

The Python API of this package; `hone plan` prints what it returns. Closed forms only: a plan takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hone.config.run import RunConfig
from hone.plan import cluster, local
from hone.plan.cures import best_cure
from hone.plan.hardware import Hardware
from hone.plan.inputs import Inputs, implementation_of, microbatch, resolve
from hone.plan.ledger import Ledger
from hone.plan.placement import Placement
from hone.plan.pools import pools_of
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
        devices = self.ledgers[:-1] if len(self.ledgers) > 1 else self.ledgers
        return max(ledger.peak.bytes / ledger.capacity_bytes for ledger in devices)

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
    """What the RL stage of a run file takes on a machine.

    Args:
        folder: the run file's, where relative paths start.
        placement: how models are spread over devices; None: one process on one device, or all devices in turn.
        mean_prompt_tokens, mean_response_tokens: as measured; None assumes half the limits.
    Raises:
        DataError: a model whose shape is not known.
    """
    workload = workload_of(config, mean_prompt_tokens=mean_prompt_tokens, mean_response_tokens=mean_response_tokens)
    found = plan_inputs(resolve(config, hardware, placement or Placement(), workload, folder))
    cure = best_cure(found.inputs, found.ledgers, lambda inputs: plan_inputs(inputs).ledgers)
    if cure is None:
        return found
    return replace(found, verdict=replace(found.verdict, sentence=f"{found.verdict.sentence}. {cure}"))


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
        is_gpu=hardware.kind == "gpu",
        max_positions=inputs.architecture.max_positions,
    )
    device, host = local.local_moments(settings, workload)
    ledgers = [Ledger(f"{hardware.name}", 1, hardware.memory_bytes, tuple(device))]
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
    host = cluster.host_moments(pools, per_node=hardware.per_node)
    ledgers.append(Ledger("host", hardware.nodes, hardware.host_bytes, tuple(host)))
    verdict = judge(ledgers, misfits(inputs, pools))
    return Plan(inputs, tuple(ledgers), verdict, step_time(inputs, pools), tuple(_notes(inputs)))


def _notes(inputs: Inputs) -> list[str]:
    notes: list[str] = []
    workload, config = inputs.workload, inputs.config
    in_flight = workload.samples * (workload.max_staleness + 1)
    concurrent = config.rollout.max_concurrent_samples
    if inputs.placement.mode == "local" and concurrent > in_flight and not workload.evaluates:
        notes.append(
            f"rollout.max_concurrent_samples = {concurrent}, but only {in_flight} samples are ever in flight: the "
            f"cache is made for all {concurrent}"
        )
    return notes
