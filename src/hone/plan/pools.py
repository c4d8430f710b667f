"""Pools of a plan: trainers, engines, critics, judges and reward models on each group of devices."""

from __future__ import annotations

from dataclasses import replace

from hone.config import topology
from hone.config.engine import POLICY_GPU_FRAC, SERVICE_GPU_FRAC, SERVICE_SEQUENCES, SERVICE_STEP_TOKENS, EngineSection
from hone.config.topology import TRAINED, TrainerGroup, is_sharded, judge_services
from hone.plan.cluster import PoolPlan, Trained, adapter_of
from hone.plan.embedded import Embedded, Reader, share_of
from hone.plan.engine import EnginePlan, EngineSettings
from hone.plan.inputs import Inputs, bytes_each, microbatch
from hone.plan.local import LocalSettings

DTYPE_BYTES, FP8_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}, 1


def pools_of(inputs: Inputs) -> list[PoolPlan]:
    """The run's pools, and services of judges with GPUs of their own."""
    pools = [] if inputs.is_local else [_pool(inputs, pool) for pool in inputs.topology.pools]
    return [*pools, *_judge_services(inputs)]


def _pool(inputs: Inputs, pool: topology.Pool) -> PoolPlan:
    config, roles = inputs.config, pool.roles
    offload = config.cluster.trainer.offload
    policy = _trained(inputs, inputs.topology.trainer)
    is_adapter_off = policy.adapter > 0 and "policy" in roles
    reference = inputs.topology.reference if inputs.workload.has_reference and not is_adapter_off else None
    critic = inputs.topology.critic if inputs.critic else None
    learns = any(role in TRAINED for role in roles)
    scorer: EnginePlan | Reader | None = None
    if "judge" in roles:
        (service,) = judge_services(config)
        scorer = _judge(inputs, service)
    elif "reward_model" in roles:
        scorer = _reader(inputs)
    return PoolPlan(
        name=pool.name,
        devices=len(pool.devices),
        policy=policy if "policy" in roles else None,
        critic=_critic(inputs, critic) if critic and "critic" in roles else None,
        reference=replace(_trained(inputs, reference), adapter=0) if reference and "reference" in roles else None,
        reference_on_host="reference" in offload,
        engine=_engine(inputs, len(pool.devices)) if "rollout" in roles else None,
        judge=scorer,
        engine_sleeps=config.cluster.engines.sleep_level if learns else 0,
        judge_sleeps=learns,
        is_gpu=inputs.hardware.kind == "gpu",
        bucket_bytes=_bucket_bytes(inputs),
    )


def _judge_services(inputs: Inputs) -> list[PoolPlan]:
    services = inputs.config.services
    return [
        PoolPlan(f"service {name}", len(services[name].devices), judge=_judge(inputs, name), judge_sleeps=False)
        for name in inputs.judges
        if services[name].devices
    ]


def _bucket_bytes(inputs: Inputs) -> int:
    weights = bytes_each(inputs) * inputs.architecture.total_parameters
    return min(round(inputs.config.cluster.bucket_mib * 2**20), weights)


def _trained(inputs: Inputs, group: TrainerGroup) -> Trained:
    """The policy on a group of ranks."""
    offload, workload = inputs.config.cluster.trainer.offload, inputs.workload
    ranks = group.data_parallel
    work = microbatch(inputs, ranks=ranks)
    return Trained(
        name="",
        work=work,
        shard=group.shard * group.tensor_parallel,
        accumulates=workload.step_tokens() > ranks * work.tokens * group.sequence_parallel,
        adapter=adapter_of(inputs.architecture, workload),
        is_sharded=is_sharded(inputs.config.cluster.trainer, group.world_size),
        offload="parameters" in offload,
        moments_on_host="optimizer" in offload,
    )


