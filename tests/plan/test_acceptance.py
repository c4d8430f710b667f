"""The acceptance run of a GPU machine: its logic, with tiny shapes on a CPU, and what a plan makes of its figures."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from ruamel.yaml import YAML

from hone.cli.main import main as hone
from hone.devices import FoundDevices, devices_here
from hone.plan.efficiency import (
    MeasuredDecoding,
    MeasuredRates,
    efficiency_path,
    known_decoding,
    known_rates,
    remember_rates,
    with_measured,
)
from hone.plan.hardware import find_hardware
from hone.plan.time import GPU
from hone.runtime.processes import environment_restored
from hone.sizes import GIB
from hone.tools.acceptance import __main__ as runner
from hone.tools.acceptance.figures import EXPECTED, Expectation, Figure, page, read_lines

ROOT = Path(__file__).parents[2]
GSM8K = str(ROOT / "examples/gsm8k/run.yaml")


@pytest.mark.parametrize(
    ("bounds", "value", "holds"),
    [
        (Expectation("s"), 5.0, None),
        (Expectation("s", most=1), 1.0, True),
        (Expectation("s", most=1), 1.1, False),
        (Expectation("", least=0.4), 0.39, False),
        (Expectation("", least=0.8, most=1.1), 1.0, True),
        (Expectation("", most=1), float("nan"), False),
    ],
)
def test_a_figure_meets_its_bounds_or_does_not(bounds, value, holds):
    assert bounds.holds(value, is_gpu=True) is holds
    assert bounds.holds(value, is_gpu=False) is None, "a GPU's targets are not a CPU's"


def rows(*figures, is_gpu=True):
    return [figure.as_dict(is_gpu=is_gpu) for figure in figures]


def test_the_page_begins_with_what_was_missed():
    text = page(rows(Figure("trainer", "update_mfu", 0.2, "8 x 2k"), Figure("run", "gate_gap", 0.01)), "Here")
    assert "1 of 2 expectations missed" in text and text.index("## Missed") < text.index("## trainer")
    assert "| update_mfu | 8 x 2k | 0.2 of the peak | at least 0.4 | **no** |  |" in text
    assert "all 1 expectations met" in page(rows(Figure("run", "gate_gap", 0.01)), "Here")


def test_every_figure_is_explained():
    text = (ROOT / "docs/gpu-acceptance.md").read_text("utf-8")
    for name, bounds in EXPECTED.items():
        row = next((line for line in text.splitlines() if line.startswith(f"| `{name}` |")), "")
        assert row, f"{name} has no row in docs/gpu-acceptance.md"
        assert row.split("|")[2].strip() == (str(bounds) or "-"), f"{name} expects {bounds}"


def replace_parts(monkeypatch, part):
    """`part` in place of each part's process, on the CPU: asking a GPU's driver is a process too."""
    monkeypatch.setattr(runner, "devices_here", lambda _: devices_here("cpu"))
    monkeypatch.setattr(runner, "why_failed", part)


def run(monkeypatch, tmp_path, lines, failure=""):
    """The runner with a part that writes these lines."""

    def part(words, log, limit_s):
        with Path(words[4]).open("a") as file:
            file.write("".join(f"{json.dumps(line)}\n" for line in lines))
        return failure

    replace_parts(monkeypatch, part)
    return runner.main(["--parts", "devices", "--tiny", "--out", str(tmp_path)])


def test_one_that_is_missed_or_a_part_that_fails_is_the_exit_code(monkeypatch, tmp_path, capsys):
    good, bad = rows(Figure("run", "gate_gap", 0.01), Figure("run", "gate_gap", 0.5))
    assert run(monkeypatch, tmp_path, [good]) == 0
    assert run(monkeypatch, tmp_path, [good, bad]) == 1
    assert "missed: run gate_gap : 0.5, expected at most 0.03" in capsys.readouterr().out
    assert run(monkeypatch, tmp_path, [good], "ValueError: no") == 1
    assert "devices: failed: ValueError: no" in capsys.readouterr().out
    names = [row["figure"] for row in read_lines(tmp_path / "acceptance.jsonl")]
    assert names == ["gate_gap", "finished", "seconds", "total_s"]
    assert "ValueError: no" in (tmp_path / "acceptance.md").read_text()


@pytest.mark.parametrize(
    ("end", "limit_s", "failure"),
    [
        ("exit 0", 100.0, ""),
        ("echo ValueError: no; exit 1", 100.0, "ValueError: no"),
        ("kill -9 $$", 100.0, "was ended by signal 9, Killed"),
        ("sleep 1000", 2.0, "not done within 2 s"),
    ],
)
def test_nothing_that_a_part_starts_outlives_it(tmp_path, end, limit_s, failure):
    """As `hone train` under it, which has a session of its own and would keep the device."""
    (tmp_path / "part.sh").write_text(f"setsid sleep 1000 &\necho $! > {tmp_path}/pid\n{end}\n")
    assert runner.why_failed(["sh", str(tmp_path / "part.sh")], tmp_path / "log", limit_s) == failure
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_all_parts_have_their_time_together(monkeypatch, tmp_path):
    """Of three parts that take 300 s each, in 500 s: one is done, one is cut short, one does not begin."""
    now, limits = [0.0], []

    def part(words, log, limit_s):
        limits.append(limit_s)
        now[0] += min(limit_s, 300)
        return f"not done within {limit_s:.0f} s" if limit_s < 300 else ""

    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    replace_parts(monkeypatch, part)
    words = ["--parts", "devices,numbers,kernels", "--out", str(tmp_path), "--total-s", "500"]
    assert runner.main(words) == 1 and limits == [480, 200]
    lines = read_lines(tmp_path / "acceptance.jsonl")
    finished = [(line["value"], line["note"]) for line in lines if line["figure"] == "finished"]
    assert finished == [(1, ""), (0, "not done within 200 s"), (0, "no time was left for it")]
    assert (lines[-1]["figure"], lines[-1]["value"]) == ("total_s", 500)
    assert EXPECTED["total_s"].holds(2401, is_gpu=True) is False


def test_a_case_without_memory_does_not_end_its_part():
    from hone.tools.acceptance.setting import within_memory

    def figures(error):
        yield Figure("modes", "mode_mfu", 0.4, "a")
        raise error

    def found(error, fits):
        return [(one.name, one.note) for one in within_memory("modes", "a", figures(error), fits=fits)][1:]

    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
    assert found(full, True) == [("out_of_memory", "CUDA out of memory. Tried to allocate 2.00 GiB.")]
    assert found(full, False)[0][0] == "left_out" and EXPECTED["out_of_memory"].holds(1.0, is_gpu=True) is False
    with pytest.raises(RuntimeError, match="another"):
        found(RuntimeError("another"), True)


def test_an_update_s_memory_is_set_beside_the_plan_s_tensors(monkeypatch):
    """Without those of a run's engine, which would hide as many GiB that the plan lacks."""
    from hone.tools.acceptance import trainers
    from hone.tools.acceptance.setting import PartSetting

    monkeypatch.setattr(trainers, "hardware_of", lambda _: find_hardware("H100-80G"))
    work = trainers.PlannedUpdate(PartSetting(torch.device("cpu"), tiny=False), "0.6b", 32768, "bfloat16")
    update = next(one for one in work.plans["none"].ledgers[0].phase_peaks() if one.phase == "update")
    terms = {one.name: one.bytes / GIB for one in update.terms}
    other = terms.pop("CUDA context"), terms.pop("KV cache") + terms.pop("CUDA graphs")
    assert other == (pytest.approx(0.5), pytest.approx(4.5, rel=0.03))
    assert {"master weights", "AdamW moments", "activations"} < terms.keys()
    measured = 1.05 * sum(terms.values())
    found = work.peak_over_plan("trainer-0.6b", "none", "", int(measured * GIB))
    assert found.value == pytest.approx(1.05) and found.note == f"{measured:.1f} of {measured / 1.05:.1f} GiB"


