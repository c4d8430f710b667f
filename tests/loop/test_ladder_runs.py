"""Whole runs that run out of memory at every site, in every stage: they finish, having learnt the same."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny import RUN, metrics_of, write_run

import hone.assemble.models
import hone.assemble.stage_runs
import hone.assemble.stages
from hone import assemble
from hone.config.load import load_config
from hone.data.chat import load_tokenizer
from hone.errors import MemoryExhausted
from hone.memory.record import Record, comparison
from hone.memory.rungs import CHUNK, PREFILL, RECOMPUTE, ROWS, TOKENS
from hone.model.decoder import Decoder
from hone.observe.page import script_json
from hone.rollout.decoding import DecoderStepper
from hone.run.folder import RunFolder
from hone.sizes import GIB
from hone.train import learner, policy
from hone.train.checkpoint import Checkpoints
from hone.train.critic import Critic
from hone.train.optim import FlatAdamW
from hone.train.pairs import PairTrainer

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
SAME = 2e-4
"""Largest difference of weights that the order of float32 sums makes in these runs, at a learning rate of 1e-3."""

REWARDED = "algorithm.overlong_buffer_frac=0.75"
"""So that these beginners' responses differ in reward."""

SITES = {
    "prefill": (DecoderStepper, "_prefill", "rollout", "rl"),
    "decode": (DecoderStepper, "advance", "rollout", "rl"),
    "logprobs": (learner, "forward_samples", "logprobs", "rl"),
    "forward and backward": (policy, "train_microbatch", "update", "sft"),
    "optimizer step": (FlatAdamW, "step", "optimizer", "sft"),
    "checkpoint": (Checkpoints, "save", "checkpoint", "sft"),
    "export": (hone.assemble.stage_runs, "hf_folder", "checkpoint", "sft"),
}


@pytest.fixture(scope="module", autouse=True)
def tried(tmp_path_factory):
    """`hone train` tries the model's class first, once; the calls that tests count come after that."""
    run_file = write_run(tmp_path_factory.mktemp("tried"), steps=3)
    for stages in ("[sft, rl]", "[rl]", "[sft]"):
        loaded = load_config(run_file, [REWARDED, f"stages={stages}"])
        tokenizer = load_tokenizer(loaded.config.model, run_file.parent)
        hone.assemble.stages.refuse_untrainable(loaded, tokenizer)


def fails(monkeypatch, owner, name, at):
    """Let call number `at` of a function run out of memory; returns all calls."""
    function, calls = getattr(owner, name), []

    def failing(*arguments, **keys):
        calls.append(name)
        if len(calls) == at:
            raise OUT_OF_MEMORY
        return function(*arguments, **keys)

    monkeypatch.setattr(owner, name, failing)
    return calls


def run(folder, *overrides, run_file=None, **options):
    run_file = run_file or write_run(folder, steps=3)
    assemble.train(load_config(run_file, [REWARDED, *overrides]), **options)
    return folder / "run"


def record_of(folder):
    record = Record.read(folder)
    assert record is not None
    return record


def weights(folder):
    return load_file(folder / "hf" / "model.safetensors")


def assert_same_run(folder, other):
    ours, theirs = weights(folder), weights(other)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < SAME
    for line, wanted in zip(metrics_of(folder.parent), metrics_of(other.parent), strict=True):
        assert (line["stage"], line["step"]) == (wanted["stage"], wanted["step"])
        assert line.get("rollout/reward_mean") == wanted.get("rollout/reward_mean")
        assert line.get("rollout/response_tokens_mean") == wanted.get("rollout/response_tokens_mean")


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("unfailed"))


def test_the_report_shows_the_plan_moment_by_moment(unfailed):
    picture = (unfailed / "memory.svg").read_text()
    assert ">backward<" in picture and "resident memory of this process, as planned" in picture
    assert script_json(picture) in (unfailed / "report.html").read_text()


@pytest.mark.parametrize(
    "site", [pytest.param(site, marks=pytest.mark.slow("a run more")) if n else site for n, site in enumerate(SITES)]
)
def test_a_run_that_fails_once_learns_the_same(tmp_path, monkeypatch, unfailed, site):
    owner, name, phase, stage = SITES[site]
    calls = fails(monkeypatch, owner, name, 2 if name != "hf_folder" else 1)
    if stage == "sft" and phase == "checkpoint":  # no engine yet, so there is nothing that could make room
        with pytest.raises(MemoryExhausted, match="out of memory in checkpoint"):
            run(tmp_path)
        return
    folder = run(tmp_path)
    assert len(calls) > 2
    record = record_of(folder)
    assert [(change.phase, change.stage) for change in record.changes] == [(phase, stage)]
    assert_same_run(folder, unfailed)


