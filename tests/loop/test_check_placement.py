"""`hone check` of a run on a cluster: who would work where."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.config.load import load_config
from hone.devices import FoundDevices
from hone.errors import ConfigError
from hone.run import check as preflight
from hone.run.report import CheckReport
from hone.services.gpus import settled_on, topology_on

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = "data.train_rows='0:50'"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(preflight, "visible_devices", list)


def report(name: str, *overrides: str) -> CheckReport:
    return asyncio.run(preflight.check(load_config(EXAMPLES / name, overrides)))


def test_a_cluster_of_models_from_the_hub_passes_without_them():
    found = report("cluster/ppo-70b-hybrid.yaml")
    assert found.is_ok
    assert found.lines[:2] == [
        "placement: 48 of 6 x 8 devices, roles take turns",
        "    role          pool  devices  machines",
    ]
    assert "    critic        all   0-47     0-5       on the policy's ranks" in found.lines
    assert "reward reward_model: its model is for the cluster's devices" in found.not_checked
    placement = json.loads(json.dumps(found.as_dict()))["placement"]
    assert (placement["colocated"], len(placement["engines"]), placement["trainer"]["world_size"]) == (True, 12, 48)


def test_a_judge_in_a_pool_is_no_service_without_a_gpu():
    found = report("judge/grm-16b.yaml")
    assert found.is_ok
    assert any(line.startswith("service grm: BBQGod/DeepSeek-GRM-16B; in pool all;") for line in found.lines)
    assert "    judge    all   0-7      0         4 replicas on 2 devices each" in found.lines


def test_one_process_has_no_placement_to_show():
    found = report("gsm8k-arithmetic/run.yaml", "data.eval=null", "eval.every=0", "eval.by=null", "stages=[rl]", ROWS)
    assert found.placement is None and not any("placement" in line for line in found.lines)


def test_what_this_machine_cannot_hold_is_a_problem(monkeypatch):
    monkeypatch.setattr(preflight, "assumed_devices", lambda config: FoundDevices("cuda", "GPU", 2))
    found = report("cluster/arithmetic-ray.yaml", "data.eval=null", "eval.every=0", "eval.by=null", "stages=[rl]", ROWS)
    assert not found.is_ok
    assert "ask for 2 + 2 = 4 devices; there are nodes x devices_per_node = 1 x 2 = 2" in found.problems[0]


def test_the_tiny_judge_on_a_cluster(tmp_path):
    """Its judge is one that judge.yaml trains first: here any directory stands for it."""
    for name in ("judge", "reward-model"):
        shutil.copytree(EXAMPLES / name, tmp_path / "examples" / name)
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "examples/judge/cluster.yaml")
    model = tmp_path / "runs/judge/hf"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    found = asyncio.run(preflight.check(load_config(tmp_path / "examples/judge/cluster.yaml")))
    assert "    judge    judge  2        0         1 replica on 1 device" in found.lines


def test_check_plan_and_train_choose_alike(monkeypatch, tmp_path, capsys):
    """The same `auto` on the same devices: `check` here, `plan --hardware` there, and what `train` would start from."""
    found = FoundDevices("cuda", "GPU", 4, True)
    monkeypatch.setattr(preflight, "assumed_devices", lambda config: found)
    monkeypatch.setattr("hone.services.gpus.find_spec", lambda name: object())
    words = ("data.eval=null", "eval.every=0", "eval.by=null", "stages=[rl]", "run.device=auto", "run.precision=auto")
    run_file = EXAMPLES / "gsm8k-arithmetic/run.yaml"
    checked = report("gsm8k-arithmetic/run.yaml", *words, ROWS)
    assert "cluster.engines.use: vllm; vLLM is installed" in checked.lines
    loaded, _ = settled_on(load_config(run_file, words), found)
    started = json.loads(json.dumps(topology_on(loaded.config, found).as_dict()))
    assert main(["plan", str(run_file), "--hardware", "4xH100-80G", "--json", *words]) == 0
    planned = json.loads(capsys.readouterr().out)["topology"]
    assert json.loads(json.dumps(checked.placement)) == started == planned
    assert (planned["backend"], len(planned["engines"]), planned["trainer"]["world_size"]) == ("ray", 4, 4)
