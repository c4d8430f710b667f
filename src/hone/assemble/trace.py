"""`hone plan --trace`: the closed form of a plan beside a trace of the same step, for all devices that train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hone.errors import DataError
from hone.memory.calibration import RESIDUAL
from hone.plan.cluster import PoolPlan, Trained, forward_moment, pool_moments, update_moments
from hone.plan.inputs import implementation_of, microbatch, microbatch_tokens
from hone.plan.ledger import Moment
from hone.plan.planner import Plan
from hone.plan.pools import pools_of
from hone.plan.presets import named_config, policy_config
from hone.train.tracing.compare import Point, compared, full_microbatch, over_depth
from hone.train.tracing.local import trace_local, with_layers
from hone.train.tracing.memory import Moments
from hone.train.tracing.sharded import trace_sharded
from hone.types import Batch

NO_TENSORS = frozenset(
    {
        RESIDUAL,
        "process",
        "kept by process",
        "freed memory",
        "CUDA context",
        "CUDA graphs",
        "KV cache",
        "engine's weights",
        "reward models",
    }
)
"""Terms of one process that a trace of its trainer does not have."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace found."""

    points: tuple[Point, ...]
    notes: tuple[str, ...]
    """What of the plan was not traced."""
    seconds: float

    @property
    def worst(self) -> Point:
        """The peak of a phase at which the closed form is furthest off."""
        return max((point for point in self.points if point.moment == "peak"), key=lambda point: abs(point.error))

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        points = [point.as_dict() for point in self.points]
        return {"points": points, "notes": list(self.notes), "seconds": self.seconds}


def trace_plan(found: Plan, folder: Path, say: Callable[[str], None]) -> Trace:
    """Trace what a plan was made for.

    Args:
        folder: the run file's, where relative paths start.
        say: gets progress messages.
    Raises:
        DataError: nothing in it can be traced.
    """
    start = time.monotonic()
    notes: list[str] = []
    trace = _local if found.inputs.is_local else _pools
    points = tuple(trace(found, folder, say, notes))
    if not points:
        raise DataError("nothing of this plan can be traced: " + "; ".join(notes))
    return Trace(points, tuple(notes), time.monotonic() - start)


def _local(found: Plan, folder: Path, say: Callable[[str], None], notes: list[str]) -> Iterator[Point]:
    """The trainer of one process."""
    ledger = found.ledgers[0]
    yield from _single(ledger.device, ledger.moments, found, folder, say, notes)


def _single(
    device: str,
    planned: Iterable[Moment],
    found: Plan,
    folder: Path,
    say: Callable[[str], None],
    notes: list[str],
) -> Iterator[Point]:
    """A trainer whose states are on one device, in flat buffers."""
    inputs, config = found.inputs, found.inputs.config
    if inputs.architecture.tower:
        notes.append("not traced: a model with a vision tower")
        return
    if inputs.architecture.caps_scores:
        notes.append("not traced: attention that caps its scores")
        return
    policy = policy_config(config.model, folder)
    named = config.critic.path
    critic = named_config(named, folder, "critic.path") if inputs.critic and named else None
    batch = _batch(found, microbatch_tokens(inputs))
    if inputs.workload.has_old_logprobs_pass:
        batch = batch.with_column("old_logprobs_T", batch.sampler_logprobs_T)

    def traced(layers: int) -> Moments:
        say(f"tracing the trainer with {layers} layers")
        theirs = None if critic is None else with_layers(critic, layers)
        return trace_local(config, with_layers(policy, layers), theirs, batch, microbatch(inputs))

    if inputs.workload.adapter_rank and implementation_of(inputs) == "transformers":
        notes.append("not traced: an adapter in Transformers' own class")
        return
    if inputs.critic and inputs.critic.layers != inputs.architecture.layers:
        notes.append("not traced: a critic of another depth")
        return
    moments = over_depth(traced, inputs.architecture.layers, dense_layers=inputs.architecture.dense_layers)
    yield from compared(device, planned, moments, without=NO_TENSORS)
    notes.append("not traced: the engine, and what the process takes besides tensors")
    if inputs.hardware.kind == "gpu":
        notes.append("not traced: what a GPU's kernels take for themselves")


def _batch(found: Plan, tokens: int) -> Batch:
    """A microbatch of so many tokens."""
    workload = found.inputs.workload
    lengths = workload.lengths
    return full_microbatch(
        tokens, max_prompt=lengths.max_prompt, max_response=lengths.max_response, group=workload.group
    )


def _pools(found: Plan, folder: Path, say: Callable[[str], None], notes: list[str]) -> Iterator[Point]:
    """Every pool's policy."""
    for pool in pools_of(found.inputs):
        if pool.policy is None:
            if pool.critic:
                notes.append(f"not traced: the critic of {pool.name}")
            continue
        if not pool.policy.is_sharded and _trains_alone(pool, found):
            trainer = pool_moments(replace(pool, engine=None, judge=None), found.inputs.workload)
            yield from _single(pool.name, trainer, found, folder, say, notes)
            continue
        if pool.critic:
            notes.append(f"not traced: the critic of {pool.name}")
        reason = _untraceable(pool.policy)
        if reason:
            notes.append(f"not traced: {pool.name}, for {reason}")
            continue
        yield from _sharded(pool.name, pool.policy, found, folder, say)


def _trains_alone(pool: PoolPlan, found: Plan) -> bool:
    """Whether a pool holds all models of the run's trainer, as one process does."""
    inputs = found.inputs
    needs_copy = inputs.workload.has_reference and not inputs.workload.adapter_rank
    return bool(pool.critic) == bool(inputs.critic) and bool(pool.reference) == needs_copy


def _untraceable(policy: Trained) -> str | None:
    reasons = {
        "a model with a vision tower": policy.architecture.tower is not None,
        "cluster.trainer.sequence_parallel > 1": policy.work.sequence_parallel > 1,
        "parameters in cluster.trainer.offload": policy.offload,
        "a single rank whose critic or reference is in another pool": not policy.is_sharded,
        "an adapter on sharded weights": policy.adapter > 0,
        "activation_checkpointing of some layers": isinstance(policy.work.checkpointing, int),
        "activation_checkpointing = selective in Transformers' own class": (
            policy.work.checkpointing == "selective" and policy.work.implementation == "transformers"
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _sharded(name: str, policy: Trained, found: Plan, folder: Path, say: Callable[[str], None]) -> Iterator[Point]:
    inputs, workload = found.inputs, found.inputs.workload
    architecture = policy_config(inputs.config.model, folder)
    batch = _batch(found, policy.work.tokens)
    forward = workload.has_reference or workload.has_old_logprobs_pass

    def traced(layers: int) -> Moments:
        say(f"tracing {name}, sharded over {policy.shard} devices, with {layers} layers")
        return trace_sharded(policy, with_layers(architecture, layers), batch, forward=forward)

    moments = over_depth(traced, inputs.architecture.layers, dense_layers=inputs.architecture.dense_layers)
    planned = [*update_moments(policy, [])]
    if forward:
        planned.append(forward_moment(policy, [*policy.states()]))
    yield from compared(name, planned, moments)
