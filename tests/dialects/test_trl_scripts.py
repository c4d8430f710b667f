"""Scripts of TRL: model, data and rewards of the trainer's call are read as syntax; what is code is named."""

import textwrap

import pytest

from hone.cli.main import main
from hone.dialects.reading import read_foreign
from hone.dialects.translate import translate

HEAD = """
import re
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
"""
CALL = "trainer = GRPOTrainer(model='a/b', reward_funcs=reward, args=GRPOConfig(num_generations=8), train_dataset=data)"


def imported(text, given=None, name="job.sh"):
    """A script, or a command that starts it."""
    script = HEAD + textwrap.dedent(text)
    one = read_foreign(script, "job.py") if given is None else read_foreign(given, name, None, lambda path: script)
    return translate(one)


def settings(one):
    return {key: value for key, (value, _) in one.settings().items()}


def of_data(code):
    one = imported(f"def reward(completions, **kwargs): ...\n{textwrap.dedent(code)}\n{CALL}")
    data = {key.removeprefix("data."): value for key, value in settings(one).items() if key.startswith("data.")}
    return data, [line.verdict.note for line in one.gaps]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("data = load_dataset('o/d', 'main')['test']", {"train": "o/d:main", "train_split": "test"}),
        ("data = load_dataset(path='o/d', split='train[:50]')", {"train": "o/d", "train_rows": "0:50"}),
        ("data = load_dataset('o/d', split='train').shuffle(seed=1).select(range(10, 90))", {"train_rows": "10:90"}),
        ("data, other = load_dataset('o/d', split=['first', 'second'])", {"train_split": "first"}),
        (
            "data = load_dataset('json', data_files={'train': ['a.jsonl', 'b.csv']})['train']",
            {"train": ["a.jsonl", "b.csv"]},
        ),
        (
            "data = Dataset.from_json('a.jsonl').rename_column('question', 'prompt')",
            {"train": "a.jsonl", "prompt_column": "question"},
        ),
        (
            """
            SYSTEM = "Think. " + "Then answer."
            def rows(split, name="o/d"):
                data = load_dataset(name)[split]
                return data.map(lambda row: {"prompt": [{"role": "system", "content": SYSTEM},
                                                        {"role": "user", "content": row["question"]}],
                                             "answer": row["gold"]})
            data = rows("train")
            """,
            {
                "train": "o/d",
                "train_split": "train",
                "prompt_column": "question",
                "system": "Think. Then answer.",
                "answer_column": "gold",
                "chat": True,
            },
        ),
        (
            """
            def asked(row):
                question = row.get("question")
                row["prompt"] = f"Q: {question}\\nA:"
                return row
            data = load_dataset("o/d", split="train")
            data = data.map(asked, num_proc=4).remove_columns("question")
            """,
            {"train": "o/d", "template": "Q: {question}\nA:", "chat": False},
        ),
    ],
)
def test_rows_that_have_a_counterpart(code, expected):
    data, gaps = of_data(code)
    assert {key: data.get(key) for key in expected} == expected and gaps == []


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("data = load_dataset('o/d').filter(lambda row: row['x'])", "filter(lambda row: row['x'])"),
        ("data = load_dataset('o/d').map(lambda r: {'answer': last(r['answer'])})", "answer = last(r['answer'])"),
        ("data = load_dataset('o/d').map(lambda r: {'gold': r['answer']})", "gold = r['answer']"),
        ("data = load_dataset('o/d').train_test_split(test_size=0.1)['train']", "train_test_split(test_size=0.1)"),
        ("data = Dataset.from_list([{'prompt': 'a'}])", "Dataset.from_list([{'prompt': 'a'}])"),
    ],
)
def test_rows_that_are_made_in_code_are_named(code, named):
    _, gaps = of_data(code)
    assert len(gaps) == 1 and gaps[0].endswith(named)


MODEL = """
def reward(completions, **kwargs): ...
data = load_dataset("o/d", split="train")
model, tokenizer = Loader.from_pretrained(model_name="a/b", load_in_4bit=True)
model = Loader.get_peft_model(model, r=4 * 2, lora_alpha=16, random_state=1)
config = GRPOConfig(**{"beta": 0.1}, num_generations=8)
config.temperature = 0.7
trainer = GRPOTrainer(model, reward, config, data)
"""


