"""Audit: verifies from events.jsonl that faults and restarts did not change what a run trained on.

It believes only the file, which other code writes, and knows nothing of how permits, routers and resumption work:

    twice       no group is trained on twice in what survives: a resumption undoes the updates after its checkpoint
    steps       the updates that survive are numbered 1, 2, 3, ... and a version is published after the update it is of
    unsynced    every token was sampled with a version that was published before, to that very replica where there are
                several, and since it was last started; replicas that hold one version hold the same bytes
    stale       no token is trained on more than max_staleness updates after the version that sampled it
    lost        a group that was started is trained on, dropped, or undone with the process; none is passed over
    permits     never more groups than permits are between their start and the publishing of what they taught

Where records were lost (a `gap` event), it names the place and takes for granted only what must have happened there:
groups and versions that were on their way across it are excused, everything after it is checked as before.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.observe.events import OF_GROUPS, read_events

RULES = ("twice", "steps", "unsynced", "stale", "lost", "permits")
_SAMPLING, _FINISHED, _TRAINED = "sampling", "finished", "trained"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule, and the number of the event that broke it, counted from 1."""

    rule: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.rule}: {self.what}"


@dataclass(frozen=True, slots=True)
class Audit:
    """What the checker found."""

    violations: tuple[Violation, ...]
    counts: Mapping[str, int]
    """Events by kind."""
    updates: int
    """Updates that survive."""
    undone: int
    """Updates that were undone by a resumption."""
    in_flight: int
    """Groups started and not ended; of a run that is active, or was killed."""
    gaps: tuple[str, ...] = ()
    """Where records were lost, and why."""

    def __str__(self) -> str:
        faults = ("requeued", "replica_down", "trainer_down")
        problems = ", ".join(f"{self.counts[kind]} {kind}" for kind in faults if self.counts.get(kind))
        starts = self.counts.get("started", 0)
        lines = [
            f"{self.updates} updates survive, {self.undone} were undone, started {starts} "
            f"time{'' if starts == 1 else 's'}, {self.in_flight} groups in flight{f', {problems}' if problems else ''}"
        ]
        broken = Counter(violation.rule for violation in self.violations)
        holds = "holds but for the gaps" if self.gaps else "holds"
        lines += [f"  {rule}: {f'{broken[rule]} violations' if broken[rule] else holds}" for rule in RULES]
        lines += [f"  {gap}" for gap in self.gaps]
        return "\n".join([*lines, *(f"  {violation}" for violation in self.violations)])


def audit(events: Iterable[Mapping[str, Any]]) -> Audit:
    """Check the events of one run, in the order in which they were written."""
    checker = _Checker()
    for line, event in enumerate(events, 1):
        checker.see(line, event)
    return checker.result()


def audit_file(path: Path) -> Audit:
    """Check an events.jsonl."""
    return audit(read_events(path))


@dataclass
class _AuditedReplica:
    versions: set[int] = field(default_factory=set)
    """Published to it since it was last started."""
    is_up: bool = True


