"""Tokens per second of the embedded engine against Transformers' `generate` (and vLLM), logprobs included.

    python benchmarks/generation.py --hidden 128 --dtype float32 --threads 1

One process, the same weights, prompts and sampling on all sides, rounds interleaved; the ratio is of medians. 64 ragged
prompts of 16 to 64 tokens, 8 samples each. `fixed`: 64 new tokens for every sample. `ragged`: 1 in 64 of the vocabulary
are stop tokens and the random model is nearly uniform, so that lengths are geometric with mean 64, cut at 256; tokens
are those of responses, up to and with the stop token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from hone.model.base import CausalModel
from hone.model.load import init_model
from hone.rollout.engine import Request, Sampling
from hone.rollout.local import LocalEngine
from hone.types import Prompt

NUM_SAMPLES = 8
EOS = 0
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Workload:
    """What every side must generate."""

    prompts: list[list[int]]
    max_tokens: int
    stop_token_ids: tuple[int, ...]


def workload(name: str, vocab: int, num_prompts: int) -> Workload:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, 65, (num_prompts,), generator=generator).tolist()
    prompts = [torch.randint(vocab // 2, vocab, (length,), generator=generator).tolist() for length in lengths]
    if name == "fixed":
        return Workload(prompts, 64, ())
    return Workload(prompts, 256, tuple(range(1, 1 + vocab // 64)))


def make_model(hidden: int, vocab: int, dtype: torch.dtype) -> CausalModel:
    """Qwen3, 4 layers, heads of 32, half as many kv heads; random weights."""
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
    return init_model(architecture, vocab_size=vocab, seed=0, dtype=dtype, device="cpu")


def hone_side(model: CausalModel, work: Workload) -> Callable[[], int]:
    """One call generates everything and returns the number of tokens."""
    sampling = Sampling(work.max_tokens, 1.0, 0, 1.0, 0.0, (), work.stop_token_ids)
    runner = asyncio.Runner()

    async def start() -> LocalEngine:
        return LocalEngine(
            model, decode=lambda ids: "", eos_ids=(), max_concurrent=len(work.prompts) * NUM_SAMPLES, timeout_s=60.0
        )

    engine = runner.run(start())
    rounds = iter(range(1000))

    async def generate() -> int:
        seed = next(rounds)
        groups = await asyncio.gather(
            *(
                engine.generate(Request(Prompt(str(i), i, "", tuple(ids)), NUM_SAMPLES, sampling, seed, "train"))
                for i, ids in enumerate(work.prompts)
            )
        )
        assert all(len(s.sampler_logprobs) == len(s.token_ids) for group in groups for s in group)
        return sum(len(sample.token_ids) for group in groups for sample in group)

    return lambda: runner.run(generate())


class LogprobRecorder:
    """The leanest way to get logprobs out of `generate`: (B, V) scores live for one step only.

    `output_logits=True` keeps them all, 1 GB here, and is several times slower.
    """

    def __init__(self) -> None:
        self.columns: list[torch.Tensor] = []

    def keep_scores(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.scores_BV = scores
        return scores

    def keep_logprobs(self, input_ids: torch.Tensor, scores: object) -> torch.Tensor:
        self.columns.append(self.scores_BV.log_softmax(-1).gather(1, input_ids[:, -1:]))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def transformers_side(model: CausalModel, work: Workload, dtype: torch.dtype) -> Callable[[], int]:
    """`generate` on the whole batch, left-padded."""
    hf = AutoModelForCausalLM.from_config(model.hf_config, dtype=dtype).eval()
    hf.load_state_dict(dict(model.named_weights()))
    width = max(map(len, work.prompts))
    token_ids = torch.tensor([[EOS] * (width - len(p)) + p for p in work.prompts])
    real = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts])
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=work.max_tokens,
        num_return_sequences=NUM_SAMPLES,
        eos_token_id=list(work.stop_token_ids) or None,
        pad_token_id=EOS,
    )
    stop = torch.tensor(work.stop_token_ids, dtype=torch.int64)

    @torch.no_grad()
    def generate() -> int:
        recorder = LogprobRecorder()
        out = hf.generate(
            token_ids,
            attention_mask=real,
            generation_config=config,
            logits_processor=[recorder.keep_scores],
            stopping_criteria=[recorder.keep_logprobs],
        )
        assert isinstance(out, torch.Tensor)
        tokens_BT = out[:, width:]
        assert torch.cat(recorder.columns, 1).shape == tokens_BT.shape
        stopped_before_BT = torch.isin(tokens_BT, stop).cumsum(1).roll(1, 1)
        stopped_before_BT[:, 0] = 0
        return int((stopped_before_BT == 0).sum())

    return generate


def measure(
    sides: dict[str, Callable[[], int]], rounds: int, clock: Callable[[], float], *, cold: bool
) -> dict[str, float]:
    """Median tokens per second of each side, rounds interleaved, after one to warm up unless `cold`."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(int(cold), rounds + 1):
        for name, side in sides.items():
            start = clock()
            tokens = side()
            if round_index:
                rates[name].append(tokens / (clock() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--lengths", nargs="+", default=["fixed", "ragged"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--matmul-precision", choices=("highest", "medium"), default="medium", help="of float32, for all sides alike"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    parser.add_argument("--cold", action="store_true", help="no round to warm up")
    parser.add_argument("--only-hone", action="store_true", help="for profiling: no comparison")
    options = parser.parse_args()
    torch.set_float32_matmul_precision(options.matmul_precision)
    print(f"{'lengths':8}{'hidden':>7}{'dtype':>10}{'threads':>8}   tokens/s")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for dtype_name in options.dtype:
            dtype = getattr(torch, dtype_name)
            for hidden in options.hidden:
                model = make_model(hidden, options.vocab, dtype)
                for lengths in options.lengths:
                    work = workload(lengths, options.vocab, options.prompts)
                    sides = {"hone": hone_side(model, work)}
                    if not options.only_hone:
                        sides["transformers"] = transformers_side(model, work, dtype)
                    rates = measure(sides, options.rounds, CLOCKS[options.clock], cold=options.cold)
                    line = "   ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
                    if not options.only_hone:
                        line += f"   ratio {rates['hone'] / rates['transformers']:.2f}"
                    print(f"{lengths:8}{hidden:7}{dtype_name:>10}{threads:8}   {line}", flush=True)


if __name__ == "__main__":
    main()
