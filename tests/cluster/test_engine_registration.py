"""An engine that Hone does not know is one file (`openai_engine.py`) and one entry point, and a run trains with it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hone.assemble import train
from hone.config.load import load_config
from hone.data.chat import character_tokenizer
from hone.errors import ConfigError
from hone.model.load import init_model, save_hf
from hone.plan.hardware import find_hardware
from hone.plan.planner import plan

HERE = Path(__file__).parent
RUN = """
run: {dir: run, steps: 2, threads: 1, device: cpu}
model:
  characters: "0123456789+="
  init: {model_type: qwen3, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
         head_dim: 8, intermediate_size: 64, max_position_embeddings: 32, tie_word_embeddings: true}
data: {train: sums.jsonl, answer_column: answer, max_prompt_tokens: 8}
reward: {components: [{use: length, args: {target_tokens: 2, tolerance_tokens: 8}}]}
rollout: {group_size: 4, max_response_tokens: 8}
train: {prompts_per_step: 4, tokens_per_microbatch: 256, optimizer: {lr: 1e-2}}
cluster: {backend: ray, devices_per_node: 1, engines: {use: openai}}
observe: {console: quiet, tensorboard: false, trace: false}
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """A run that names the engine, whose package is installed as pip leaves it."""
    metadata = tmp_path / "site/openai_engine-1.0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(HERE / "openai_engine.py", tmp_path / "site")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: openai-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[hone.rollout.engine]\nopenai = openai_engine:ENGINE\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(5)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(RUN.replace("dir: run", f"dir: {tmp_path}/run"))
    return tmp_path / "run.yaml"


@pytest.fixture
def server(run_file, tmp_path):
    """URL of a server of the run's model, with weights of its own at first."""
    tokenizer, model = character_tokenizer("0123456789+="), load_config(run_file, [URL]).config.model
    policy = init_model(model.init, vocab_size=len(tokenizer), seed=9, dtype=torch.float32, device="cpu")
    save_hf(tmp_path / "hf", policy.hf_config, policy.named_weights(), tokenizer)
    command = [sys.executable, "-u", str(HERE / "weights_server.py"), str(tmp_path / "hf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield re.search(r"http://\S+", process.stdout.readline())[0]
        process.terminate()


URL = "cluster.engines.args={url: http://127.0.0.1:1}"


def test_check_accepts_it_and_knows_its_settings(run_file):
    assert load_config(run_file, [URL]).config.cluster.engines.kind.start == "openai_engine:start"
    for overrides, said in (
        ([], "cluster.engines.args.url: Field required"),
        ([URL, "cluster.engines.args.uri=a"], "cluster.engines.args.uri: Extra inputs are not permitted"),
        ([URL, "cluster.engines.max_num_seqs=2"], "max_num_seqs: is only used by use = vllm (got use = openai)"),
        ([URL, "cluster.engines.use=hone"], "cluster.engines.args: is only used by use = other engines"),
        ([URL, "algorithm.replay_routing=true"], "needs an engine that records routing, which openai does not do"),
        (["cluster.engines.use=opena"], "no engine is called 'opena'. Engines: hone, vllm, openai"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(run_file, overrides)
        assert said in str(error.value)


@pytest.mark.slow("starts a server, and a whole run against it")
@pytest.mark.timeout(400)
def test_a_run_trains_with_it_and_its_logprobs_are_the_trainers_at_every_version(run_file, server, tmp_path):
    train(load_config(run_file, [f"cluster.engines.args={{url: {server}}}"]))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    gaps = [line["train/mismatch_gap"] for line in lines if "train/mismatch_gap" in line]
    assert len(gaps) == 2 and max(gaps) < 1e-4
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    held = [event["fingerprint"] for event in events if event["kind"] == "published" and "fingerprint" in event]
    assert len(set(held)) == 3  # three versions, each with weights of its own


def test_a_plan_counts_no_memory_for_a_server_elsewhere(run_file):
    config = load_config(run_file, [URL]).config
    found = plan(config, find_hardware("T4-16G"), folder=run_file.parent)
    names = {term.name for ledger in found.ledgers for moment in ledger.moments for term in moment.terms}
    assert "AdamW moments" in names and not any("cache" in name for name in names)
    assert any("cluster.engines.use = openai takes no memory of these devices" in note for note in found.notes)
