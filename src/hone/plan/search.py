"""Search for better settings of the same algorithm that fit: the presets of `hone plan`.

Prompts, group size, lengths, optimizer-step size, loss and precision stay as they are; `knobs.py` has the keys that may
change and the values to try. They are searched block by block, all combinations of a block with the others fixed, until
nothing changes; then every change that gains nothing is undone.

safe, recommended and aggressive make the steps of a run short. throughput, latency and memory tune judges and reward
models alone. A run of one process is also tried on all devices by the first three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

from hone.errors import DataError
from hone.plan.inputs import Inputs, Settings, changed, plain, value_of
from hone.plan.knobs import Block, has_vllm, scoring, whole_run
from hone.plan.ledger import gib, percent
from hone.plan.planner import Plan, cluster_settings, plan_inputs
from hone.plan.pools import judge_engine
from hone.plan.time import StepTime
from hone.plan.verdict import TIGHT_FRAC

Preset = Literal["safe", "recommended", "aggressive", "throughput", "latency", "memory"]


class Goal(NamedTuple):
    """What a preset makes small, and by which keys."""

    of: Callable[[Plan], float]
    gain: str
    """What a change brings, after a percentage."""
    then: Callable[[Plan], float]
    """What decides between settings that reach the goal equally well; differences are shares."""
    then_gain: str
    blocks: Callable[[Inputs], Sequence[Block]]
    title: str
    """In `recommended (6 % head-room)`."""
    headroom: float = TIGHT_FRAC
    """Share of every device that is left free."""
    slowdown: float = math.inf
    """How much longer a step may become, as a share of today's."""


def _short_steps(headroom: float) -> Goal:
    return Goal(
        of=lambda plan: plan.time.step_s,
        gain="shorter steps",
        then=lambda plan: plan.memory_utilisation,
        then_gain="of a device's memory freed, at the same speed",
        blocks=whole_run,
        title=f"{percent(headroom)} head-room",
        headroom=headroom,
    )


def _fast_scores(of: Callable[[StepTime], float], what: str) -> Goal:
    gain = f"less time to score {what}"
    return Goal(lambda plan: of(plan.time), gain, lambda plan: 0.0, "", scoring, f"time to score {what}", slowdown=0.1)


GOALS: Mapping[Preset, Goal] = {
    "safe": _short_steps(0.10),
    "recommended": _short_steps(TIGHT_FRAC),
    "aggressive": _short_steps(0.03),
    "throughput": _fast_scores(lambda time: time.phases["reward"], "all samples of a step"),
    "latency": _fast_scores(lambda time: time.group_score_s or 0.0, "one group"),
    "memory": Goal(
        of=lambda plan: plan.scoring_bytes,
        gain="less memory of judges and reward models",
        then=lambda plan: math.log(plan.time.step_s),
        then_gain="shorter steps, in the same memory",
        blocks=scoring,
        title="memory of judges and reward models",
        slowdown=0.1,
    ),
}
WORTH_FRAC = 0.01
"""A change must make the goal this much smaller, or it is not made."""
ROUNDS = 3
CLUSTER = (
    "cluster.backend",
    "cluster.nodes",
    "cluster.address",
    "cluster.devices_per_node",
    "cluster.pools",
    "cluster.engines.use",
)
"""Keys that take a run of one process to a cluster."""


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
            "changes": [asdict(one) for one in self.changes],
            "plan": self.plan.as_dict(),
        }


def propose(today: Plan, preset: Preset, *, pinned: frozenset[str] = frozenset()) -> Proposal:
    """The settings that reach a preset's goal best and leave its head-room; where none does, those that lack least.

    Args:
        today: the plan of the run file as it is.
        pinned: keys that keep their values, sections of them included.
    Raises:
        DataError: a preset for judges and reward models, of a run that has none on devices.
    """
    goal, start = GOALS[preset], today.inputs
    if goal.blocks is scoring and today.time.group_score_s is None:
        raise DataError(
            f"--preset {preset} is for judges and reward models, and this run has none with devices of a pool or of "
            "services.NAME.devices. Use safe, recommended or aggressive."
        )
    search = _Search(goal, (1 + goal.slowdown) * today.time.step_s, pinned)
    starts = [start]
    is_free = not any(_is_pinned(key, pinned) for key in CLUSTER)
    if goal.blocks is whole_run and start.is_local and start.hardware.devices > 1 and is_free:
        settings = cluster_settings(start)  # all devices instead of one, as far as the rules allow
        starts += [changed(start, settings)] if settings else []
    best, *others = (search.from_(inputs) for inputs in starts)
    for other in others:
        best = other if other.is_better_than(best) else best
    best = search.without_idle_changes(start, best)
    changes = [
        PlanChange(one, plain(before), plain(after), search.why(start, best, key))
        for key, value in search.differences(start, best.inputs).items()
        for one, before, after in _written(key, value_of(start.config, key), value)
    ]
    return Proposal(preset, best.plan, tuple(changes))


