"""Whole runs with an environment: masks and gate, faults, evaluation, and a resume that is exact to the last bit."""

import asyncio
import json
import shutil
from dataclasses import replace

import pytest
import torch
from test_gate import ARCHITECTURE, EOS, a_run, check
from tiny import metrics_of, weights_of

from hone.algo.algorithm import Algorithm
from hone.cli.main import main
from hone.config.algorithm import AlgorithmSection
from hone.data.pack import collate
from hone.errors import GateError
from hone.model.load import init_model
from hone.observe.recorder import read_samples
from hone.rollout.engine import Request
from hone.rollout.env import Observation
from hone.rollout.episodes import EpisodeEngine
from hone.rollout.local import LocalEngine
from hone.train.roles import Roles
from hone.types import Group, Prompt, Score, version_spans

ENVIRONMENT = '''
import random
from hone.rollout.env import Observation

class Game:
    """Answers two turns with a number that only the episode's own seed knows; likes answers that repeat it."""

    def __init__(self, episode, *, break_every=0):
        self.turn, self.breaks = 0, break_every and episode.prompt.index % break_every == 0
        self.secret = str(random.Random(episode.seed).randrange(10))

    async def step(self, turn):
        self.turn += 1
        if self.breaks and self.turn == 2:
            raise RuntimeError("no game today")
        liked = float(self.secret in turn)
        if self.turn == 3:
            return Observation(None, reward=liked)
        return Observation(f"={self.secret};", reward=0.1 * liked, metrics={"liked": liked})
'''

RUN = """
run: {{dir: {folder}/run, steps: 6, threads: 1, device: cpu}}
model:
  characters: "0123456789+=;"
  init: {{model_type: qwen3, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
         head_dim: 8, intermediate_size: 64, max_position_embeddings: 64, tie_word_embeddings: true}}
data: {{train: sums.jsonl, eval: sums.jsonl, eval_rows: "0:20", answer_column: answer, max_prompt_tokens: 8}}
rollout: {{group_size: 4, max_response_tokens: 30, stop: [";"], stop_token_ids: [3, 4],
          environment: {{use: game.py:Game, max_turns: 4, args: {{break_every: {break_every}}}}}}}
train: {{prompts_per_step: 8, tokens_per_microbatch: 512, optimizer: {{lr: 1e-3}}}}
algorithm: {{kl_loss_coef: 0.01}}
reward: {{max_unscored_frac: {max_unscored_frac}, components: [{{use: "watched.py:length", weight: 0}}]}}
eval: {{every: 3}}
checkpoint: {{every: 1, keep: 9}}
observe: {{console: quiet, tensorboard: false, trace: false}}
"""


def write_run(folder, *, break_every=0, max_unscored_frac=0.05):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "game.py").write_text(ENVIRONMENT)
    (folder / "watched.py").write_text("def length(group):\n    return [len(s.text) for s in group.samples]\n")
    run_file = folder / "game.yaml"
    run_file.write_text(RUN.format(folder=folder, break_every=break_every, max_unscored_frac=max_unscored_frac))
    return run_file


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert main(["train", str(write_run(folder))]) == 0
    return folder


def test_rewards_are_sums_over_turns_and_metrics_tell_of_them(finished):
    step = read_samples(finished / "run", 1)
    assert len(step) == 32
    for recorded in step:
        turns, mask = recorded.sample.turns, recorded.sample.loss_mask
        assert 1 <= len(turns) <= 3
        assert recorded.reward == recorded.scores["environment"] == pytest.approx(sum(turn.reward for turn in turns))
        assert [i for i, own in enumerate(mask) if own] == [i for turn in turns for i in range(turn.start, turn.end)]
    metrics = next(line for line in metrics_of(finished) if line.get("step") == 1)
    samples = [recorded.sample for recorded in step]
    assert metrics["rollout/turns_mean"] == sum(len(s.turns) for s in samples) / 32 > 2
    assert metrics["rollout/response_tokens_mean"] == sum(len(s.token_ids) for s in samples) / 32
    tool_tokens = sum((~s.loss_mask).sum() for s in samples)
    assert metrics["rollout/tool_tokens_mean"] == tool_tokens / 32
    assert metrics["train/masked_frac"] == pytest.approx(tool_tokens / sum(len(s.token_ids) for s in samples))
    assert metrics["rollout/env_liked_mean"] == sum(t.metrics.get("liked", 0) for s in samples for t in s.turns) / 32
    assert metrics["gate/logprob_gap"] < 1e-5
    assert sum("eval/turns_mean" in line for line in metrics_of(finished)) == 3