def test_memory_is_the_device_s_also_before_anything_uses_it(monkeypatch):
    """As in the part on sleeping, whose model is on the CPU: a figure that is not there is never missed."""
    from hone.tools.acceptance import engines
    from hone.tools.acceptance.setting import PartSetting

    device = SimpleNamespace(mem_get_info=lambda: (60 * GIB, 80 * GIB), is_initialized=lambda: False)
    monkeypatch.setattr(engines, "module_of", lambda _: device)
    assert engines.used_bytes(PartSetting(torch.device("cuda"), tiny=True)) == 20 * GIB
    assert engines.used_bytes(PartSetting(torch.device("cpu"), tiny=True)) == 0


@pytest.mark.parametrize(
    ("name", "gib", "known", "tera"),
    [
        ("NVIDIA H100 PCIe", 79, "H100-PCIe-80G", 756),
        ("NVIDIA A800-SXM4-80GB", 79, "A100-80G", 312),
        ("AMD Instinct MI300X", 191, "MI300X-192G", 1307),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9, None, 50),
        ("NVIDIA Unheard 1", 40, None, 50),
    ],
)
def test_any_gpu_has_a_peak(monkeypatch, name, gib, known, tera):
    """By the name that torch says: nvidia-smi calls a part of a device by the name of the whole."""
    from hone.tools.acceptance import setting as shared

    properties = SimpleNamespace(name=name, total_memory=gib * GIB)
    module = SimpleNamespace(current_device=lambda: 0, get_device_properties=lambda _: properties)
    peak = replace(find_hardware("T4-16G"), name=name, fp32_flops=50e12, bf16_flops=50e12)
    monkeypatch.setattr(shared, "module_of", lambda _: module)
    monkeypatch.setattr(shared, "measured_hardware", lambda device, name: peak)
    monkeypatch.setattr(shared, "hardware_of", shared.hardware_of.__wrapped__)
    monkeypatch.setattr(shared, "devices_here", lambda _: FoundDevices("cuda", "GPU", 1, True))
    gpu = torch.device("cuda")
    found = shared.hardware_of(gpu)
    assert (found.name, found.memory_bytes, found.flops(2)) == (known or name, gib * GIB, tera * 1e12)
    assert shared.has_data_sheet(gpu) is (known is not None)
    figure = shared.peak_figure("modes", shared.PartSetting(gpu, tiny=False))
    assert figure.value == tera and figure.note.startswith("data sheet" if known else f"no data sheet of {name}: ")


