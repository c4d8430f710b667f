"""The ladder by itself: which rung is taken, that it ends, what it remembers; and the gauges that it reads."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measuring import FakeGauge

from hone.errors import MemoryExhausted
from hone.memory import calibration
from hone.memory.gauges import Busy, HostGauge, Meter, ran_out_of_memory
from hone.memory.ladder import HIGH, Ladder, OutOfMemory
from hone.memory.rungs import CHUNK, PREFILL, RECOMPUTE, ROWS, RUNGS, TOKENS, Knob
from hone.plan.ledger import Ledger, moment, term
from hone.sizes import GIB, MIB
from hone.types import Progress

SETTINGS = {TOKENS: 16384, CHUNK: 1024, RECOMPUTE: "none", ROWS: 512, PREFILL: 16384}
LOWEST = {TOKENS: 512, CHUNK: 64, RECOMPUTE: 1, ROWS: 1, PREFILL: 256}


def make(gauge=None, *, stage="rl", predict=None, knobs=None, **options):
    """A ladder with every knob bound, and what the knobs were last given."""
    applied = {}
    ladder = Ladder(Meter(gauge or FakeGauge()), settings=SETTINGS, **options)
    ladder.begin(Progress(stage=stage), predict)
    ladder.bind(*(knobs or [knob(key, applied) for key in SETTINGS]))
    return ladder, applied


def knob(key, applied, **options):
    return Knob(key, lambda value: applied.__setitem__(key, value), lowest=LOWEST[key], **options)


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def failing(times, phase="update", error=OUT_OF_MEMORY):
    """Work that runs out of memory so many times, and how often it was begun."""
    begun = []

    def work(ladder):
        begun.append(phase)
        with ladder.phase(phase):
            if len(begun) <= times:
                raise error
        return "done"

    return work, begun


def failure(phase="update", name=""):
    return OutOfMemory(phase, name, 50 * GIB, "made up")


# ---- what counts as out of memory --------------------------------------------------------------------------------


def test_real_failures_of_allocators_are_known():
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 58)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(1 << 58)
    assert ran_out_of_memory(of_torch.value)
    assert ran_out_of_memory(of_numpy.value)
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert ran_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert not ran_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not ran_out_of_memory(OSError(28, "No space left on device"))
    assert not ran_out_of_memory(KeyError("memory"))


# ---- down --------------------------------------------------------------------------------------------------------


def test_work_is_undone_and_done_again_with_less():
    gauge, undone = FakeGauge(), []
    ladder, applied = make(gauge)
    work, begun = failing(2)
    assert ladder.attempt(lambda: work(ladder), lambda: undone.append(dict(applied))) == "done"
    assert len(begun) == 3
    assert applied[CHUNK] == 256
    assert [state[CHUNK] for state in undone] == [512, 256]
    assert gauge.given_back == 2
    assert [(c.phase, c.key, c.old, c.new) for c in ladder.changes] == [
        ("update", CHUNK, 1024, 512),
        ("update", CHUNK, 512, 256),
    ]
    assert "Tried to allocate 2.00 GiB" in ladder.changes[0].detail


def test_other_errors_are_none_of_its_business():
    ladder, _ = make()
    work, begun = failing(1, error=RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        ladder.attempt(lambda: work(ladder))
    assert len(begun) == 1
    assert not ladder.changes


@pytest.mark.parametrize("phase", [*RUNGS, "start"])
def test_every_phase_ends_at_the_bottom_of_its_rungs_with_exit_code_4(phase):
    ladder, applied = make()
    work, begun = failing(10**6, phase)
    with pytest.raises(MemoryExhausted) as error:
        ladder.attempt(lambda: work(ladder))
    assert error.value.exit_code == 4
    assert f"out of memory in {phase}" in str(error.value)
    assert "No setting is left" in str(error.value)
    for key in RUNGS.get(phase, ()):
        assert applied[key] in (LOWEST[key], "full")
    assert len(begun) == len(ladder.changes) + 1
    if ladder.changes:
        assert "Changed already" in str(error.value)


@given(st.lists(st.sampled_from([*RUNGS]), max_size=200))
def test_no_sequence_of_failures_makes_a_loop(phases):
    ladder, _ = make()
    seen = {tuple(sorted(ladder.settings.items()))}
    for phase in phases:
        try:
            ladder.climb_down(failure(phase))
        except MemoryExhausted:
            continue
        state = tuple(sorted(ladder.settings.items()))
        assert state not in seen
        seen.add(state)
    # halvings from each value to its lowest, and what is made again: none, selective, full
    assert len(ladder.changes) <= 5 + 4 + 2 + 9 + 6


def test_halving_begins_where_work_really_was():
    applied = {}
    ladder, _ = make(knobs=[knob(TOKENS, applied, in_use=lambda: 3000)])
    ladder.climb_down(failure())
    assert applied[TOKENS] == 1500


def ledger_of(settings, *, logits=1, layers=1):
    """Logits follow the chunk, activations the tokens and whether they are made again, prompts the prefill."""
    gib = GIB
    stored_frac = {"none": 1, "selective": 0.5, "full": 0.1}[settings[RECOMPUTE]]
    saved = layers * settings[TOKENS] / 16384 * stored_frac * 20 * gib
    update = moment(
        "update",
        "loss backward",
        term("weights", 8 * gib, ""),
        term("logits", logits * settings[CHUNK] / 1024 * 10 * gib, ""),
        term("activations", saved, ""),
    )
    cache = term("cache", settings[ROWS] / 512 * 10 * gib, "")
    prompts = moment("rollout", "prompts computed", cache, term("layer", settings[PREFILL] / 16384 * 4 * gib, ""))
    return Ledger("made up", 1, 64 * gib, (moment("rollout", "sampling", cache), prompts, update))


@pytest.mark.parametrize(
    ("what", "phase", "at", "expected"),
    [
        ({"logits": 1, "layers": 0}, "update", "", CHUNK),
        ({"logits": 0, "layers": 1}, "update", "", TOKENS),
        ({}, "rollout", "prompts computed", PREFILL),
        ({}, "rollout", "sampling", ROWS),
    ],
)
def test_the_plan_says_which_rung_helps(what, phase, at, expected):
    ladder, _ = make(predict=lambda settings: ledger_of(settings, **what))
    change = ladder.climb_down(failure(phase, at))
    assert change.key == expected
    assert change.predicted_bytes == max(m.bytes for m in ledger_of(SETTINGS, **what).moments if m.phase == phase)


def test_a_change_says_phase_term_planned_and_seen_in_one_sentence():
    said = []
    ladder, _ = make(predict=lambda settings: ledger_of(settings, logits=3), say=said.append)
    ladder.climb_down(failure())
    assert said == [
        "out of memory in update (loss backward: logits 30.0 GiB (52 %)) at step 1, 50.0 GiB of 64.0 GiB seen, "
        "58.0 GiB planned: train.logprob_chunk_tokens 1024 -> 512. It is done again; nothing is lost"
    ]


def test_exhausted_says_the_plans_sentence():
    ladder, _ = make(predict=ledger_of, knobs=[knob(CHUNK, {})])
    with pytest.raises(MemoryExhausted, match=r"peak 28.6 GiB of 64.0 GiB in update, loss backward: activations"):
        for _ in range(10):
            ladder.climb_down(failure())


def test_a_resumed_run_continues_where_the_ladder_was():
    first, _ = make()
    first.climb_down(failure())
    first.climb_down(failure("rollout", "sampling"))
    _, applied = make(earlier=first.changes)
    assert applied == {**SETTINGS, CHUNK: 512, ROWS: 256}
    user_lowered = {**SETTINGS, CHUNK: 128}
    ladder = Ladder(Meter(FakeGauge()), settings=user_lowered, earlier=first.changes)
    assert ladder.settings == {**user_lowered, ROWS: 256}


# ---- a budget on a CPU -------------------------------------------------------------------------------------------


def test_a_budget_is_out_of_memory_for_a_cpu():
    tokens = {TOKENS: SETTINGS[TOKENS]}
    gauge = FakeGauge(lambda: tokens[TOKENS] * MIB)
    ladder = Ladder(Meter(gauge), settings=SETTINGS, budget_bytes=5000 * MIB)
    ladder.begin(Progress())
    ladder.bind(Knob(TOKENS, lambda value: tokens.__setitem__(TOKENS, value), lowest=512))

    def work():
        with ladder.phase("update"):
            return tokens[TOKENS]

    assert ladder.attempt(work) == 4096
    assert ladder.changes[-1].limit_bytes == 5000 * MIB


def test_what_must_not_happen_twice_is_measured_and_not_failed():
    ladder, _ = make(FakeGauge(9 * GIB), budget_bytes=GIB)
    with ladder.phase("optimizer", final=True):
        pass
    assert ladder.metrics()["memory/optimizer_peak_mib"] == 9 * 1024
    assert not ladder.changes


# ---- up ----------------------------------------------------------------------------------------------------------


def tuned(bytes_of, steps, *, limit_gib=100, rows_most=4096):
    """Rows, and share of the memory, over so many steps of a device whose memory is a function of the rows."""
    rows = {}
    gauge = FakeGauge(lambda: bytes_of(rows[ROWS]) * GIB)
    gauge.capacity_bytes = limit_gib * GIB
    ladder = Ladder(Meter(gauge), settings={**SETTINGS, ROWS: 16}, budget_bytes=limit_gib * GIB, autotune=True)
    ladder.begin(Progress())
    ladder.bind(Knob(ROWS, lambda value: rows.__setitem__(ROWS, value), highest=rows_most))
    history = []
    for _ in range(steps):

        def work():
            with ladder.phase("rollout"):
                pass

        ladder.attempt(work)
        with ladder.phase("update", final=True):
            pass
        history.append((rows[ROWS], ladder.metrics()["memory/device_frac"]))
        ladder.tune()
    return history, ladder


def test_room_is_used_step_by_step_up_to_85_percent():
    history, ladder = tuned(lambda rows: 20 + rows, steps=30)
    assert [rows for rows, _ in history[::3]][:4] == [16, 24, 32, 48]
    assert history[-1] == (48, 0.68)  # 64 rows would take 84 GiB; without a plan all memory counts as theirs: 91
    assert all(share <= HIGH for _, share in history)
    assert {change.reason for change in ladder.changes} == {"room"}


def test_a_raise_that_takes_more_than_thought_is_taken_back_and_not_tried_again():
    history, ladder = tuned(lambda rows: 10 + rows if rows < 48 else 90, steps=30)
    rows = [rows for rows, _ in history]
    assert rows.count(48) == 1
    assert rows[-1] == 32
    assert [change.reason for change in ladder.changes][-1] == "near the limit"


def test_a_raise_that_does_not_fit_is_the_first_to_go():
    history, ladder = tuned(lambda rows: 10 + rows if rows < 48 else 120, steps=30)
    assert history[-1][0] == 32
    down = [change for change in ladder.changes if change.is_down]
    assert [(change.key, change.old, change.new) for change in down] == [(ROWS, 48, 32)]


def test_nothing_is_raised_beyond_what_is_of_use_or_unasked():
    assert tuned(lambda rows: 1, steps=20, rows_most=20)[0][-1][0] == 20
    ladder, _ = make(FakeGauge(MIB), budget_bytes=GIB)
    for _ in range(10):
        with ladder.phase("update"):
            pass
        ladder.metrics()
        ladder.tune()
    assert not ladder.changes


# ---- gauges ------------------------------------------------------------------------------------------------------


def test_the_high_water_mark_of_a_phase_is_its_own():
    meter = Meter(HostGauge(64 * GIB))
    if not meter.gauge.keeps_peaks:
        pytest.skip("this kernel does not keep high-water marks for us")
    with meter.phase("update"):
        torch.ones(64 << 20)  # 256 MiB, gone at once
    with meter.phase("rollout"):
        torch.ones(1 << 20)
    peaks = meter.take_peaks()
    assert 200 * MIB < peaks["update"] - peaks["rollout"] < 300 * MIB
    assert meter.process_peak_bytes() >= peaks["update"]
    assert meter.take_peaks() == {}


def test_phases_that_overlap_see_the_same_peak():
    gauge = FakeGauge(1)
    meter = Meter(gauge)
    meter.open("rollout")
    with meter.phase("update"):
        gauge.peak = 7
    gauge.peak = 3
    meter.close("rollout")
    assert meter.take_peaks() == {"update": 7, "rollout": 7}


def test_busy_is_the_mean_of_readings_and_a_broken_driver_ends_nothing():
    readings = iter([0.5, 1.0])
    busy = Busy(lambda: next(readings), every_s=0.001)  # StopIteration, from then on
    until = time.monotonic() + 10
    while busy._count < 2 and time.monotonic() < until:
        time.sleep(0.001)
    assert busy.take_mean() == 0.75
    assert busy.take_mean() is None
    busy.close()


# ---- calibration -------------------------------------------------------------------------------------------------


def test_residuals_are_of_runs_about_as_large_and_only_add(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ledger = Ledger("d", 1, 100 * GIB, (moment("update", "x", term("all", 10 * GIB, "")),))
    for measured in (11, 12, 13):
        calibration.remember("gpu: X", {"update": (10 * GIB, measured * GIB)})
    calibration.remember("gpu: X", {"update": (GIB // 10, GIB // 5)})  # a small run says nothing of a large one
    calibration.remember("gpu: X", {"update": (10 * GIB, 100 * GIB)})  # nor does a mistake
    known = calibration.residuals("gpu: X", ledger)
    assert str(known["update"]) == "x1.20 of what was planned in 3 runs (1.10 to 1.30)"
    assert calibration.calibrated(ledger, known).peak.bytes == pytest.approx(12 * GIB)
    less = {"update": replace(known["update"], middle=0.8)}
    assert calibration.calibrated(ledger, less) == ledger
    assert calibration.residuals("gpu: Y", ledger) == {}


def test_calibration_is_bounded_and_never_fatal(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ledger = Ledger("d", 1, GIB, (moment("update", "x", term("all", GIB, "")),))
    calibration.path().parent.mkdir(parents=True)
    for broken in (
        "",
        "[",
        '{"format": 2}',
        '{"format": 2, "entries": [{"device": 3}]}',
        '{"format": 9, "entries": []}',
    ):
        calibration.path().write_text(broken)
        assert calibration.residuals("cpu: X", ledger) == {}
    for _ in range(30):
        calibration.remember("cpu: X", dict.fromkeys([*RUNGS, *"abcdefghijkl"], (GIB, GIB)))
    assert calibration.path().read_text().count('"device"') == calibration.MOST_ENTRIES
    calibration.path().unlink()
    calibration.path().mkdir()  # cannot be written
    calibration.remember("cpu: X", {"update": (GIB, GIB)})
    assert calibration.residuals("cpu: X", ledger) == {}


def test_changes_of_ranks_are_recorded_as_the_runs_own_and_reported_once():
    """Made by the ranks' ladders, adopted by that of the process that writes the record."""
    said: list[str] = []
    of_rank, of_run = (Ladder(Meter(FakeGauge()), settings={TOKENS: 64}, say=said.append) for _ in range(2))
    of_rank.bind(Knob(TOKENS, lambda value: None))
    of_rank.climb_down(OutOfMemory("update", "", 5, "it failed"))
    of_run.begin(Progress(stage="rl", step=6))
    of_run.adopt(of_rank.take_changes())
    assert of_rank.take_changes() == []
    assert of_run.settings == {TOKENS: 32} and of_run.redone == 1
    assert [(change.stage, change.step, change.key) for change in of_run.changes] == [("rl", 7, TOKENS)]
    assert "64 -> 32" in said[-1]


def test_layers_made_again_go_from_the_first_ones_to_all():
    knob = Knob(RECOMPUTE, lambda value: None)
    assert [knob.lower(value) for value in ("none", "selective", 12, "full")] == ["selective", "full", "full", None]
