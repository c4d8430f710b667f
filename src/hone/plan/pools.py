"""Pools of a plan: trainers, engines, critics, judges and reward models on each group of devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hone.config import topology
from hone.config.engine import (
    JUDGE_ANSWER_TOKENS,
    ROLE_TOKENS,
    SERVICE_SEQUENCES,
    EngineSection,
    vllm_rank,
)
from hone.config.run import RolloutSection
from hone.config.topology import TRAINED, TrainerGroup, is_sharded, judge_services
from hone.plan.architecture import Architecture
from hone.plan.cluster import PoolPlan, Trained, adapter_of
from hone.plan.embedded import Embedded, EmbeddedJudge, Reader
from hone.plan.engine import EnginePlan, EngineSettings
from hone.plan.inputs import (
    Inputs,
    automatic_implementation,
    bytes_each,
    has_graphs,
    is_cuda,
    microbatch,
    room_of,
)
from hone.plan.kv_cache import CacheRoom, most_within
from hone.plan.local import LocalSettings
from hone.plan.workload import share_of
from hone.sizes import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class JudgeRequests:
    """What one reward asks a judge for, per sample."""

    prompt: int
    """Tokens of the longest prompt."""
    answer: int
    """Tokens of the longest answer."""
    votes: int
    has_limit: bool
    """The reward keeps prompts within `prompt`; without a limit it is the policy's longest prompt and response."""


def pools_of(inputs: Inputs) -> list[PoolPlan]:
    """The run's pools, and services of judges with GPUs of their own."""
    pools = [] if inputs.is_local else [_pool(inputs, pool) for pool in inputs.topology.pools]
    services = inputs.config.services
    judges = [
        PoolPlan(
            f"service {name}",
            len(services[name].devices),
            judge=_judge(inputs, name),
            judge_sleeps=False,
            is_gpu=inputs.hardware.kind == "gpu",
        )
        for name in inputs.judges
        if services[name].devices
    ]
    return [*pools, *judges]


def _pool(inputs: Inputs, pool: topology.Pool) -> PoolPlan:
    config, roles = inputs.config, pool.roles
    offload = config.cluster.trainer.offload
    policy = _trained(inputs, inputs.topology.trainer)
    is_adapter_off = policy.adapter > 0 and "policy" in roles
    reference = inputs.topology.reference if inputs.workload.has_reference and not is_adapter_off else None
    critic = inputs.topology.critic if inputs.critic else None
    learns = any(role in TRAINED for role in roles)
    each, adapter = bytes_each(inputs), config.lora.publish == "adapter"
    weights = each * (policy.adapter if adapter else inputs.architecture.total_parameters)
    arch = inputs.architecture  # repositories have experts one by one
    largest_sent = max(arch.vocab * arch.hidden, arch.hidden * max(arch.inner, arch.q_size))
    by_host = adapter or topology.transport_of(config, inputs.topology, on_gpu=is_cuda(inputs)) == "ray"
    scorer: EnginePlan | EmbeddedJudge | Reader | None = None
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
        bucket_bytes=min(round(config.cluster.bucket_mib * 2**20), weights),
        sent_bytes=min(each * largest_sent, weights),
        by_host=by_host,
    )


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
        tower_learns=inputs.tower_learns,
        has_pictures=bool(inputs.config.data.image_columns),
    )


def _critic(inputs: Inputs, group: TrainerGroup) -> Trained:
    assert inputs.critic is not None
    policy = _trained(inputs, group)
    work = replace(policy.work, architecture=inputs.critic, has_logits=False)
    return replace(policy, name="critic", work=work, adapter=0)


def _engine(inputs: Inputs, devices: int) -> EnginePlan | Embedded | None:
    args, rollout, lengths = inputs.config.cluster.engines, inputs.config.rollout, inputs.workload.lengths
    if args.kind.memory == "none":
        return None
    if args.kind.memory == "own":
        return Embedded(local_settings(inputs, devices), share_of(inputs.workload, devices))
    settled = args.for_policy(
        longest=lengths.longest,
        max_concurrent=rollout.max_concurrent_samples,
        prefill_tokens=rollout.prefill_tokens,
        on_gpu=inputs.hardware.kind == "gpu",
    )
    return EnginePlan(
        replace(
            _vllm(settled, "cluster.engines", inputs.architecture, bytes_each(inputs)),
            picture_pixels=inputs.picture_pixels,
            adapter_rank=vllm_rank(inputs.config.lora.rank) if inputs.config.lora.publish == "adapter" else 0,
            prefix="engine: ",
        ),
        inputs.hardware.memory_bytes,
    )