class _Checker:
    """Goes through the events of a run once."""

    def __init__(self) -> None:
        self._violations: list[Violation] = []
        self._counts: Counter[str] = Counter()
        self._line = 0
        self._step: int | None = None  # None before the first `started`
        self._updates: dict[int, list[int]] = {}  # those that survive: step -> its groups
        self._trained_at: dict[int, int] = {}  # group -> the step that survives and had it
        self._undone = 0
        self._gaps: list[str] = []
        self._permits = self._max_staleness = sys.maxsize  # until `started` says
        self._begin_life()

    def see(self, line: int, event: Mapping[str, Any]) -> None:
        self._line = line
        kind = event["kind"]
        self._counts[kind] += len(event["prompts"]) if kind in OF_GROUPS else 1
        look = getattr(self, f"_on_{kind}", None)
        if look is not None:
            look(event)

    def result(self) -> Audit:
        in_flight = sum(state != _TRAINED for state, _ in self._holding.values())
        violations, gaps = tuple(self._violations), tuple(self._gaps)
        return Audit(violations, dict(self._counts), len(self._updates), self._undone, in_flight, gaps)

    def _broken(self, rule: str, what: str) -> None:
        self._violations.append(Violation(rule, self._line, what))

    def _begin_life(self) -> None:
        """A process, or an attempt of its supervisor: what was in flight before is undone."""
        self._holding: dict[int, tuple[str, int]] = {}  # groups with a permit -> state, step that trained it
        self._live: set[int] = set()  # versions published, wherever
        self._current: int | None = None  # the one that was published everywhere
        self._replicas: dict[str, _AuditedReplica] = {}
        self._fingerprints: dict[int, str] = {}
        self._after_gap = False  # nothing made an update since records were lost, so the step is not known
        self._seen_from: int | None = 0  # groups from this one on were started where nothing was lost; None: none yet
        self._excused_version: int | None = -1  # versions to this one may have been published unseen; None: any

    def _is_seen(self, prompt: int) -> bool:
        return self._seen_from is not None and prompt >= self._seen_from

    def _unpublished(self, versions: Collection[int], published: Collection[int]) -> set[int]:
        excused = self._excused_version
        return set() if excused is None else {v for v in versions if v > excused} - set(published)

    def _go_to(self, step: int) -> None:
        """The updates that survive are those to this step: later ones are undone, those not recorded were lost."""
        for undone in [made for made in self._updates if made > step]:
            for prompt in self._updates.pop(undone):
                self._trained_at.pop(prompt, None)
            self._undone += 1
        self._updates |= {made: [] for made in range(1, step + 1) if made not in self._updates}
        self._step = step

    # ---- one method for each kind that matters

    def _on_started(self, event: Mapping[str, Any]) -> None:
        step = event["step"]
        if self._step is not None and step > self._step and not self._after_gap:
            self._broken("steps", f"began at step {step}, but only {self._step} updates were made")
        self._go_to(step)
        self._permits, self._max_staleness = event["permits"], event["max_staleness"]
        self._begin_life()

    def _on_stopped(self, event: Mapping[str, Any]) -> None:
        self._begin_life()

    def _on_gap(self, event: Mapping[str, Any]) -> None:
        self._gaps.append(f"line {self._line}: records are missing: {event['why']}")
        if event["what"] != "events":
            return
        replicas = {name: _AuditedReplica(replica.versions) for name, replica in self._replicas.items()}
        live, current = self._live, self._current
        self._begin_life()
        self._replicas, self._live, self._current = replicas, live, current
        self._after_gap, self._seen_from, self._excused_version = True, None, None

    def _on_group_started(self, event: Mapping[str, Any]) -> None:
        for prompt in event["prompts"]:
            if self._seen_from is None:
                self._seen_from = prompt
            if prompt in self._holding:
                self._broken("lost", f"group {prompt} was started again before it ended")
            self._holding[prompt] = _SAMPLING, 0
            if len(self._holding) > self._permits:
                self._broken("permits", f"group {prompt} is number {len(self._holding)} in flight of {self._permits}")

    def _on_sampled(self, event: Mapping[str, Any]) -> None:
        name = event["replica"]
        replica = self._replicas.get(name, _AuditedReplica(is_up=self._excused_version != -1))
        groups = _named_groups(event["prompts"])
        if not replica.is_up:
            self._broken("unsynced", f"{groups} sampled by {name}, which was not up")
        missing = self._unpublished(event["versions"] or (), replica.versions)
        if missing:
            self._broken("unsynced", f"{groups} sampled by {name} with {_named(missing)}, never given it")

    def _on_group_finished(self, event: Mapping[str, Any]) -> None:
        missing = self._unpublished(event["versions"] or (), self._live)
        if missing:
            groups = _named_groups(event["prompts"])
            self._broken("unsynced", f"{groups} sampled with {_named(missing)}, which was not published")
        for prompt in event["prompts"]:
            if self._holding.get(prompt, ("", 0))[0] != _SAMPLING and self._is_seen(prompt):
                self._broken("lost", f"group {prompt} finished without being sampled")
            self._holding[prompt] = _FINISHED, 0

    def _on_group_dropped(self, event: Mapping[str, Any]) -> None:
        for prompt in event["prompts"]:
            if self._holding.pop(prompt, ("", 0))[0] != _SAMPLING and self._is_seen(prompt):
                self._broken("lost", f"group {prompt} was dropped without being sampled")

    def _on_requeued(self, event: Mapping[str, Any]) -> None:
        prompt = event["prompt"]
        is_sampling = self._holding.get(prompt, ("", 0))[0] == _SAMPLING
        if event["stream"] == "train" and not is_sampling and self._is_seen(prompt):
            self._broken("lost", f"group {prompt} was requeued without being sampled")

    def _on_trained(self, event: Mapping[str, Any]) -> None:
        step, prompts, oldest = event["step"], event["prompts"], event["oldest"]
        self._find_step(step - 1)
        if step != (self._step or 0) + 1:
            self._broken("steps", f"update {step} follows update {self._step}")
        if oldest is not None and step - 1 - oldest > self._max_staleness:
            self._broken("stale", f"update {step} has tokens of version {oldest}, {step - 1 - oldest} updates late")
        for prompt in prompts:
            if prompt in self._trained_at:
                self._broken("twice", f"group {prompt} was trained at step {self._trained_at[prompt]} and at {step}")
            if self._holding.get(prompt, ("", 0))[0] != _FINISHED and self._is_seen(prompt):
                self._broken("lost", f"update {step} has group {prompt}, which had not finished")
            self._holding[prompt] = _TRAINED, step
            self._trained_at[prompt] = step
        last = max(prompts, default=-1)
        for prompt in [p for p, (state, _) in self._holding.items() if p < last and state != _TRAINED]:
            self._broken("lost", f"group {prompt} was passed over by update {step}")
            del self._holding[prompt]
        self._updates[step] = prompts
        self._step = step

    def _on_published(self, event: Mapping[str, Any]) -> None:
        version, name = event["version"], event.get("replica")
        if name is None:
            self._find_step(version)
            if self._excused_version is None:
                self._excused_version = version
        self._live.add(version)
        is_again = name is not None and version == self._current  # to a replica that was started again
        if version != self._step and not is_again and not self._after_gap:
            self._broken("steps", f"version {version} was published after update {self._step}")
        if name is None:
            self._current = version
            self._holding = {p: held for p, held in self._holding.items() if held[0] != _TRAINED or held[1] > version}
            return
        self._replicas.setdefault(name, _AuditedReplica()).versions.add(version)
        fingerprint = event.get("fingerprint")
        if fingerprint is not None and self._fingerprints.setdefault(version, fingerprint) != fingerprint:
            self._broken("unsynced", f"{name} holds other bytes as version {version} than another replica")

    def _find_step(self, step: int) -> None:
        """After a gap, the first event with a step is believed."""
        if self._after_gap:
            self._go_to(step)
            self._after_gap = False

    def _on_replica_up(self, event: Mapping[str, Any]) -> None:
        self._replicas[event["replica"]] = _AuditedReplica()

    def _on_replica_down(self, event: Mapping[str, Any]) -> None:
        self._replicas[event["replica"]] = _AuditedReplica(is_up=False)


def _named_groups(prompts: Sequence[int]) -> str:
    return f"group {prompts[0]} was" if len(prompts) == 1 else f"groups {', '.join(map(str, prompts))} were"


def _named(versions: Collection[int]) -> str:
    return f"version{'s' if len(versions) > 1 else ''} {', '.join(map(str, sorted(versions)))}"
