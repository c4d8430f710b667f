"""Tokens per second of the embedded engine against Transformers' `generate` and vLLM on a CPU, logprobs included.

    python benchmarks/generation.py                                     # about 5 minutes on a quiet machine
    python benchmarks/generation.py --hidden 128 256 --dtype float32 bfloat16
    python benchmarks/generation.py --quick --no-vllm

The same random weights, prompts and sampling on all sides, taking turns round by round; ratios are of medians. 64
prompts of 16 to 64 tokens, 8 samples each, in three ways:

fixed   64 new tokens for every sample.
ragged  1 in 64 of the vocabulary are stop tokens and the random model is nearly uniform, so that lengths are geometric
        with mean 64, cut at 256: one distribution, not one set of lengths. Counted are tokens up to and with the stop.
forced  one set of such lengths for both engines: each sample is a request of its own, with its own limit and no stop.
        Hone then computes a prompt once per sample, while vLLM finds its full blocks of 32 tokens in the prefix cache.
        `generate` cannot force a length per row.

Hone and Transformers compute in this process, on one thread and its OpenMP team; vLLM (`vllm/`) in a process and an
environment of its own, made on the first call. Heads are of 32, which vLLM's CPU attention supports. That all sides
hold the same weights is checked by the logprobs that they report.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hone.model.base import CausalModel
from hone.model.load import init_model, save_hf
from hone.rollout.engine import Request, Sampling
from hone.rollout.local import LocalEngine
from hone.types import Prompt

sys.path.insert(0, str(Path(__file__).resolve().parent / "vllm"))
from side import VllmProcess, make_environment

NUM_SAMPLES = 8
EOS = 0
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
KINDS = ("fixed", "ragged", "forced")
LOGPROB_GAP = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Largest mean |gap| in nats between two sides that hold the same weights; other random weights are 0.2 apart."""

Side = Callable[["Workload"], tuple[int, float]]
"""Generates everything; returns the number of tokens and the seconds on the clock that was asked for."""


