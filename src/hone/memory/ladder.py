"""Out-of-memory ladder: lowers one setting at a time when memory runs out, and raises them with room.

Only settings that the algorithm does not depend on are rungs: how much is computed at one time, and what is kept or
made again. What failed is done again from its start (`guard.py` shows how), so a gradient is never applied twice and
a sampled group is never lost. Every change is recorded, and every change down lowers one of a few bounded values, so
the ladder ends: with `MemoryExhausted`, and with the plan's sentence of what takes the memory.

Not here: measuring (`memory.gauges`), how a setting takes effect (the owner of a `Knob`), and where records go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from hone.errors import MemoryExhausted, first_line
from hone.memory.gauges import Busy, Meter, ran_out_of_memory
from hone.memory.rungs import PREFILL, ROWS, RUNGS, TOKENS, Change, Knob, Reason, shown
from hone.plan.ledger import Ledger, Moment, gib
from hone.plan.verdict import describe, shares
from hone.sizes import GIB, MIB

if TYPE_CHECKING:
    from hone.types import Progress

T = TypeVar("T")

LEAST_RELIEF = 0.01
"""Share of a phase's planned peak; rungs that free less come after those that free more."""
CHECK_EVERY_S = 0.02
LOW, HIGH = 0.75, 0.85
"""Memory in use that is well used: below, `plan.autotune` goes up; above, it takes its last step back."""
WATCHED_STEPS = 3
"""Steps in which a setting has to prove itself before the next is raised."""

Predict = Callable[[Mapping[str, Any]], Ledger]
"""The device's ledger under other values of the rungs' settings."""


class OutOfMemory(Exception):
    """A phase ran out of memory, or how near it came: plain facts. Raised by `Ladder.phase`, caught by `attempt`."""

    def __init__(self, phase: str, moment: str, seen_bytes: int, detail: str) -> None:
        super().__init__(f"{phase}: {detail}")
        self.phase, self.moment, self.seen_bytes, self.detail = phase, moment, seen_bytes, detail


class _OverBudget(MemoryError):
    """Raised on a CPU where resident memory exceeds the budget."""


