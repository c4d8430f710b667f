"""`hone compare`: two runs whose folders are written by hand."""

import json
import re
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


def test_only_what_should_be_high_has_a_best_value(tmp_path, capsys):
    folder = write(tmp_path / "a", 1e-3, [0.2, 0.1])
    with (folder / "metrics.jsonl").open("a") as lines:
        for step, frac in ((1, 0.5), (2, 0.25)):
            line = {"stage": "rl", "step": step, "time_s": 99.0, "eval/truncated_frac": frac, "eval/pass@4": frac}
            lines.write(json.dumps(line) + "\n")
    assert main(["compare", str(folder), str(folder)]) == 0
    rows = {line.split("  ")[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["eval/truncated_frac"] == ["0.25", "0.25"]
    assert rows["eval/pass@4"] == 2 * ["0.25", "(best", "0.5", "at", "1)"]


def test_json_has_every_metric(tmp_path, capsys):
    folders = [write(tmp_path / name, 1e-3, [0.2]) for name in "ab"]
    assert main(["compare", *map(str, folders), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {} and found["runs"][0]["ends"]["train/update_kl"] == 0.5


def test_a_page_has_curves_over_steps_samples_tokens_and_time(tmp_path, capsys):
    """4 prompts of 2 samples a step; responses have no length here, so that no tokens are counted."""
    folders = [write(tmp_path / name, lr, [0.2, 0.4]) for name, lr in (("a", 1e-3), ("b", 1e-2))]
    page = tmp_path / "both.html"
    assert main(["compare", *map(str, folders), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])
    (stage,) = data["runs"][1]["stages"]
    assert stage["steps"]["step"] == list(range(1, 13))
    assert stage["steps"]["values"]["x/samples"] == [8.0 * step for step in range(1, 13)]
    assert stage["steps"]["values"]["x/time_s"][-1] == 24 and stage["steps"]["values"]["x/tokens"][-1] == 0
    assert stage["evals"]["values"]["eval/accuracy"] == [0.2, 0.4]
    assert data["settings"] == {"train.optimizer.lr": [1e-3, 1e-2]}


def test_the_error_of_an_evaluation_is_half_its_interval(tmp_path, capsys):
    """A standard error of 0.01 gives 0.0196 to each side."""
    folder = write(tmp_path / "a", 1e-3, [])
    with (folder / "metrics.jsonl").open("a") as lines:
        line = {"stage": "rl", "step": 12, "time_s": 99.0, "eval/accuracy": 0.4, "eval/accuracy_se": 0.01}
        lines.write(json.dumps(line) + "\n")
    assert main(["compare", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "0.4 ± 0.0196 (best 0.4 at 12)" in out and "accuracy_se" not in out


def test_every_evaluation_metric_with_an_error_has_its_interval(tmp_path, capsys):
    names = ("eval/accuracy[seen=False]", "eval/pass@4", "eval/reward_mean")
    errors = ("eval/accuracy_se[seen=False]", "eval/pass@4_se", "eval/reward_mean_se")
    folder = write(tmp_path / "a", 1e-3, [])
    with (folder / "metrics.jsonl").open("a") as lines:
        line = {"stage": "rl", "step": 12, "time_s": 99.0} | dict.fromkeys(names, 0.4) | dict.fromkeys(errors, 0.01)
        lines.write(json.dumps(line) + "\n")
    assert main(["compare", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.count("0.4 ± 0.0196 (best 0.4 at 12)") == 3 and "_se" not in out


def test_a_page_and_json_at_once(tmp_path, capsys):
    folder, page = write(tmp_path / "a", 1e-3, [0.2]), tmp_path / "a.html"
    assert main(["compare", str(folder), "--html", str(page), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["runs"][0]["name"] == str(folder)
    assert page.exists() and printed.err == f"wrote {page}\n"


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "there is no run here" in capsys.readouterr().err
