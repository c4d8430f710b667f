"""Timeline of one policy update: its phases, and which of them overlap."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hone.plan import time
from hone.plan.cluster import PoolPlan, Trained, adapter_of
from hone.plan.efficiency import MeasuredDecoding, MeasuredRates, with_measured, with_measured_decoding
from hone.plan.embedded import Embedded, EmbeddedJudge, Reader
from hone.plan.engine import EnginePlan
from hone.plan.inputs import Inputs, bytes_each, has_graphs, room_of
from hone.plan.time import CPU, GPU, GPU_EAGER, Efficiency, LearnerTime, Sampler, StepTime
from hone.plan.workload import Lengths


def step_time(inputs: Inputs, pools: Sequence[PoolPlan]) -> StepTime:
    """Seconds of one policy update, by phase.

    Args:
        pools: of the cluster and of services; see `pools_of`.
    """
    engine = next((pool.engine for pool in pools if pool.engine), None)
    rates, sampler = _rates(inputs, engine), _sampler(inputs, pools)
    workload, hardware = inputs.workload, inputs.hardware
    decoding = measured_decoding(inputs, engine, rates)[0]
    rolling = time.decode_s(sampler, hardware, decoding, workload.lengths, workload.samples, workload.group)
    rolling += time.prefill_s(sampler, hardware, rates, workload.lengths, workload.prompts)
    generating, phases, group_s = rolling, {"rollout": rolling}, _scoring_s(inputs, pools, workload.group)
    if group_s is not None:
        scoring = phases["reward"] = _scoring_s(inputs, pools, workload.samples) or 0.0
        # On devices of their own they score while others sample; the last group's score comes when all are sampled.
        apart = not any(pool.engine and pool.judge for pool in pools)
        generating = max(rolling, scoring) + min(group_s, rolling, scoring) if apart else rolling + scoring
    after = _publishing(inputs, rates) | _learning(inputs, pools, rates)
    phases |= after
    rest = sum(after.values())
    # Devices of their own that may run ahead, generate while others train.
    overlaps = not inputs.is_local and not inputs.topology.colocated and workload.max_staleness > 0
    return StepTime(
        phases=phases,
        step_s=max(generating, rest) if overlaps else generating + rest,
        response_tokens=workload.samples * workload.lengths.mean_response,
        samples=workload.samples,
        useful_flops=_useful_flops(inputs),
        peak_flops=inputs.topology.num_devices * hardware.flops(bytes_each(inputs)),
        efficiency=decoding,
        concurrent=time.concurrent_sequences(sampler, workload.lengths, workload.group),
        group_score_s=group_s,
    )


def _rates(inputs: Inputs, engine: EnginePlan | Embedded | EmbeddedJudge | Reader | None) -> Efficiency:
    """The priors for this hardware and an engine; None is the one of a run of one process."""
    if inputs.hardware.kind == "cpu":
        return CPU
    return measured_rates(inputs, GPU if _decodes_by_graphs(inputs, engine) else GPU_EAGER)[0]


def _decodes_by_graphs(inputs: Inputs, engine: EnginePlan | Embedded | EmbeddedJudge | Reader | None) -> bool:
    return has_graphs(inputs) if engine is None else not isinstance(engine, Reader) and engine.settings.graphs


def measured_decoding(
    inputs: Inputs, engine: EnginePlan | Embedded | None, rates: Efficiency
) -> tuple[Efficiency, MeasuredDecoding | None]:
    """What `make gpu` measured of Hone's own engine on this kind of device, nearest to the policy; otherwise `rates`.

    Args:
        engine: that samples; None is the one of a run of one process.
    """
    if inputs.hardware.kind == "cpu" or isinstance(engine, EnginePlan):
        return rates, None
    return with_measured_decoding(
        rates,
        inputs.hardware.name,
        parameters=inputs.architecture.total_parameters,
        bytes_each=bytes_each(inputs),
        graphs=_decodes_by_graphs(inputs, engine),
    )


def measured_rates(inputs: Inputs, prior: Efficiency = GPU) -> tuple[Efficiency, MeasuredRates | None]:
    """What `make gpu` measured on this kind of device nearest to the policy and its sequences, or the prior."""
    return with_measured(
        prior,
        inputs.hardware.name,
        parameters=inputs.architecture.total_parameters,
        tokens=inputs.workload.lengths.mean,
        bytes_each=bytes_each(inputs),
    )


def _sampler(inputs: Inputs, pools: Sequence[PoolPlan]) -> Sampler:
    pool = next((pool for pool in pools if pool.engine), None)
    if pool is None or pool.engine is None:
        concurrent = inputs.config.rollout.max_concurrent_samples
        prefill = inputs.config.rollout.prefill_tokens
        room = room_of(inputs).tokens(concurrent)
        return Sampler(inputs.architecture, 1, 1, concurrent, room, prefill, bytes_each(inputs))
    return _of_engine(pool.engine, pool.devices)


def _of_engine(engine: EnginePlan | Embedded | EmbeddedJudge | Reader, devices: int) -> Sampler:
    if not isinstance(engine, EnginePlan):
        settings, step = engine.settings, engine.settings.prefill_tokens
        if isinstance(engine, Reader):
            step = min(one.batch_tokens for one in engine.models)
        room = math.inf if isinstance(engine, Reader) else settings.room.tokens(settings.max_concurrent)
        return Sampler(engine.architecture, devices, 1, settings.max_concurrent, room, step, engine.bytes_each)
    settings, each = engine.settings, engine.settings.tensor_parallel_size
    replicas, cache, step = max(devices // each, 1), engine.cache_tokens, settings.max_num_batched_tokens
    return Sampler(settings.architecture, replicas, each, settings.max_num_seqs, cache, step, settings.weight_bytes)


def _scoring_s(inputs: Inputs, pools: Sequence[PoolPlan], samples: int) -> float | None:
    """Seconds in which judges and reward models score `samples` samples, all at the same time; None: there are none."""
    return max((_scorer_s(inputs, pool.judge, pool.devices, samples) for pool in pools if pool.judge), default=None)


def _scorer_s(inputs: Inputs, scorer: EnginePlan | EmbeddedJudge | Reader, devices: int, samples: int) -> float:
    """A judge reads each response and writes its answers; a reward model only reads."""
    read, written, answers = inputs.workload.lengths.longest, 0, 1
    if isinstance(scorer, EnginePlan):
        (read, written), answers = scorer.settings.lengths, scorer.settings.answers
    elif isinstance(scorer, EmbeddedJudge):
        asks, answers = scorer.workload.lengths, scorer.workload.group
        read, written = asks.max_prompt, asks.max_response
    lengths = Lengths(
        max_prompt=read,
        max_response=max(written, 1),
        mean_prompt=min(inputs.workload.lengths.mean, read),
        mean_response=written / 2,
    )
    sampler, rates = _of_engine(scorer, devices), _rates(inputs, scorer)
    seconds = time.prefill_s(sampler, inputs.hardware, rates, lengths, samples)
    if written:
        seconds += time.decode_s(sampler, inputs.hardware, rates, lengths, samples * answers, answers)
    return seconds


def _publishing(inputs: Inputs, rates: Efficiency) -> dict[str, float]:
    """New weights to the engines; in one process they are shared, or copied where sampling runs ahead."""
    if not inputs.is_local:
        is_alone = inputs.config.lora.publish == "adapter"
        sent = adapter_of(inputs.architecture, inputs.workload) if is_alone else inputs.architecture.total_parameters
        return {"publish": 2 * sent / (inputs.hardware.link * rates.link)}  # in bfloat16, all over one device's link
    if not inputs.workload.max_staleness:
        return {}
    copied = 2 * bytes_each(inputs) * inputs.architecture.total_parameters
    return {"publish": copied / (inputs.hardware.bandwidth * rates.decode_bandwidth)}


def _learning(inputs: Inputs, pools: Sequence[PoolPlan], rates: Efficiency) -> dict[str, float]:
    workload, hardware, lengths = inputs.workload, inputs.hardware, inputs.workload.lengths
    tokens, logit_tokens = _tokens(inputs), workload.samples * lengths.mean_response
    policy = _learner(inputs, next((pool.policy for pool in pools if pool.policy), None), pools)
    critic = None if inputs.critic is None else _critic(inputs, policy, pools)
    phases = _measuring(inputs, pools, policy, critic, rates)
    once = time.update_s(policy, hardware, rates, tokens, lengths, logit_tokens)
    step = workload.optimizer_steps * time.optimizer_s(policy, hardware, rates)
    if critic is None:
        return phases | {"update": workload.passes * once, "optimizer": step}
    learning = workload.passes * time.update_s(critic, hardware, rates, tokens, lengths, 0)
    own_devices = any(pool.critic and not pool.policy for pool in pools)
    update = max(workload.passes * once, learning) if own_devices else workload.passes * once + learning
    return phases | {"update": update, "optimizer": step * (1 if own_devices else 2)}


def _measuring(
    inputs: Inputs, pools: Sequence[PoolPlan], policy: LearnerTime, critic: LearnerTime | None, rates: Efficiency
) -> dict[str, float]:
    """Passes without gradients of policy, reference and critic: pools at the same time, those of one after another."""
    workload, lengths = inputs.workload, inputs.workload.lengths
    home = next((pool.name for pool in pools if pool.policy), "")
    passes: list[tuple[str, LearnerTime, float]] = []
    logit_tokens = workload.samples * lengths.mean_response
    if workload.has_old_logprobs_pass:
        passes.append((home, policy, logit_tokens))
    if workload.has_reference:
        pool = next((pool for pool in pools if pool.reference), None)
        where, reference = (pool.name, replace(policy, devices=pool.devices)) if pool else (home, policy)
        passes.append((where, reference, logit_tokens))
    if critic is not None:
        passes.append((next((pool.name for pool in pools if pool.critic), home), critic, 0.0))
    seconds: dict[str, float] = defaultdict(float)
    for where, learner, logits in passes:
        seconds[where] += time.forward_s(learner, inputs.hardware, rates, _tokens(inputs), lengths, logits)
    return {"logprobs": max(seconds.values())} if seconds else {}


def _tokens(inputs: Inputs) -> float:
    """That all passes of one kind compute in a policy update."""
    workload = inputs.workload
    return workload.samples / workload.samples_per_optimizer_step * workload.mean_step_tokens()


def _learner(inputs: Inputs, trained: Trained | None, pools: Sequence[PoolPlan]) -> LearnerTime:
    devices = next((pool.devices for pool in pools if pool.policy), 1)
    return LearnerTime(
        architecture=inputs.architecture,
        devices=devices,
        microbatches=_microbatches(inputs, devices),
        tensor_parallel=inputs.topology.trainer.tensor_parallel,
        checkpointing=inputs.config.train.activation_checkpointing,
        bytes_each=bytes_each(inputs),
        trained_parameters=trained.trained if trained else inputs.architecture.total_parameters,
        offloaded=bool(trained and trained.offload),
        visiting=bool(trained and trained.moments_on_host),
    )


def _microbatches(inputs: Inputs, devices: int) -> int:
    """Of one rank, over the optimizer steps of one pass."""
    workload, trainer = inputs.workload, inputs.topology.trainer
    ranks = max(devices // (trainer.tensor_parallel * trainer.sequence_parallel), 1)
    steps = workload.samples // workload.samples_per_optimizer_step
    budget = inputs.config.train.tokens_per_microbatch
    return steps * max(1, math.ceil(workload.mean_step_tokens() / ranks / budget))


def _critic(inputs: Inputs, policy: LearnerTime, pools: Sequence[PoolPlan]) -> LearnerTime:
    assert inputs.critic is not None, "asked for only where there is one"
    return replace(
        policy,
        architecture=inputs.critic,
        devices=next((pool.devices for pool in pools if pool.critic), 1),
        trained_parameters=inputs.critic.total_parameters,
    )


def _useful_flops(inputs: Inputs) -> float:
    """Operations without recomputation: sample once, and forward and backward over what was sampled."""
    workload, lengths = inputs.workload, inputs.workload.lengths
    tokens = _tokens(inputs)
    responses = workload.samples * lengths.mean_response
    one = time.forward_flops(inputs.architecture, tokens, lengths.mean / 2, logit_tokens=responses)
    passes = 1 + 3 * workload.passes + workload.has_reference + workload.has_old_logprobs_pass
    critic = (1 + 3 * workload.passes) * one if inputs.critic else 0.0
    return passes * one + critic
