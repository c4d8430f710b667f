"""Search for faster settings of the same algorithm that fit: the presets of `hone plan`.

Prompts, group size, lengths, optimizer-step size, loss and precision stay as they are. What may change: tokens per
microbatch, recomputation, offloading, how models are divided over devices, and the engines of policy and judges. The
lattice is searched block by block (training, sampling, each judge), each exhaustively with the others fixed, until
nothing changes; then every change that gains nothing is undone. A run of one process is also tried on all devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from hone.config.engine import EngineSection
from hone.plan.inputs import Inputs
from hone.plan.ledger import gib, percent
from hone.plan.planner import Plan, cluster_settings, plan_inputs
from hone.plan.rules import cluster_violations
from hone.plan.settings import Settings, changed, plain, setting
from hone.plan.verdict import TIGHT_FRAC

Preset = Literal["safe", "recommended", "aggressive"]

MARGINS: Mapping[Preset, float] = {"safe": 0.10, "recommended": TIGHT_FRAC, "aggressive": 0.03}
"""Head-room that each preset leaves on every device, as a share of it."""
WORTH_FRAC = 0.01
"""A change must make a step this much shorter, or it is not made."""
ROUNDS = 3
TOKEN_BUDGETS = tuple(sorted(step << bits for bits in range(9, 18) for step in (2, 3)))
DEGREES = (1, 2, 4, 8, 16)
"""Of tensor parallelism."""
CLUSTER = (
    "cluster.backend",
    "cluster.nodes",
    "cluster.address",
    "cluster.devices_per_node",
    "cluster.pools",
    "cluster.engines.use",
)
"""Keys that take a run of one process to a cluster."""
FRACS = tuple(round(0.2 + 0.1 * n, 1) for n in range(8))


@dataclass(frozen=True, slots=True)
class PlanChange:
    """One setting that a preset changes."""

    key: str
    before: Any
    after: Any
    why: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a preset comes to."""

    preset: Preset
    plan: Plan
    changes: tuple[PlanChange, ...]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "preset": self.preset,
            "changes": [
                {"key": one.key, "before": one.before, "after": one.after, "why": one.why} for one in self.changes
            ],
            "plan": self.plan.as_dict(),
        }


def propose(today: Plan, preset: Preset, *, pinned: frozenset[str] = frozenset()) -> Proposal:
    """The fastest settings that leave a preset's head-room; where none does, those that lack least.

    Args:
        today: the plan of the run file as it is.
        pinned: keys that keep their values, sections of them included.
    """
    start, margin = today.inputs, MARGINS[preset]
    found = [_searched(_Found.of(inputs, margin), margin, pinned) for inputs in (start, *_on_cluster(start, pinned))]
    best = found[0]
    for other in found[1:]:
        best = other if other.is_better_than(best) else best
    best = _without_idle_changes(start, best, margin)
    changes = [
        PlanChange(key, plain(setting(start, key)), plain(after), _why(start, best, key, margin))
        for key, after in _differences(start, best.inputs).items()
    ]
    return Proposal(preset, best.plan, tuple(changes))


def _searched(start: _Found, margin: float, pinned: frozenset[str]) -> _Found:
    """The best point of the lattice around a start, where a block no longer improves on the other ones."""
    lattice = (training(start.inputs), sampling(start.inputs), *scoring(start.inputs), loss(start.inputs))
    blocks = [{key: values for key, values in block.items() if not _is_pinned(key, pinned)} for block in lattice]
    best = start
    for _ in range(ROUNDS):
        before = best
        for block in blocks:
            best = _best_of(best, block, margin)
        if best is before:
            break
    return best


