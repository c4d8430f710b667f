import json
import math
import subprocess
import sys

import pytest

from hone.doctor.ranges import healthy_ranges
from hone.errors import RunFolderError
from hone.observe.sinks import MetricsFile, TensorBoard, last_metric_lines, metric_lines, some_metric_lines


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_time(line):
    return {name: value for name, value in line.items() if name != "time_s"}


def test_a_line_has_stage_step_time_and_sorted_values(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl", None)
    file.write("rl", 1, {"train/loss": 0.5, "rollout/reward_mean": 1, "train/lr": math.nan})
    file.close()
    (line,) = lines(tmp_path / "m.jsonl")
    assert list(line) == sorted(line)
    assert without_time(line) == {
        "stage": "rl",
        "step": 1,
        "rollout/reward_mean": 1,
        "train/loss": 0.5,
        "train/lr": None,
    }


def test_a_resumed_file_equals_the_uninterrupted_one(tmp_path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    file = MetricsFile(whole, None)
    for step in range(6):
        file.write("rl", step, {"train/loss": step / 3})
    file.close()
    file = MetricsFile(cut, None)
    for step in range(5):
        file.write("rl", step, {"train/loss": step / 3})
        if step == 2:
            position = file.position()
    file.close()
    resumed = MetricsFile(cut, position)
    assert resumed.last_step == {"rl": 2}
    for step in range(3, 6):
        resumed.write("rl", step, {"train/loss": step / 3})
    resumed.close()
    assert [*map(without_time, lines(cut))] == [*map(without_time, lines(whole))]
    times = [line["time_s"] for line in lines(cut)]
    assert times == sorted(times)


def test_a_file_that_is_not_the_checkpoints_is_refused(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path, None)
    file.write("rl", 0, {"train/loss": 0.0})
    position = file.position()
    file.close()
    with pytest.raises(RunFolderError, match=f"has {position} bytes, the checkpoint was written at {position + 1}"):
        MetricsFile(path, position + 1)
    with pytest.raises(RunFolderError, match="not the end of a line"):
        MetricsFile(path, position - 1)
    assert path.stat().st_size == position


def test_none_begins_anew(tmp_path):
    (tmp_path / "m.jsonl").write_text("something old\n")
    MetricsFile(tmp_path / "m.jsonl", None).close()
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_a_long_file_is_read_in_part_and_has_the_same_healthy_ranges(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, None)
    for stage, metric in (("sft", "sft/loss"), ("rl", "train/entropy")):
        for step in range(1, 1501):
            file.write(stage, step, {metric: 1 + 1 / step, "train/loss": step})
    file.close()
    lines, is_whole = some_metric_lines(path, 50)
    assert not is_whole and len(lines) < 150
    assert [(line["stage"], line["step"]) for line in lines] == sorted(
        {(line["stage"], line["step"]) for line in lines}, key=lambda place: (place[0] == "rl", place[1])
    )
    ranges = healthy_ranges(metric_lines(path))
    assert healthy_ranges(lines) == ranges
    assert ranges["sft"]["sft/loss"][1] == pytest.approx(1.3 * (1 + sum(1 / n for n in range(5, 21)) / 16), rel=1e-3)


def test_damaged_lines_of_a_long_file_are_left_out_and_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"stage": "rl", "step": {step}, "time_s": 1.0, "train/loss": 1.0}}\n' for step in range(1, 5001)]
    lines[2] = '{"stage": "rl", "step": 3, "ti\n'
    path.write_text("".join(lines))
    broken = []
    found, is_whole = some_metric_lines(path, 50, broken)
    assert not is_whole and [line["step"] for line in found[:3]] == [1, 2, 4]
    assert len(broken) == 1 and broken[0].startswith(f"byte {2 * len(lines[0])}: ")
    assert len(last_metric_lines(path, 2)) == 2


READ_BACK = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
tags = events.Tags()["scalars"]
found = [[tag, [[event.step, round(event.value, 3)] for event in events.Scalars(tag)]] for tag in tags]
texts = [tag for tag in events.Tags()["tensors"] if events.SummaryMetadata(tag).plugin_data.plugin_name == "text"]
for tag in texts:
    found.append([tag, [[e.step, e.tensor_proto.string_val[0].decode()] for e in events.Tensors(tag)]])
print(json.dumps(found))
"""


def read_back(folder):
    """What TensorBoard itself reads; in its own process, whose imports warn."""
    out = subprocess.run([sys.executable, "-c", READ_BACK, str(folder)], capture_output=True, text=True, check=True)
    return dict(json.loads(out.stdout))


def test_tensorboard_reads_what_was_written_and_a_resumed_run_replaces_what_it_repeats(tmp_path):
    first = TensorBoard(tmp_path, resume=False)
    for step in range(4):
        first.write("rl", step, {"train/loss": step + 0.5, "train/tokens": 7}, 100.0 + step)
    first.write_samples("rl", 3, [("2+2=", "a | <b>\nc", 1.0, None, "4", "stop")], 103.0)
    first.close()
    ((step, table),) = read_back(tmp_path / "rl")["samples"]
    assert step == 3 and table.splitlines()[0].startswith("| prompt | response | reward")
    assert table.splitlines()[2] == "| 2+2= | a &#124; &lt;b><br>c | 1 |  | 4 | stop |"
    assert read_back(tmp_path / "rl")["train/loss"] == [[0, 0.5], [1, 1.5], [2, 2.5], [3, 3.5]]
    second = TensorBoard(tmp_path, resume=True)
    second.write("rl", 2, {"train/loss": 9.0}, 200.0)
    second.close()
    assert read_back(tmp_path / "rl")["train/loss"] == [[0, 0.5], [1, 1.5], [2, 9.0]]
