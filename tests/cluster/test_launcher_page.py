"""docs/services.md and examples/reward-service say what works."""

import json
import re
from pathlib import Path

import pytest

from hone.cli.main import app, main
from hone.config.load import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "services.md").read_text()
EXAMPLE = ROOT / "examples" / "reward-service" / "run.yaml"


def test_the_page_s_run_file_loads(tmp_path, monkeypatch):
    (run_file,) = re.findall(r"```yaml\n# poster.yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "poster.yaml").write_text(run_file)
    (tmp_path / "posters.jsonl").write_text(json.dumps({"prompt": "a", "layers": "b"}) + "\n")
    (tmp_path / "rewards.yaml").write_text("reward: {components: [{use: 'hone_poster:poster'}]}\n")
    vllm = tmp_path / "vllm"
    vllm.write_text("#!/bin/sh\n")
    vllm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    services = load_config(tmp_path / "poster.yaml").config.services
    assert list(services) == ["reward_server", "taste"] and services["taste"].devices == (7,)


def test_the_page_s_commands_exist():
    verbs = {command.name for command in app.registered_commands}
    used = re.findall(r"^hone (\w+)", "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)), re.MULTILINE)
    assert used and set(used) <= verbs


def test_every_key_of_the_page_exists():
    from hone.config.run import ServiceSection

    for key in ("reward", "policy", "command", "devices", "port", "health", "restarts", "start_timeout_s"):
        assert key in ServiceSection.model_fields and f"`{key}" in PAGE


@pytest.mark.slow("a run with its service")
def test_the_example_trains_on_the_rewards_of_its_service(tmp_path):
    small = ["run.steps=2", "run.threads=1", "train.prompts_per_step=4", "rollout.group_size=4", "sft.epochs=1"]
    rows = ["sft.rows=0:128", "data.train_rows=10000:10200"]
    quiet = ["data.eval=null", "eval.every=0", "eval.by=null", "observe.console=quiet", "observe.tensorboard=false"]
    assert main(["train", str(EXAMPLE), f"run.dir={tmp_path}/run", *small, *rows, *quiet]) == 0
    assert "POST /v1/rewards 200" in (tmp_path / "run" / "logs" / "reward_server.log").read_text()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and last["reward/sums_fault_frac"] == 0