def _is_pinned(key: str, pinned: frozenset[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") or one.startswith(f"{key}.") for one in pinned)


def _on_cluster(start: Inputs, pinned: frozenset[str]) -> Iterator[Inputs]:
    """A run of one process on all devices instead; as far as the rules allow."""
    if not start.is_local or start.hardware.devices == 1 or any(_is_pinned(key, pinned) for key in CLUSTER):
        return
    if settings := cluster_settings(start):
        yield changed(start, settings)


# ---- the lattice


def training(inputs: Inputs) -> dict[str, Sequence[Any]]:
    """Knobs of what trains, with the values to try."""
    workload, config, trainer = inputs.workload, inputs.config, inputs.topology.trainer
    longest = workload.lengths.longest
    most = max(-(-workload.step_tokens() // trainer.data_parallel), longest)
    budgets = {budget for budget in TOKEN_BUDGETS if longest <= budget < 2 * most}
    knobs: dict[str, Sequence[Any]] = {
        "train.tokens_per_microbatch": sorted(budgets | {config.train.tokens_per_microbatch}),
        "train.activation_checkpointing": ("none", "selective", "full"),
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
    if inputs.is_local or not engines.kind.takes_share:
        counts = {count for count in (16, 32, 64, 128, 256, 512, 1024, 2048) if count < in_flight} | {in_flight, today}
        prefill = {1024, 4096, 16384, config.rollout.prefill_tokens}
        return {"rollout.max_concurrent_samples": sorted(counts), "rollout.prefill_tokens": sorted(prefill)}
    key = "cluster.engines.tensor_parallel_size"
    return {
        key: _legal(inputs, key, DEGREES),
        "cluster.engines.gpu_memory_utilization": _with(engines.gpu_memory_utilization, FRACS),
        "cluster.engines.max_num_seqs": _with(engines.max_num_seqs, (64, 128, 256, 512, 1024)),
    }


def scoring(inputs: Inputs) -> Iterator[dict[str, Sequence[Any]]]:
    """Knobs of each judge's engine, with the values to try."""
    for service in inputs.judges:
        section = f"services.{service}.engine"
        engine = inputs.config.services[service].engine or EngineSection()
        if engine.use == "hone":
            continue
        key = f"{section}.tensor_parallel_size"
        yield {
            key: _legal(inputs, key, DEGREES),
            f"{section}.gpu_memory_utilization": _with(engine.gpu_memory_utilization, FRACS),
            f"{section}.max_num_seqs": _with(engine.max_num_seqs, (16, 32, 64, 128, 256)),
            f"{section}.max_num_batched_tokens": _with(engine.max_num_batched_tokens, (2048, 8192, 32768)),
        }


def _legal(inputs: Inputs, key: str, values: Sequence[int]) -> list[int]:
    """Today's value, and those that break no rule of the run file."""
    legal = [value for value in values if not cluster_violations(changed(inputs, {key: value}))]
    return _with(setting(inputs, key), legal)


def _with(today: Any, values: Iterable[Any]) -> list[Any]:
    """Today's value first, then the others."""
    return [*dict.fromkeys((today, *values))]


def _differences(start: Inputs, end: Inputs) -> dict[str, Any]:
    keys = [*CLUSTER] if start.is_local and not end.is_local else []
    for block in (training(end), sampling(end), *scoring(end), loss(end)):
        keys += block
    after = {key: setting(end, key) for key in keys}
    return {key: value for key, value in after.items() if value is not None and value != setting(start, key)}


# ---- the search


@dataclass(frozen=True, slots=True)
class _Found:
    """A point of the lattice and how good it is."""

    inputs: Inputs
    plan: Plan
    cost: tuple[float, float, float]
    """What is impossible (rules broken, bytes too many), seconds per step, peak: less is better, in this order."""

    @classmethod
    def of(cls, inputs: Inputs, margin: float) -> _Found:
        plan = plan_inputs(inputs)
        impossible = plan.impossible(margin)
        return cls(inputs, plan, (impossible, plan.time.step_s, plan.memory_utilisation))

    def is_better_than(self, other: _Found) -> bool:
        (mine, my_s, my_peak), (theirs, their_s, their_peak) = self.cost, other.cost
        if mine != theirs:
            return mine < theirs
        if abs(my_s - their_s) > WORTH_FRAC * their_s:
            return my_s < their_s
        return my_peak < their_peak - WORTH_FRAC


def _best_of(start: _Found, block: Mapping[str, Sequence[Any]], margin: float) -> _Found:
    best = start
    for settings in _points(block):
        found = _Found.of(changed(start.inputs, settings), margin)
        if found.is_better_than(best):
            best = found
    return best


def _points(block: Mapping[str, Sequence[Any]]) -> Iterator[Settings]:
    for values in product(*block.values()):
        yield dict(zip(block, values, strict=True))


def _without_idle_changes(start: Inputs, best: _Found, margin: float) -> _Found:
    """Undo, one by one, the changes that gain nothing; the keys of a cluster go together."""
    for key in _differences(start, best.inputs):
        if key in CLUSTER:
            continue
        undone = _Found.of(changed(best.inputs, {key: setting(start, key)}), margin)
        if not best.is_better_than(undone):
            best = undone
    return best


def _why(start: Inputs, best: _Found, key: str, margin: float) -> str:
    """What would be without this one change."""
    undone = _Found.of(changed(best.inputs, {key: setting(start, key)}), margin)
    if undone.plan.verdict.problems:
        return f"without it: {undone.plan.verdict.problems[0]}"
    if undone.cost[0] > best.cost[0]:
        worst = min(undone.plan.ledgers, key=lambda ledger: ledger.headroom_bytes / ledger.capacity_bytes)
        peak = worst.peak
        return f"without it {peak.phase} would take {gib(peak.bytes)} of {gib(worst.capacity_bytes)}"
    saved = undone.plan.time.step_s - best.plan.time.step_s
    if saved > WORTH_FRAC * best.plan.time.step_s:
        return f"{percent(saved / undone.plan.time.step_s)} shorter steps"
    freed = undone.plan.memory_utilisation - best.plan.memory_utilisation
    return f"{percent(freed)} of a device's memory freed, at the same speed"


# ---- what the algorithm's own numbers would bring, said and never done


def beyond(plan: Plan) -> list[str]:
    """What other numbers of the algorithm would bring: for people to decide, because they change what is learnt."""
    inputs, lines = plan.inputs, []
    workload = inputs.workload
    more = replace(
        inputs,
        workload=replace(
            workload,
            prompts=2 * workload.prompts,
            samples_per_optimizer_step=2 * workload.samples_per_optimizer_step,
        ),
    )
    gain = plan_inputs(more).time.samples_per_s / plan.time.samples_per_s - 1
    if gain > 0.05:
        lines.append(
            f"train.prompts_per_step {workload.prompts} -> {2 * workload.prompts}: {percent(gain)} more samples per "
            "second, but half as many updates for the same samples"
        )
    lengths = workload.lengths
    shorter = replace(
        inputs,
        workload=replace(
            workload,
            lengths=replace(
                lengths,
                max_response=lengths.max_response // 2,
                mean_response=min(lengths.mean_response, lengths.max_response // 4),
            ),
        ),
    )
    gain = plan_inputs(shorter).time.samples_per_s / plan.time.samples_per_s - 1
    if gain > 0.05:
        lines.append(
            f"rollout.max_response_tokens {lengths.max_response} -> {lengths.max_response // 2}: {percent(gain)} more "
            "samples per second, but longer answers are cut"
        )
    return lines
