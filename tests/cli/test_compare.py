"""`hone plan --compare`, and what a plan for this machine learns from runs on it."""

import json

import pytest

from hone.cli.main import main
from hone.memory import calibration
from hone.memory.calibration import device_key
from hone.memory.record import Expected, Record
from hone.memory.rungs import TOKENS, Change

CHANGE = Change(
    stage="rl",
    step=2,
    key=TOKENS,
    old=1024,
    new=512,
    reason="out of memory",
    phase="update",
    moment="loss backward: logits 1.0 GiB (50 %)",
    detail="made up",
    seen_bytes=3 << 30,
    predicted_bytes=2 << 30,
    limit_bytes=4 << 30,
)


RUN = """
model:
  characters: "0123456789+="
  init: {model_type: qwen3, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
         head_dim: 8, intermediate_size: 64, max_position_embeddings: 32, tie_word_embeddings: true}
data: {train: sums.jsonl, answer_column: answer, max_prompt_tokens: 8}
reward: {components: [{use: exact}]}
rollout: {max_response_tokens: 4}
algorithm: {kl_loss_coef: 0.01}
"""


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "tiny.yaml"
    path.write_text(RUN)
    return path


@pytest.fixture
def folder(tmp_path):
    """A run of four steps whose ladder took a rung in the second; the last line is torn by a kill."""
    record = Record(
        device="cpu of here",
        what="resident memory of this process",
        limit_bytes=4 << 30,
        has_limit=True,
        expected={"rl": {"update": Expected("loss backward", 2 << 30, "logits", 1 << 30)}},
        changes=(CHANGE,),
    )
    record.write(tmp_path)
    settings = {"train": {"prompts_per_step": 8}, "rollout": {"group_size": 4}}
    (tmp_path / ".identity.json").write_text(json.dumps({"run_file": "run.yaml", "config": settings}))
    lines = [
        {"stage": "rl", "step": step, "time_s": 1.0, "memory/update_peak_mib": peak, "memory/rollout_peak_mib": 512.0}
        for step, peak in enumerate([4000.0, 4000.0, 2560.0, 2816.0], 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"stage": "r')
    return tmp_path


def test_planned_beside_measured_since_the_last_change(folder, capsys):
    assert main(["plan", "--compare", str(folder)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "memory, resident memory of this process: measured beside planned",
        "  rl rollout      512 MiB  not planned",
        "  rl update       2.8 GiB    2.0 GiB planned, loss backward (x1.38)",
        "  69 % of 4.0 GiB used at most: below 75-85 %. plan.autotune=true raises what pays; hone plan --preset "
        "recommended shows what",
        f"  {CHANGE.sentence}",
    ]


def test_the_same_for_programs(folder, capsys):
    assert main(["plan", "--compare", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["phase"], row["measured_bytes"] >> 20, row["planned_bytes"]) for row in found["phases"]] == [
        ("rollout", 512, None),
        ("update", 2816, 2 << 30),
    ]
    assert found["changes"][0]["new"] == 512


def test_what_more_samples_per_step_would_buy(folder, capsys):
    """A step has 32 samples and the noise scale is 96: gradients of 32 and of 64 have 1 + 96 / B times the signal."""
    lines = [
        {"stage": "rl", "step": step, "time_s": 1.0, "train/gradient_signal": 2.0, "train/gradient_noise": 192.0}
        for step in range(60)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["plan", "--compare", str(folder)]) == 0
    assert "noise scale: 96 samples (last 50 steps); a step has 32\n" in (out := capsys.readouterr().out)
    assert "twice the samples is worth 1.60 of today's (train.optimizer.lr x 1.26), with half of them 0.57" in out
    assert main(["plan", "--compare", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gradient_noise"]["worth_of_twice"] == pytest.approx(4 / 2.5)


def test_what_is_no_run_is_said(tmp_path, capsys):
    assert main(["plan", "--compare", str(tmp_path)]) == 2
    assert "no memory.json in it" in capsys.readouterr().err
    (tmp_path / "memory.json").write_text('{"format": 7}')
    assert main(["plan", "--compare", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_plan_for_this_machine_says_and_uses_what_was_measured_on_it(run_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["plan", str(run_file), "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["ledgers"][0]["peak"]
    for _ in range(3):
        calibration.remember(device_key("cpu"), {before["phase"]: (before["bytes"], round(before["bytes"] * 1.25))})
    assert main(["plan", str(run_file), "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["ledgers"][0]["peak"]["bytes"] == pytest.approx(1.25 * before["bytes"], rel=1e-6)
    assert f"measured on this machine: {before['phase']} came to x1.25 of what was planned in 3 runs" in str(
        after["notes"]
    )
    assert main(["plan", str(run_file), "--hardware", "A100-80G", "--json"]) == 0
    assert "measured on this machine" not in capsys.readouterr().out


def test_a_budget_is_what_a_plan_plans_for(run_file, capsys):
    assert main(["plan", str(run_file), "plan.memory_budget_gib=0.2"]) == 4
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "205 MiB" in out
