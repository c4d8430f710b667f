"""Memory and time plan of a run file on given hardware: `plan(config, hardware)`, which `hone plan` prints.

Closed forms only: a plan takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hone.config.automatic import on_devices
from hone.config.engine import EngineSection
from hone.config.render import inline
from hone.config.rules.division import heads_divide
from hone.config.rules.engines import ENGINE_RULES
from hone.config.rules.placement import CLUSTER_RULES
from hone.config.run import RunConfig
from hone.config.topology import divided_tower, service_devices
from hone.errors import DataError
from hone.plan import cluster, local
from hone.plan.cluster import PoolPlan
from hone.plan.engine import EnginePlan
from hone.plan.hardware import Hardware
from hone.plan.inputs import Inputs, changed, implementation_of, plain, resolve
from hone.plan.ledger import Ledger, Moment
from hone.plan.local import routing_records
from hone.plan.pools import local_settings, pools_of
from hone.plan.schedule import measured_decoding, measured_rates, step_time
from hone.plan.time import GPU, StepTime
from hone.plan.verdict import Verdict, best_suggestion, judge
from hone.plan.workload import workload_of
from hone.sizes import GIB

FORMAT = 2
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
    """Assumptions, idle devices, suggestions."""

    @property
    def memory_utilisation(self) -> float:
        """Peak over capacity, of the device that is fullest; the host does not count."""
        devices = [ledger for ledger in self.ledgers if ledger.device != "host"]
        return max(ledger.peak.bytes / ledger.capacity_bytes for ledger in devices)

    @property
    def scoring_bytes(self) -> int:
        """Memory of judges and reward models while they score, on all their devices."""
        return sum(
            pool.devices * sum(one.bytes for one in pool.judge.terms()) for pool in pools_of(self.inputs) if pool.judge
        )

    def impossible(self, margin: float) -> float:
        """How far from possible: rules broken, and the share of each device that lacks to a head-room of `margin`."""
        lacking = (ledger.peak.bytes / ledger.capacity_bytes - (1 - margin) for ledger in self.ledgers)
        return len(self.verdict.problems) + sum(max(0.0, share) for share in lacking)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
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
            "topology": inputs.topology.as_dict(),
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
    mean_prompt_tokens: float | None = None,
    mean_response_tokens: float | None = None,
) -> Plan:
    """Plan of a run file's RL stage on the devices that `hone train` would use, within `plan.memory_budget_gib`.

    Args:
        folder: the run file's, where relative paths start.
        mean_prompt_tokens, mean_response_tokens: as measured; None assumes half the limits.
    Raises:
        DataError: a model whose shape is not known, or a run file without stage rl.
    """
    if "rl" not in config.stages:
        raise DataError(
            f"stages: hone plan covers stage rl, and the run has {', '.join(config.stages)} alone. With stages=[rl] "
            "its moments update, optimizer and checkpoint are those of other stages too, engine and reference aside."
        )
    budget = config.plan.memory_budget_gib
    if budget is not None:
        hardware = replace(hardware, memory_bytes=min(hardware.memory_bytes, int(budget * GIB)))
    workload = workload_of(config, mean_prompt_tokens=mean_prompt_tokens, mean_response_tokens=mean_response_tokens)
    found = plan_inputs(resolve(config, hardware, workload, folder))
    suggestion = best_suggestion(found.inputs, found.ledgers, lambda inputs: plan_inputs(inputs).ledgers)
    if suggestion is None:
        return found
    return replace(found, verdict=replace(found.verdict, sentence=f"{found.verdict.sentence}. {suggestion}"))


def plan_inputs(inputs: Inputs) -> Plan:
    """The plan of resolved inputs; what a search calls many times."""
    hardware, pools = inputs.hardware, pools_of(inputs)
    ledgers, host = _local_ledgers(inputs) if inputs.is_local else ([], [])
    ledgers += [
        Ledger(
            f"{hardware.name} ({pool.name})",
            pool.devices,
            hardware.memory_bytes,
            tuple(cluster.pool_moments(pool, inputs.workload)),
        )
        for pool in pools
    ]
    if hardware.kind == "gpu":
        host = host or cluster.host_moments(
            pools, per_node=hardware.per_node, records=routing_records(inputs.architecture, inputs.workload)
        )
        nodes = inputs.topology.nodes
        ledgers.append(Ledger("host", nodes, hardware.host_bytes, tuple(host)))
    verdict = judge(ledgers, violations(inputs, pools))
    return Plan(inputs, tuple(ledgers), verdict, step_time(inputs, pools), tuple(_notes(inputs, pools)))


def _local_ledgers(inputs: Inputs) -> tuple[list[Ledger], list[Moment]]:
    """The ledger of a run of one process, and moments of its host."""
    hardware, config = inputs.hardware, inputs.config
    settings = replace(
        local_settings(inputs),
        critic=inputs.critic,
        reward_models=inputs.reward_models,
        has_computed=config.stages.index("rl") > 0,
    )
    device, host = local.local_moments(settings, inputs.workload)
    return [Ledger(hardware.name, 1, hardware.memory_bytes, tuple(device))], host


def _notes(inputs: Inputs, pools: Sequence[PoolPlan]) -> list[str]:
    notes: list[str] = []
    if tower := inputs.architecture.tower:
        notes.append(
            f"vision tower: {tower.parameters:,} parameters besides; a picture has at most "
            f"{inputs.config.data.max_image_pixels // (tower.patches_per_token * tower.patch**2):,} tokens "
            "(data.max_image_pixels). The time of its passes is not counted."
        )
    config = inputs.config
    if inputs.hardware.kind == "gpu" and (measured := measured_rates(inputs)[1]):
        notes.append(
            f"training at {measured.training_flops:.0%} of the peak and passes without gradients at "
            f"{measured.forward_flops:.0%}, as measured with {measured.parameters:,} parameters and "
            f"{measured.tokens:,} tokens a sequence"
        )
    engines = config.cluster.engines
    if not inputs.is_local and engines.kind.memory == "none":
        notes.append(
            f"cluster.engines.use = {engines.name} takes no memory of these devices; the time of its samples is "
            "counted as that of Hone's own engine on one device"
        )
    engine = next((pool.engine for pool in pools if pool.engine), None)
    if decoding := measured_decoding(inputs, engine, GPU)[1]:
        notes.append(
            f"decoding at {decoding.bandwidth:.0%} of the memory's bandwidth and {1000 * decoding.overhead_s:.1f} ms a "
            f"step besides, as measured with {decoding.parameters:,} parameters"
        )
    used = inputs.topology.num_devices + len(service_devices(config))
    if (idle := inputs.hardware.devices - used) > 0:
        notes.append(f"{idle} of {inputs.hardware.devices} devices would idle{_cluster_snippet(inputs)}")
    if len(config.stages) > 1:
        others = ", ".join(stage for stage in config.stages if stage != "rl")
        notes.append(f"this plan covers stage rl; {others} trains the same model without engine, reference and critic")
    return notes


def _cluster_snippet(inputs: Inputs) -> str:
    """What to write into the run file of one process so that it uses all devices."""
    if not inputs.is_local:
        return ": they are in no pool"
    if not (settings := cluster_settings(inputs)):
        return ": the run is one process on one device (cluster.backend = local)"
    lines = ["cluster:"]
    for key, value in settings.items():
        *_, section, name = key.split(".")
        if value and value != 1:
            lines.append(
                f"  engines: {{use: {value}}}" if section == "engines" else f"  {name}: {inline(plain(value))}"
            )
    return ": the run is one process on one device (cluster.backend = local). To use all of them:\n" + "\n".join(
        f"  {line}" for line in lines
    )


def cluster_settings(inputs: Inputs) -> dict[str, Any]:
    """Run-file keys that put a run of one process on all devices; empty if the rules do not allow it."""
    hardware, config = inputs.hardware, inputs.config
    arch = inputs.architecture
    is_unseen = arch.tower and EngineSection(use="vllm").vision_problem(arch.model_type)
    for use in ("hone",) if is_unseen else ("vllm", "hone"):
        settings: dict[str, Any] = {"cluster.backend": "ray"}
        if not config.cluster.pools:  # separate ones if sampling runs ahead
            settings |= {
                "cluster.nodes": hardware.nodes,
                "cluster.address": "auto" if hardware.nodes > 1 else None,
                "cluster.devices_per_node": min(hardware.devices, hardware.per_node),
                "cluster.pools": on_devices(config, use, hardware.devices).cluster.pools,
                "cluster.engines.use": use,
            }
        if not cluster_violations(changed(inputs, settings)):
            return settings
    return {}


def violations(inputs: Inputs, pools: Sequence[PoolPlan]) -> list[str]:
    """Every rule that is broken, as lines that name key, value and cure."""
    found, arch, lengths = [], inputs.architecture, inputs.workload.lengths
    if arch.max_positions and lengths.longest > arch.max_positions:
        found.append(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {lengths.max_prompt} + {lengths.max_response} = "
            f"{lengths.longest}, but the model has {arch.max_positions} positions. Take "
            f"{lengths.longest - arch.max_positions} off."
        )
    if arch.tower and not inputs.is_local:
        unseen = inputs.config.cluster.engines.vision_problem(arch.model_type)
        found += [unseen] if unseen else []
    if arch.tower and (divided := divided_tower(arch.model_type, inputs.config.cluster)):
        found.append(divided)
    if not inputs.is_local:
        found += cluster_violations(inputs)
    engines = (engine for pool in pools for engine in (pool.engine, pool.judge) if isinstance(engine, EnginePlan))
    return found + [problem for problem in (engine.problem() for engine in engines) if problem]


def cluster_violations(inputs: Inputs) -> list[str]:
    """Those of the `cluster` section, of judges' engines there, and of heads and devices that do not divide."""
    topology, hardware, arch = inputs.topology, inputs.hardware, inputs.architecture
    each = inputs.config.cluster.devices_per_node or hardware.per_node
    cluster = inputs.config.cluster.model_copy(update={"devices_per_node": each})
    config = inputs.config.model_copy(update={"cluster": cluster})
    breaches = [breach for rule in (*CLUSTER_RULES, *ENGINE_RULES) for breach in rule(config)]
    shape = {"model_type": arch.model_type, "num_attention_heads": arch.heads, "num_key_value_heads": arch.kv_heads}
    breaches += heads_divide(config, shape)
    found = [f"{breach.keys[0]}: {breach.message}." for breach in breaches]
    if topology.num_devices > hardware.devices:
        are = "is" if hardware.devices == 1 else "are"
        found.insert(
            0,
            f"the pools of the run file have {topology.num_devices} devices, and {hardware.title} {are} planned for. "
            "Leave --hardware without a number, or make the pools smaller.",
        )
    return found
