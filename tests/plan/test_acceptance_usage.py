"""What the acceptance run makes of a GPU's recording, and of numbers that differ: made-up events and outcomes."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from hone.tools.acceptance import decoding, trainers, usage
from hone.tools.acceptance.arithmetic import UpdateOutcome, errors_of, layout_shapes
from hone.tools.acceptance.decoding import DrawnSteps
from hone.tools.acceptance.runs import digest, is_in_order
from hone.tools.acceptance.setting import PartSetting, UpdateFigures, laid_out
from hone.tools.acceptance.trainers import BESIDE_FIRST, BESIDE_TORCH, beside
from hone.tools.acceptance.usage import DeviceUsage, RecordedEvent, covered_us, watched


def kernel(start, end, name="gemm"):
    return RecordedEvent(name, True, start, end)


def call(start, end, name="cudaLaunchKernel"):
    return RecordedEvent(name, False, start, end)


def test_overlapping_events_count_once():
    assert covered_us([kernel(0, 10), kernel(5, 12), kernel(6, 7), kernel(20, 21)]) == 13
    assert covered_us([]) == 0


def test_a_device_is_busy_while_it_computes_and_a_host_while_it_does_not_wait():
    waits = [call(20, 60, "cudaStreamSynchronize"), call(50, 70, "hipDeviceSynchronize")]
    use = DeviceUsage(100e-6, [kernel(10, 40), kernel(30, 60), call(0, 5), call(6, 9, "cudaEventRecord"), *waits])
    assert use.kernels == 2, "calls of the host are none"
    assert use.busy_frac == pytest.approx(0.5)
    assert use.host_s == pytest.approx(50e-6)


def test_what_the_profiler_recorded(monkeypatch):
    """Its own marks are left out, for they last as long as the kernels in them together."""

    def recorded(name, device, start, end, is_mark=False):
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=device, time_range=span, is_user_annotation=is_mark)

    events = [
        recorded("gemm", DeviceType.CUDA, 1, 4),
        recorded("mark", DeviceType.CUDA, 0, 99, is_mark=True),
        recorded("cudaDeviceSynchronize", DeviceType.CPU, 2, 3),
    ]

    @contextmanager
    def profile(activities):
        assert activities == [usage.ProfilerActivity.CUDA]
        yield SimpleNamespace(events=lambda: events)

    monkeypatch.setattr(usage, "profile", profile)
    done = []
    use = watched(lambda: done.append(1))
    assert done == [1] and use.seconds > 0
    assert use.events == [kernel(1, 4), call(2, 3, "cudaDeviceSynchronize")]


def by_name(figures):
    return {figure.name: figure.value for figure in figures}


def test_waiting_in_a_step_does_not_count_that_of_prompts(monkeypatch):
    """Three waits for prompts, and one in each step."""
    waits = {"count": 0}

    def draw(tokens):
        waits["count"] += 3 + tokens
        return DrawnSteps([], steps=tokens + 1)

    def synchronizations(work):
        before = waits["count"]
        work()
        return waits["count"] - before

    monkeypatch.setattr(decoding, "synchronizations", synchronizations)
    monkeypatch.setattr(decoding, "watched", lambda work: DeviceUsage(1e-3, [kernel(0, 250)]))
    found = by_name(decoding.use_of_steps(draw, "here"))
    assert found == {"syncs_per_step": 1.0, "decode_busy": pytest.approx(0.25), "decode_host_frac": 1.0}


def test_use_of_an_update_is_by_microbatch(monkeypatch):
    """Waits are of further microbatches, four instead of two; all else of the first update."""
    passes = SimpleNamespace(tokens_per_microbatch=0)
    trainer, work = SimpleNamespace(passes=passes), SimpleNamespace(budget=512, batch=None)

    def microbatches():
        return 1024 // passes.tokens_per_microbatch

    waits = [call(0, 400, "cudaStreamSynchronize")]
    monkeypatch.setattr(trainers, "update", lambda *_: {"train/microbatches": microbatches()})
    monkeypatch.setattr(trainers, "synchronizations", lambda work: 6 + 2 * microbatches())
    monkeypatch.setattr(trainers, "watched", lambda work: DeviceUsage(1e-3, [kernel(0, 300), kernel(300, 900), *waits]))
    found = by_name(trainers.use_of_update("trainer", "here", trainer, None, work))
    assert (found["syncs_per_update"], found["syncs_per_microbatch"]) == (10, 2)
    assert found["kernels_per_microbatch"] == 1
    assert (found["host_ms_per_microbatch"], found["update_busy"]) == (pytest.approx(0.3), pytest.approx(0.9))
    assert passes.tokens_per_microbatch == 512


def outcome(**other):
    numbers = torch.tensor([3.0, 4.0], dtype=torch.float64)
    return UpdateOutcome(
        **{
            "hidden_UH": numbers,
            "logprobs_T": numbers,
            "grad_norm": 2.0,
            "gradient": numbers,
            "moved": numbers,
            **other,
        }
    )


@pytest.mark.parametrize(
    ("field", "value", "figure", "error"),
    [
        ("hidden_UH", torch.tensor([3.0, 4.5]), "hidden_error", 0.1),
        ("logprobs_T", torch.tensor([3.0, 4.5]), "logprob_error", 0.25),
        ("grad_norm", 1.5, "grad_norm_error", 0.25),
        ("gradient", torch.tensor([3.5, 4.0]), "grad_error", 0.1),
        ("moved", torch.tensor([-3.0, -4.0]), "step_error", 2.0),
    ],
)
def test_each_number_that_differs_is_one_error(field, value, figure, error):
    found = errors_of(outcome(**{field: value}), outcome())
    assert found.pop(figure) == pytest.approx(error)
    assert set(found.values()) == {0.0}


def test_layouts_are_of_five_shapes():
    batches = layout_shapes(PartSetting(torch.device("cpu"), tiny=True), 512)
    shapes = [(len(one.prompts), len(one.length_S), len(one.prompts[0])) for one in batches.values()]
    assert len(set(shapes)) == 5
    inputs = {case: len(laid_out(one, torch.device("cpu")).token_ids_X) for case, one in batches.items()}
    assert inputs["one group"] < 8 * (16 + 24), "their prompt is computed once"


UP = {"kind": "replica_up", "replica": "one"}
OFF = {"kind": "replica_state", "replica": "one", "state": "offloaded"}
TRAINER = {"kind": "trainer_up"}


@pytest.mark.parametrize(
    ("events", "holds"),
    [
        ([UP, OFF, TRAINER], True),
        ([UP, OFF, TRAINER, {**OFF, "state": "ready"}, UP, OFF, TRAINER], True),
        ([UP, TRAINER], False),
        ([TRAINER, UP, OFF], False),
        ([UP, OFF, TRAINER, UP, TRAINER], False),
        ([UP, OFF, {**OFF, "state": "ready"}, TRAINER], False),
        ([UP, {**UP, "replica": "two"}, OFF, TRAINER], False),
        ([UP, OFF], False),
    ],
)
def test_engines_that_share_devices_come_before_the_trainer(tmp_path, events, holds):
    lines = (json.dumps(event, separators=(",", ":")) for event in events)
    (tmp_path / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert is_in_order(tmp_path / "events.jsonl") is holds


def test_exported_weights_are_compared_by_their_bytes(tmp_path):
    for name, text in (("a", "same"), ("b", "same"), ("c", "other")):
        (tmp_path / name / "hf").mkdir(parents=True)
        (tmp_path / name / "hf" / "model.safetensors").write_text(text)
    found = [digest(tmp_path / name) for name in "abc"]
    assert found[0] == found[1] != found[2]


def way(seconds, peak, logprob=0.0, norm=1.0):
    return UpdateFigures(torch.tensor([logprob]), norm, seconds, peak)


def test_ways_are_compared_in_time_memory_and_numbers():
    first, other = way(2.0, 100), way(2.5, 60, logprob=0.5, norm=1.5)
    assert by_name(beside(other, first, BESIDE_FIRST, "")) == {
        "mode_time_ratio": 1.25,
        "mode_memory_ratio": 0.6,
        "mode_logprob_difference": 0.5,
        "mode_grad_difference": 0.5,
    }
    assert by_name(beside(other, first, BESIDE_TORCH, ""))["mode_kernels_ratio"] == 1.25
    for names in (BESIDE_FIRST, BESIDE_TORCH):
        assert not [*beside(first, first, names, "")], "nothing is compared with itself"
