import json
import math
import random
import struct
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from observed import make_group

from hone.observe.background import Background
from hone.observe.recorder import Recorder, TokenFigures, read_samples, recorded_steps, samples_file
from hone.types import version_spans


@pytest.fixture
def background():
    background = Background(pytest.fail)
    yield background
    background.close()


def recorder(tmp_path, background, *, max_bytes=2**20, last_step=None, said=None, step_tokens=None):
    return Recorder(
        tmp_path / "samples",
        max_bytes=max_bytes,
        step_tokens=step_tokens,
        background=background,
        warn=(said if said is not None else []).append,
        last_step=last_step or {},
    )


def test_every_field_comes_back_exactly(tmp_path, background):
    group = make_group(3, texts=("4", "2é\n"), rewards=(1.0, None), step=7)
    recorder(tmp_path, background).record("rl", 7, [group], [[0.1 + 0.2, 0.0]])
    background.drain()
    first, second = read_samples(tmp_path, 7)
    assert (first.sample, second.sample) == group.samples
    assert first.prompt == "2+2=" and first.prompt_token_ids.tolist() == [50, 43, 50, 61] and first.answer == "4"
    assert (first.reward, first.advantage, first.scores, first.faults) == (1.0, 0.1 + 0.2, {"exact": 1.0}, {})
    assert (second.reward, second.scores, second.faults) == (None, {"exact": None}, {"exact": "infra: time-out"})


def test_mixed_versions_and_masks_come_back(tmp_path, background):
    group = make_group()
    sample = replace(group.samples[1], versions=version_spans([3, 3, 4]), loss_mask=(True, False, True))
    group = replace(group, samples=(group.samples[0], sample))
    recorder(tmp_path, background).record("rl", 0, [group], None)
    background.drain()
    first, second = read_samples(tmp_path, 0)
    assert first.sample.loss_mask is None and second.sample == sample
    assert first.advantage is None


def test_any_float32_logprob_comes_back_to_the_bit(tmp_path, background):
    bits = random.Random(0)
    values = [struct.unpack("f", struct.pack("I", bits.getrandbits(31) | 1 << 31))[0] for _ in range(2000)]
    values = (*(v for v in values if not math.isnan(v)), -math.inf, -0.0, -(2.0**-149))
    group = make_group(texts=("4",), rewards=(1.0,))
    columns = {"token_ids": range(len(values)), "versions": version_spans([0] * len(values))}
    sample = replace(group.samples[0], sampler_logprobs=values, **columns)
    recorder(tmp_path, background).record("rl", 0, [replace(group, samples=(sample,))], None)
    background.drain()
    assert read_samples(tmp_path, 0)[0].sample.sampler_logprobs.tobytes() == np.array(values, np.float32).tobytes()


def test_figures_of_tokens_come_back_rounded_and_only_where_they_are_known(tmp_path, background):
    known = TokenFigures(np.array([0.5, -1e9]), np.array([1.234567e-3, math.nan]), np.array([0.75, 0.0]))
    recorder(tmp_path, background).record(
        "rl", 1, [make_group()], [[1.0, -1.0]], lambda places: [TokenFigures(), known]
    )
    background.drain()
    first, second = read_samples(tmp_path, 1)
    assert first.figures.advantages_T is None and first.figures.mismatch_T is None
    assert second.figures.advantages_T.tolist() == [0.5, -65504.0]
    assert first.figures.entropy_T is None and second.figures.entropy_T.tolist() == [0.75, 0.0]
    assert second.figures.mismatch_T == pytest.approx([1.234567e-3, math.nan], rel=2**-11, nan_ok=True)


def test_of_a_large_step_groups_spread_evenly_are_recorded(tmp_path, background):
    r = recorder(tmp_path, background, step_tokens=20)
    groups = [make_group(n) for n in range(10)]  # of five tokens each

    def figures(places):
        return [TokenFigures(np.full(length, place)) for place in places for length in (2, 3)]

    r.record("rl", 1, groups, [[n, -n] for n in range(10)], figures)
    r.record("rl", 2, [make_group(0, texts=("4" * 30, "22"))], None)
    background.drain()
    found = read_samples(tmp_path, 1)
    assert [(s.prompt_id, s.advantage) for s in found][::2] == [(f"row-{n}", n) for n in (0, 2, 5, 7)]
    assert [s.figures.advantages_T.tolist() for s in found[2:4]] == [[2.0] * 2, [2.0] * 3]
    assert len(read_samples(tmp_path, 2)) == 2, "one group at least"


def test_several_records_of_one_step_are_kept_together_and_stages_apart(tmp_path, background):
    r = recorder(tmp_path, background)
    r.record("rl", 1, [make_group(0), make_group(1)], [[1, -1], [1, -1]])
    r.record("rl", 1, [make_group(2)], None)
    r.record("eval", 1, [make_group(3)], None)
    background.drain()
    assert [s.prompt_id for s in read_samples(tmp_path, 1)][::2] == ["row-0", "row-1", "row-2"]
    assert [s.prompt_id for s in read_samples(tmp_path, 1, "eval")][::2] == ["row-3"]
    assert recorded_steps(tmp_path) == {"eval": [1], "rl": [1]}
    assert read_samples(tmp_path, 2) == []


