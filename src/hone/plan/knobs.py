"""Keys of a run file that change memory and speed and never the algorithm, with the values that presets try."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hone.config.cluster import PoolSection
from hone.config.engine import ROLE_TOKENS
from hone.config.rules.files import served_by
from hone.config.topology import service_devices
from hone.plan.inputs import Inputs, changed, value_of
from hone.plan.planner import cluster_violations
from hone.plan.pools import judge_engine, judge_requests

Block = Mapping[str, Sequence[Any]]
"""Values to try by key; all combinations are tried."""

TOKEN_BUDGETS = tuple(sorted(step << bits for bits in range(9, 18) for step in (2, 3)))
DEGREES = (1, 2, 4, 8, 16)
"""Of tensor parallelism, and devices that one pool gives to another."""
FRACS = tuple(round(0.2 + 0.1 * n, 1) for n in range(8))
SCORER_FRACS = (*reversed(FRACS), 0.25, 0.15, 0.1, 0.05)
"""Judges are often small. The largest first: of settings that are equally good the first one stays."""
SCORES = frozenset(("judge", "reward_model"))


def whole_run(inputs: Inputs) -> list[Block]:
    """Keys of everything that trains, samples and scores."""
    return [training(inputs), sampling(inputs), *scoring(inputs), loss(inputs)]


def training(inputs: Inputs) -> dict[str, Sequence[Any]]:
    """Knobs of what trains, with the values to try."""
    workload, config, trainer = inputs.workload, inputs.config, inputs.topology.trainer
    longest = workload.lengths.longest
    most = max(-(-workload.step_tokens() // trainer.data_parallel), longest)
    budgets = {budget for budget in TOKEN_BUDGETS if longest <= budget < 2 * most}
    knobs: dict[str, Sequence[Any]] = {
        "train.tokens_per_microbatch": sorted(budgets | {config.train.tokens_per_microbatch}),
        "train.activation_checkpointing": tuple(
            dict.fromkeys(("none", "selective", "full", config.train.activation_checkpointing))
        ),
    }
    if inputs.is_local:
        return knobs
    today = config.cluster.trainer.offload
    others = tuple(part for part in today if part == "reference")
    return knobs | {
        "cluster.trainer.offload": [*dict.fromkeys((today, ("parameters", *others)))],
        "cluster.trainer.tensor_parallel": _legal(inputs, "cluster.trainer.tensor_parallel", DEGREES),
    }


def loss(inputs: Inputs) -> dict[str, Sequence[Any]]:
    """Knobs of the loss, with the values to try."""
    return {"train.logprob_chunk_tokens": sorted({256, 1024, 4096, inputs.config.train.logprob_chunk_tokens})}


def sampling(inputs: Inputs) -> dict[str, Sequence[Any]]:
    """Knobs of what samples, with the values to try."""
    workload, config = inputs.workload, inputs.config
    in_flight = workload.samples * (workload.max_staleness + 1)
    today, engines = config.rollout.max_concurrent_samples, config.cluster.engines
    if inputs.is_local or engines.kind.memory != "share":
        counts = {count for count in (16, 32, 64, 128, 256, 512, 1024, 2048) if count < in_flight} | {in_flight, today}
        prefill = {1024, 4096, 16384, config.rollout.prefill_tokens}
        return {"rollout.max_concurrent_samples": sorted(counts), "rollout.prefill_tokens": sorted(prefill)}
    key = "cluster.engines.tensor_parallel_size"
    return {
        key: _legal(inputs, key, DEGREES),
        "cluster.engines.gpu_memory_utilization": _with(engines.gpu_memory_utilization, FRACS),
        "cluster.engines.max_num_seqs": _with(engines.max_num_seqs, (64, 128, 256, 512, 1024)),
    }


def scoring(inputs: Inputs) -> list[Block]:
    """Knobs of judges' engines, and of the devices that judges and reward models have, with the values to try."""
    engines = (block for service in inputs.judges for block in _engine(inputs, service))
    devices = (_service_devices(inputs, service) for service in inputs.judges)
    return [block for block in (*engines, *devices, _pools(inputs)) if block]


