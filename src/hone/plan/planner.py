"""`plan(config, hardware)`: the ledgers of a run and the verdict on them, from the run file and a device's name.

The Python API of this package; `hone plan` prints what it returns. Closed forms only: a plan takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.config.run import RunConfig
from hone.plan import activations, cluster, local
from hone.plan.activations import Checkpointing, Implementation, Pass
from hone.plan.architecture import Architecture
from hone.plan.cluster import Pool, Trained
from hone.plan.engine import Engine, EngineSettings
from hone.plan.hardware import Hardware
from hone.plan.ledger import Ledger
from hone.plan.placement import JudgePlacement, Placement
from hone.plan.presets import find_architecture, named_architecture
from hone.plan.verdict import Verdict, judge
from hone.plan.workload import Workload, workload_of

FORMAT = 1
"""Of `Plan.as_dict()`; raised when a reader would have to change."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a plan follows from, resolved."""

    config: RunConfig
    hardware: Hardware
    placement: Placement
    """`mode` is not auto any more."""
    architecture: Architecture
    critic: Architecture | None
    judge: Architecture | None
    reward_models: tuple[tuple[str, Architecture], ...]
    workload: Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """A run on a machine: what it takes, and whether that is there."""

    inputs: Inputs
    ledgers: tuple[Ledger, ...]
    """One per kind of device, the host last."""
    verdict: Verdict
    notes: tuple[str, ...] = field(default=())
    """What is worth knowing besides: assumptions, waste."""

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
    return plan_inputs(resolve(config, hardware, placement or Placement(), workload, folder))


def resolve(config: RunConfig, hardware: Hardware, placement: Placement, workload: Workload, folder: Path) -> Inputs:
    """Look up every architecture, and decide what `auto` means."""
    architecture = find_architecture(config.model, folder)
    critic = None
    if workload.has_critic:
        named = config.critic.path
        critic = (architecture if named is None else named_architecture(named, folder, key="critic.path")).as_critic()
    if placement.mode == "auto":
        placement = placement.model_copy(update={"mode": "local" if hardware.devices == 1 else "colocated"})
    rewards = [
        (str(component.args["path"]), named_architecture(str(component.args["path"]), folder, key="reward_model"))
        for component in config.reward.components
        if component.use == "reward_model" and "path" in component.args
    ]
    scorer = placement.judge
    return Inputs(
        config=config,
        hardware=hardware,
        placement=placement,
        architecture=architecture,
        critic=critic,
        judge=None if scorer is None else named_architecture(scorer.model, folder, key="placement.judge.model"),
        reward_models=tuple(rewards),
        workload=workload,
    )


def plan_inputs(inputs: Inputs) -> Plan:
    """The plan of resolved inputs; what a search calls many times."""
    if inputs.placement.mode == "local":
        return _local_plan(inputs)
    return _cluster_plan(inputs)


def implementation_of(inputs: Inputs) -> Implementation:
    """Which code runs the policy."""
    wanted = inputs.config.model.implementation
    if wanted != "auto":
        return wanted
    return "hone" if inputs.architecture.model_type in activations.OWN_FAMILIES else "transformers"


def checkpointing_of(inputs: Inputs) -> Checkpointing:
    if inputs.placement.checkpointing is not None:
        return inputs.placement.checkpointing
    return "full" if inputs.config.train.activation_checkpointing else "none"


