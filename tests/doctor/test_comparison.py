"""`hone compare`: two runs whose folders are written by hand."""

import json
from pathlib import Path

from hone.cli.main import main


def write(folder: Path, lr: float, values: list[float], steps: int = 12) -> Path:
    folder.mkdir()
    settings = {
        "run": {"dir": str(folder)}, "seed": 1, "train": {"optimizer": {"lr": lr}, "prompts_per_step": 4},
        "rollout": {"group_size": 2},
    }  # fmt: skip
    (folder / ".identity.json").write_text(json.dumps({"run_file": "run.yaml", "config": settings}))
    lines = [
        {"stage": "rl", "step": step, "time_s": 2.0 * step, "rollout/reward_mean": step, "train/update_kl": 0.5}
        for step in range(1, steps + 1)
    ]
    lines += [{"stage": "rl", "step": step, "time_s": 99.0, "eval/accuracy": v} for step, v in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_settings_that_differ_evaluations_ends_and_alarms(tmp_path, capsys):
    """Ends are means of the last ten steps: 3 to 12 are 7.5 on average. 12 steps of 4 prompts and 2 samples are 96."""
    first, second = write(tmp_path / "a", 1e-3, [0.2, 0.6, 0.4]), write(tmp_path / "b", 1e-2, [0.1])
    assert main(["compare", str(first), str(second)]) == 0
    rows = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["run"] == ["run", str(first), str(second)]
    assert rows["train.optimizer.lr"] == ["train.optimizer.lr", "0.001", "0.01"]
    assert rows["samples"] == ["samples", "96", "96"]
    assert rows["eval/accuracy"] == [
        "eval/accuracy",
        "0.4",
        "(best",
        "0.6",
        "at",
        "2)",
        "0.1",
        "(best",
        "0.1",
        "at",
        "1)",
    ]
    assert rows["rollout/reward_mean"] == ["rollout/reward_mean", "7.5", "7.5"]
    assert rows["first alarm"][2:] == ["none", "none"]
    assert "seed" not in rows and "run.dir" not in rows


def test_json_has_every_metric(tmp_path, capsys):
    folders = [write(tmp_path / name, 1e-3, [0.2]) for name in "ab"]
    assert main(["compare", *map(str, folders), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {} and found["runs"][0]["ends"]["train/update_kl"] == 0.5


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "there is no run here" in capsys.readouterr().err
