"""Who does what on which devices, in a placement of many: trainers, engines, a critic's or a judge's own devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hone.config.cluster import Role
from hone.config.topology import judge_services
from hone.plan.cluster import BUCKET_BYTES, Pool, Trained, adapter_of
from hone.plan.embedded import Embedded, Reader, share_of
from hone.plan.engine import Engine, EngineSettings
from hone.plan.inputs import Inputs, bytes_each, key_in, microbatch
from hone.plan.local import LocalSettings
from hone.plan.placement import JudgePlacement

Roles = frozenset[Role]
LEARNERS: Roles = frozenset(["policy", "critic", "reference"])
SAMPLERS: Roles = frozenset(["rollout"])
SCORERS: Roles = frozenset(["judge", "reward_model"])
CRITICS: Roles = frozenset(["critic"])


@dataclass(frozen=True, slots=True)
class Place:
    """Devices and who takes turns on them, before it is known what that takes."""

    name: str
    devices: int
    roles: Roles


def pools_of(inputs: Inputs) -> list[Pool]:
    """Who does what where."""
    return [_pool(inputs, place) for place in places_of(inputs)]


def places_of(inputs: Inputs) -> list[Place]:
    """The pools of the run file's `cluster` section; else what `placement.mode` and its sizes say."""
    if inputs.topology is not None:
        return [Place(pool.name, len(pool.devices), frozenset(pool.roles)) for pool in inputs.topology.pools]
    return [*_worded(inputs)]


def _worded(inputs: Inputs) -> Iterator[Place]:
    placement, scorer = inputs.placement, inputs.placement.judge
    judges = scorer.devices if scorer else 0
    rest = inputs.hardware.devices - judges
    shared = SAMPLERS if judges else SAMPLERS | SCORERS
    if placement.mode == "colocated":
        yield Place("policy and engine", rest, LEARNERS | shared)
    else:
        engines = placement.engine_devices or placement.engine.tensor_parallel
        critics = placement.critic_devices if inputs.critic else 0
        trainers = max(rest - engines - critics, 1)
        yield Place("policy", trainers, LEARNERS - CRITICS if critics else LEARNERS)
        if critics:
            yield Place("critic", critics, CRITICS)
        yield Place("engine", engines, shared)
    if judges:
        yield Place("judge", judges, SCORERS)


def _pool(inputs: Inputs, place: Place) -> Pool:
    placement, roles, scorer = inputs.placement, place.roles, inputs.placement.judge
    policy = _policy(inputs, place.devices)
    is_adapter_off = policy.adapter > 0 and "policy" in roles
    has_reference = "reference" in roles and inputs.workload.has_reference and not is_adapter_off
    return Pool(
        name=place.name,
        devices=place.devices,
        policy=policy if "policy" in roles else None,
        critic=_critic(inputs, policy, place.devices) if "critic" in roles else None,
        reference=replace(policy, adapter=0) if has_reference else None,
        reference_on_host=placement.offload_reference,
        engine=_engine(inputs, place.devices) if "rollout" in roles else None,
        judge=_scorer(inputs, scorer) if scorer and roles & SCORERS else None,
        engine_sleeps=placement.engine.sleep_level if roles & LEARNERS else 0,
        judge_sleeps=_judge_sleeps(inputs, place),
        judge_scores_beside_engine=inputs.topology is not None,
        trainer_leaves=placement.offload_trainer and "rollout" in roles,
        is_gpu=inputs.hardware.kind == "gpu",
        bucket_bytes=_bucket_bytes(inputs),
    )


def _judge_sleeps(inputs: Inputs, place: Place) -> bool:
    """Whether whoever scores gives its memory to others; with a `cluster` section, where something trains."""
    scorer = inputs.placement.judge
    on_cluster = inputs.topology is not None
    return bool(place.roles & LEARNERS) if on_cluster else scorer is None or scorer.sleeps