def _engine(inputs: Inputs, service: str) -> Iterator[Block]:
    engine, section = inputs.config.services[service].engine, f"services.{service}.engine"
    if engine is None:
        return
    sequences = {f"{section}.max_num_seqs": _with(engine.max_num_seqs, (16, 32, 64, 128, 256))}
    if engine.use == "hone":
        yield sequences
        return
    key, share = f"{section}.tensor_parallel_size", f"{section}.gpu_memory_utilization"
    shares = _with(engine.gpu_memory_utilization, SCORER_FRACS)
    yield {
        key: _legal(inputs, key, DEGREES if has_vllm(inputs, service) else ()),
        share: shares,
        **sequences,
    }
    yield {
        share: shares,
        f"{section}.max_num_batched_tokens": _with(engine.max_num_batched_tokens, (2048, 8192, 32768)),
        f"{section}.max_model_len": _with(engine.max_model_len, _context(inputs, service)),
        f"{section}.enforce_eager": _with(engine.enforce_eager, (True,)),
    }


def has_vllm(inputs: Inputs, service: str) -> bool:
    """Whether a judge's engine is vLLM on this machine, where the file is checked, whatever hardware is planned for."""
    return served_by(judge_engine(inputs, service), inputs.folder) == "vllm"


def _context(inputs: Inputs, service: str) -> list[int]:
    """The shortest context that its rewards' prompts and answers fit into; none where a reward sets no limit."""
    asked = judge_requests(inputs, service)
    if not all(one.has_limit for one in asked):
        return []
    return [max(one.prompt + one.answer for one in asked) + ROLE_TOKENS]


def _service_devices(inputs: Inputs, service: str) -> Block:
    """Fewer of its devices, or more of this machine's; one at least is left for the run."""
    config, key = inputs.config, f"services.{service}.devices"
    today = config.services[service].devices
    if not today or set(today) & {
        number for name, one in config.services.items() if name != service for number in one.devices
    }:
        return {}
    taken = service_devices(config) | set(config.run.devices or ())
    free = [number for number in range(inputs.hardware.per_node) if number not in taken]
    most = len(today) + len(free) - (config.run.devices is None) if has_vllm(inputs, service) else 1
    return {key: _legal(inputs, key, [(*today, *free)[:count] for count in DEGREES if count <= most])}


def _pools(inputs: Inputs) -> Block:
    """Pools of other sizes: what is idle goes to one of them, or one that scores gives to or takes from another."""
    pools = inputs.config.cluster.pools
    idle = inputs.hardware.devices - inputs.topology.num_devices - len(service_devices(inputs.config))
    tried: list[dict[str, PoolSection]] = []
    for taker, section in pools.items() if not inputs.is_local else ():
        tried += [_resized(pools, {taker: count}) for count in {*DEGREES, idle} if 0 < count <= idle]
        for giver in (name for name in pools if name != taker and SCORES & {*section.roles, *pools[name].roles}):
            counts = (count for count in DEGREES if count < pools[giver].devices)
            tried += [_resized(pools, {taker: count, giver: -count}) for count in counts]
    return {"cluster.pools": _legal(inputs, "cluster.pools", tried)} if tried else {}


def _resized(pools: Mapping[str, PoolSection], more: Mapping[str, int]) -> dict[str, PoolSection]:
    return {name: pool.model_copy(update={"devices": pool.devices + more.get(name, 0)}) for name, pool in pools.items()}


def _legal(inputs: Inputs, key: str, values: Iterable[Any]) -> list[Any]:
    """Today's value, and those that break no rule of the run file."""
    legal = [value for value in values if not cluster_violations(changed(inputs, {key: value}))]
    return _with(value_of(inputs.config, key), legal)


def _with(today: Any, values: Iterable[Any]) -> list[Any]:
    """Today's value first, then the others."""
    return [today, *(value for value in values if value != today)]
