"""`hone.train` and `hone.check`: the same runs from Python, in a script and where an event loop is running already."""

import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import hone
from hone.cli.main import main
from hone.errors import ConfigError, Stopped
from hone.run.folder import RunFolder

sys.path.append(str(Path(__file__).parents[1] / "loop"))
from tiny import write_run

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(10)]


def config(folder, **sections):
    """The content of a tiny run file: reinforcement learning from a random model."""
    init = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    init |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 32}
    return {
        "extends": "algorithm/grpo",
        "run": {"dir": folder / "run", "steps": 2, "threads": 1, "device": "cpu"},
        "model": {"characters": "0123456789+=", "init": init},
        "data": {"max_prompt_tokens": 8},
        "rollout": {"group_size": 4, "max_response_tokens": 4},
        "train": {"prompts_per_step": 4, "optimizer": {"lr": 1e-3}},
        "observe": {"console": "quiet", "tensorboard": False, "trace": False},
    } | sections


def unique_characters(seen):
    """The reward of TRL's first page, which also says in which processes it was called."""

    def num_unique_chars(completions, **kwargs):
        seen.add(os.getpid())
        return [len(set(completion)) for completion in completions]

    return num_unique_chars


def weights(run):
    return (run.model_path / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run from a script, the processes of its reward, and what its callback got."""
    folder, seen, lines = tmp_path_factory.mktemp("api"), set(), []
    run = hone.train(config(folder), rewards=[unique_characters(seen)], train=ROWS, callbacks=[lines.append])
    return run, seen, lines


def test_a_script_trains_on_its_own_rows_and_function(trained):
    run, seen, lines = trained
    assert seen == {os.getpid()}, "called here"
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line.keys() <= written.keys() for line, written in zip(lines, run.metrics, strict=True))
    assert 1 <= lines[-1]["reward/num_unique_chars_mean"] <= 4
    assert run.report.read_text().startswith("<!")
    assert AutoModelForCausalLM.from_pretrained(run.model_path).num_parameters() > 1000


def test_a_notebook_gets_the_same_run_and_keeps_its_loop_and_settings(trained, tmp_path):
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), signal.getsignal(signal.SIGINT)

    async def cell():
        there = hone.check(config(tmp_path), rewards=[unique_characters(set())], train=ROWS)
        run = hone.train(config(tmp_path), rewards=[unique_characters(set())], train=ROWS)
        assert asyncio.get_running_loop().is_running()
        return there, run

    checked, run = asyncio.run(cell())
    assert checked.is_ok, checked.problems
    assert weights(run) == weights(trained[0])
    assert before == (torch.get_num_threads(), torch.get_float32_matmul_precision(), signal.getsignal(signal.SIGINT))


def test_an_interrupted_notebook_leaves_a_checkpoint_and_continues(tmp_path):
    def interrupt(line):
        if "train/loss" in line:
            os.kill(os.getpid(), signal.SIGINT)

    async def cell():
        long = config(tmp_path)
        long["run"]["steps"] = 100_000
        hone.train(long, rewards=[unique_characters(set())], train=ROWS, callbacks=[interrupt])

    loop = asyncio.new_event_loop()  # as Jupyter has it: SIGINT raises KeyboardInterrupt
    with pytest.raises(Stopped, match="hone train --resume"):
        loop.run_until_complete(cell())
    loop.close()
    made = RunFolder.read(tmp_path / "run").last_metrics(1)[0]["step"]
    rest = config(tmp_path)
    rest["run"]["steps"] = made + 2
    run = hone.train(rest, rewards=[unique_characters(set())], train=ROWS, resume=True)
    assert run.metrics[-1]["step"] == made + 2


def test_a_run_is_resumed_by_its_folder_and_the_command_line_says_whose_function_it_lacks(trained, capsys):
    run, *_ = trained
    assert main(["train", "--resume", str(run.path)]) == 2
    assert "'num_unique_chars' is a function of the Python program that started this run" in capsys.readouterr().err
    before = weights(run)
    assert hone.train(run.path, rewards=[unique_characters(set())], resume=True) == run and weights(run) == before


def test_a_function_that_can_be_imported_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    code = "import os\ndef elsewhere(group):\n    return [float(os.getpid() != {pid}) for _ in group.samples]\n"
    (tmp_path / "rewards_of_mine.py").write_text(code.format(pid=os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    from rewards_of_mine import elsewhere

    run_file = write_run(tmp_path, steps=1)
    hone_run = hone.train(
        run_file, rewards=[elsewhere, lambda group: [None, 0.5, 0.5, 0.5]], train=ROWS[:40], eval=ROWS[:8]
    )
    line = hone_run.metrics[-1]
    first, second = RunFolder.read(hone_run.path).identity()["reward"]["components"]
    assert (first["use"], second["use"]) == ("rewards_of_mine:elsewhere", "given")
    assert any(line.get("reward/elsewhere_mean") == 1 for line in hone_run.metrics), line
    files = sorted(path.name.rpartition("-")[0] for path in tmp_path.glob("run.*.jsonl"))
    assert files == ["run.eval", "run.train"], "rows are kept beside the run's folder"


def test_every_problem_of_a_dictionary_is_reported(tmp_path):
    wrong = config(tmp_path, rollout={"grop_size": 4}, seed=-1)
    report = hone.check(wrong, rewards=[unique_characters(set())], train=ROWS)
    assert not report.is_ok and any("config  seed: must be at least 0" in problem for problem in report.problems)
    assert any("config  rollout.grop_size" in problem and "group_size" in problem for problem in report.problems)
    with pytest.raises(ConfigError):
        hone.train(wrong, rewards=[unique_characters(set())], train=ROWS)
    assert not (tmp_path / "run").exists()


def half(group):
    return [0.5] * len(group.samples)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"sections": {"seed": half}}, "config  seed: must be what a run file can hold: .* (got function)"),
        ({"sections": {"run": {"steps": 10**5000}}}, "config  run.steps: an integer must be from -2^63 to 2^63 - 1"),
        ({"sections": {"data": [1]}}, "config  data: must be a mapping from keys to values (got list)"),
        ({"sections": {"reward": "exact"}}, "config  reward: must be a mapping from keys to values (got str)"),
        ({"rewards": ["exact"]}, "rewards.0: must be a function (got 'exact'). Rewards that have a name"),
        ({"train": {"train": ROWS}}, "train: must be rows, .* (got dict). Of several splits take one"),
        ({"train": [ROWS[0], "2+2="]}, "train row 2: must be a mapping from column to value (got str)"),
        ({"train": [ROWS[0], {"prompt": half}]}, "train row 2: must hold plain JSON values: Object of type function"),
        ({"train": [{"prompt": "\ud800"}]}, "jsonl:1 prompt: character '\\ud800'"),
    ],
)
def test_objects_that_do_not_fit_are_named(tmp_path, given, problem):
    settings = config(tmp_path, **given.pop("sections", {}))
    report = hone.check(settings, **{"rewards": half, "train": ROWS} | given)
    pattern = ".*".join(map(re.escape, problem.split(".*")))
    assert any(re.search(pattern, said) for said in report.problems), report.problems


def test_one_function_several_of_one_name_and_numpy_s_numbers_fit(tmp_path, monkeypatch):
    (tmp_path / "light_reward.py").write_text("def half(group):\n    return [0.5] * len(group.samples)\n")
    monkeypatch.syspath_prepend(tmp_path)
    half = importlib.import_module("light_reward").half

    def other():
        def half(completions, **kwargs):
            return [1.0] * len(completions)

        return half

    settings = config(tmp_path, seed=np.int64(3), algorithm={"kl_loss_coef": np.float32(0.5)})
    assert hone.check(settings, rewards=other(), train=ROWS).is_ok
    settings["data"]["answer_column"] = "answer"
    report = hone.check(settings, rewards=[half, half, other(), other()], train=ROWS)
    given = {name: report.figures[f"{name}: gold answers score"] for name in ("half", "half_2", "half_3", "half_4")}
    assert given == {"half": 0.5, "half_2": 0.5, "half_3": 1.0, "half_4": 1.0}


def test_what_a_function_changes_in_its_row_no_other_one_sees(tmp_path):
    def changes(group):
        group.prompt.columns["answer"] = "else"
        group.prompt.columns["numbers"].clear()
        return [1.0] * len(group.samples)

    def compares(completions, answer, numbers, **kwargs):
        return [
            float(text == gold and len(own) == 2) for text, gold, own in zip(completions, answer, numbers, strict=True)
        ]

    settings = config(tmp_path, data={"max_prompt_tokens": 8, "answer_column": "answer"})
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1), "numbers": [a, 1]} for a in range(8)]
    report = hone.check(settings, rewards=[changes, compares], train=rows)
    assert report.figures["compares: gold answers score"] == 1.0


@pytest.mark.parametrize("callback", [None, "print", asyncio.sleep])
def test_what_cannot_be_a_callback_is_named_before_anything_starts(tmp_path, callback):
    with pytest.raises(ConfigError, match=r"^callbacks.1: must be a plain function \(got .*\)"):
        hone.train(config(tmp_path), rewards=half, train=ROWS, callbacks=[print, callback])
    with pytest.raises(ConfigError, match=r"^callbacks: must be a list of functions \(got <built-in function print>\)"):
        hone.train(config(tmp_path), rewards=half, train=ROWS, callbacks=print)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("error", [KeyError("no such thing"), SystemExit("no such thing")])
def test_a_function_that_raises_is_a_fault_of_its_samples(tmp_path, error):
    def broken(completions, **kwargs):
        raise error

    with pytest.raises(hone.errors.RewardError, match=f"raised {type(error).__name__}: '?no such thing"):
        hone.train(config(tmp_path), rewards=[broken], train=ROWS)


def test_importing_hone_is_light_and_its_names_stay():
    program = (
        "import sys, hone\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
        "first = hone.train\n"
        "assert 'torch' not in sys.modules\n"
        "import hone.train.policy\n"  # of the package, which has the function's name
        "assert hone.train is first and callable(hone.check) and hone.Run.__name__ == 'Run'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