def test_a_model_with_an_adapter_and_arguments_by_place():
    one = imported(MODEL)
    found = settings(one)
    assert (found["model.path"], found["lora.rank"], found["lora.alpha"]) == ("a/b", 8, 16)
    assert (found["algorithm.kl_loss_coef"], found["rollout.temperature"]) == (0.1, 0.7)
    assert [line.key for line in one.gaps] == ["load_in_4bit"], "quantised training is refused, not passed over"


PARSED = """
from trl import ModelConfig, TrlParser
if __name__ == "__main__":
    parser = TrlParser((GRPOConfig, ModelConfig))
    parser.add_argument("--rows", default="o/d")
    args, model_args = parser.parse_args_and_config()
    args.model_init_kwargs = dict(revision=model_args.model_revision)
    PATTERN = re.compile("[0-9]+")

    def found(text):
        return PATTERN.findall(text)

    def reward(completions, **kwargs):
        return [len(found(text)) for text in completions]

    trainer = GRPOTrainer(model_args.model_name_or_path, [reward], args, load_dataset(args.rows, split="train"))
"""


def test_a_command_is_read_with_the_script_that_it_starts():
    command = "accelerate launch --num_processes 2 job.py --rows c/d --model_name_or_path a/b --num_generations 16"
    one = imported(PARSED, command)
    found = settings(one)
    assert (found["model.path"], found["data.train"], found["rollout.group_size"]) == ("a/b", "c/d", 16)
    assert found["reward.components"] == [{"use": "job_rewards.py:reward"}]
    assert one.gaps == () and one.foreign.files.keys() == {"job_rewards.py"}
    alone = imported(PARSED)
    assert {"GRPOConfig", "model_name_or_path"} <= {line.key for line in alone.gaps}, "they are in the command"
    others = imported(PARSED, "python job.py --rows e/f")
    assert settings(others)["data.train"] == "e/f", "found by its script, as no argument is TRL's"


def test_rewards_are_copied_with_what_they_use(tmp_path):
    (tmp_path / "job.py").write_text(HEAD + PARSED)
    (tmp_path / "job.sh").write_text("python job.py --model_name_or_path a/b --num_generations 8\n")
    assert main(["import", str(tmp_path / "job.sh"), "--to", str(tmp_path / "run.yaml")]) == 0
    names: dict = {}
    exec((tmp_path / "job_rewards.py").read_text(), names)
    assert names["reward"](["1 and 22", "none"]) == [2, 0]
    assert "trl" not in (tmp_path / "job_rewards.py").read_text().split('"""')[2], "it imports nothing that trains"
    (tmp_path / "run.yaml").unlink()
    assert main(["import", str(tmp_path / "job.sh"), "--to", str(tmp_path / "run.yaml")]) == 2, "it is not overwritten"


@pytest.mark.parametrize(
    "line",
    [f"KEY = 'hf_{'a1' * 17}'", "KEY = parser.parse_args().key", "KEY = 1\nKEY = 2"],
    ids=["secret", "call", "twice"],
)
def test_rewards_with_secrets_or_arguments_are_not_copied(line):
    code = f"{line}\ndef reward(completions, **kwargs):\n    return [KEY]\ndata = load_dataset('o/d')\n{CALL}"
    one = imported(code)
    assert not one.foreign.files and settings(one)["reward.components"] == [{"use": "job.py:reward"}]


ENVIRONMENT = """
def reward(completions, **kwargs): ...
n = int(os.getenv("N", "8"))
config = GRPOConfig(num_generations=n, learning_rate=float(os.environ.get("LR", "2e-5")), bf16=is_bfloat16_supported(),
    fp16=not torch.cuda.is_bf16_supported(), generation_kwargs={"stop": ["</answer>"]}, per_device_train_batch_size=n)
data = load_dataset("json", data_files="a.jsonl")["train"]
GRPOTrainer(model="a/b", args=config, train_dataset=data, reward_funcs=reward)
"""


def test_defaults_of_the_environment_and_of_the_device_are_known():
    one = imported(ENVIRONMENT)
    assert not one.gaps
    ours = settings(one)
    assert (ours["rollout.group_size"], ours["train.optimizer.lr"], ours["run.precision"]) == (8, 2e-5, "bfloat16")
    assert ours["rollout.stop"] == ["</answer>"]
    cut = imported(ENVIRONMENT.replace('"stop": ["</answer>"]', '"repetition_penalty": 1.1'))
    assert [line.key for line in cut.gaps] == ["generation_kwargs"]
