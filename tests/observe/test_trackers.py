"""Experiment trackers against their real packages, offline."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hone.assemble.inputs import provenance
from hone.errors import ConfigError
from hone.observe.trackers import Labels, open_trackers

NAMES = ("wandb", "swanlab", "trackio", "mlflow")
SCRIPT = """
import sys
from pathlib import Path
from types import SimpleNamespace
from hone.observe.trackers import Labels, open_trackers
name, folder = sys.argv[1], Path(sys.argv[2])
names = dict.fromkeys(("wandb", "swanlab", "trackio", "mlflow")) | {name: "project"}
metadata = {"config": {"run": {"steps": 3}}, "command": "hone train run.yaml"}
labels = Labels("title", "seeds", ("math", "try"))
(tracker,) = open_trackers(folder, SimpleNamespace(**names), labels, metadata)
for step in range(int(sys.argv[3]), int(sys.argv[3]) + 2):
    rows = [("2+2=", f"it is {step}", 1.0, -0.5, "4", "stop"), ("2+3=", "?", None, 0.0, "5", "length")]
    tracker.write_samples("rl", step, rows)
    tracker.write("rl", step, {"train/loss": 0.5 * step})
tracker.close()
assert "torch" not in sys.modules
"""


def settings(**names):
    return SimpleNamespace(**dict.fromkeys(NAMES) | names)


def test_without_a_name_there_is_no_tracker(tmp_path):
    assert open_trackers(tmp_path, settings(), Labels("title"), {}) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_is_missing_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setattr("hone.observe.trackers.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"pip install 'hone-rl\[{name}\]'"):
        open_trackers(tmp_path, settings(**{name: "project"}), Labels("title"), {})


def test_wandb_without_a_key_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr("hone.observe.trackers.find_spec", lambda package: object())
    with pytest.raises(ConfigError, match=r"WANDB_API_KEY.*WANDB_MODE=offline"):
        open_trackers(tmp_path, settings(wandb="project"), Labels("title"), {})


def used(name, folder, first=1):
    """A run of a process of its own, offline, that logs two steps."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "SWANLAB_", "MLFLOW_"))
    }
    environment |= {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "HOME": str(folder)}
    environment |= {"TRACKIO_DIR": str(folder / "trackio-db"), "TRACKIO_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, name, str(folder), str(first)]
    subprocess.run(command, check=True, env=environment, timeout=300)


@pytest.mark.slow("starts the tracker's service")
def test_wandb_keeps_the_run_in_the_folder_under_its_id(tmp_path):
    used("wandb", tmp_path)
    (record,) = (tmp_path / "wandb").glob("wandb/offline-run-*/*.wandb")
    assert (tmp_path / "wandb" / "id").read_text() in record.name
    for written in (b"train/loss", b"hone train run.yaml", b"title", b"seeds", b"math", b"samples"):
        assert written in record.read_bytes()
    tables = [json.loads(path.read_text())["data"][0] for path in record.parent.rglob("samples_*.table.json")]
    assert ["2+2=", "it is 2", 1.0, -0.5, "4", "stop"] in tables and len(tables) == 2


@pytest.mark.peers
def test_swanlab_keeps_the_run_in_the_folder(tmp_path):
    used("swanlab", tmp_path)
    (record,) = (tmp_path / "swanlab").glob("run-*/*.swanlab")
    assert (tmp_path / "swanlab" / "id").read_text() in record.name
    assert b"rl/train/loss" in record.read_bytes() and b"rl/samples" in record.read_bytes()
    media = [path.read_bytes() for path in record.parent.rglob("*.json") if b"it is 2" in path.read_bytes()]
    assert len(media) == 1 and b"advantage" in media[0]
    assert "hone train run.yaml" in (record.parent / "files" / "config.yaml").read_text()


@pytest.mark.peers
def test_trackio_continues_the_run_in_its_database(tmp_path):
    used("trackio", tmp_path)
    used("trackio", tmp_path, first=3)
    with sqlite3.connect(tmp_path / "trackio-db" / "project.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
        configs = database.execute("select config from configs").fetchall()
    database.close()
    assert {name for name, _, _ in rows} == {f"title-{(tmp_path / 'trackio' / 'id').read_text()}"}
    found = [(step, json.loads(metrics)) for _, step, metrics in rows]
    losses = [(step, values["rl/train/loss"]) for step, values in found if "rl/train/loss" in values]
    assert losses == [(step, 0.5 * step) for step in range(1, 5)]
    tables = [(step, values["rl/samples"]["_value"][0]["response"]) for step, values in found if "rl/samples" in values]
    assert tables == [(step, f"it is {step}") for step in range(1, 5)]
    assert json.loads(configs[0][0])["config"] == {"run": {"steps": 3}}


@pytest.mark.peers
def test_mlflow_continues_the_run_in_its_database(tmp_path):
    used("mlflow", tmp_path)
    used("mlflow", tmp_path, first=3)
    database = sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")
    rows = database.execute("select run_uuid, key, step, value from metrics order by step").fetchall()
    params = dict(database.execute("select key, value from params").fetchall())
    tags = dict(database.execute("select key, value from tags").fetchall())
    database.close()
    run = (tmp_path / "mlflow" / "id").read_text()
    assert rows == [(run, "rl/train/loss", step, 0.5 * step) for step in range(1, 5)]
    assert tags["group"] == "seeds" and tags["mlflow.runName"] == "title" and {"math", "try"} <= tags.keys()
    (table,) = tmp_path.rglob("samples/rl/step-000004.json")
    assert json.loads(table.read_text())["data"][0] == ["2+2=", "it is 4", 1.0, -0.5, "4", "stop"]
    assert params == {"config.run.steps": "3", "command": "hone train run.yaml"}


def test_where_a_run_comes_from(tmp_path):
    found = provenance(tmp_path, ["hone", "train", "run.yaml", "a.api_key=abc", "run.steps=3"])
    assert found.keys() == {"command", "hardware"}
    assert found["command"] == "hone train run.yaml 'a.api_key=[hidden]' run.steps=3"
    assert re.fullmatch(r"\d+ CPU cores, \d+ GiB(, .+)?", found["hardware"])
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    assert len(provenance(tmp_path, ["hone"])["git_commit"]) == 40
