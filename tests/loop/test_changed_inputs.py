"""What a run learns from is part of what it is: a change is named when it is resumed, and needs a flag."""

import json
import shutil

import pytest
import torch
from picture_run import write_run as write_picture_run
from pictures import save_picture
from safetensors.torch import load_file, save_file
from tiny import write_run

from hone.assemble import inputs
from hone.assemble.inputs import changed_inputs, file_hash, input_hashes
from hone.cli.main import main
from hone.config.load import load_config
from hone.data.chat import character_tokenizer, load_tokenizer
from hone.model.load import init_model, save_hf
from hone.train.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of a model directory, a reward with a helper, a reward model and an environment."""
    folder = tmp_path_factory.mktemp("made")
    run_file = write_run(folder)
    config = load_config(run_file).config.model
    tokenizer = character_tokenizer(config.characters)
    model = init_model(
        config.init, vocab_size=len(tokenizer), seed=0, dtype=torch.float32, device="cpu", implementation="hone"
    )
    for name in ("base", "rm"):
        save_hf(folder / name, model.hf_config, model.named_weights(), tokenizer)
    (folder / "rewards.py").write_text(
        "import marks\n\ndef right(group):\n    return [marks.FULL] * len(group.samples)\n"
    )
    (folder / "marks.py").write_text("FULL = 1.0\n")
    (folder / "world.py").write_text("class World: ...\n")
    text = run_file.read_text()
    start, end = text.index("model:"), text.index("data:")
    text = text[:start] + "model: {path: base}\n" + text[end:]
    text = text.replace("[{use: exact}]", '[{use: "rewards.py:right", args: {path: rm}}]')
    text = text.replace("rollout: {", 'rollout: {environment: {use: "world.py:World"}, ')
    run_file.write_text(text.replace(f"dir: {folder}/run", "dir: run"))
    return folder


def hashes(folder):
    loaded = load_config(folder / "tiny.yaml")
    return input_hashes(loaded, load_tokenizer(loaded.config.model, folder))


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(path, name, place):
    tensors = load_file(path)
    tensors[name].view(-1)[place] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


def reorder(path):
    first, second, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([second, first, *others]))


CHANGES = {
    "rows in another order": ("data.eval, data.train", lambda f: reorder(f / "sums.jsonl")),
    "another label": (
        "data.eval, data.train",
        lambda f: (f / "sums.jsonl").write_text((f / "sums.jsonl").read_text().replace('"9"', '"8"', 1)),
    ),
    "another rope theta": ("model.path config.json", lambda f: edit_json(f / "base" / "config.json", rope_theta=5e5)),
    "other weights": (
        "model.path model.safetensors",
        lambda f: edit_weights(f / "base" / "model.safetensors", "model.norm.weight", 5),
    ),
    "another tokenizer": (
        "tokenizer",
        lambda f: (f / "base" / "tokenizer.json").write_text(
            (f / "base" / "tokenizer.json").read_text().replace('"1"', '"one"')
        ),
    ),
    "another stop token": (
        "tokenizer", lambda f: (f / "base" / "generation_config.json").write_text('{"eos_token_id": 5}')),
    "another reward": ("code rewards.py", 
        lambda f: (f / "rewards.py").write_text("import marks\n\ndef right(group): ...\n")),
    "what a reward imports": ("code marks.py", lambda f: (f / "marks.py").write_text("FULL = 2.0\n")),
    "another environment": ("code world.py", lambda f: (f / "world.py").write_text("class World: x = 1\n")),
    "another reward model": (
        "args rm/model.safetensors",
        lambda f: edit_weights(f / "rm" / "model.safetensors", "model.norm.weight", 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_every_input_is_seen_to_change_and_named(made, tmp_path, what):
    copy = shutil.copytree(made, tmp_path / "elsewhere")
    before = hashes(made)
    assert hashes(copy) == before, "where it lies is no matter"
    names, change = CHANGES[what]
    change(copy)
    changed = [line.partition(":")[0] for line in changed_inputs(before, hashes(copy))]
    assert changed == names.split(", ")


@pytest.mark.parametrize("number", [0, 1])
def test_each_of_two_rewards_of_one_name_elsewhere_is_seen_to_change(made, tmp_path, number):
    copy = shutil.copytree(made, tmp_path / "copy")
    rewards = [tmp_path / name / "rewards.py" for name in ("one", "two")]
    for path in rewards:
        path.parent.mkdir()
        path.write_text("def right(group): ...\n")
    uses = ", ".join(f'{{use: "{path}:right", name: {path.parent.name}}}' for path in rewards)
    run_file = copy / "tiny.yaml"
    run_file.write_text(run_file.read_text().replace('[{use: "rewards.py:right", args: {path: rm}}]', f"[{uses}]"))
    before = hashes(copy)
    rewards[number].write_text("def right(group): pass\n")
    assert [line.partition(":")[0] for line in changed_inputs(before, hashes(copy))] == ["code rewards.py"]


def test_a_judge_of_a_service_is_seen_to_change(made, tmp_path):
    copy = shutil.copytree(made, tmp_path / "copy")
    shutil.copytree(made / "base", copy / "judge")
    with (copy / "tiny.yaml").open("a") as run_file:
        run_file.write("services: {judge: {policy: judge}}\n")
    before = hashes(copy)
    edit_weights(copy / "judge" / "model.safetensors", "model.norm.weight", 0)
    changed = [line.partition(":")[0] for line in changed_inputs(before, hashes(copy))]
    assert changed == ["services.judge.policy model.safetensors"]


def test_another_hone_is_named(made, monkeypatch):
    before = hashes(made)
    monkeypatch.setattr(inputs.hone, "__version__", "9.9")
    assert changed_inputs(before, hashes(made)) == [f"hone: {before['hone']} -> 9.9"]


@pytest.mark.parametrize(("place", "is_seen"), [(0, True), (-1, True), (40_000, True), (10_000, False)])
def test_a_large_file_of_weights_is_sampled_in_every_tensor(tmp_path, place, is_seen):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(80_000), "b": torch.zeros(3)}, path, metadata={"format": "pt"})
    before = file_hash(path, full_bytes=0)
    edit_weights(path, "a", place)
    assert (file_hash(path, full_bytes=0) != before) == is_seen
    edit_weights(path, "b", 1)
    assert file_hash(path, full_bytes=0) != before


@pytest.mark.slow("several runs")
def test_a_change_is_refused_and_accepted_with_a_flag(tmp_path, capsys):
    run_file = str(write_run(tmp_path, steps=2))
    assert main(["train", run_file]) == 0
    reorder(tmp_path / "sums.jsonl")
    capsys.readouterr()
    assert main(["train", run_file, "--resume", "run.steps=3"]) == 2
    said = capsys.readouterr().err
    assert "differ from those that step-000002 was trained with" in said and "--accept-changed-inputs" in said
    old = Checkpoints(tmp_path / "run" / "checkpoints", 2).newest().run["inputs"]["data.train"][:12]
    assert f"  data.train: {old} -> " in said
    assert main(["train", run_file, "--resume", "run.steps=3", "--accept-changed-inputs"]) == 0
    log = (tmp_path / "run" / "logs" / "training.log").read_text()
    assert f"continues with another input than before: data.train: {old} -> " in log
    assert main(["train", run_file, "--resume", "run.steps=4"]) == 0, "the new one is now the run's"


def test_a_replaced_picture_is_a_changed_input(tmp_path):
    run_file = write_picture_run(tmp_path)
    loaded = load_config(run_file)
    tokenizer = load_tokenizer(loaded.config.model, tmp_path)
    before = input_hashes(loaded, tokenizer)
    save_picture(tmp_path / "4.png", 5, 40, 60)
    assert [line.split(":")[0] for line in changed_inputs(before, input_hashes(loaded, tokenizer))] == [
        "data.eval pictures",
        "data.train pictures",
    ]
    message = {"role": "user", "content": [{"type": "image", "image": "4.png"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [message], "images": []}) + "\n")
    before = input_hashes(loaded, tokenizer)
    save_picture(tmp_path / "4.png", 6, 40, 60)
    assert "data.train pictures" in changed_inputs(before, input_hashes(loaded, tokenizer))[1]