def _bucket_bytes(inputs: Inputs) -> int:
    weights = bytes_each(inputs) * inputs.architecture.total_parameters
    wanted = BUCKET_BYTES if inputs.topology is None else round(inputs.config.cluster.bucket_mib * 2**20)
    return min(wanted, weights)


def _policy(inputs: Inputs, devices: int) -> Trained:
    placement, workload = inputs.placement, inputs.workload
    ranks = max(devices // (placement.tensor_parallel * placement.context_parallel), 1)
    work = microbatch(inputs, ranks=ranks, bytes_each=bytes_each(inputs))
    return Trained(
        name="",
        work=work,
        shard=min(placement.shard or devices, devices),
        accumulates=workload.step_tokens() > ranks * work.tokens * placement.context_parallel,
        adapter=adapter_of(inputs.architecture, workload),
        splits_root=placement.splits_root,
        offload=placement.offload_optimizer,
        moments_on_host=placement.offload_moments,
    )


def _critic(inputs: Inputs, policy: Trained, devices: int) -> Trained | None:
    if inputs.critic is None:
        return None
    work = replace(policy.work, architecture=inputs.critic, has_logits=False)
    return replace(policy, name="critic", work=work, shard=devices, adapter=0)


def _engine(inputs: Inputs, devices: int) -> Engine | Embedded:
    placement, lengths = inputs.placement.engine, inputs.workload.lengths
    concurrent = placement.max_samples or inputs.config.rollout.max_concurrent_samples
    if inputs.topology is not None and inputs.config.cluster.engines.use != "vllm":
        return Embedded(_local_settings(inputs), share_of(inputs.workload, devices))
    return Engine(
        EngineSettings(
            architecture=inputs.architecture,
            tensor_parallel=placement.tensor_parallel,
            memory_frac=placement.memory_frac,
            max_batched_tokens=placement.max_batched_tokens,
            max_samples=concurrent,
            longest=lengths.longest,
            graphs=placement.graphs,
            prefix="engine: ",
            knob=key_in(inputs, "placement.engine"),
            **({} if inputs.topology is None else VLLM_NAMES),
        ),
        inputs.hardware.memory_bytes,
    )


def _local_settings(inputs: Inputs) -> LocalSettings:
    return LocalSettings(
        architecture=inputs.architecture,
        critic=None,
        reward_models=(),
        work=microbatch(inputs, bytes_each=bytes_each(inputs)),
        max_concurrent=inputs.config.rollout.max_concurrent_samples,
        prefill_tokens=inputs.config.rollout.prefill_tokens,
        is_gpu=inputs.hardware.kind == "gpu",
        max_positions=inputs.architecture.max_positions,
        has_computed=True,
    )


VLLM_NAMES = {
    "frac_key": "gpu_memory_utilization",
    "split_key": "tensor_parallel_size",
    "tokens_key": "max_num_batched_tokens",
}


def _names(inputs: Inputs) -> dict[str, str]:
    """What the settings of a judge's engine are called."""
    services = judge_services(inputs.config) if inputs.topology is not None else []
    if not services:
        return {"knob": "placement.judge"}
    return {"knob": f"services.{services[0]}.engine"} | VLLM_NAMES


def _scorer(inputs: Inputs, scorer: JudgePlacement) -> Engine | Reader:
    assert inputs.judge is not None, "a judge has an architecture"
    if inputs.topology is not None and not scorer.writes:
        return Reader(replace(_local_settings(inputs), architecture=inputs.judge))
    settings = EngineSettings(
        architecture=inputs.judge,
        tensor_parallel=scorer.tensor_parallel,
        memory_frac=scorer.memory_frac,
        max_batched_tokens=scorer.max_batched_tokens,
        max_samples=scorer.max_samples,
        longest=scorer.prompt_tokens + (scorer.response_tokens if scorer.writes else 0),
        graphs=scorer.writes,
        prefix="judge: ",
        **_names(inputs),
    )
    return Engine(settings, inputs.hardware.memory_bytes)
