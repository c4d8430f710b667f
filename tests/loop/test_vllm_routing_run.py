"""A run of a mixture of experts that replays the routing of vLLM in a process of Ray's. Real vLLM, with Triton."""

from importlib.util import find_spec

import pytest
from tiny import metrics_of, write_run

from hone.assemble import check_run, train
from hone.config.load import load_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: make test-vllm"),
]
INIT = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "initializer_range": 0.15,
}


def test_a_run_replays_the_routing_of_vllm_at_every_version(tmp_path):
    run_file = write_run(tmp_path, steps=2)
    loaded = load_config(
        run_file,
        [
            *(f"model.init.{name}={value}" for name, value in INIT.items()),
            "stages=[rl]",
            "algorithm.replay_routing=true",
            "cluster.backend=ray",
            "cluster.start_timeout_s=600",  # kernels are interpreted, and Triton is imported by every process
            "cluster.devices_per_node=1",
            "cluster.engines.use=vllm",
            "cluster.engines.max_num_seqs=32",
        ],
    )
    assert any("routing is replayed" in line for line in check_run(loaded).lines)
    train(loaded)
    steps = [line for line in metrics_of(tmp_path) if "train/mismatch_gap" in line]
    assert len(steps) == 2
    assert all(0 < line["train/mismatch_gap"] < 1e-4 for line in steps)