@dataclass(frozen=True)
class Piece:
    """One request: a number of samples of one prompt, each up to a number of tokens."""

    prompt: int
    num_samples: int
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """What every side must generate."""

    prompts: list[list[int]]
    pieces: list[Piece]
    stop_token_ids: tuple[int, ...]

    @classmethod
    def make(cls, kind: str, *, vocab: int, num_prompts: int) -> Workload:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(16, 65, (num_prompts,), generator=generator).tolist()
        prompts = [torch.randint(vocab // 2, vocab, (length,), generator=generator).tolist() for length in lengths]
        everyone = range(num_prompts)
        if kind == "fixed":
            return cls(prompts, [Piece(i, NUM_SAMPLES, 64) for i in everyone], ())
        if kind == "ragged":
            return cls(prompts, [Piece(i, NUM_SAMPLES, 256) for i in everyone], tuple(range(1, 1 + vocab // 64)))
        limits = torch.empty(num_prompts, NUM_SAMPLES).geometric_(1 / 64, generator=generator).clamp(max=256)
        return cls(prompts, [Piece(i, 1, int(limit)) for i in everyone for limit in limits[i]], ())

    def start(self) -> Workload:
        """An eighth of it, to warm up with."""
        last = max(1, len(self.prompts) // 8)
        return Workload(self.prompts[:last], [p for p in self.pieces if p.prompt < last], self.stop_token_ids)


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


def hone_side(model: CausalModel, compute: Executor, clock: Callable[[], float]) -> Side:
    """The embedded engine, one request for each piece."""
    runner = asyncio.Runner()

    async def start() -> LocalEngine:
        return LocalEngine(
            model, decode=lambda ids: "", eos_ids=(), max_concurrent=512, timeout_s=60.0, executor=compute
        )

    engine = runner.run(start())
    seeds = iter(range(1000))

    async def generate(work: Workload) -> tuple[int, float]:
        requests = list(requests_of(work, seed=next(seeds)))
        started = clock()
        groups = await asyncio.gather(*map(engine.generate, requests))
        seconds = clock() - started
        assert all(len(s.sampler_logprobs) == len(s.token_ids) for group in groups for s in group)
        return sum(len(sample.token_ids) for group in groups for sample in group), seconds

    return lambda work: runner.run(generate(work))


def requests_of(work: Workload, *, seed: int) -> Iterator[Request]:
    for number, piece in enumerate(work.pieces):
        prompt = Prompt(str(number), number, "", tuple(work.prompts[piece.prompt]))
        sampling = Sampling(piece.max_tokens, 1.0, 0, 1.0, 0.0, (), work.stop_token_ids)
        yield Request(prompt, piece.num_samples, sampling, seed, "train")


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


def transformers_side(hf: PreTrainedModel, compute: Executor, clock: Callable[[], float]) -> Side:
    """`generate` on the whole batch, left-padded."""

    @torch.no_grad()
    def generate(work: Workload) -> tuple[int, float]:
        config = GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=work.pieces[0].max_tokens,
            num_return_sequences=NUM_SAMPLES,
            eos_token_id=list(work.stop_token_ids) or None,
            pad_token_id=EOS,
        )
        started = clock()
        width = max(map(len, work.prompts))
        token_ids = torch.tensor([[EOS] * (width - len(p)) + p for p in work.prompts])
        real = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts])
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
        stopped_before_BT = torch.isin(tokens_BT, torch.tensor(work.stop_token_ids)).cumsum(1).roll(1, 1)
        stopped_before_BT[:, 0] = 0
        return int((stopped_before_BT == 0).sum()), clock() - started

    return lambda work: compute.submit(generate, work).result()


def vllm_side(process: VllmProcess, hf: PreTrainedModel, compute: Executor, clock: str) -> Side:
    """vLLM over there; the first answer is checked against the model here."""
    checked = False

    def generate(work: Workload) -> tuple[int, float]:
        nonlocal checked
        answer = process.generate(asdict(work))
        if not checked:
            compute.submit(check_logprobs, hf, work.prompts[0], answer).result()
            checked = True
        return answer["tokens"], answer["seconds"][clock]

    return generate


@torch.no_grad()
def check_logprobs(hf: PreTrainedModel, prompt: list[int], answer: dict[str, Any]) -> None:
    """Exits when the logprobs of vLLM's first response are not this model's."""
    response = torch.tensor(answer["token_ids"])
    logits_TV = hf(torch.tensor([prompt + answer["token_ids"]])).logits[0, len(prompt) - 1 : -1].float()
    expected_T = logits_TV.log_softmax(-1).gather(1, response[:, None])[:, 0]
    gap = (expected_T - torch.tensor(answer["logprobs"])).abs().mean().item()
    if gap > LOGPROB_GAP[hf.dtype]:
        sys.exit(f"vLLM's logprobs are {gap:.2g} nats off: it does not hold the same weights")


def measure(sides: dict[str, Side], work: Workload, rounds: int) -> dict[str, float]:
    """Median tokens per second of each side, rounds interleaved, after a part of the work to warm up."""
    for side in sides.values():
        side(work.start())
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            tokens, seconds = side(work)
            found[name].append(tokens / seconds)
    return {name: statistics.median(rates) for name, rates in found.items()}


def compare(hidden: int, dtype_name: str, threads: int, options: argparse.Namespace) -> None:
    """Print one line for each kind of lengths."""
    dtype = getattr(torch, dtype_name)
    with ExitStack() as stack:
        # The only thread that computes: a second one would bring a second team of OpenMP threads.
        compute = stack.enter_context(ThreadPoolExecutor(1))
        compute.submit(torch.set_num_threads, threads).result()
        model = compute.submit(make_model, hidden, options.vocab, dtype).result()
        sides = {"hone": hone_side(model, compute, CLOCKS[options.clock])}
        if not options.only_hone:
            hf = compute.submit(transformers_model, model, dtype).result()
            if options.vllm:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                save_hf(folder / "model", hf.config, model.named_weights())
                process = VllmProcess(folder / "model", dtype=dtype_name, threads=threads, log=folder / "log.txt")
                sides["vllm"] = vllm_side(stack.enter_context(process), hf, compute, options.clock)
            sides["transformers"] = transformers_side(hf, compute, CLOCKS[options.clock])
        for kind in options.lengths:
            work = Workload.make(kind, vocab=options.vocab, num_prompts=options.prompts)
            able = {name: side for name, side in sides.items() if (name, kind) != ("transformers", "forced")}
            rates = measure(able, work, options.rounds)
            cells = [f"{name} {rate:,.0f}" for name, rate in rates.items()]
            cells += [f"hone / {name} {rates['hone'] / rates[name]:.2f}" for name in rates if name != "hone"]
            print(f"{kind:8}{hidden:7}{dtype_name:>10}{threads:8}   {'   '.join(cells)}", flush=True)


def transformers_model(model: CausalModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights in Transformers' own class, whose name vLLM needs to find in config.json."""
    hf = AutoModelForCausalLM.from_config(model.hf_config, dtype=dtype)
    hf.eval()
    hf.load_state_dict(dict(model.named_weights()))
    hf.config.architectures = [type(hf).__name__]
    return hf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128])
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16"])
    parser.add_argument("--lengths", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="8 prompts, one round: does it run?")
    parser.add_argument(
        "--vllm",
        action=argparse.BooleanOptionalAction,
        default=platform.machine() == "x86_64",
        help="makes .venv-vllm of 2.5 GB on the first call; there is a build for x86-64 only",
    )
    parser.add_argument(
        "--matmul-precision", choices=("highest", "medium"), default="medium", help="of float32, not of vLLM's"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    parser.add_argument("--only-hone", action="store_true", help="for profiling: no comparison")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.rounds = 8, 1
    if options.vllm and not options.only_hone:
        make_environment()
    torch.set_float32_matmul_precision(options.matmul_precision)
    print(f"{'lengths':8}{'hidden':>7}{'dtype':>10}{'threads':>8}   tokens/s, median of {options.rounds}")
    for threads in options.threads:
        for dtype_name in options.dtype:
            for hidden in options.hidden:
                compare(hidden, dtype_name, threads, options)


if __name__ == "__main__":
    main()
