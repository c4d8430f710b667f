"""Tokens per second of `VllmEngine` against vLLM stepped bare in the same process, and against the embedded engine.

    python benchmarks/vllm_engine.py            # a minute, in vLLM's own environment, which it makes on the first call

The first ratio is what Hone's side of vLLM costs: requests, seeds, versions, samples. Both sides are the same vLLM with
the same weights and settings, taking turns; only the driving differs. The embedded engine has the same model and
requests. 64 prompts of 16 to 64 tokens, 8 samples each of 64 tokens; Qwen3 with random weights in bfloat16, one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hone.config.engine import EngineSection
from hone.model.base import CausalModel
from hone.model.load import init_model, save_hf
from hone.rollout.engine import Engine, Request, Sampling
from hone.rollout.local import LocalEngine
from hone.rollout.vllm import VllmEngine
from hone.rollout.vllm_args import VllmPlace
from hone.types import Prompt

sys.path.insert(0, str(Path(__file__).resolve().parent / "vllm"))
from side import VENV, make_environment

NUM_SAMPLES, NUM_TOKENS, VOCAB = 8, 64, 2048


def make_model(hidden: int) -> CausalModel:
    """4 layers, heads of 32, half as many kv heads."""
    architecture = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    return init_model(architecture, vocab_size=VOCAB, seed=0, dtype=torch.bfloat16, device="cpu")


def make_requests(count: int, seed: int, stop: tuple[str, ...] = ()) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    requests = []
    for number in range(count):
        length = int(torch.randint(16, 65, (1,), generator=generator))
        token_ids = torch.randint(VOCAB // 2, VOCAB, (length,), generator=generator).tolist()
        sampling = Sampling(NUM_TOKENS, 1.0, 0, 1.0, 0.0, stop, ())
        requests.append(
            Request(Prompt(str(number), number, "", tuple(token_ids)), NUM_SAMPLES, sampling, seed, "train")
        )
    return requests


async def through(engine: Engine, requests: list[Request]) -> float:
    """Tokens per second of all requests at once."""
    started = time.perf_counter()
    groups = await asyncio.gather(*(engine.generate(request) for request in requests))
    tokens = sum(len(sample.token_ids) for group in groups for sample in group)
    return tokens / (time.perf_counter() - started)


def bare(llm: Any, requests: list[Request]) -> float:
    """The same through vLLM alone, as it is fastest: one request for a group, answered at its end."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    started = time.perf_counter()
    for request in requests:
        settings = SamplingParams(
            n=NUM_SAMPLES,
            max_tokens=NUM_TOKENS,
            temperature=1.0,
            seed=request.seed,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        llm.add_request(
            f"bare {request.seed} {request.prompt.id}", tokens_input(list(request.prompt.token_ids)), settings
        )
    tokens = 0
    while llm.has_unfinished_requests():
        tokens += sum(len(response.token_ids) for output in llm.step() for response in output.outputs)
    return tokens / (time.perf_counter() - started)


async def compare(hidden: int, prompts: int, rounds: int, folder: Path) -> None:
    """Print the medians, and the ratios of VllmEngine to the two others."""
    model = make_model(hidden)
    save_hf(folder / "hf", model.hf_config, model.named_weights())
    vllm = await VllmEngine.start(
        VllmPlace(folder / "hf", "bfloat16", longest_tokens=192, max_concurrent=512, prefill_tokens=16384),
        EngineSection(),
        decode=lambda ids: "",
        eos_ids=(),
        timeout_s=120.0,
        start_timeout_s=300.0,
    )
    embedded = LocalEngine(model, decode=lambda ids: "", eos_ids=(), max_concurrent=512, timeout_s=120.0)
    found: dict[str, list[float]] = {"VllmEngine": [], "with a stop string": [], "vLLM bare": [], "embedded": []}
    try:
        for number in range(rounds + 1):
            requests = make_requests(prompts, seed=number)
            rates = {
                "VllmEngine": await through(vllm, requests),
                "with a stop string": await through(vllm, make_requests(prompts, seed=number, stop=("never",))),
                "vLLM bare": bare(vllm._llm, requests),
                "embedded": await through(embedded, requests),
            }
            for name, rate in rates.items():
                found[name] += [rate] if number else []  # the first warms up
    finally:
        await vllm.close()
        await embedded.close()
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    cells = [f"{name} {rate:,.0f}" for name, rate in medians.items()]
    cells += [f"VllmEngine / {name} {medians['VllmEngine'] / medians[name]:.2f}" for name in ("vLLM bare", "embedded")]
    print(f"hidden {hidden}, tokens/s, median of {rounds}:   {'   '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if Path(sys.prefix) != VENV:
        make_environment()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([VENV / "bin" / "python", __file__, *sys.argv[1:]], env=environment).returncode)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(options.hidden, options.prompts, options.rounds, Path(folder)))


if __name__ == "__main__":
    main()