def test_a_device_without_a_data_sheet_is_measured():
    from hone.tools.acceptance.setting import measured_hardware

    found = measured_hardware(torch.device("cpu"), "NVIDIA Unheard 1", rows=64, copied_bytes=1 << 20)
    assert found.name == "NVIDIA Unheard 1" and found.names == ("cuda", "GPU")
    assert 1e6 < found.fp32_flops < 1e15 and 1e6 < found.bandwidth < 1e13


def test_a_model_whose_states_have_no_room_is_left_out_before_it_is_made(monkeypatch):
    from hone.tools.acceptance import trainers
    from hone.tools.acceptance.setting import PartSetting

    monkeypatch.setattr(trainers, "hardware_of", lambda _: find_hardware("A100-40G"))
    monkeypatch.setattr(trainers, "random_model", None)
    (figure,) = trainers.trainer_part("4b")(PartSetting(torch.device("cpu"), tiny=False))
    assert (figure.name, figure.case) == ("left_out", "4b") and "no room for weights" in figure.note


def test_it_starts_without_what_may_not_be_installed():
    program = "import sys; sys.modules |= dict.fromkeys(('ray', 'vllm', 'peft')); import hone.tools.acceptance.parts"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def tiny_figures(*parts):
    """Value of each figure of some parts with tiny shapes on a CPU, where no expectation is missed."""
    from hone.tools.acceptance.parts import PARTS
    from hone.tools.acceptance.setting import PartSetting

    found = {}
    with environment_restored("CUBLAS_WORKSPACE_CONFIG"):  # a part has a process of its own otherwise
        for part in parts:
            for figure in PARTS[part](PartSetting(torch.device("cpu"), tiny=True)):
                line = figure.as_dict(is_gpu=False)
                assert line["holds"] is not False, line
                found[part, figure.name] = figure.value
    return found


@pytest.mark.slow("trains with tiny shapes in many ways")
def test_tiny_numbers_meet_what_a_cpu_can():
    found = tiny_figures("devices", "numbers", "deterministic", "attention")
    assert found["numbers", "logprob_error_float32"] < 1e-5 and found["numbers", "grad_error_float32"] < 1e-4
    assert found["numbers", "step_error_float32"] < 0.01 < 0.05 < found["numbers", "step_error_bfloat16"]
    assert found["attention", "operators_per_layer"] > 0


