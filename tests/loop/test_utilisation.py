"""Share of the peak that updates reach, against operations counted token by token and by torch."""

from pathlib import Path

import pytest
import torch
from fakes import fake_run
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from hone.config.run import RunConfig
from hone.config.topology import topology_of
from hone.loop.policy import learn
from hone.loop.utilisation import Utilisation
from hone.plan import hardware
from hone.plan.families import architecture_from
from hone.types import Batch

KEYS = {"model_type": "qwen3", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3}
KEYS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}

NORMS = 3 * (16 + 16 + 8 + 8) + 16


def batch_of(prompts, responses):
    """`responses`: (prompt, tokens) of each sample."""
    prompt_S, length_S = (torch.tensor(column) for column in zip(*responses, strict=True))
    ones_T = torch.ones(int(length_S.sum()))
    return Batch(
        tuple((1,) * length for length in prompts), prompt_S, length_S, ones_T.long(), ones_T, ones_T, ones_T[:1]
    )


def utilisation(peak_flops=1e9):
    return Utilisation(architecture_from(KEYS), peak_flops)


def test_against_operations_counted_token_by_token():
    prompts, responses = [5, 3], [(0, 7), (0, 0), (1, 4)]
    body = 3 * (16 * (4 + 2 + 2) * 8 + 4 * 8 * 16 + 3 * 16 * 40) + NORMS  # weights that a token is multiplied with
    flops = 0
    for length in prompts:
        flops += sum(2 * body + 3 * 4 * 4 * 8 * (position + 1) for position in range(length))
    for prompt, length in responses:
        places = range(prompts[prompt], prompts[prompt] + length)
        flops += sum(2 * (body + 50 * 16) + 3 * 4 * 4 * 8 * (position + 1) for position in places)
    reached = utilisation().reached(batch_of(prompts, responses), trained_tokens=11, seconds=0.5)
    assert reached == pytest.approx(3 * flops / (0.5 * 1e9))


def test_two_passes_over_half_of_the_tokens_are_one_over_all():
    batch = batch_of([5], [(0, 6), (0, 6)])
    once, twice = (utilisation().reached(batch, tokens, 1.0) for tokens in (12, 24))
    assert twice == pytest.approx(2 * once)


def test_against_the_operations_that_torch_counts_in_transformers():
    """Torch counts no norms, and all scores of attention; ours are those that a causal mask leaves."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**KEYS), attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, 21, dtype=torch.int64), logits_to_keep=1)
    norms = 2 * NORMS * 21
    masked = 3 * 4 * 4 * 8 * (21 * 21 - 21 * 22 // 2)
    reached = utilisation().reached(batch_of([20], [(0, 1)]), trained_tokens=1, seconds=1.0)
    assert counter.get_total_flops() + norms - masked == pytest.approx(reached * 1e9 / 3)


def test_it_is_a_metric_of_each_update():
    batch = batch_of([5], [(0, 6)])
    run = fake_run()
    run.trainer.update = lambda batch, algorithm: {"train/loss": 0.0, "train/tokens": 6.0}
    assert "train/mfu" not in learn(run, batch)[1]
    run.utilisation = utilisation()
    assert learn(run, batch)[1]["train/mfu"] > 0
    run.trainer.update = lambda batch, algorithm: {"train/loss": 0.0, "train/tokens": 0.0}
    assert "train/mfu" not in learn(run, batch)[1], "nothing was trained"


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("changes", "named", "device", "tera"),
    [
        ({}, "NVIDIA H100 80GB HBM3", GPU, 989.0),
        ({"run": {"precision": "float32"}}, "NVIDIA H100 80GB HBM3", GPU, None),
        ({"algorithm": {"credit": "gae"}}, "NVIDIA H100 80GB HBM3", GPU, 0.0),
        ({"model": {"init": {"model_type": "unheard"}}}, "NVIDIA H100 80GB HBM3", GPU, 0.0),
        ({}, "NVIDIA Unheard 1", GPU, 0.0),
        ({}, "NVIDIA H100 80GB HBM3", torch.device("cpu"), 0.0),
    ],
)
def test_where_the_peak_is_known(monkeypatch, changes, named, device, tera):
    monkeypatch.setattr(hardware, "nvidia_smi", lambda fields: f"{named}, 81559\n")
    base = {"model": {"init": KEYS}, "data": {"train": "unused"}, "run": {"precision": "bfloat16"}}
    config = RunConfig.model_validate({**base, **changes})
    found = Utilisation.here(config, topology_of(config), device, Path())
    if tera is None:
        assert found is not None and found.peak_flops == hardware.find_hardware("H100-80G").fp32_flops
    else:
        assert (found.peak_flops if found else 0) == pytest.approx(tera * 1e12, rel=0.01)
