"""Better settings for the same algorithm: a search over what changes memory and speed and nothing else.

Prompts, group size, lengths, optimizer-step size, loss and precision stay as they are. What may change is listed in
`knobs`: how many tokens are computed at a time, what is recomputed, what lives on the host, how models are divided over
devices, and how much of a device an engine gets. The lattice is searched block by block (what trains, what samples),
each block exhaustively with the other one fixed, until nothing changes; then every change that gains nothing is undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from hone.plan.inputs import Inputs, key_in
from hone.plan.ledger import gib, percent
from hone.plan.placement import placement_key
from hone.plan.planner import Plan, plan_inputs
from hone.plan.settings import Settings, changed, setting
from hone.plan.verdict import TIGHT_FRAC

Preset = Literal["safe", "recommended", "aggressive"]

MARGINS: Mapping[Preset, float] = {"safe": 0.10, "recommended": TIGHT_FRAC, "aggressive": 0.03}
"""Head-room that each preset leaves on every device, as a share of it."""
WORTH_FRAC = 0.01
"""A change must make a step this much shorter, or it is not made."""
ROUNDS = 3
TOKEN_BUDGETS = tuple(sorted(step << bits for bits in range(9, 18) for step in (2, 3)))
FRACS = tuple(round(0.2 + 0.1 * n, 1) for n in range(8))


@dataclass(frozen=True, slots=True)
class Change:
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
    changes: tuple[Change, ...]

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
        pinned: keys that keep their values.
    """
    start = today.inputs
    best = _Found.of(start, MARGINS[preset])
    lattice = (training(start), sampling(start), loss(start))
    pinned = pinned | {placement_key(key) for key in pinned}
    blocks = [{key: values for key, values in block.items() if key not in pinned} for block in lattice]
    for _ in range(ROUNDS):
        before = best
        for block in blocks:
            best = _best_of(best, block, MARGINS[preset])
        if best is before:
            break
    best = _without_idle_changes(start, best, MARGINS[preset])
    changes = [
        Change(key_in(start, key), setting(start, key), after, _why(start, best, key, MARGINS[preset]))
        for key, after in _differences(start, best.inputs).items()
    ]
    return Proposal(preset, best.plan, tuple(changes))


# ---- the lattice


def training(inputs: Inputs) -> dict[str, Sequence[Any]]:
    """Knobs of what trains, with the values to try."""
    workload, placement = inputs.workload, inputs.placement
    many = placement.mode != "local"
    longest = workload.lengths.longest
    ranks = inputs.hardware.devices // (placement.tensor_parallel * placement.context_parallel)
    most = max(-(-workload.step_tokens() // max(ranks, 1)), longest)
    budgets = {budget for budget in TOKEN_BUDGETS if longest <= budget < 2 * most}
    knobs: dict[str, Sequence[Any]] = {
        "train.tokens_per_microbatch": sorted(budgets | {inputs.config.train.tokens_per_microbatch}),
    }
    if not many:
        return knobs | {"train.activation_checkpointing": ("none", "selective", "full")}
    knobs |= {
        "placement.checkpointing": ("none", "selective", "full"),
        "placement.offload_optimizer": (False, True),
    }
    return knobs | {"placement.tensor_parallel": _divisors(inputs, inputs.hardware.per_node)}


def loss(inputs: Inputs) -> dict[str, Sequence[Any]]:
    """Knobs of the loss, with the values to try."""
    knobs: dict[str, Sequence[Any]] = {
        "train.logprob_chunk_tokens": sorted({256, 1024, 4096, inputs.config.train.logprob_chunk_tokens})
    }
    return knobs | ({"placement.loss": ("naive", "chunked")} if inputs.placement.loss == "naive" else {})


def sampling(inputs: Inputs) -> dict[str, Sequence[Any]]:
    """Knobs of what samples, with the values to try."""
    workload, placement = inputs.workload, inputs.placement
    in_flight = workload.samples * (workload.max_staleness + 1)
    today = inputs.config.rollout.max_concurrent_samples
    counts = {count for count in (16, 32, 64, 128, 256, 512, 1024, 2048) if count < in_flight} | {in_flight, today}
    if placement.mode == "local":
        prefill = {1024, 4096, 16384, inputs.config.rollout.prefill_tokens}
        return {"rollout.max_concurrent_samples": sorted(counts), "rollout.prefill_tokens": sorted(prefill)}
    knobs: dict[str, Sequence[Any]] = {
        "placement.engine.tensor_parallel": _divisors(inputs, inputs.hardware.per_node),
        "placement.engine.memory_frac": sorted({*FRACS, placement.engine.memory_frac}),
        "placement.engine.max_samples": sorted({64, 128, 256, 512, 1024, placement.engine.max_samples or today}),
    }
    if inputs.topology is not None:  # how many devices who has is said by the run file
        return knobs
    if placement.mode == "colocated":
        return knobs | {"placement.offload_trainer": (False, True)}
    spare = inputs.hardware.devices - (placement.judge.devices if placement.judge else 0) - placement.critic_devices
    return knobs | {"placement.engine_devices": range(1, spare)}


def _divisors(inputs: Inputs, most: int) -> list[int]:
    """Degrees of tensor parallelism that divide heads and devices, within one machine."""
    heads, devices = inputs.architecture.heads, inputs.hardware.devices
    return [n for n in (1, 2, 4, 8, 16) if n <= min(most, devices) and heads % n == 0 and devices % n == 0]


def _differences(start: Inputs, end: Inputs) -> dict[str, Any]:
    keys = {**training(start), **sampling(start), **loss(start)}
    return {key: setting(end, key) for key in keys if setting(end, key) != setting(start, key)}


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
    """Undo, one by one, the changes that nothing is gained by."""
    for key in _differences(start, best.inputs):
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