@pytest.mark.slow("compiles kernels for many shapes")
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_tiny_kernels_and_modes_meet_what_a_cpu_can():
    found = tiny_figures("kernels", "modes")
    assert found["kernels", "kernels_compiled"] == 1 and found["kernels", "kernels_logprob_difference"] < 1e-5
    assert found["modes", "mode_grad_difference"] < 1e-6 < found["modes", "mode_tokens_per_s"]
    assert ("modes", "left_out") in found, "memory, which a CPU does not tell"


@pytest.mark.slow("trains and samples with tiny shapes in many ways")
def test_tiny_trainers_and_engines_meet_what_a_cpu_can():
    found = tiny_figures("trainer-0.6b", "trainer-8b", "transformers", "decoding", "engines", "export")
    assert found["trainer-0.6b", "update_tokens_per_s"] > 0 < found["trainer-8b", "logprob_mfu"]
    for part in ("trainer-0.6b", "decoding", "engines", "export"):
        assert (part, "left_out") in found, "what only a GPU can tell is named"


@pytest.mark.slow("a run that is killed and resumed, and one that is not")
@pytest.mark.timeout(600)  # six starts of a process, of which each takes long where many share the cores
def test_a_tiny_run_is_killed_and_ends_as_without_it():
    found = tiny_figures("run")
    assert found["run", "resumed_steps"] == 6 and found["run", "resumed_same"] == 1
    assert found["run", "trained_frac"] > 0.9, "weights that never moved would be the same too"


@pytest.mark.slow("starts Ray twice, for a run that is killed and resumed")
@pytest.mark.timeout(600)  # as above
def test_a_tiny_run_on_ray_is_killed_and_resumed(tmp_path):
    assert runner.main(["--parts", "cluster-hone,cluster-vllm", "--tiny", "--out", str(tmp_path)]) == 0
    found = {(one["part"], one["figure"]): one["value"] for one in read_lines(tmp_path / "acceptance.jsonl")}
    assert found["cluster-hone", "resumed_steps"] == 6 and found["cluster-hone", "engines_first"] == 1
    assert found["cluster-vllm", "left_out"] == 1


@pytest.mark.slow("a run, and a plan of it")
@pytest.mark.timeout(300)
def test_a_tiny_first_run_is_set_beside_its_plan():
    found = tiny_figures("gsm8k")
    assert found["gsm8k", "example_steps"] == 3 and found["gsm8k", "trained_frac"] > 0.9
    assert found["gsm8k", "step_over_plan"] > 0


def test_the_first_run_has_the_example_s_sizes():
    from hone.tools.acceptance.first_run import EXAMPLE

    example = YAML(typ="safe").load(Path(GSM8K))
    for section, keys in EXAMPLE.items():
        assert {name: example[section][name] for name in keys} == keys
    assert set(example["rollout"]) == set(EXAMPLE["rollout"]) and set(example["train"]) == set(EXAMPLE["train"])


@pytest.mark.slow("compiles layers")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")  # Dynamo's own
def test_tiny_classes_meet_what_a_cpu_can():
    found = tiny_figures("classes")
    assert found["classes", "class_logprob_error"] < 1e-4 and found["classes", "class_compiled_difference"] < 1e-4


@pytest.mark.slow("starts Ray, and processes of ranks")
@pytest.mark.timeout(600)  # as above
def test_publishing_and_two_devices_meet_what_a_cpu_can(tmp_path):
    assert runner.main(["--parts", "publishing,several", "--tiny", "--out", str(tmp_path)]) == 0
    held = [line["value"] for line in read_lines(tmp_path / "acceptance.jsonl") if line["figure"] == "held_versions"]
    assert held == [1.0, 1.0], "by Ray's object store and by gloo"


# ---- the calibration


def rates(tokens=512, training=0.25, parameters=596_049_920, device="H100-80G"):
    return MeasuredRates(device, parameters, tokens, 2, training, 0.5)