def microbatch(inputs: Inputs, *, ranks: int = 1, bytes_each: int = 2) -> Pass:
    """The largest microbatch of the policy on one of `ranks` devices that divide the samples among them."""
    workload, train, placement = inputs.workload, inputs.config.train, inputs.placement
    lengths = workload.lengths
    tokens = min(train.tokens_per_microbatch, max(-(-workload.step_tokens() // ranks), lengths.longest))
    tokens = -(-tokens // placement.context_parallel)
    responses = workload.group * lengths.max_response
    share = responses / (lengths.max_prompt + responses)
    return Pass(
        architecture=inputs.architecture,
        implementation=implementation_of(inputs),
        bytes_each=bytes_each,
        tokens=tokens,
        response_tokens=max(1, round(tokens * share)),
        longest=lengths.longest,
        checkpointing=checkpointing_of(inputs),
        loss=placement.loss,
        chunk_tokens=train.logprob_chunk_tokens,
        entropy_gradient=workload.has_entropy_gradient,
        tensor_parallel=placement.tensor_parallel,
    )


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
    return Plan(inputs, tuple(ledgers), judge(ledgers, ()), tuple(_notes(inputs)))


# ---- many devices


def pools_of(inputs: Inputs) -> list[Pool]:
    """Who does what where."""
    placement, hardware, workload = inputs.placement, inputs.hardware, inputs.workload
    scorer = placement.judge
    judge_devices = scorer.devices if scorer else 0
    rest = hardware.devices - judge_devices
    judge_engine = _judge_engine(inputs, scorer) if scorer else None
    judge_sleeps = scorer.sleeps if scorer else True
    pools: list[Pool] = []
    if placement.mode == "colocated":
        policy, critic = _learners(inputs, rest, rest)
        pools.append(
            Pool(
                name="policy and engine",
                devices=rest,
                policy=policy,
                critic=critic,
                has_reference=workload.has_reference,
                reference_on_host=placement.offload_reference,
                engine=_engine(inputs),
                judge=None if judge_devices else judge_engine,
                engine_sleeps=placement.engine.sleep_level,
                judge_sleeps=judge_sleeps,
                trainer_leaves=placement.offload_trainer,
            )
        )
    else:
        engines = placement.engine_devices or max(1, rest // 2)
        critics = placement.critic_devices if inputs.critic else 0
        trainers = max(rest - engines - critics, 1)
        policy, critic = _learners(inputs, trainers, critics or trainers)
        pools.append(
            Pool(
                name="policy",
                devices=trainers,
                policy=policy,
                critic=None if critics else critic,
                has_reference=workload.has_reference,
                reference_on_host=placement.offload_reference,
            )
        )
        if critics:
            pools.append(Pool(name="critic", devices=critics, critic=critic))
        pools.append(
            Pool(
                name="engine",
                devices=engines,
                engine=_engine(inputs),
                judge=None if judge_devices else judge_engine,
                judge_sleeps=judge_sleeps,
                engine_sleeps=0,
            )
        )
    if judge_devices:
        pools.append(Pool(name="judge", devices=judge_devices, judge=judge_engine))
    return pools


def _learners(inputs: Inputs, devices: int, critic_devices: int) -> tuple[Trained, Trained | None]:
    placement, workload = inputs.placement, inputs.workload
    ways = placement.tensor_parallel * placement.context_parallel
    ranks = max(devices // ways, 1)
    work = microbatch(inputs, ranks=ranks)
    several = workload.step_tokens() > ranks * work.tokens * placement.context_parallel
    policy = Trained(
        name="",
        work=work,
        shard=placement.shard or devices,
        accumulates=several,
        adapter=cluster.adapter_of(inputs.architecture, workload),
        splits_root=placement.splits_root,
        offload=placement.offload_optimizer,
    )
    if inputs.critic is None:
        return policy, None
    body = Pass(**{**{name: getattr(work, name) for name in Pass.__slots__}, "architecture": inputs.critic})
    critic = Trained(
        name="critic",
        work=Pass(**{**{name: getattr(body, name) for name in Pass.__slots__}, "has_logits": False}),
        shard=critic_devices,
        accumulates=several,
        splits_root=placement.splits_root,
        offload=placement.offload_optimizer,
    )
    return policy, critic


def _engine(inputs: Inputs) -> Engine:
    placement, lengths = inputs.placement.engine, inputs.workload.lengths
    settings = EngineSettings(
        architecture=inputs.architecture,
        tensor_parallel=placement.tensor_parallel,
        memory_frac=placement.memory_frac,
        max_batched_tokens=placement.max_batched_tokens,
        max_samples=placement.max_samples or inputs.config.rollout.max_concurrent_samples,
        longest=lengths.longest,
        graphs=placement.graphs,
        prefix="engine: ",
    )
    return Engine(settings, inputs.hardware.memory_bytes)


def _judge_engine(inputs: Inputs, scorer: JudgePlacement) -> Engine:
    assert inputs.judge is not None, "a judge has an architecture"
    settings = EngineSettings(
        architecture=inputs.judge,
        tensor_parallel=scorer.tensor_parallel,
        memory_frac=scorer.memory_frac,
        max_batched_tokens=scorer.max_batched_tokens,
        max_samples=scorer.max_samples,
        longest=scorer.prompt_tokens + (scorer.response_tokens if scorer.writes else 0),
        graphs=scorer.writes,
        prefix="judge: ",
        knob="placement.judge",
    )
    return Engine(settings, inputs.hardware.memory_bytes)


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
    engines = [engine for pool in pools for engine in (pool.engine, pool.judge) if engine]
    problems = [problem for problem in (engine.problem() for engine in engines) if problem]
    return Plan(inputs, tuple(ledgers), judge(ledgers, problems), tuple(_notes(inputs)))


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
