"""Rule violations of a plan: settings that cannot run, each with the nearest legal values.

The rules are `config`'s own, applied to the devices and the model that are planned for; a violation makes the verdict
`does not fit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hone.config.rules.division import heads_divide
from hone.config.rules.engines import ENGINE_RULES
from hone.config.rules.placement import CLUSTER_RULES
from hone.plan.cluster import PoolPlan
from hone.plan.engine import EnginePlan
from hone.plan.inputs import Inputs


def violations(inputs: Inputs, pools: Sequence[PoolPlan]) -> list[str]:
    """Every rule that is broken, as lines that name key, value and cure."""
    found = [*_sequence_fits_the_model(inputs)]
    if not inputs.is_local:
        found += cluster_violations(inputs)
    engines = (engine for pool in pools for engine in (pool.engine, pool.judge) if isinstance(engine, EnginePlan))
    return found + [problem for problem in (engine.problem() for engine in engines) if problem]


def _sequence_fits_the_model(inputs: Inputs) -> Iterator[str]:
    longest, limit = inputs.workload.lengths.longest, inputs.architecture.max_positions
    if limit and longest > limit:
        lengths = inputs.workload.lengths
        yield (
            f"data.max_prompt_tokens + rollout.max_response_tokens = {lengths.max_prompt} + {lengths.max_response} = "
            f"{longest}, but the model has {limit} positions. Take {longest - limit} off."
        )


def cluster_violations(inputs: Inputs) -> list[str]:
    """Those of the `cluster` section, of judges' engines there, and of heads and devices that do not divide."""
    topology, hardware, arch = inputs.topology, inputs.hardware, inputs.architecture
    each = inputs.config.cluster.devices_per_node or hardware.per_node
    cluster = inputs.config.cluster.model_copy(update={"devices_per_node": each})
    config = inputs.config.model_copy(update={"cluster": cluster})
    breaches = [breach for rule in (*CLUSTER_RULES, *ENGINE_RULES) for breach in rule(config)]
    breaches += heads_divide(config, {"num_attention_heads": arch.heads, "num_key_value_heads": arch.kv_heads})
    found = [f"{breach.keys[0]}: {breach.message}." for breach in breaches]
    if topology.num_devices > hardware.devices:
        are = "is" if hardware.devices == 1 else "are"
        found.insert(
            0,
            f"the pools of the run file have {topology.num_devices} devices, and {hardware.title} {are} planned for. "
            "Leave --hardware without a number, or make the pools smaller.",
        )
    return found
