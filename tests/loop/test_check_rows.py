"""`hone check` on small run files that are wrong in one place: it says ready only where training could learn."""

import asyncio
import json
import re
import socket

import pytest

from hone.config.load import load_config
from hone.data.chat import character_tokenizer
from hone.data.lazy import SampleSize
from hone.run import check as preflight

RUN = """\
run: {dir: runs/tiny, steps: 3}
model:
  characters: "0123456789+= "
  init: {model_type: qwen3, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1, num_key_value_heads: 1,
         head_dim: 8, intermediate_size: 8, max_position_embeddings: 32}
data: {train: sums.jsonl, answer_column: answer, max_prompt_tokens: 8}
reward:
  components:
    - {use: "mine.py:score", timeout_s: 1}
rollout: {group_size: 4, max_response_tokens: 4}
train: {prompts_per_step: 4, tokens_per_microbatch: 256}
"""
COMPARE = "def score(group):\n    return [float(s.text == group.prompt.answer) for s in group.samples]\n"
BUILT_IN = "reward.components=[{use: exact}]"
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "key": f"{a},{b}"} for a in range(4) for b in range(2)]


@pytest.fixture
def check(tmp_path, monkeypatch):
    """`check(rows, *overrides, reward=source, **sizes)`: the report on these rows, with this file of rewards."""
    monkeypatch.chdir(tmp_path)

    def checked(rows, *overrides, reward=COMPARE, **sizes):
        (tmp_path / "run.yaml").write_text(RUN)
        (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "mine.py").write_text(reward)
        return asyncio.run(preflight.check(load_config("run.yaml", overrides), **sizes))

    return checked


def test_a_right_run_is_ready(check):
    report = check(ROWS)
    assert (report.problems, report.warnings, report.not_checked) == ([], [], [])
    assert report.figures["gold answers"] == 8
    assert (report.figures["score: gold answers score"], report.figures["score: shuffled answers score"]) == (1, 0)


@pytest.mark.parametrize(("shared", "is_warned"), [(0, False), (3, False), (8, True)])
def test_evaluation_on_training_prompts_is_counted_and_warned_of(check, tmp_path, shared, is_warned):
    others = [{"prompt": f"{a}+9=", "answer": str(a + 9)} for a in range(8)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:shared] + others[shared:]))
    report = check(ROWS, "data.eval=eval.jsonl")
    counted = [line for line in report.lines if "training prompts too" in line]
    assert counted == ([f"eval: {shared / 8:.0%} of its prompts are training prompts too"] if shared else [])
    assert [warning.partition(", so")[0].partition("data.eval: ")[2] for warning in report.warnings] == (
        ["100% of its prompts are training prompts too"] if is_warned else []
    )


def test_integer_answers_compared_with_text_are_a_problem_and_the_cause_is_named(check):
    (problem,) = check([row | {"answer": int(row["answer"])} for row in ROWS]).problems
    assert problem.startswith("reward: gold answers earn 0 on average and other rows' answers 0")
    assert "The data's answers are integers (0), but the reward compares with text: given as '0' they earn" in problem


def test_text_answers_compared_with_numbers_too(check):
    (problem,) = check(ROWS, reward=COMPARE.replace("s.text", "int(s.text)")).problems
    assert "The data's answers are text ('0'), but the reward compares with integers: given as 0 they earn" in problem


def test_a_reward_that_gives_all_the_same_is_a_problem(check):
    (problem,) = check(ROWS, reward="def score(group):\n    return (1,) * 4\n").problems
    assert "gold answers earn 1 on average and other rows' answers 1" in problem
    assert "The first answer is '0' (sums.jsonl:1). Leave data.answer_column out if" in problem


def test_rewards_get_groups_as_large_as_in_training_with_token_ids(check):
    source = (
        "import numpy\n"
        "def score(group):\n"
        "    assert len(group.samples) == 4 and all(len(s.token_ids) == len(s.text) + 1 for s in group.samples)\n"
        "    return numpy.array([s.text == group.prompt.answer for s in group.samples])\n"
    )
    assert check(ROWS, reward=source).is_ok


def test_a_group_of_one(check):
    reward = COMPARE.replace("    return", "    assert len(group.samples) == 1\n    return")
    report = check(ROWS, "rollout.group_size=1", "algorithm.credit=reinforce_pp", reward=reward)
    assert report.is_ok and report.figures["score: shuffled answers score"] == 0


