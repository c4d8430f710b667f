"""Who does what on which devices, in a placement of many: trainers, engines, a critic's or a judge's own devices."""

from __future__ import annotations

from dataclasses import replace

from hone.plan.cluster import Pool, Trained, adapter_of
from hone.plan.engine import Engine, EngineSettings
from hone.plan.inputs import Inputs, microbatch
from hone.plan.placement import JudgePlacement


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
        engines = placement.engine_devices or placement.engine.tensor_parallel
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
        adapter=adapter_of(inputs.architecture, workload),
        splits_root=placement.splits_root,
        offload=placement.offload_optimizer,
    )
    if inputs.critic is None:
        return policy, None
    critic = Trained(
        name="critic",
        work=replace(work, architecture=inputs.critic, has_logits=False),
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
