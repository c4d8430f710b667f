"""The page about the reward service: its files are written, its commands run, its tables compared with the code."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from served import serving

PAGE = (Path(__file__).parents[2] / "docs" / "rewards-service.md").read_text("utf-8")


def snippets(language):
    return re.findall(rf"```{language}(?: (\S+))?\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each curl command of the page prints, asked of a service made of the page's files."""
    folder = tmp_path_factory.mktemp("page")
    rewards = dict(snippets("yaml"))["rewards.yaml"]
    ((name, code),) = snippets("python")
    printed = []
    with serving(folder, rewards=rewards, files={name: code}) as served:
        for _, command in snippets("sh"):
            command = command.replace("http://127.0.0.1:8899", served.url)
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
            assert done.returncode == 0, done.stderr
            printed.append(json.loads(done.stdout))
        yield printed, served


def test_the_commands_answer_as_the_page_says(answers):
    (batch, flat, health), _ = answers
    assert [result["score"] for result in batch["results"]] == [1.5, 0.0, None]
    assert batch["results"][2]["error"]["fault"] == "data"
    assert flat["score"] == 1.5 and flat["exact_score"] == 1.0 and flat["short_score"] == 1.0 and flat["error"] is None
    assert health["status"] == "healthy"


def test_routes_and_metrics_of_the_page_are_all_there_are(answers):
    _, served = answers
    routes = set(served.client.get("/openapi.json").json()["paths"])
    assert set(re.findall(r"`(?:POST |GET )?(/[\w/]+)`", PAGE)) >= routes
    exposed = set(re.findall(r"^# TYPE (\w+)", served.client.get("/metrics").text, re.MULTILINE))
    assert set(re.findall(r"`(reward_[a-z_]+)[{`]", PAGE)) - {"reward_model"} == exposed


@pytest.mark.slow("starts each command of the page")
def test_options_that_the_page_names_exist():
    command = [sys.executable, "-m", "hone.cli.main", "serve", "reward", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    own = set(re.findall(r"(--[a-z][a-z-]+)", PAGE)) - {"--reward", "--rm-type", "--rm-url", "--reward-key", "--help"}
    assert own and own <= set(re.findall(r"(--[a-z][a-z-]+)", done.stdout))