def test_what_a_reward_raises_is_shown_once_with_its_lines(check):
    source = (
        "def parse(text):\n    return int('x' + text[1:])\n\n"
        "def score(group):\n    return [parse(s.text) for s in group.samples]\n"
    )
    (problem,) = check(ROWS, reward=source).problems
    assert problem.startswith(
        "reward score: 16 of 16 responses could not be scored, the first is '0' under sums.jsonl:1"
    )
    assert problem.endswith("base 10: 'x' (mine.py:5 in score, mine.py:2 in parse: return int('x' + text[1:]))")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module\ndef score(group): ...\n", "(mine.py:1 in <module>: import no_such_module)"),
        ("def score(group, bonus):\n    return []\n", "score(group, bonus) does not fit args {}: missing a required"),
    ],
)
def test_a_reward_that_cannot_be_had_is_a_problem_of_a_line_of_the_run_file(check, source, said):
    (problem,) = check(ROWS, reward=source).problems
    assert problem.startswith("run.yaml:9  reward.components.0.use: ") and said in problem


def test_a_hanging_reward_is_given_up_after_three_timeouts(check):
    source = "import time\ndef score(group):\n    time.sleep(60)\n"
    (problem,) = check(ROWS, "reward.components.0.timeout_s=0.1", reward=source).problems
    assert "took longer than its timeout_s 3 times (score 0.1 s), so the check of rewards stopped after 2 of" in problem


@pytest.mark.slow("waits for time-outs")
def test_a_reward_that_hangs_on_each_response_too(check):
    source = (
        "import time\nfrom hone.reward import reward\nfrom hone.types import Fault\n"
        "@reward(minimum=0.0, overrun=Fault.MODEL)\n"
        "def score(group):\n    time.sleep(60 * len(group.samples))\n    return []\n"
    )
    report = check(ROWS, "reward.components.0.timeout_s=0.1", "rollout.group_size=64", reward=source)
    (problem,) = report.problems
    assert re.search("stopped after [0-2] of 8 rows", problem)  # 0 unless the machine is too busy to give it 0.1 s


def test_without_answers_rewards_are_still_tried(check):
    report = check(ROWS, "data.answer_column=null", reward="def score(group):\n    return [1 / 0]\n")
    (problem,) = report.problems
    assert "8 of 8 responses could not be scored, the first is '0+0=' under sums.jsonl:1: infra: raised Zero" in problem
    assert any("tried on prompts instead of gold answers" in what for what in report.not_checked)


def test_a_large_group_that_cannot_be_scored_is_a_problem_as_a_small_one(check):
    (problem,) = check(ROWS, "rollout.group_size=64", reward="def score(group):\n    return [1 / 0]\n").problems
    assert "raised Zero" in problem


CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"
TRL_CHAT = (
    "def score(completions, answer):\n    return [float(c[0]['content'] == a) for c, a in zip(completions, answer)]\n"
)
TRL_TEXT = "def score(completions, answer):\n    return [float(c.strip() == a) for c, a in zip(completions, answer)]\n"


@pytest.fixture
def chat(tmp_path):
    (tmp_path / "chat.jinja").write_text(CHAT)
    return ["data.chat=true", "model.chat_template=chat.jinja"]


def test_gold_prompts_are_those_of_training(check, chat):
    """A TRL reward gets lists of messages with `data.chat`, though the column holds text."""
    assert check(ROWS, *chat, reward=TRL_CHAT).is_ok
    assert check(ROWS, reward=TRL_TEXT).is_ok
    (problem,) = check(ROWS, *chat, reward=TRL_TEXT).problems
    assert "raised AttributeError: 'list' object has no attribute 'strip' (mine.py:2 in score" in problem


def test_a_prompt_with_the_answer_in_it_is_refused_with_the_cure(check, chat):
    rows = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]}
        for row in ROWS
    ]
    keys = [*chat, "data.prompt_column=messages", "data.answer_column=null"]
    problem, *_ = check(rows, *keys, reward=TRL_CHAT).problems
    assert "sums.jsonl:1 messages: the last message is the assistant's" in problem
    assert "data.last_turn=answer" in problem
    report = check(rows, *keys, "data.last_turn=answer", reward=TRL_CHAT)
    assert report.is_ok and report.figures["score: gold answers score"] == 1


def test_answers_that_the_tokenizer_cannot_write(check):
    (problem,) = check([*ROWS, {"prompt": "1=", "answer": "one"}], BUILT_IN).problems
    assert problem.startswith("the tokenizer cannot write 1 of 9 gold answers, the first is sums.jsonl:9: character ")


