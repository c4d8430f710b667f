"""The checker: proves from events.jsonl that faults and restarts changed nothing of what a run may train on.

It believes only the file, which other code writes, and knows nothing of how permits, routers and resumption work:

    twice       no group is trained on twice in what survives: a resumption undoes the updates after its checkpoint
    steps       the updates that survive are numbered 1, 2, 3, ... and a version is published after the update it is of
    unsynced    every token was sampled with a version that was published before, to that very replica where there are
                several, and since it was last started; replicas that hold one version hold the same bytes
    stale       no token is trained on more than max_staleness updates after the version that sampled it
    lost        a group that was started is trained on, dropped, or undone with the process; none is passed over
    permits     never more groups than permits are between their start and the publishing of what they taught
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hone.observe.events import read_events

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
    """That survive."""
    undone: int
    """That were made, and made again after a resumption."""
    in_flight: int
    """Groups started and not ended; of a run that is going on, or was killed."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        faults = ("requeued", "replica_down", "trainer_down")
        told = ", ".join(f"{self.counts[kind]} {kind}" for kind in faults if self.counts.get(kind))
        starts = self.counts.get("started", 0)
        lines = [
            f"{self.updates} updates survive, {self.undone} were undone, started {starts} "
            f"time{'' if starts == 1 else 's'}, {self.in_flight} groups in flight{f', {told}' if told else ''}"
        ]
        broken = Counter(violation.rule for violation in self.violations)
        lines += [f"  {rule}: {f'{broken[rule]} violations' if broken[rule] else 'holds'}" for rule in RULES]
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
class _Replica:
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
        self._permits = self._max_staleness = 0
        self._begin_life()

    def see(self, line: int, event: Mapping[str, Any]) -> None:
        self._line = line
        kind = event["kind"]
        self._counts[kind] += 1
        look = getattr(self, f"_on_{kind}", None)
        if look is not None:
            look(event)

    def result(self) -> Audit:
        in_flight = sum(state != _TRAINED for state, _ in self._holding.values())
        return Audit(tuple(self._violations), dict(self._counts), len(self._updates), self._undone, in_flight=in_flight)

    def _broken(self, rule: str, what: str) -> None:
        self._violations.append(Violation(rule, self._line, what))

    def _begin_life(self) -> None:
        """A process, or an attempt of its supervisor: what was in flight before is undone."""
        self._holding: dict[int, tuple[str, int]] = {}  # groups with a permit -> state, step that trained it
        self._live: set[int] = set()  # versions published, wherever
        self._current: int | None = None  # the one that was published everywhere
        self._replicas: dict[str, _Replica] = {}
        self._fingerprints: dict[int, str] = {}

    # ---- one method for each kind that matters

    def _on_started(self, event: Mapping[str, Any]) -> None:
        step = event["step"]
        if self._step is None:
            self._updates = {made: [] for made in range(1, step + 1)}  # before there was a record
        elif step > self._step:
            self._broken("steps", f"began at step {step}, but only {self._step} updates were made")
        for undone in [made for made in self._updates if made > step]:
            for prompt in self._updates.pop(undone):
                self._trained_at.pop(prompt, None)
            self._undone += 1
        self._step = step
        self._permits, self._max_staleness = event["permits"], event["max_staleness"]
        self._begin_life()

    def _on_stopped(self, event: Mapping[str, Any]) -> None:
        self._begin_life()

    def _on_group_started(self, event: Mapping[str, Any]) -> None:
        prompt = event["prompt"]
        if prompt in self._holding:
            self._broken("lost", f"group {prompt} was started again before it ended")
        self._holding[prompt] = _SAMPLING, 0
        if len(self._holding) > self._permits:
            self._broken("permits", f"group {prompt} is number {len(self._holding)} in flight of {self._permits}")

    def _on_sampled(self, event: Mapping[str, Any]) -> None:
        name = event["replica"]
        replica = self._replicas.get(name, _Replica(is_up=False))
        if not replica.is_up:
            self._broken("unsynced", f"group {event['prompt']} was sampled by {name}, which was not up")
        missing = set(event["versions"] or ()) - replica.versions
        if missing:
            self._broken("unsynced", f"group {event['prompt']}: {name} sampled with {_named(missing)}, never given it")

    def _on_group_finished(self, event: Mapping[str, Any]) -> None:
        prompt = event["prompt"]
        if self._holding.get(prompt, ("", 0))[0] != _SAMPLING:
            self._broken("lost", f"group {prompt} finished without being sampled")
        missing = set(event["versions"] or ()) - self._live
        if missing:
            self._broken("unsynced", f"group {prompt} has tokens of {_named(missing)}, which was not published")
        self._holding[prompt] = _FINISHED, 0

    def _on_group_dropped(self, event: Mapping[str, Any]) -> None:
        if self._holding.pop(event["prompt"], ("", 0))[0] != _SAMPLING:
            self._broken("lost", f"group {event['prompt']} was dropped without being sampled")

    def _on_requeued(self, event: Mapping[str, Any]) -> None:
        prompt = event["prompt"]
        if event["stream"] == "train" and self._holding.get(prompt, ("", 0))[0] != _SAMPLING:
            self._broken("lost", f"group {prompt} was requeued without being sampled")

    def _on_trained(self, event: Mapping[str, Any]) -> None:
        step, prompts, oldest = event["step"], event["prompts"], event["oldest"]
        if step != (self._step or 0) + 1:
            self._broken("steps", f"update {step} follows update {self._step}")
        if oldest is not None and step - 1 - oldest > self._max_staleness:
            self._broken("stale", f"update {step} has tokens of version {oldest}, {step - 1 - oldest} updates late")
        for prompt in prompts:
            if prompt in self._trained_at:
                self._broken("twice", f"group {prompt} was trained at step {self._trained_at[prompt]} and at {step}")
            if self._holding.get(prompt, ("", 0))[0] != _FINISHED:
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
        self._live.add(version)
        is_again = name is not None and version == self._current  # to a replica that was started again
        if version != self._step and not is_again:
            self._broken("steps", f"version {version} was published after update {self._step}")
        if name is None:
            self._current = version
            self._holding = {p: held for p, held in self._holding.items() if held[0] != _TRAINED or held[1] > version}
            return
        self._replicas.setdefault(name, _Replica()).versions.add(version)
        fingerprint = event.get("fingerprint")
        if fingerprint is not None and self._fingerprints.setdefault(version, fingerprint) != fingerprint:
            self._broken("unsynced", f"{name} holds other bytes as version {version} than another replica")

    def _on_replica_up(self, event: Mapping[str, Any]) -> None:
        self._replicas[event["replica"]] = _Replica()

    def _on_replica_down(self, event: Mapping[str, Any]) -> None:
        self._replicas[event["replica"]] = _Replica(is_up=False)


def _named(versions: Collection[int]) -> str:
    return f"version{'s' if len(versions) > 1 else ''} {', '.join(map(str, sorted(versions)))}"
