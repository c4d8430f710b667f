"""Commands of five common practices import into the run files beside them; `hone plan` says what cannot work."""

import json
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.dialects.reading import read_foreign
from hone.dialects.translate import translate
from hone.dialects.writing import run_file_of

FOLDER = Path(__file__).parent / "practices"
FILES = sorted(path for path in FOLDER.iterdir() if not path.name.endswith(".run.yaml"))


def imported(name: str):
    return translate(read_foreign((FOLDER / name).read_text("utf-8"), name))


def test_all_five_are_here():
    assert {path.name[0] for path in FILES} == set("abcde")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_practice_gives_its_run_file(path):
    assert run_file_of(imported(path.name)) == path.with_suffix(".run.yaml").read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "gaps"),
    [
        ("a.sh", []),
        ("b.sh", []),
        ("c-colocated.sh", []),
        ("c-split.sh", []),
        ("d.yaml", ["megatron_training.data_path"]),
        ("e.sh", ["source", "matrix_lr"]),
    ],
)
def test_what_a_practice_lacks_is_named(name, gaps):
    assert [line.key for line in imported(name).gaps] == gaps


def planned(tmp_path: Path, capsys, name: str, *words: str) -> tuple[int, str]:
    """Exit code and output of `hone plan` on the run file of a practice, with a stub for its data."""
    row = {
        "prompt": "a",
        "context_messages": "a",
        "question": "a",
        "answer": "b",
        "reward_model": {"ground_truth": "b"},
    }
    (tmp_path / "stub.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "grm.py").write_text("def construct_inputs(question, response): ...\ndef convert_output(text): ...\n")
    (tmp_path / "run.yaml").write_text((FOLDER / f"{name}.run.yaml").read_text("utf-8"))
    code = main(["plan", str(tmp_path / "run.yaml"), "data.train=stub.jsonl", "--json", *words])
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


def test_a_the_lengths_of_the_judge_overflow(tmp_path, capsys):
    code, said = planned(tmp_path, capsys, "a")
    assert code == 2 and "16024 + response_length 1500 + 32 for the chat template = 17556 tokens >" in said


def test_a_0_3_of_the_memory_is_impossible(tmp_path, capsys):
    longer = ["services.judge.engine.max_model_len=17556", "reward.components.0.args.max_model_len=17556"]
    code, said = planned(tmp_path, capsys, "a", *longer, "--hardware", "A100-80G")
    assert code == 4
    assert "gpu_memory_utilization = 0.3 of 79.1 GiB is 23.7 GiB: weights (29.3 GiB) and workspace do not fit" in said
    assert "At least 0.46 is needed, or a larger services.judge.engine.tensor_parallel_size" in said


def test_b_the_server_of_the_script_is_a_service_on_its_own_device():
    settings = {key: value for key, (value, _) in imported("b.sh").settings().items()}
    assert settings["services.reward_server.command"] == ["python", "reward_server.py", "--port", "{port}"]
    assert (settings["services.reward_server.port"], settings["services.reward_server.devices"]) == (8899, [7])
    assert settings["cluster.pools"] == {"all": {"devices": 7, "roles": ["policy", "rollout"]}}
    assert settings["cluster.devices_per_node"] == 8


def test_c_the_second_group_of_roles_is_said():
    (line,) = [line for line in imported("c-colocated.sh").keys if line.key == "colocate_critic_reward"]
    assert "asks for a second set of devices" in line.verdict.note


def test_c_the_48_gpus_are_64(tmp_path, capsys):
    code, said = planned(tmp_path, capsys, "c-split", "data.answer_column=answer", "--hardware", "48xA100-80G")
    assert code == 4 and "the pools of the run file have 64 devices, and 48 x A100-80G are planned for" in said


def test_d_an_unknown_verifier_is_refused_and_numbers_in_text_are_read():
    text = (FOLDER / "d.yaml").read_text("utf-8").replace('"strict_format"', '"strict_formal"')
    found = {line.key: line for line in translate(read_foreign(text, "d.yaml")).keys}
    assert found["rl_config.verifier_function"].verdict.kind == "refused"
    assert found["actor_config.lr"].verdict.settings == {"train.optimizer.lr": 1e-6}


def test_e_samples_that_do_not_divide_are_dropped_there_and_said_here():
    text = (FOLDER / "e.sh").read_text("utf-8").replace("device_batch_size=8", "device_batch_size=6")
    (line,) = [line for line in translate(read_foreign(text, "e.sh")).keys if line.key == "num_samples"]
    assert line.verdict.settings == {"rollout.group_size": 30} and "silently" in line.verdict.note
    other = text.replace("nproc_per_node=1", "nproc_per_node=5")
    found = {line.key: line.verdict for line in translate(read_foreign(other, "e.sh")).keys}
    assert found["examples_per_step"].kind == "refused"