def _vllm(settled: EngineSection, section: str, architecture: Architecture, automatic: int) -> EngineSettings:
    """A section whose null keys have their values, as vLLM gets it.

    Args:
        section: its name in the run file.
        automatic: see `EngineSection.bytes_each`.
    """
    tokens, sequences, longest = settled.max_num_batched_tokens, settled.max_num_seqs, settled.max_model_len
    assert settled.gpu_memory_utilization and tokens and sequences and longest
    weight_bytes, kv_bytes = settled.bytes_each(automatic)
    return EngineSettings(
        architecture=architecture,
        tensor_parallel_size=settled.tensor_parallel_size,
        gpu_memory_utilization=settled.gpu_memory_utilization,
        max_num_batched_tokens=tokens,
        max_num_seqs=sequences,
        max_model_len=longest,
        section=section,
        graphs=not settled.enforce_eager,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        fixed_cache_bytes=settled.kv_cache_memory_bytes,
        offload_bytes=round(settled.cpu_offload_gb * 2**30),
    )


def local_settings(inputs: Inputs, replicas: int = 1) -> LocalSettings:
    """Of Hone's own engine on one device, where `replicas` of it share what is sampled."""
    return LocalSettings(
        critic=None,
        reward_models=(),
        work=microbatch(inputs),
        room=room_of(inputs, replicas),
        max_concurrent=inputs.config.rollout.max_concurrent_samples,
        prefill_tokens=inputs.config.rollout.prefill_tokens,
        is_gpu=inputs.hardware.kind == "gpu",
        graphs=has_graphs(inputs),
        has_computed=True,
        tower_learns=inputs.tower_learns,
        picture_pixels=inputs.picture_pixels,
    )


def _reader(inputs: Inputs) -> Reader | None:
    """The reward models: each replica holds all of them."""
    models = inputs.reward_models
    if not models:
        return None
    largest = max((one.architecture for one in models), key=lambda one: one.active_parameters)
    settings = local_settings(inputs)
    return Reader(replace(settings, work=replace(settings.work, architecture=largest)), models)


def judge_requests(inputs: Inputs, service: str) -> list[JudgeRequests]:
    """What each reward asks a judge for."""
    found = []
    for args in (one.args for one in inputs.config.reward.components if one.args.get("service") == service):
        answer, prompt = args.get("response_length", JUDGE_ANSWER_TOKENS), args.get("prompt_length")
        if prompt is None and args.get("max_model_len") is not None:
            prompt = args["max_model_len"] - answer - ROLE_TOKENS
        longest = prompt or inputs.workload.lengths.longest
        found.append(JudgeRequests(longest, answer, args.get("votes", 1), has_limit=prompt is not None))
    return found


def judge_engine(inputs: Inputs, service: str) -> EngineSection:
    """How a judge is held; without a section it is Hone's own engine with its defaults, as `hone train` starts it."""
    return inputs.config.services[service].engine or EngineSection(use="hone")


def _judge(inputs: Inputs, service: str) -> EnginePlan | EmbeddedJudge:
    engine, asked = judge_engine(inputs, service), judge_requests(inputs, service)
    lengths = max(one.prompt for one in asked), max(one.answer for one in asked)
    if engine.use == "hone":
        return _embedded_judge(inputs, service, lengths, sum(one.votes for one in asked))
    architecture, settled = inputs.judges[service], engine.for_service()
    longest = engine.max_model_len or architecture.max_positions or sum(lengths)
    settled = settled.model_copy(update={"max_model_len": longest})
    settings = replace(
        _vllm(settled, f"services.{service}.engine", architecture, DTYPE_BYTES["bfloat16"]),
        lengths=lengths,
        answers=sum(one.votes for one in asked),
        prefix="judge: ",
    )
    return EnginePlan(settings, inputs.hardware.memory_bytes)


def _embedded_judge(inputs: Inputs, service: str, lengths: tuple[int, int], votes: int) -> EmbeddedJudge:
    """In Hone's own engine: its cache grows with what is in flight, within half of its device's memory."""
    architecture, hardware, (prompt, answer) = inputs.judges[service], inputs.hardware, lengths
    rows = judge_engine(inputs, service).max_num_seqs or SERVICE_SEQUENCES
    each = 2 if hardware.bfloat16 else 4
    most = most_within(hardware.memory_bytes, architecture, each, rows)
    code = automatic_implementation(architecture)
    work = replace(microbatch(inputs), architecture=architecture, implementation=code, bytes_each=each, prompt=prompt)
    settings = replace(
        local_settings(inputs),
        work=work,
        room=CacheRoom(prompt, answer, rows, rows, most, shares_prompts=code == "hone"),
        max_concurrent=rows,
        prefill_tokens=RolloutSection.model_fields["prefill_tokens"].default,
        graphs=code == "hone" and is_cuda(inputs),
        picture_pixels=0,
    )
    asks = replace(inputs.workload.lengths, max_prompt=prompt, max_response=answer)
    workload = replace(inputs.workload, group=votes, lengths=asks, evaluates=True)
    return EmbeddedJudge(settings, workload)
