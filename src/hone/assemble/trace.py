"""`hone plan --trace`: the closed form of a plan beside a trace of the same step, for all devices that train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hone.errors import DataError
from hone.memory.calibration import RESIDUAL
from hone.plan.cluster import Trained, forward_moment, pool_moments, update_moments
from hone.plan.inputs import implementation_of, microbatch, microbatch_tokens
from hone.plan.known_models import named_config, policy_config
from hone.plan.ledger import Moment
from hone.plan.planner import Plan
from hone.plan.pools import pools_of
from hone.train.tracing.local import trace_local, with_layers
from hone.train.tracing.memory import Moments
from hone.train.tracing.sharded import trace_sharded
from hone.types import Batch, read_only

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
SHALLOW, DEEPER = 3, 5
"""Layers that are traced; each moment of a deeper model lies on the line through them. Two would not do: FSDP2 gathers
the next layer while one computes."""


@dataclass(frozen=True, slots=True)
class Point:
    """One moment of one kind of device, in bytes of tensors; the largest of a phase where only one side knows more."""

    device: str
    phase: str
    moment: str
    planned: int
    traced: int

    @property
    def error(self) -> float:
        """Error of the closed form, as a share of the trace."""
        return self.planned / self.traced - 1

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "device": self.device,
            "phase": self.phase,
            "moment": self.moment,
            "planned_bytes": self.planned,
            "traced_bytes": self.traced,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace found."""

    points: tuple[Point, ...]
    notes: tuple[str, ...]
    """Parts of the plan that were not traced."""
    seconds: float

    @property
    def worst(self) -> Point:
        """The peak of a phase at which the closed form is furthest off."""
        return max((point for point in self.points if point.moment == "peak"), key=lambda point: abs(point.error))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
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
    if found.inputs.is_local:
        ledger = found.ledgers[0]
        points = tuple(_single(ledger.device, ledger.moments, found, folder, say, notes))
    else:
        points = tuple(_pools(found, folder, say, notes))
    if not points:
        raise DataError("this plan cannot be traced: " + "; ".join(notes))
    return Trace(points, tuple(notes), time.monotonic() - start)


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
    if inputs.architecture.experts:  # weights are float32 there, and what is not to be traced raises
        notes.append("not traced: experts in one process, whose products PyTorch can trace in bfloat16 alone")
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
    """A microbatch of `tokens` tokens."""
    workload = found.inputs.workload
    lengths = workload.lengths
    return full_microbatch(
        tokens, max_prompt=lengths.max_prompt, max_response=lengths.max_response, group=workload.group
    )


def _pools(found: Plan, folder: Path, say: Callable[[str], None], notes: list[str]) -> Iterator[Point]:
    """Every pool's policy; where a pool holds all models of the run's trainer, with those, as one process does."""
    inputs = found.inputs
    needs_copy = inputs.workload.has_reference and not inputs.workload.adapter_rank
    for pool in pools_of(inputs):
        if pool.policy is None:
            if pool.critic:
                notes.append(f"not traced: the critic of {pool.name}")
            continue
        has_all = bool(pool.critic) == bool(inputs.critic) and bool(pool.reference) == needs_copy
        if not pool.policy.is_sharded and has_all:
            trainer = pool_moments(replace(pool, engine=None, judge=None), inputs.workload)
            yield from _single(pool.name, trainer, found, folder, say, notes)
            continue
        if pool.critic:
            notes.append(f"not traced: the critic of {pool.name}")
        policy = pool.policy
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
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None:
            notes.append(f"not traced: {pool.name}, for {reason}")
            continue
        yield from _sharded(pool.name, policy, found, folder, say)


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


def compared(
    device: str, planned: Iterable[Moment], traced: Moments, *, without: frozenset[str] = frozenset()
) -> list[Point]:
    """Moments that both know, then the peak of every phase that both know.

    Args:
        without: names of terms that no trace has: what is not a tensor, or belongs to an engine.
    """
    plan: Moments = {}
    for moment in planned:
        size = sum(term.bytes for term in moment.terms if term.name not in without)
        plan[moment.phase, moment.name] = max(size, plan.get((moment.phase, moment.name), 0))
    points = [Point(device, *key, plan[key], size) for key, size in traced.items() if key in plan]
    for phase in dict.fromkeys(phase for phase, _ in traced):
        both = [[size for (other, _), size in side.items() if other == phase] for side in (plan, traced)]
        if all(both):
            points.append(Point(device, phase, "peak", *map(max, both)))
    return points


def over_depth(trace: Callable[[int], Moments], layers: int, *, dense_layers: int = 0) -> Moments:
    """The moments of a model of `layers` layers, from traces of shallow ones where it is deep.

    Args:
        trace: makes one of a model with the given number of layers.
        dense_layers: first layers that are unlike the rest.
    """
    shallow, deeper = dense_layers + SHALLOW, dense_layers + DEEPER
    if layers <= deeper:
        return trace(layers)
    low, high = trace(shallow), trace(deeper)
    return {key: low[key] + (high[key] - low[key]) * (layers - shallow) // (deeper - shallow) for key in low}


def full_microbatch(tokens: int, *, max_prompt: int, max_response: int, group: int) -> Batch:
    """A batch of one microbatch that computes exactly `tokens`: prompts and responses as long as may be, the last of
    them cut to what is left.

    Every response to a prompt is another one; the columns are those that any algorithm reads.
    """
    prompts: list[int] = []
    prompt_S: list[int] = []
    length_S: list[int] = []
    left = tokens
    while left > 0:
        prompts.append(min(max_prompt, -(-left // 2)))
        left -= prompts[-1]
        for _ in range(group):
            prompt_S.append(len(prompts) - 1)
            length_S.append(1 + min(max_response - 1, left))
            left -= length_S[-1] - 1
            if left == 0:
                break
    total = sum(length_S)
    ids = [(sample + place) % 2**15 for sample, length in enumerate(length_S) for place in range(length)]
    names = ("advantages_T", "ref_logprobs_T", "value_T", "return_T")
    return Batch(
        prompts=tuple(read_only([0] * length, np.int32) for length in prompts),
        prompt_S=torch.tensor(prompt_S),
        length_S=torch.tensor(length_S),
        token_ids_T=torch.tensor(ids),
        loss_mask_T=torch.ones(total),
        sampler_logprobs_T=torch.zeros(total),
        reward_S=torch.ones(len(length_S)),
        columns={name: torch.ones(total) for name in names},
    )
