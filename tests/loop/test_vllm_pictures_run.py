"""A run with pictures in prompts whose engine is vLLM in a process of Ray's: SFT, then RL, with a trained tower.

Real vLLM. Its classes of these models import torchvision; `make test-vllm` gives these tests a folder with it.
"""

import json
from importlib.util import find_spec

import pytest
from picture_run import write_run
from pictures import for_vllm
from tiny import metrics_of

from hone.assemble import train
from hone.config.load import load_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision: make test-vllm"),
]

REWARD = """
def length(group):
    assert len(group.prompt.pictures) == group.prompt.columns["count"]
    return [float(sum(s.token_ids) % 7) for s in group.samples]
"""
"""Differs within groups, so that every step has a gradient."""


def test_vllm_sees_the_trainers_pictures_at_every_version(tmp_path):
    run_file = write_run(tmp_path, sizes=for_vllm("qwen2_5_vl"))
    (tmp_path / "rewards.py").write_text(REWARD)
    settings = [
        "model.freeze=[]",
        "cluster.backend=ray",
        "cluster.devices_per_node=1",
        "cluster.engines.use=vllm",
        "cluster.engines.max_num_seqs=16",
    ]
    train(load_config(run_file, settings))
    steps = [line for line in metrics_of(tmp_path) if "train/mismatch_gap" in line]
    assert len(steps) == 3
    assert all(line["train/mismatch_gap"] < 1e-4 for line in steps)
    assert all(line["train/grad_norm"] > 0 for line in steps)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    held = [event["fingerprint"] for event in events if event["kind"] == "published" and "fingerprint" in event]
    assert len(set(held)) == 4
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