def test_answers_that_it_spells_with_its_unknown_token(check, tmp_path):
    hf = character_tokenizer("0123456789+= ")
    vocabulary = hf.get_vocab()
    vocabulary["<unk>"] = len(vocabulary)
    backend = json.loads(hf.backend_tokenizer.to_str())
    backend["model"] |= {"vocab": vocabulary, "unk_token": "<unk>"}
    hf.save_pretrained(tmp_path / "words")
    (tmp_path / "words" / "tokenizer.json").write_text(json.dumps(backend))
    settings = json.loads((tmp_path / "words" / "tokenizer_config.json").read_text())
    (tmp_path / "words" / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": "<unk>"}))
    rows = [*ROWS, {"prompt": "1=", "answer": "one"}]
    (problem,) = check(rows, BUILT_IN, "model.characters=null", "model.tokenizer=words").problems
    assert "cannot write 1 of 9 gold answers, the first is sums.jsonl:9: the tokenizer spells it with <unk>" in problem


def test_rows_of_one_id_are_named_once(check):
    rows = [*ROWS, ROWS[2] | {"prompt": "9+9="}]
    (problem,) = check(rows, "data.id_column=key").problems
    assert "sums.jsonl:9 key: '1,0' is also the id of sums.jsonl:3; ids must be unique" in problem


def test_a_bad_row_is_a_problem_once(check):
    """It is read for training and for evaluation, and its answer is asked for by the rewards."""
    (problem,) = check([*ROWS, {"prompt": "1="}], "data.eval=sums.jsonl", "stages=[sft, rl]").problems
    assert problem.startswith("sums.jsonl:9 answer: no such column")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.prompts_per_step=9", "train.prompts_per_step: 9 prompts per step, but there are only 8"),
        ("run.steps=0", "run.steps: 0 updates, so stage rl would learn nothing. Nearest: 1"),
    ],
)
def test_nothing_could_be_learnt(check, override, said):
    (problem,) = check(ROWS, override, BUILT_IN).problems
    assert said in problem


def test_the_same_prompt_twice_in_a_step_is_a_warning(check):
    report = check([*ROWS[:2], *ROWS[:2], *ROWS[4:]], "data.order=source", BUILT_IN)
    (warning,) = report.warnings
    assert "1 of the 2 steps of the first epoch hold the same prompt" in warning
    assert "step 1: sums.jsonl:1 and sums.jsonl:3" in warning
    assert report.is_ok
    assert not check([*ROWS, *ROWS], "data.order=source", BUILT_IN).warnings  # twice, in two steps


def test_the_mixture_of_several_sources_is_shown(check, tmp_path):
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row | {"key": "few"}) + "\n" for row in ROWS[:2]))
    sources = "data.train=[sums.jsonl, few.jsonl, few.jsonl]"
    weights = [f"data.train.{number}.weight={weight}" for number, weight in enumerate((3, 1, 0))]
    report = check(ROWS, sources, *weights, "run.steps=8", BUILT_IN)
    assert report.lines[report.lines.index("train: sums.jsonl, few.jsonl, few.jsonl: 12 of 12 rows") + 1 :][:3] == [
        "  sums.jsonl: 8 rows, 75.0% of the prompts, 3 epochs in 8 steps",
        "  few.jsonl: 2 rows, 25.0% of the prompts, 4 epochs in 8 steps",
        "  few.jsonl: 2 rows, not used (weight 0)",
    ]
    report = check(ROWS, "data.train=[sums.jsonl, few.jsonl]", "run.epochs=2", BUILT_IN)
    assert "  few.jsonl: 2 rows, 20.0% of the prompts, 2 epochs in 5 steps" in report.lines


@pytest.mark.parametrize("reward", [BUILT_IN, "run.steps=3"])
def test_of_many_rows_a_sample_is_checked_and_it_says_so(check, reward):
    report = check([*ROWS, *ROWS, *ROWS[:4]], reward, sample=SampleSize(6, of_each=1), most_tried=4)
    assert report.is_ok and report.not_checked == ["train: 14 rows outside of the sample"]
    assert "train: sums.jsonl: 6 of 6 rows, a sample of the 20 there are" in report.lines
    assert "rewards: tried on 4 of 20 rows" in report.lines
    assert (report.figures["train rows"], report.figures["gold answers"]) == (20, 4)


@pytest.mark.parametrize(("lr", "said"), [("0.5", "would overwrite the weights"), ("1e-12", "would not move")])
def test_an_absurd_learning_rate_is_a_warning(check, lr, said):
    (warning,) = check(ROWS, f"train.optimizer.lr={lr}", BUILT_IN).warnings
    assert "train.optimizer.lr: " in warning and said in warning


def test_a_gpu_that_is_not_there(check, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (problem,) = check(ROWS, "run.device=cuda", BUILT_IN).problems
    assert "run.device: cuda, but torch sees no GPU" in problem


def test_a_port_that_is_taken(check):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        services = f"services={{files: {{command: [sleep, '60'], port: {port}}}}}"
        (problem,) = check(ROWS, services, BUILT_IN).problems
    assert f"services.files.port: {port} is taken by process" in problem
    assert check(ROWS, services, BUILT_IN).is_ok