def _critic(inputs: Inputs, group: TrainerGroup) -> Trained:
    assert inputs.critic is not None
    policy = _trained(inputs, group)
    work = replace(policy.work, architecture=inputs.critic, has_logits=False)
    return replace(policy, name="critic", work=work, adapter=0)


def _engine(inputs: Inputs, devices: int) -> EnginePlan | Embedded:
    args, rollout, lengths = inputs.config.cluster.engines, inputs.config.rollout, inputs.workload.lengths
    if not args.kind.takes_share:
        return Embedded(_local_settings(inputs), share_of(inputs.workload, devices))
    sequences = args.max_num_seqs or rollout.max_concurrent_samples
    longest = args.max_model_len or lengths.longest
    least = max(sequences, longest) if args.enable_chunked_prefill is False else sequences
    weight_bytes = DTYPE_BYTES[inputs.config.run.precision if args.dtype == "auto" else args.dtype]
    return EnginePlan(
        EngineSettings(
            architecture=inputs.architecture,
            tensor_parallel=args.tensor_parallel_size,
            memory_frac=args.gpu_memory_utilization or POLICY_GPU_FRAC,
            max_batched_tokens=args.max_num_batched_tokens or max(rollout.prefill_tokens, least),
            max_samples=sequences,
            longest=longest,
            lengths=(lengths.max_prompt, lengths.max_response),
            graphs=not args.enforce_eager,
            weight_bytes=weight_bytes,
            kv_bytes=weight_bytes if args.kv_cache_dtype == "auto" else FP8_BYTES,
            fixed_cache_bytes=args.kv_cache_memory_bytes,
            offload_bytes=round(args.cpu_offload_gb * 2**30),
            prefix="engine: ",
            section="cluster.engines",
        ),
        inputs.hardware.memory_bytes,
    )


def _local_settings(inputs: Inputs) -> LocalSettings:
    return LocalSettings(
        architecture=inputs.architecture,
        critic=None,
        reward_models=(),
        work=microbatch(inputs),
        max_concurrent=inputs.config.rollout.max_concurrent_samples,
        prefill_tokens=inputs.config.rollout.prefill_tokens,
        is_gpu=inputs.hardware.kind == "gpu",
        max_positions=inputs.architecture.max_positions,
        has_computed=True,
    )


def _reader(inputs: Inputs) -> Reader | None:
    """The reward models: each replica holds all of them."""
    models = sorted((architecture for _, architecture in inputs.reward_models), key=lambda one: -one.active_parameters)
    if not models:
        return None
    return Reader(replace(_local_settings(inputs), architecture=models[0]), tuple(models[1:]))


def _judge_lengths(inputs: Inputs, service: str) -> tuple[int, int]:
    """Tokens of the longest prompt and the longest answer that the rewards ask a judge for."""
    prompt, answer = 4096, 1024
    for component in inputs.config.reward.components:
        if component.args.get("service") == service:
            found = [component.args.get(name) for name in ("prompt_length", "response_length")]
            prompt = found[0] if isinstance(found[0], int) else prompt
            answer = found[1] if isinstance(found[1], int) else answer
    return prompt, answer


def _judge(inputs: Inputs, service: str) -> EnginePlan:
    engine, lengths = inputs.config.services[service].engine or EngineSection(), _judge_lengths(inputs, service)
    return EnginePlan(
        EngineSettings(
            architecture=inputs.judges[service],
            tensor_parallel=engine.tensor_parallel_size,
            memory_frac=engine.gpu_memory_utilization or SERVICE_GPU_FRAC,
            max_batched_tokens=engine.max_num_batched_tokens or SERVICE_STEP_TOKENS,
            max_samples=engine.max_num_seqs or SERVICE_SEQUENCES,
            longest=engine.max_model_len or inputs.judges[service].max_positions or sum(lengths),
            lengths=lengths,
            graphs=not engine.enforce_eager,
            prefix="judge: ",
            section=f"services.{service}.engine",
        ),
        inputs.hardware.memory_bytes,
    )
