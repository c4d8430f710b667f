import gzip
import json

import pytest

from hone.config.rewards import BUILTIN_REWARDS, registered_rewards


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__train": "trian.jsonl"}, "data.train: 'trian.jsonl' does not exist"),
        ({"data__train": "trian.jsonl"}, "Did you mean train.jsonl?"),
        ({"data__train": "train.txt"}, "data.train: must end in .jsonl, .jsonl.gz, .json"),
        ({"data__train": "tr*n-*.jsonl"}, "data.train: no file matches 'tr*n-*.jsonl'"),
        ({"data__eval": "nope.parquet"}, "data.eval: 'nope.parquet' does not exist"),
        ({"data__answer_column": "anwser"}, "train.jsonl has no column 'anwser'. Did you mean answer?"),
        ({"data__id_column": "uid"}, "data.id_column: train.jsonl has no column 'uid'. It has: answer, prompt"),
        ({"data__prompt_column": "question"}, "data.prompt_column: train.jsonl has no column 'question'"),
        ({"data__eval": "train.jsonl", "eval__by": "sen"}, "eval.by: train.jsonl has no column 'sen'"),
        ({"data__template": "'{question}'"}, "data.template: train.jsonl has no column 'question'"),
        ({"stages": "[sft, rl]", "sft__response_column": "solution"}, "sft.response_column: train.jsonl has no column"),
        ({"stages": "[sft]", "sft__data": "warm.jsonl"}, "sft.data: 'warm.jsonl' does not exist"),
    ],
)
def test_data_files_and_their_columns(problems_of, changes, said):
    assert any(said in problem for problem in problems_of(**changes))


def test_a_column_that_nothing_reads_is_not_asked_for(problems_of):
    assert problems_of(data__template="'{answer}'", data__prompt_column="question") == []


def test_a_name_of_the_hub_is_believed(problems_of):
    assert problems_of(data__train="openai/gsm8k") == []


def save_to_disk(row, place):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict(train=datasets.Dataset.from_list([row])).save_to_disk(place)


def test_every_kind_of_file_is_looked_into(folder, problems_of):
    import pyarrow
    import pyarrow.parquet

    row = {"prompt": "1", "answer": "1", "reward_model": {"ground_truth": "1", "style": {"name": "rule"}}}
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"\n" + json.dumps(row).encode() + b"\n"))
    (folder / "a.json").write_text(json.dumps([row, row], indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "a.parquet")
    (folder / "a.csv").write_text("prompt,answer,reward_model.ground_truth\n1,1,1\n")
    (folder / "parts").mkdir()
    (folder / "parts" / "train-1.jsonl").write_text(json.dumps(row) + "\n")
    save_to_disk(row, folder / "saved")
    for name in ("a.jsonl.gz", "a.json", "a.parquet", "a.csv", "parts/train-*.jsonl", "saved"):
        assert problems_of(data__train=name) == []
        assert "has no column 'x'" in problems_of(data__train=name, data__id_column="x")[0]
        assert problems_of(data__train=name, data__answer_column="reward_model.ground_truth") == []
        (problem,) = problems_of(data__train=name, data__answer_column="reward_model.ground_truht")
        assert "Did you mean reward_model.ground_truth? It has: answer, prompt, " in problem


@pytest.mark.parametrize("source", ["math", "math.idx", "math_packed_input_ids_document"])
def test_data_of_megatron_is_refused(folder, problems_of, source):
    for ending in ("bin", "idx"):
        (folder / f"math_packed_input_ids_document.{ending}").write_bytes(b"x")
    (folder / "math.idx").write_bytes(b"x")
    (folder / "math.bin").write_bytes(b"x")
    problem = problems_of(data__train=source)[0]
    assert "is Megatron's preprocessed data" in problem and "Name the JSONL or Parquet file" in problem


def test_a_megatron_checkpoint_is_refused(folder, problems_of):
    (folder / "ckpt").mkdir()
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("100")
    assert "is a Megatron checkpoint: name the Hugging Face directory" in problems_of(model__path="ckpt", **LOCAL)[0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.jsonl", b"\n \n"),
        ("torn.jsonl.gz", b"\x1f\x8b\x08"),
        ("damaged.jsonl.gz", gzip.compress(b"")[:10] + b"\xff" * 100),
        ("text.parquet", b"no"),
        ("wide.csv", b'prompt,"' + b"x" * 200_000 + b'"\n'),
    ],
)
def test_a_file_that_cannot_be_read(folder, problems_of, name, content):
    (folder / name).write_bytes(content)
    assert f"data.train: {name} cannot be read" in problems_of(data__train=name)[0]