def _is_pinned(key: str, pinned: frozenset[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") or one.startswith(f"{key}.") for one in pinned)


def _written(key: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """A change as keys of a run file: of pools that were there, their sizes."""
    if key == "cluster.pools" and before:
        for name, pool in after.items():
            if pool.devices != before[name].devices:
                yield f"{key}.{name}.devices", before[name].devices, pool.devices
    else:
        yield key, before, after


@dataclass(frozen=True, slots=True)
class _Found:
    """A point of the search and how good it is."""

    inputs: Inputs
    plan: Plan
    cost: tuple[float, float, float]
    """What is impossible (rules broken, bytes too many, steps too long), `Goal.of`, `Goal.then`: less is better, in
    this order."""

    def is_better_than(self, other: _Found) -> bool:
        (mine, my_goal, my_rest), (theirs, their_goal, their_rest) = self.cost, other.cost
        if mine != theirs:
            return mine < theirs
        if abs(my_goal - their_goal) > WORTH_FRAC * their_goal:
            return my_goal < their_goal
        return my_rest < their_rest - WORTH_FRAC


@dataclass(frozen=True, slots=True)
class _Search:
    goal: Goal
    longest_step_s: float
    pinned: frozenset[str]

    def found(self, inputs: Inputs) -> _Found:
        goal, plan = self.goal, plan_inputs(inputs)
        impossible = plan.impossible(goal.headroom) + max(0.0, plan.time.step_s / self.longest_step_s - 1)
        return _Found(inputs, plan, (impossible, goal.of(plan), goal.then(plan)))

    def from_(self, start: Inputs) -> _Found:
        """The best point around a start, where no block improves on the others any more."""
        best = self.found(start)
        for _ in range(ROUNDS):
            before = best
            for block in self._blocks(best.inputs):
                best = self._best_of(best, block)
            if best is before:
                break
        return best

    def _blocks(self, inputs: Inputs) -> list[Block]:
        return [
            {key: values for key, values in block.items() if not _is_pinned(key, self.pinned)}
            for block in self.goal.blocks(inputs)
        ]

    def _best_of(self, start: _Found, block: Block) -> _Found:
        best = start
        for values in product(*block.values()):
            found = self.found(changed(start.inputs, dict(zip(block, values, strict=True))))
            if found.is_better_than(best):
                best = found
        return best

    def differences(self, start: Inputs, end: Inputs) -> Settings:
        """The keys that have another value at the end, with it."""
        keys = [*CLUSTER] if start.is_local and not end.is_local else []
        for block in self.goal.blocks(end):
            keys += block
        after = {key: value_of(end.config, key) for key in keys}
        return {
            key: value for key, value in after.items() if value is not None and value != value_of(start.config, key)
        }

    def without_idle_changes(self, start: Inputs, best: _Found) -> _Found:
        """Undo, one by one, the changes that gain nothing; those that make a cluster go together."""
        for key in self.differences(start, best.inputs):
            if start.is_local and key in CLUSTER:
                continue
            undone = self._undone(start, best, key)
            if not best.is_better_than(undone):
                best = undone
        return best

    def _undone(self, start: Inputs, best: _Found, key: str) -> _Found:
        return self.found(changed(best.inputs, {key: value_of(start.config, key)}))

    def why(self, start: Inputs, best: _Found, key: str) -> str:
        """What would be without this one change."""
        undone = self._undone(start, best, key)
        plan, margin = undone.plan, self.goal.headroom
        broken = [problem for problem in plan.verdict.problems if problem not in best.plan.verdict.problems]
        if len(plan.verdict.problems) > len(best.plan.verdict.problems):
            return f"without it: {broken[0]}"
        if plan.impossible(margin) > best.plan.impossible(margin):
            with_it = {ledger.device: ledger.peak.bytes for ledger in best.plan.ledgers}
            lacking = [one for one in plan.ledgers if one.peak.bytes > (1 - margin) * one.capacity_bytes]
            worst = max(lacking, key=lambda one: (one.peak.bytes - with_it.get(one.device, 0)) / one.capacity_bytes)
            return f"without it {worst.peak.phase} would take {gib(worst.peak.bytes)} of {gib(worst.capacity_bytes)}"
        if undone.cost[0] > best.cost[0]:
            return f"without it a step would take {plan.time.step_s:.3g} s"
        (_, goal, rest), (_, without, rest_without) = best.cost, undone.cost
        if without - goal > WORTH_FRAC * without:
            return f"{percent((without - goal) / without)} {self.goal.gain}"
        return f"{percent(rest_without - rest)} {self.goal.then_gain}"


# ---- what the algorithm's own numbers would bring, said and never done


def beyond(plan: Plan) -> list[str]:
    """What other numbers of the algorithm would bring, and judges on several devices where vLLM is not installed: for
    people to decide."""
    inputs, lines = plan.inputs, []
    for service in (service for service in inputs.judges if not has_vllm(inputs, service)):
        is_own = judge_engine(inputs, service).use == "hone"
        why = "and its engine is Hone's own" if is_own else "which is not installed here"
        lines.append(f"services.{service}: several devices need vLLM, {why}")
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