def test_a_plan_takes_what_was_measured_nearest(monkeypatch, tmp_path):
    monkeypatch.setenv("HONE_EFFICIENCY", str(tmp_path / "efficiency.json"))
    remember_rates(
        [rates(512, 0.25), rates(16384, 0.10), rates(512, 0.7, device="A100-80G"), rates(512, 0.9, 8 * 10**9)]
    )
    like = {"parameters": 600e6, "bytes_each": 2}
    assert with_measured(GPU, "H100-80G", tokens=700, **like)[0].training_flops == 0.25
    assert with_measured(GPU, "H100-80G", tokens=12000, **like)[0].training_flops == 0.10
    assert with_measured(GPU, "H100-80G", tokens=100_000, **like) == (GPU, None), "too far to say anything"
    assert with_measured(GPU, "H100-80G", tokens=700, parameters=600e6, bytes_each=4) == (GPU, None)
    remember_rates([rates(512, 0.30), rates(1024, 7.0)])
    assert with_measured(GPU, "H100-80G", tokens=700, **like)[0].training_flops == 0.30, "the new one stays"
    assert 1024 not in [one.tokens for one in known_rates()], "beyond the peak is a mistake"
    efficiency_path().write_text("{")
    assert known_rates() == []


def test_decoding_steps_give_back_the_share_and_overhead_that_made_them(monkeypatch):
    """Steps of 8 and 512 rows of Qwen3-0.6B, as the plan would have them at other rates."""
    from hone.plan import time
    from hone.plan.families import architecture_from
    from hone.tools.acceptance import decoding
    from hone.tools.acceptance.setting import PartSetting, shape_of

    h100, shape = find_hardware("H100-80G"), shape_of("0.6b")
    sampler = time.Sampler(architecture_from(shape), 1, 1, 512, float("inf"), 8192, 2)
    rates = replace(GPU, decode_bandwidth=0.35, decode_overhead_s=0.008)
    context = decoding.PROMPT + decoding.TOKENS / 2
    steps = {rows: time._decode_step_s(sampler, h100, rates, rows, context) for rows in decoding.ROWS}
    monkeypatch.setattr(decoding, "hardware_of", lambda _: h100)
    found = decoding.measured_steps(PartSetting(torch.device("cpu"), tiny=False), shape, 2, steps, graphs=True)
    assert (found.device, found.parameters, found.graphs) == ("H100-80G", 596_049_920, True)
    assert (found.bandwidth, found.overhead_s) == (pytest.approx(0.35), pytest.approx(0.008))


def test_the_plan_s_rollout_follows_what_decoding_steps_took(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HONE_EFFICIENCY", str(tmp_path / "efficiency.json"))
    words = ["plan", GSM8K, "--hardware", "H100-80G", "model.path=Qwen/Qwen3-0.6B", "--json"]

    def planned(*more):
        hone([*words, *more])
        found = json.loads(capsys.readouterr().out)
        notes = [note for note in found["notes"] if note.startswith("decoding at")]
        return found["time"]["phases_s"]["rollout"], found["time"]["phases_s"]["optimizer"], notes

    local = ["cluster.backend=local"]
    (before_s, optimizer_s, none), vllm = planned(*local), planned(*ON_RAY)
    remember_rates([rates(512, 0.2)])
    remember_rates(decoding=[MeasuredDecoding("H100-80G", 596_049_920, 2, True, 0.3, 0.006)])
    after_s, same_s, notes = planned(*local)
    assert none == [] and after_s > 1.5 * before_s and same_s == optimizer_s
    assert notes == [
        "decoding at 30% of the memory's bandwidth and 6.0 ms a step besides, as measured with 596,049,920 parameters"
    ]
    assert planned(*ON_RAY)[::2] == vllm[::2], "vLLM has other steps"
    assert len(known_rates()) == len(known_decoding()) == 1


ON_RAY = ["cluster.backend=ray", "cluster.engines.use=vllm"]


def test_the_plan_s_times_follow_the_calibration(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HONE_EFFICIENCY", str(tmp_path / "efficiency.json"))
    words = ["plan", GSM8K, "--hardware", "H100-80G", "model.path=Qwen/Qwen3-0.6B", "--json"]

    def planned():
        hone(words)
        return json.loads(capsys.readouterr().out)

    before = planned()
    remember_rates([rates(512, 0.20)])
    after = planned()
    assert (before["time"]["efficiency"]["training_flops"], after["time"]["efficiency"]["training_flops"]) == (0.4, 0.2)
    assert after["time"]["phases_s"]["update"] > 1.5 * before["time"]["phases_s"]["update"]
    assert any("as measured with 596,049,920 parameters and 512 tokens" in note for note in after["notes"])