class Ladder:
    """`guard.Guard` of a run.

    Args:
        meter: of the device that computes.
        settings: values of all rungs' keys as the run file has them.
        budget_bytes: `plan.memory_budget_gib`; None: the device's own limit.
        autotune: see `tune`.
        say: shows a message.
        changed: called after every change, to record it.
        earlier: changes of the run that this one continues. A key that the user has set anew since is the user's.
        busy: how much of the time the device computes.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        settings: Mapping[str, Any],
        budget_bytes: int | None = None,
        autotune: bool = False,
        say: Callable[[str], None] = lambda message: None,
        changed: Callable[[], object] = lambda: None,
        earlier: Sequence[Change] = (),
        busy: Busy | None = None,
    ) -> None:
        self.meter = meter
        self.limit_bytes = min(budget_bytes or meter.gauge.capacity_bytes, meter.gauge.capacity_bytes)
        self.settings = dict(settings)
        self.changes: list[Change] = []
        self.redone = 0
        """Times that work was done again."""
        self.predicted: dict[str, dict[str, Moment]] = {}
        """Stage -> phase -> its largest moment by the plan, at the settings of now."""
        self.measured: dict[str, dict[str, int]] = {}
        """Stage -> phase -> bytes, the most since a setting of the stage was changed."""
        self._is_counted = budget_bytes is not None and meter.gauge.kind == "cpu"  # a GPU's allocator refuses by itself
        self._has_limit = budget_bytes is not None or meter.gauge.kind == "gpu"
        self._autotune, self._say, self._changed, self._busy = autotune, say, changed, busy
        self._lock = threading.RLock()
        self._knobs: dict[str, Knob] = {}
        self._progress: Progress | None = None
        self._predict: Predict | None = None
        self._next_check_s = 0.0
        self._ceilings: dict[str, int] = {}
        """Key -> a value that was too much."""
        self._peaks: dict[str, int] = {}
        """Bytes by phase since the last change, of the steps that `_watched` counts."""
        self._watched = 0
        self._raised: Change | None = None
        """What is being watched."""
        configured, first = dict(settings), {change.key: change.old for change in reversed(earlier)}
        for change in earlier:
            if first[change.key] != configured.get(change.key):
                continue
            self.changes.append(change)
            self.settings[change.key] = change.new
            if change.is_down:
                self._ceilings[change.key] = change.old
        self._num_taken = len(self.changes)

    # ---- a stage begins

    def begin(self, progress: Progress, predict: Predict | None = None) -> None:
        """Begin a stage; its knobs are bound next."""
        with self._lock:
            self._progress, self._predict, self._knobs = progress, predict, {}
            self._peaks, self._watched, self._raised = {}, 0, None
            self._foresee()

    def bind(self, *knobs: Knob) -> None:
        """These settings can be changed from here on; each takes its present value at once."""
        with self._lock:
            for knob in knobs:
                self._knobs[knob.key] = knob
                knob.apply(self.settings[knob.key])

    # ---- Guard

    @contextmanager
    def phase(
        self, name: str, *, moment: Callable[[], str] | None = None, final: bool = False, measured: bool = True
    ) -> Iterator[None]:
        """See `Guard.phase`."""
        if measured:
            self.meter.open(name)
        try:
            yield
            if self._is_counted and measured and not final:
                self._check()
        except (MemoryError, RuntimeError, OSError) as error:
            if not ran_out_of_memory(error):
                raise
            at = moment() if moment else ""
            raise OutOfMemory(name, at, self.meter.peak_bytes(), first_line(error)[:200]) from error
        finally:
            if measured:
                self.meter.close(name)

    def open(self, name: str) -> None:
        """See `Guard.open`."""
        self.meter.open(name)

    def close(self, name: str) -> None:
        """See `Guard.close`."""
        self.meter.close(name)

    def attempt(self, work: Callable[[], T], undo: Callable[[], object] | None = None) -> T:
        """See `Guard.attempt`."""
        while True:
            try:
                return work()
            except OutOfMemory as error:
                failure = OutOfMemory(error.phase, error.moment, error.seen_bytes, error.detail)
            # Out here the failed work's frames are gone, and with them its tensors.
            self.climb_down(failure)
            self._prepare_retry(undo)

    def _prepare_retry(self, undo: Callable[[], object] | None) -> None:
        """Undo what the failed attempt did, and give its memory back."""
        if undo is not None:
            undo()
        self.meter.gauge.give_back()
        self.meter.gauge.reset()
        self.redone += 1

    def agree(self) -> None:
        """See `Guard.agree`; this process is alone."""

    def check(self) -> None:
        """See `Guard.check`."""
        if self._is_counted and (now := perf_counter()) >= self._next_check_s:
            self._next_check_s = now + CHECK_EVERY_S
            self._check()

    def _check(self) -> None:
        if self.meter.peak_bytes() > self.limit_bytes:
            raise _OverBudget("more than plan.memory_budget_gib")

    # ---- down

    def climb_down(self, failure: OutOfMemory) -> Change:
        """Take the next rung for a phase that ran out of memory.

        Raises:
            MemoryExhausted: there is none.
        """
        with self._lock:
            found = self._next_rung(failure)
            if found is None:
                raise MemoryExhausted(self._exhausted(failure))
            knob, new = found
            change = self._change(knob.key, new, "out of memory", failure)
            self._ceilings[knob.key] = knob.used(change.old)
            self._make(change)
            return change

    def _next_rung(self, failure: OutOfMemory) -> tuple[Knob, Any] | None:
        """The step that was taken up last; else the first rung that the plan says helps, else the first of all."""
        keys = RUNGS.get(failure.phase, ())
        if self._raised is not None and self._raised.key in keys:
            return self._knobs[self._raised.key], self._raised.old
        if failure.phase == "rollout" and failure.moment != "prompts computed":
            keys = (ROWS, PREFILL)
        options: list[tuple[Knob, Any]] = []
        for key in keys:
            knob = self._knobs.get(key)
            lowered = None if knob is None else knob.lower(self.settings[key])
            if knob is not None and lowered is not None:
                options.append((knob, lowered))
        if self._predict is not None and (now := _moment_of(self._predict(self.settings), failure)):
            for knob, new in options:
                then = _moment_of(self._predict({**self.settings, knob.key: new}), failure)
                if then is None or now.bytes - then.bytes >= LEAST_RELIEF * now.bytes:
                    return knob, new
        return options[0] if options else None

    def _exhausted(self, failure: OutOfMemory) -> str:
        where = f"{failure.phase} ({failure.moment})" if failure.moment else failure.phase
        place = f"{self._progress.stage} step {self._progress.step + 1}" if self._progress else "the start"
        lines = [
            f"out of memory in {where} at {place}: {gib(failure.seen_bytes)} of {gib(self.limit_bytes)} seen "
            f"({failure.detail}). No setting is left that would take less without changing the algorithm."
        ]
        if self._predict is not None:
            ledger = self._predict(self.settings)
            lines.append(describe(replace(ledger, moments=tuple(_of_phase(ledger, failure.phase)) or ledger.moments)))
        first = {change.key: change.old for change in reversed(self.changes)}
        done = [f"{key} {shown(old)} -> {shown(self.settings[key])}" for key, old in first.items()]
        lines += [f"Changed already: {', '.join(sorted(done))}."] if done else []
        lines.append(
            "What remains to try: run.precision=bfloat16, lora.rank, shorter prompts or responses, a smaller model, "
            "or a device with more memory (plan.memory_budget_gib where it is set)."
        )
        return "\n".join(lines)

    # ---- on ranks, and in the process that records what they did

    def take_changes(self) -> list[Change]:
        """Changes since the last call."""
        with self._lock:
            new, self._num_taken = self.changes[self._num_taken :], len(self.changes)
        return new

    def adopt(self, changes: Sequence[Change]) -> None:
        """Record changes that the ranks of this run made together, as of the step that is running."""
        with self._lock:
            for change in changes:
                at = self._progress
                known = replace(change, stage=at.stage, step=at.step + 1) if at else change
                self.settings[known.key] = known.new
                self.changes.append(known)
                self.redone += 1
                self._foresee()
                self._changed()
                self._say(known.sentence)

    # ---- up

    def tune(self) -> None:
        """After a step: with `plan.autotune`, raise one setting while there is room, or take the last raise back.

        A setting is raised when for some steps in a row less than `LOW` of the memory was used, and what the plan says
        of the raise would leave it below `HIGH`. A value that was once too much is not tried again.
        """
        with self._lock:
            if not (self._autotune and self._has_limit and self._peaks):
                return
            phase = max(self._peaks, key=lambda name: self._peaks[name])
            share = self._peaks[phase] / self.limit_bytes
            full = f"{100 * share:.0f} % of the memory used"
            if self._raised is not None and share > HIGH:
                back, self._raised = self._raised, None
                self._ceilings[back.key] = back.new
                fact = OutOfMemory(phase, "", self._peaks[phase], full)
                self._make(self._change(back.key, back.old, "near the limit", fact))
                self.meter.gauge.give_back()
            elif self._watched >= WATCHED_STEPS and share < LOW:
                self._raise(phase, f"{full} in {self._watched} steps")

    def _raise(self, phase: str, detail: str) -> None:
        self._raised = None
        for key in (ROWS, TOKENS):
            knob = self._knobs.get(key)
            new = None if knob is None else knob.higher(self.settings[key])
            if new is None or new >= self._ceilings.get(key, new + 1) or self._expected(key, new) > HIGH:
                continue
            fact = OutOfMemory(phase, "", self._peaks[phase], detail)
            self._raised = self._change(key, new, "room", fact)
            self._make(self._raised)
            return

    def _expected(self, key: str, new: int) -> float:
        """Share of the memory with a setting raised: what was seen, as much larger as the plan says it becomes."""
        if self._predict is None:
            growth = dict.fromkeys(self._peaks, new / int(self.settings[key]))
        else:
            now = {moment.phase: moment.bytes for moment in self._predict(self.settings).phase_peaks()}
            then = {m.phase: m.bytes for m in self._predict({**self.settings, key: new}).phase_peaks()}
            growth = {phase: then[phase] / now[phase] for phase in now}
        return max(seen * growth.get(phase, 1.0) for phase, seen in self._peaks.items()) / self.limit_bytes

    # ---- what is known

    def metrics(self) -> dict[str, float]:
        """Since the last call: peaks by phase, how full and how busy the device was, and what the ladder did."""
        peaks = self.meter.take_peaks()
        found = {f"memory/{phase}_peak_mib": seen / MIB for phase, seen in peaks.items()}
        if self.meter.gauge.kind == "cpu":
            found["memory/peak_rss_gib"] = self.meter.process_peak_bytes() / GIB
        elif peaks:
            found["memory/cuda_peak_gib"] = max(peaks.values()) / GIB
        if peaks and self._has_limit:
            found["memory/device_frac"] = max(peaks.values()) / self.limit_bytes
        busy = self._busy.take_mean() if self._busy else None
        if busy is not None:
            found["memory/device_busy_frac"] = busy
        with self._lock:
            if self.changes:
                found["memory/rungs"] = sum(change.is_down for change in self.changes)
                found["memory/redone"] = self.redone
            measured = self.measured.setdefault(self._progress.stage, {}) if self._progress else {}
            for phase, seen in peaks.items():
                self._peaks[phase] = max(seen, self._peaks.get(phase, 0))
                measured[phase] = max(seen, measured.get(phase, 0))
            self._watched += "update" in peaks
        return found

    def _change(self, key: str, new: Any, reason: Reason, fact: OutOfMemory) -> Change:
        phase = fact.phase
        planned = self.predicted.get(self._progress.stage, {}).get(phase) if self._progress else None
        return Change(
            stage=self._progress.stage if self._progress else "start",
            step=self._progress.step + 1 if self._progress else 0,
            key=key,
            old=self.settings[key],
            new=new,
            reason=reason,
            phase=phase,
            moment=fact.moment or (f"{planned.name}: {shares(planned, 1)}" if planned else ""),
            detail=fact.detail,
            seen_bytes=fact.seen_bytes,
            predicted_bytes=planned.bytes if planned else None,
            limit_bytes=self.limit_bytes,
        )

    def _make(self, change: Change) -> None:
        self.settings[change.key] = change.new
        self.changes.append(change)
        self._knobs[change.key].apply(change.new)
        self._peaks, self._watched = {}, 0
        self.measured.pop(change.stage, None)
        self.meter.forget(change.phase)
        if change.reason != "room":
            self._raised = None
        self._foresee()
        self._changed()
        self._say(change.sentence)

    def _foresee(self) -> None:
        if self._progress is not None and self._predict is not None:
            moments = self._predict(self.settings).phase_peaks()
            self.predicted[self._progress.stage] = {moment.phase: moment for moment in moments}


def _moment_of(ledger: Ledger, failure: OutOfMemory) -> Moment | None:
    """The moment that failed, where it is known; else the largest of the phase."""
    found = _of_phase(ledger, failure.phase)
    named = [moment for moment in found if moment.name == failure.moment]
    return max(named or found, key=lambda moment: moment.bytes, default=None)


def _of_phase(ledger: Ledger, phase: str) -> list[Moment]:
    """A phase's moments. A plan has logprobs only where each step needs them; else they are as the update without its
    backward pass, as far as what would help is concerned."""
    found = [moment for moment in ledger.moments if moment.phase == phase]
    return found or (_of_phase(ledger, "update") if phase == "logprobs" else [])