def test_a_malformed_first_row_is_left_to_the_reader(folder, problems_of):
    (folder / "bad.jsonl").write_bytes(b'{"prompt": \n{"prompt": "1"}\n')
    assert problems_of(data__train="bad.jsonl") == []


REWARD = "import json as js\nraise SystemExit\n\nclass A: ...\nB = lambda g: [1.0]\nif True:\n    def c(g): ...\n"


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("exakt", "no reward is called 'exakt'. Did you mean exact?"),
        (
            "nothing_like_it",
            f"Built in or installed: {', '.join([*BUILTIN_REWARDS, *registered_rewards()])}. Your own: package.module:",
        ),
        ("mine.py:d", "mine.py defines no 'd'"),
        ("mine.py:1", "must end in the name of a function after the colon"),
        ("yours.py:c", "yours.py does not exist"),
        ("broken.py:c", "broken.py is not valid Python: "),
        ("no_such_package.rewards:c", "there is no module 'no_such_package.rewards' to import here"),
        ("hone.no_such_module:c", "there is no module 'hone.no_such_module'"),
        ("hone.errors:no_such", "hone.errors defines no 'no_such'"),
        ("a-b:c", "must be package.module:function or file.py:function (got a-b:c)"),
    ],
)
def test_rewards_that_cannot_be_had(folder, problems_of, use, said):
    (folder / "mine.py").write_text(REWARD)
    (folder / "broken.py").write_text("def c(:\n")
    (problem,) = problems_of(reward__components=f"[{{use: '{use}'}}]")
    assert problem.startswith("reward.components.0.use: ")
    assert said in problem


@pytest.mark.parametrize(
    "use", ["exact", "mine.py:A", "mine.py:B", "mine.py:c", "mine.py:js", "hone.errors:HoneError", "math:sqrt"]
)
def test_rewards_are_found_without_being_run(folder, problems_of, use):
    (folder / "mine.py").write_text(REWARD)
    assert problems_of(reward__components=f"[{{use: '{use}'}}]") == []


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ("reward: reward.yaml", "services.judge.reward: 'reward.yaml' does not exist, looked for at"),
        ("reward: reward.yaml", "Did you mean rewards.yaml?"),
        ("policy: ./nowhere", "services.judge.policy: './nowhere' does not exist"),
        ("policy: a b", "services.judge.policy: 'a b' is neither a directory nor a hub name"),
        ("command: [no-such-program, '{port}']", "services.judge.command: there is no program 'no-such-program'"),
        ("command: [./serve.sh, '{port}']", "services.judge.command: there is no program './serve.sh'"),
    ],
)
def test_services_that_cannot_be_started(folder, problems_of, service, said):
    (folder / "rewards.yaml").write_text("reward: {}\n")
    (problem,) = problems_of(services=f"{{judge: {{{service}}}}}")
    assert said in problem


@pytest.mark.parametrize(
    "service",
    ["reward: rewards.yaml", "policy: Qwen/Qwen3-0.6B", "command: [python, '{port}']", "command: [./a.sh, '{port}']"],
)
def test_services_that_can_be_started(folder, problems_of, service):
    (folder / "rewards.yaml").write_text("reward: {}\n")
    (folder / "a.sh").write_text("#!/bin/sh\n")
    (folder / "a.sh").chmod(0o755)
    assert problems_of(services=f"{{judge: {{{service}}}}}") == []


LOCAL = {"model__init": None, "model__characters": None}


def test_a_local_model_lends_its_context(folder, problems_of):
    (folder / "model").mkdir()
    assert "is a directory without config.json" in problems_of(model__path="model", **LOCAL)[0]
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 1000}))
    assert "exceeds the model's context (max_position_embeddings), 1000" in problems_of(model__path="model", **LOCAL)[0]
    (folder / "model" / "config.json").write_text("not json")
    assert problems_of(model__path="model", **LOCAL) == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("./nope", "'./nope' does not exist, looked for at"),
        ("/nope/model", "does not exist"),
        ("a b", "is neither a directory nor a hub name"),
        ("''", "must not be empty"),
    ],
)
def test_a_model_path_that_leads_nowhere(problems_of, path, said):
    assert said in problems_of(model__path=path, **LOCAL)[0]


def test_a_hub_name_is_believed(problems_of):
    assert problems_of(model__path="Qwen/Qwen3-0.6B", **LOCAL) == []


@pytest.mark.parametrize("key", ["data__train", "model__path", "run__dir", "extends"])
def test_a_name_that_is_too_long_for_a_file_is_a_problem(problems_of, key):
    assert any("aaa" in problem for problem in problems_of(**{key: f"{'a' * 300}/{'a' * 300}/data.jsonl"}))