def test_the_same_samples_give_the_same_bytes(tmp_path, background):
    for name in ("a", "b"):
        recorder(tmp_path / name, background).record("rl", 1, [make_group()], [[1.0, -1.0]])
    background.drain()
    a, b = (samples_file(tmp_path / name / "samples", "rl", 1).read_bytes() for name in ("a", "b"))
    assert a == b


def test_recording_stops_at_the_limit_says_so_once_and_stays_stopped(tmp_path, background):
    said: list[str] = []
    r = recorder(tmp_path, background, said=said)
    r.record("rl", 0, [make_group()], None)
    background.drain()
    size = r.total_bytes
    r = recorder(tmp_path, background, said=said, max_bytes=2 * size + 5)
    for step in range(5):
        r.record("rl", step, [make_group()], None)
    background.drain()
    assert recorded_steps(tmp_path) == {"rl": [0, 1]} and r.total_bytes == 2 * size
    assert said == [
        f"samples/ has reached observe.samples_max_mib ({(2 * size + 5) / 2**20:g} MiB): "
        "samples are not recorded from rl step 2 on"
    ]
    resumed = recorder(tmp_path, background, last_step={"rl": 3})
    resumed.record("rl", 4, [make_group()], None)
    earlier = recorder(tmp_path, background, last_step={"rl": 1})
    earlier.record("rl", 2, [make_group()], None)
    background.drain()
    assert recorded_steps(tmp_path) == {"rl": [0, 1, 2]}


def test_zero_records_nothing_and_asks_for_no_figures(tmp_path, background):
    recorder(tmp_path, background, max_bytes=0).record("rl", 0, [make_group()], None, pytest.fail)
    background.drain()
    assert recorded_steps(tmp_path) == {}


def test_a_resumed_run_drops_later_steps_and_replaces_the_one_it_repeats(tmp_path, background):
    r = recorder(tmp_path, background)
    for step in range(4):
        r.record("rl", step, [make_group(step)], None)
    background.drain()
    resumed = recorder(tmp_path, background, last_step={"sft": 9, "rl": 2})
    assert recorded_steps(tmp_path) == {"rl": [0, 1, 2]}
    resumed.record("rl", 2, [make_group(8)], None)
    resumed.record("rl", 2, [make_group(9)], None)
    background.drain()
    assert [s.prompt_id for s in read_samples(tmp_path, 2)][::2] == ["row-8", "row-9"]
    sizes = [p.stat().st_size for p in tmp_path.glob("samples/rl/*")]
    assert resumed.total_bytes == sum(sizes)


def test_a_disk_that_cannot_be_written_costs_the_record_not_the_run(tmp_path, background):
    said: list[str] = []
    (tmp_path / "samples").write_text("a file where the folder should be")
    r = recorder(tmp_path, background, said=said)
    r.record("rl", 0, [make_group()], None)
    r.record("rl", 1, [make_group()], None)
    background.drain()
    assert len(said) == 1 and "cannot be written" in said[0] and "from rl step 0 on" in said[0]


def test_answers_of_any_type_are_recorded(tmp_path, background):
    group = make_group()
    group = replace(group, prompt=replace(group.prompt, answer=date(2024, 1, 2)))
    recorder(tmp_path, background).record("rl", 0, [group], None)
    background.drain()
    assert json.dumps(read_samples(tmp_path, 0)[0].answer) == '"2024-01-02"'


def test_files_that_are_lost_or_cut_short_are_named_and_out_of_the_way(tmp_path, background):
    r = recorder(tmp_path, background)
    for step in range(1, 5):
        r.record("rl", step, [make_group()], None)
    background.submit(r.sync)
    background.drain()
    assert r.num_files == 4
    cut = samples_file(tmp_path / "samples", "rl", 3)
    cut.write_bytes(cut.read_bytes()[:-9])
    samples_file(tmp_path / "samples", "rl", 2).write_bytes(b"")
    samples_file(tmp_path / "samples", "rl", 4).unlink()
    (tmp_path / "samples" / "full.json").write_text("{")
    said = []
    resumed = Recorder(
        tmp_path / "samples", max_bytes=2**20, background=background, warn=said.append, last_step={"rl": 4},
        expected_files=4,
    )  # fmt: skip
    assert resumed.num_files == 1 and recorded_steps(tmp_path) == {"rl": [1]}
    assert {path.name for path in (tmp_path / "set-aside").iterdir()} == {
        "step-000002.jsonl.gz", "step-000003.jsonl.gz", "full.json",
    }  # fmt: skip
    assert [message.partition(": ")[2].split()[0] for message in said] == ["moved", "moved", "3", "moved"], said