def test_a_checkpoint_of_rl_that_fails_makes_room_and_is_written(tmp_path, monkeypatch, unfailed):
    fails(monkeypatch, Checkpoints, "save", 9)  # the second of RL, after seven of SFT
    folder = run(tmp_path)
    assert [(c.phase, c.stage, c.step, c.key) for c in record_of(folder).changes] == [("checkpoint", "rl", 3, ROWS)]
    assert_same_run(folder, unfailed)


def test_evaluation_before_the_first_step(tmp_path, monkeypatch, unfailed):
    fails(monkeypatch, DecoderStepper, "advance", 1)
    folder = run(tmp_path)
    change = record_of(folder).changes[0]
    assert (change.step, change.phase, change.moment) == (1, "rollout", "sampling")
    assert_same_run(folder, unfailed)


def test_the_record_is_complete_and_a_resumed_run_keeps_the_rungs(tmp_path, monkeypatch):
    calls = fails(monkeypatch, policy, "train_microbatch", 8)  # the first of RL
    said = []
    monkeypatch.setattr("hone.observe.observer.Observer.say", lambda self, message: said.append(message))
    folder = run(tmp_path, "run.steps=2")
    assert len(calls) > 9
    [change] = record_of(folder).changes
    assert (change.phase, change.stage, change.step) == ("update", "rl", 1)
    assert (change.predicted_bytes or 0) > 0
    assert change.detail == str(OUT_OF_MEMORY)
    assert change.sentence in said
    assert change.sentence.startswith("out of memory in update (")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["memory/redone"] for line in lines if line["stage"] == "rl" and "train/loss" in line] == [1, 1]
    [yaml] = [line for line in (folder / "run.yaml").read_text().splitlines() if "# ladder, rl step 1" in line]
    assert f"{change.key.rpartition('.')[2]}: {change.new}" in yaml
    assert any("measured beside planned" in message for message in said)

    resumed = run(tmp_path, "run.steps=3", run_file=tmp_path / "tiny.yaml", resume=True)
    record = record_of(resumed)
    assert record.changes == [change]
    assert "# ladder, rl step 1" in (folder / "run.yaml").read_text()
    assert RunFolder.read(folder).identity()["train"] == {
        **load_config(tmp_path / "tiny.yaml").config.model_dump(mode="json")["train"]
    }


@pytest.mark.slow("whole runs, close to another test")
def test_exit_code_4_and_no_loop_when_nothing_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(DecoderStepper, "advance", lambda self, tokens: (_ for _ in ()).throw(OUT_OF_MEMORY))
    with pytest.raises(MemoryExhausted) as error:
        run(tmp_path, "rollout.max_concurrent_samples=16", "rollout.prefill_tokens=64", "sft.rows_per_step=100")
    assert error.value.exit_code == 4
    message = str(error.value)
    assert "out of memory in rollout (sampling) at rl step 1" in message
    assert "peak" in message and "process" in message  # the plan's sentence
    record = record_of(tmp_path / "run")
    assert {change.key for change in record.changes} == {ROWS, PREFILL}
    assert len(record.changes) <= 4 + 3


def test_out_of_memory_before_anything_started(tmp_path, monkeypatch):
    monkeypatch.setattr(hone.assemble.models, "make_passes", lambda *a, **k: (_ for _ in ()).throw(OUT_OF_MEMORY))
    with pytest.raises(MemoryExhausted, match="out of memory in start"):
        run(tmp_path, "stages=[rl]")
    with pytest.raises(MemoryExhausted, match="out of memory in start"):
        run(tmp_path, "stages=[sft]", f"run.dir={tmp_path}/other", run_file=tmp_path / "tiny.yaml")


@pytest.mark.slow("whole runs, close to another test")
@pytest.mark.parametrize("site", ["_forward", "update"])
def test_a_critic_is_not_trained_twice(tmp_path, monkeypatch, site):
    ppo = ("stages=[rl]", "algorithm.credit=gae", "algorithm.kl_loss_coef=0", "run.steps=2")
    unfailed = run(tmp_path / "a", *ppo)
    if site == "_forward":
        calls = fails(monkeypatch, Critic, "_forward", 2)
    else:  # the policy's part, when the critic has learnt already
        calls = fails(monkeypatch, policy, "train_microbatch", 1)
    folder = run(tmp_path / "b", *ppo)
    assert len(calls) > 2
    assert len(record_of(folder).changes) == 1
    assert_same_run(folder, unfailed)


def test_weights_are_published_again(tmp_path, monkeypatch):
    calls = fails(monkeypatch, Decoder, "load_weights", 4)  # the first two make the models
    folder = run(tmp_path, "stages=[rl]", "rollout.max_staleness=1")
    assert len(calls) > 2
    assert [change.phase for change in record_of(folder).changes] == ["publish"]


