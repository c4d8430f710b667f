"""Transformers' classes in one row without padding against padded rows: time of the processor, forward and backward.

    python -m benchmarks.one_row [--repeats 5] [--threads 1]

One process, the same model and samples, in turns; the figure is the median ratio of padded to one row, so above 1 the
one row is faster. Tokens are those that each way computes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from hone.model.hf import TransformersModel
from hone.model.layout import Layout
from hone.model.load import init_model

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, **EXPERTS},
    "gpt_oss": {**SIZES, **EXPERTS, "sliding_window": 64},
    "gemma3_text": {**SIZES, "sliding_window": 64},
}
CASES = {
    "4 prompts of 64, 8 samples of 8 to 128": (4, 64, 8, 8, 128),
    "1 prompt of 256, 8 samples of 32 to 64": (1, 256, 8, 32, 64),
    "2 prompts of 16, 2 samples of 500": (2, 16, 2, 500, 500),
    "8 prompts of 32, 1 sample of 32": (8, 32, 1, 32, 32),
    "1 prompt of 4, 1 sample of 8": (1, 4, 1, 8, 8),
}
"""Prompts and their length, samples of each and their lengths, evenly between two."""


def layout_of(prompts: int, prompt_tokens: int, samples: int, shortest: int, longest: int) -> Layout:
    draw = np.random.default_rng(0)
    lengths = np.linspace(shortest, longest, samples).astype(int)
    words = [draw.integers(0, SIZES["vocab_size"], prompt_tokens).tolist() for _ in range(prompts)]
    responses = [draw.integers(0, SIZES["vocab_size"], size).tolist() for _ in range(prompts) for size in lengths]
    return Layout.build(words, [number for number in range(prompts) for _ in lengths], responses)


def seconds(model: TransformersModel, layout: Layout, why_rows: str | None) -> float:
    model.why_rows = why_rows
    begin = time.process_time()
    model.hidden(layout).square().sum().backward()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| Samples | Tokens, padded | one row | " + " | ".join(MODELS) + " |")
    models = {name: make(name, keys) for name, keys in MODELS.items()}
    for name, shape in CASES.items():
        layout, ratios = layout_of(*shape), []
        for model in models.values():
            pairs = [
                (seconds(model, layout, "measured"), seconds(model, layout, None)) for _ in range(arguments.repeats + 1)
            ]
            ratios.append(statistics.median(padded / packed for padded, packed in pairs[1:]))
        tokens = f"{layout.rows().real_RL.numel():,} | {len(layout.token_ids_X):,}"
        print(f"| {name} | {tokens} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |", flush=True)


def make(name: str, keys: dict[str, Any]) -> TransformersModel:
    architecture = {"model_type": name, **keys}
    model = init_model(architecture, vocab_size=None, seed=0, dtype=torch.float32, device="cpu")
    assert isinstance(model, TransformersModel) and model.why_rows is None
    return model


if __name__ == "__main__":
    main()
