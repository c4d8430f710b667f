"""Routed experts in a pass without gradients: the closed form of a layer against a trace of Transformers' classes."""

import gc
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.cli.main import main
from hone.model.hf import as_computed
from hone.model.load import init_config
from hone.plan.activations import Pass, forward_per_token
from hone.plan.families import architecture_from
from hone.plan.known_models import named_config
from hone.train.tracing.local import marked, with_layers
from hone.train.tracing.memory import LiveMemory, fake_tensors
from hone.train.tracing.sharded import fused_attention

TOKENS, LONGEST = 8192, 2048


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b-v0.1", "deepseek-v2-lite", "qwen1.5-moe-a2.7b"])
def test_the_closed_form_meets_the_trace(name):
    keys = named_config(name, Path(), "model")
    architecture = architecture_from(keys)
    config = init_config(with_layers(keys, architecture.dense_layers + 2), vocab_size=None)
    rows = TOKENS // LONGEST
    memory = LiveMemory()
    with fake_tensors(memory), torch.no_grad():
        model = AutoModelForCausalLM.from_config(
            as_computed(config), dtype=torch.bfloat16, attn_implementation=fused_attention()
        )
        gc.collect()
        weights = memory.now
        with marked(memory, model, last=""):
            position_RX = torch.arange(LONGEST).expand(rows, -1)
            model.base_model(input_ids=torch.zeros_like(position_RX), position_ids=position_RX, use_cache=False)
    traced = (memory.peaks["logprobs", "layers"] - weights) / TOKENS
    work = Pass(architecture, "transformers", 2, TOKENS, TOKENS // 2, LONGEST, on_cuda=True)
    assert forward_per_token(work) == pytest.approx(traced, rel=0.01)


def test_a_copy_for_each_expert_is_counted_by_hand():
    """Eight of 128 experts, on a residual stream of 2,048, in bfloat16: of each copy what is read, returned, and then
    weighted, twice; three indices; 128 numbers of the router; the residual stream four times."""
    architecture = architecture_from(named_config("qwen3-30b-a3b", Path(), "model"))
    work = Pass(architecture, "transformers", 2, TOKENS, TOKENS // 2, LONGEST, on_cuda=True)
    assert forward_per_token(work) == 8 * (4 * 2 * 2048 + 3 * 8) + 2 * (128 + 4 * 2048)


def test_a_trace_of_experts_in_one_process_says_that_there_is_none(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("data: {train: a/b, answer_column: answer}\nreward: {components: [{use: exact}]}\n")
    words = ["model.path=qwen3-30b-a3b", "cluster.backend=local"]
    assert main(["plan", str(file), *words, "--hardware", "H200-141G", "--trace"]) == 2
    assert "experts in one process" in capsys.readouterr().err