@pytest.mark.slow("whole runs, close to another test")
def test_a_reward_model_fails_in_both_of_its_passes(tmp_path, monkeypatch):
    run_file = write_run(tmp_path / "data")
    rows = [{"prompt": f"{a}+{a}=", "chosen": str(2 * a), "rejected": str(2 * a + 1)} for a in range(40)]
    (tmp_path / "data" / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stages = ["stages=[reward_model]", "data.train=pairs.jsonl", "data.eval=pairs.jsonl", "data.answer_column=null"]
    stages += ["data.eval_rows=0:20", "rm.pairs_per_step=10", "algorithm.kl_loss_coef=0"]
    unfailed = run(tmp_path / "a", *stages, f"run.dir={tmp_path}/a/run", run_file=run_file)
    fails(monkeypatch, PairTrainer, "_scores", 1)
    calls = fails(monkeypatch, PairTrainer, "_accumulate", 2)
    folder = run(tmp_path / "b", *stages, f"run.dir={tmp_path}/b/run", run_file=run_file)
    assert len(calls) > 2
    assert {change.phase for change in record_of(folder).changes} == {"update", "logprobs"}
    ours, theirs = weights(folder), weights(unfailed)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < SAME


# ---- real memory -------------------------------------------------------------------------------------------------

LARGE = {"hidden_size: 32": "hidden_size: 128", "intermediate_size: 64": "intermediate_size: 4096"}
REAL = (
    "stages=[rl]",
    "run.steps=1",
    "rollout.group_size=32",
    "train.prompts_per_step=40",
    "train.tokens_per_microbatch=16384",
    "algorithm.kl_loss_coef=0",
    "data.eval=null",
    "eval.every=0",
)


def in_a_process(run_file, *overrides):
    """`hone train` by itself, so that resident memory is its own."""
    command = [sys.executable, "-m", "hone.cli.main", "train", str(run_file), *REAL, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


def peaks(folder, stage="rl"):
    return {row.phase: row.measured_bytes for row in comparison(folder)[1] if row.stage == stage}


@pytest.mark.slow("a run with a model large enough to exceed a memory budget")
def test_a_budget_is_kept_by_climbing_down(tmp_path):
    """No failure is made up: the update takes more than the budget, microbatches shrink until it does not."""
    run_file = write_run(tmp_path)
    text = run_file.read_text()
    for old, new in LARGE.items():
        text = text.replace(old, new)
    run_file.write_text(text)
    free = in_a_process(run_file, f"run.dir={tmp_path}/free")
    assert free.returncode == 0, free.stderr
    found = peaks(tmp_path / "free")
    ratios = {row.phase: row.ratio for row in comparison(tmp_path / "free")[1] if row.phase != "start"}
    assert max(ratio for ratio in ratios.values() if ratio) < 1, "no phase takes more than planned"
    training = max(found["update"], found["logprobs"])
    budget = (training + found["rollout"]) // 2
    assert training > found["rollout"] + (100 << 20), "training is what takes the memory"
    held = in_a_process(run_file, f"run.dir={tmp_path}/held", f"plan.memory_budget_gib={budget / GIB}")
    assert held.returncode == 0, held.stderr
    record = record_of(tmp_path / "held")
    assert {change.phase for change in record.changes} <= {"logprobs", "update"}
    assert {change.key for change in record.changes} <= {TOKENS, CHUNK, RECOMPUTE}
    assert record.changes
    assert all(change.seen_bytes > budget for change in record.changes)
    assert max(peaks(tmp_path / "held").values()) <= budget
    ours, theirs = weights(tmp_path / "held"), weights(tmp_path / "free")
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < SAME


def test_a_budget_that_nothing_could_keep(tmp_path):
    with pytest.raises(MemoryExhausted, match=r"out of memory in start at rl step 1.*more than plan.memory_budget_gib"):
        run(tmp_path, "stages=[rl]", "plan.memory_budget_gib=0.1")


@pytest.mark.slow("whole runs, close to another test")
def test_autotune_raises_rows_and_tokens_and_learns_the_same(tmp_path):
    slow = ("rollout.max_concurrent_samples=4", "train.tokens_per_microbatch=32", "run.steps=8", "eval.every=0")
    fixed = run(tmp_path / "a", *slow)
    tuned = run(tmp_path / "b", *slow, "plan.autotune=true", "plan.memory_budget_gib=64")
    changes = record_of(tuned).changes
    assert {change.reason for change in changes} == {"room"}
    assert changes[0].key == ROWS
    assert (changes[0].old, changes[0].new) == (4, 6)
    assert "autotune, rl step" in (tuned / "run.yaml").read_text()
    assert_same_run(tuned, fixed)


assert "max_concurrent_samples" not in RUN, "the tests count on the default"