def test_memory_of_the_processes_with_user_code_is_logged(finished):
    lines = map(json.loads, (finished / "run" / "metrics.jsonl").read_text().splitlines())
    (line,) = [line for line in lines if line["stage"] == "rl" and line["step"] == 2 and "train/loss" in line]
    assert 0.01 < line["memory/reward_workers_process_rss_gib"] < 2
    assert 0.01 < line["memory/environments_process_rss_gib"] < 2


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.slow("a run more")) for step in (1, 4))])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(finished, tmp_path, step):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    run_file = write_run(finished)  # a run's identity has its folder in it, so it goes on where it was
    folder = finished / "run"
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "hf")
    assert main(["train", str(run_file), "--resume"]) == 0
    assert weights_of(finished) == weights_of(tmp_path)
    assert metrics_of(finished) == metrics_of(tmp_path)


def test_a_critic_learns_from_each_turn_where_it_was_rewarded(tmp_path, monkeypatch):
    """The first token's return is the sample's reward; a later turn's lacks what was given before it."""
    learnt = []
    update = Roles.update
    monkeypatch.setattr(Roles, "update", lambda *args: (learnt.append(args[1]), update(*args))[1])
    settings = ["algorithm.credit=gae", "algorithm.gae_lambda=1", "algorithm.kl_loss_coef=0", "run.steps=1"]
    assert main(["train", str(write_run(tmp_path)), *settings]) == 0
    return_T, start, partly = learnt[0].columns["return_T"], 0, 0
    for recorded in read_samples(tmp_path / "run", 1):
        turns, to_come = recorded.sample.turns, recorded.reward
        for turn in turns:
            assert return_T[start + turn.start : start + turn.end].tolist() == pytest.approx(
                [to_come] * (turn.end - turn.start), abs=1e-6
            )
            to_come -= turn.reward
        partly += 0 < turns[0].reward < recorded.reward
        start += len(recorded.sample.token_ids)
    assert start == len(return_T) and partly, "witness: some sample was rewarded in its first turn and again later"


@pytest.mark.slow("a whole run")
def test_an_asynchronous_run_meets_environments_too(tmp_path):
    assert main(["train", str(write_run(tmp_path)), "rollout.max_staleness=1"]) == 0
    samples = [recorded.sample for step in range(1, 7) for recorded in read_samples(tmp_path / "run", step)]
    assert len(samples) == 6 * 32 and sum(len(sample.turns) for sample in samples) > 2 * len(samples)
    assert all(list(sample.versions) == sorted(sample.versions) for sample in samples)


@pytest.mark.slow("a whole run")
def test_samples_that_the_environment_fails_are_unscored_and_the_rest_is_trained_on(tmp_path):
    assert main(["train", str(write_run(tmp_path, break_every=4, max_unscored_frac=0.5))]) == 0
    dropped = [recorded for recorded in read_samples(tmp_path / "run", 1) if recorded.reward is None]
    assert dropped, "the fault really happened"
    cause = "infra: raised RuntimeError: no game today"
    assert all(recorded.faults["environment"].startswith(cause) for recorded in dropped)
    assert all(recorded.sample.fault and len(recorded.sample.turns) == 2 for recorded in dropped)


def test_an_environment_that_always_fails_ends_the_run(tmp_path, capsys):
    assert main(["train", str(write_run(tmp_path, break_every=1))]) == 3
    assert "environment: infra fault: raised RuntimeError: no game today" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("game.py:Game", "game.py:Gaem", "game.py defines no 'Gaem'"),
        ("game.py:Game", "gaem.py:Game", "gaem.py does not exist"),
        ("game.py:Game", "Game", "must be package.module:class or file.py:class"),
        ("use: game.py:Game, ", "", "rollout.environment.use: is required with rollout.environment.args"),
        ("break_every: 0", "break: 0", "does not fit args {'break': 0}"),
    ],
)
def test_check_finds_what_is_wrong_with_an_environment(tmp_path, capsys, old, new, message):
    run_file = write_run(tmp_path)
    run_file.write_text(run_file.read_text().replace(old, new))
    assert main(["check", str(run_file)]) == 2
    shown = capsys.readouterr()
    assert message in (shown.out + shown.err).replace("\n", " ")


# ---- the gate and the loss, on samples of two turns


class TwoTurns:
    """An environment in this process that answers once."""

    def open(self, episode):
        return self

    def close(self): ...

    async def step(self, turn):
        return Observation("tool")


