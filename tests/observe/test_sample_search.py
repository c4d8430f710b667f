"""Search in all recorded samples of a run."""

import math

import pytest
from observed import Settings, make_group

from hone.observe.observer import Observer
from hone.observe.recorder import read_samples, samples_file
from hone.observe.search import MAX_FOUND, search_samples

STEPS = 6


@pytest.fixture
def run(tmp_path):
    """Six steps of two groups. The first group has a fault; the second has the step in words."""
    observer = Observer(tmp_path, Settings(), title="t", total_steps=STEPS)
    for step in range(1, STEPS + 1):
        groups = [
            make_group(0, texts=("4", "2<b>"), rewards=(1.0, None), step=step),
            make_group(1, texts=(f"Step {step}, \\ ÄGYPTEN", "abcdefgh"), rewards=(0.1 + 1e-9, 0.0), step=step - 1),
        ]
        observer.record("rl", step, groups, [[0.5, -0.5], [0.25, -0.25]] if step > 1 else None)
        observer.log("rl", step, {"train/loss": 1.0})
    observer.close("finished")
    return tmp_path


def found(run, query):
    """(step, prompt, index) of the samples, in the order they come."""
    result = search_samples(run, query)
    assert result.after is None and result.searched == result.steps == STEPS and result.matches == len(result.samples)
    return [(s.step, s.prompt_id, s.sample.index) for s in result.samples]


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        ("step 3,", lambda s: s.sample.text.startswith("Step 3")),
        ("<B> 2+2", lambda s: "<b>" in s.sample.text),
        ("ägypten", lambda s: "ÄGYPTEN" in s.sample.text),
        ("\\", lambda s: "\\" in s.sample.text),
        ("fault", lambda s: s.reward is None),
        ("time-out", lambda s: s.reward is None),
        ("reward<0.5", lambda s: s.reward is not None and s.reward < 0.5),
        ("reward=0.1", lambda s: s.reward == 0.1 + 1e-9),
        ("exact=1 step>=4", lambda s: s.scores["exact"] == 1 and s.step >= 4),
        ("advantage>0", lambda s: s.advantage is not None and s.advantage > 0),
        ("tokens=9", lambda s: len(s.sample.token_ids) == 9),
        ("tokens>2 version<=2", lambda s: len(s.sample.token_ids) > 2 and s.sample.versions[0].version <= 2),
        ("unknown>0", lambda s: False),
        ("nowhere", lambda s: False),
        ("", lambda s: True),
    ],
)
def test_a_query_finds_what_fits_in_every_step_the_newest_first(run, query, fits):
    every = [sample for step in range(STEPS, 0, -1) for sample in read_samples(run, step)]
    expected = [(s.step, s.prompt_id, s.sample.index) for s in every if fits(s)]
    assert found(run, query) == expected
    assert expected or query in ("unknown>0", "nowhere")


def test_it_is_done_in_parts_that_continue_each_other(run):
    parts = [search_samples(run, "step", seconds=-1.0)]
    while parts[-1].after:
        parts.append(search_samples(run, "step", after=parts[-1].after, seconds=-1.0))
    assert [(part.searched, part.steps, part.after) for part in parts[:2]] == [(1, 6, ("rl", 6)), (2, 6, ("rl", 5))]
    assert [part.samples[0].step for part in parts] == [6, 5, 4, 3, 2, 1]


def test_a_damaged_file_is_counted_and_hides_no_other(run):
    path = samples_file(run / "samples", "rl", 4)
    path.write_bytes(path.read_bytes()[:-20])
    samples_file(run / "samples", "rl", 2).write_bytes(b"")
    result = search_samples(run, "reward=1")
    assert result.damaged == 1 and result.searched == 6
    assert [s.step for s in result.samples if s.step not in (4, 2)] == [6, 5, 3, 1]


def test_a_part_holds_a_bounded_number_of_samples(tmp_path):
    observer = Observer(tmp_path, Settings(), title="t", total_steps=3)
    for step in (1, 2):
        observer.record("rl", step, [make_group(i) for i in range(MAX_FOUND)], None)
    observer.close("finished")
    result = search_samples(tmp_path, "2+2", seconds=math.inf)
    assert (len(result.samples), result.matches, result.after) == (MAX_FOUND, 2 * MAX_FOUND, ("rl", 2))
    assert search_samples(tmp_path, "2+2", after=("rl", 1)).samples == []