@pytest.fixture(scope="module")
def model():
    return init_model(ARCHITECTURE, vocab_size=12, seed=0, dtype=torch.float32, device="cpu")


def two_turn_run(model):
    """A run at step 0 whose groups met an environment: token 4 ends a turn, as EOS does."""
    run, _ = a_run(model)
    run.sampling = replace(run.sampling, max_tokens=24, stop_token_ids=(4, 5, 6))
    prompts = [Prompt(f"p{i}", i, "", (3 + i, 2, 7)) for i in range(8)]

    async def sample():
        run.engine = LocalEngine(run.trainer.policy.model, decode=str, eos_ids=(EOS,), max_concurrent=64, timeout_s=60)
        await run.engine.load(None, 0)
        episodes = EpisodeEngine(run.engine, TwoTurns(), encode=lambda _: [9, 10, 9], max_turns=2, in_step=True)
        try:
            return [await episodes.generate(Request(prompt, 4, run.sampling, 0, "train")) for prompt in prompts]
        finally:
            await run.engine.close()

    rewards = (1.0, 0.0, 0.0, None)
    scores = tuple(Score(reward) if reward is not None else Score(None, "infra") for reward in rewards)
    groups = [
        Group(prompt, samples).scored({"fake": scores}, rewards)
        for prompt, samples in zip(prompts, asyncio.run(sample()), strict=True)
    ]
    assert sum(len(s.turns) == 2 and s.finish_reason == "stop" for g in groups for s in g.samples) >= 8
    return run, groups


def with_samples(groups, change):
    return [replace(group, samples=tuple(map(change, group.samples))) for group in groups]


def test_the_gate_passes_a_sound_multi_turn_run(model):
    assert check(*two_turn_run(model))["gate/logprob_gap"] < 1e-5


def test_the_gate_catches_a_mask_that_is_off_by_one(model):
    run, groups = two_turn_run(model)
    shifted = with_samples(groups, lambda s: replace(s, loss_mask=(True, *s.loss_mask[:-1])))
    with pytest.raises(GateError, match=r"loss mask .* off by one, so that prompt or tool tokens are trained on"):
        check(run, shifted)


def test_the_gate_catches_tool_tokens_that_pass_for_the_policys(model):
    run, groups = two_turn_run(model)
    with pytest.raises(GateError, match="loss mask"):
        check(run, with_samples(groups, lambda s: replace(s, loss_mask=None)))


def test_the_gate_looks_at_the_end_of_every_turn(model):
    """The stop token of the first turn is gone; the sample's last one is there."""

    def cut(sample):
        if len(sample.turns) < 2:
            return sample
        at, (first, second) = sample.turns[0].end - 1, sample.turns
        columns = {
            name: (*getattr(sample, name)[:at], *getattr(sample, name)[at + 1 :])
            for name in ("token_ids", "sampler_logprobs", "loss_mask")
        }
        turns = (replace(first, end=at), replace(second, start=second.start - 1, end=second.end - 1))
        versions = version_spans([*sample.token_versions()[:at], *sample.token_versions()[at + 1 :]])
        return replace(sample, **columns, versions=versions, turns=turns)

    run, groups = two_turn_run(model)
    with pytest.raises(GateError, match=r"do not end with a stop token.* final token"):
        check(run, with_samples(groups, cut))


def test_tool_tokens_carry_no_advantage_and_later_tokens_are_conditioned_on_them(model):
    run, groups = two_turn_run(model)
    batch, _ = Algorithm(AlgorithmSection(credit="group_mean")).assign(collate(groups))
    mask_T, advantages_T = batch.loss_mask_T, batch.columns["advantages_T"]
    assert (advantages_T[mask_T == 0] == 0).all() and (advantages_T[mask_T == 1] != 0).all()

    is_tool_T = torch.cat([~torch.tensor(s.loss_mask) for g in groups for s in g.samples])
    logprobs_T = run.trainer.logprobs(batch)
    other = replace(batch, token_ids_T=torch.where(is_tool_T, 2 + (batch.token_ids_T + 1) % 10, batch.token_ids_T))
    moved_T = (run.trainer.logprobs(other) - logprobs_T).abs() > 1e-6
    start = 0
    for sample in (s for g in groups for s in g.samples):
        before, after = sample.turns[0], sample.turns[1:]
        assert not moved_T[start + before.start : start + before.end].any()
        assert all(moved_T[start + turn.start : start + turn.end].all() for turn in after)
        start += len(sample.token_ids)
