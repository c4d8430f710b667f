"""Chunked logprobs against full logits at a vocabulary of 151,936: peak memory, time, and accuracy.

    python -m benchmarks.logprobs [--tokens 2048] [--hidden 1024] [--dtype float32] [--threads 2]

Each variant runs in a process of its own, forward and backward. Memory is the highest resident size that the kernel
saw (VmHWM), less that of a process that stopped before the forward pass, so inputs and their weight do not count; the
gradients do. Accuracy is measured against float64 at the same hidden size and a smaller vocabulary.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor

from hone.model.logprobs import token_logprobs

VOCAB = 151_936
CHUNKS = (2048, 1024, 256)


def naive_logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = (hidden @ weight.T).float().log_softmax(-1)
    return logprobs.gather(1, target[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def inputs(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden) * 0.02).to(dtype).requires_grad_()
    return states, weight, torch.randint(vocab, (tokens,))


def run_variant(variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    """In the child process: seconds of forward and backward, and the highest resident size in MiB."""
    torch.set_num_threads(arguments.threads)
    states, weight, target = inputs(arguments.tokens, arguments.hidden, VOCAB, getattr(torch, arguments.dtype))
    start = time.perf_counter()
    if variant == "naive":
        naive_logprobs(states, weight, target)[0].sum().backward()
    elif variant != "nothing":
        logprob, _ = token_logprobs(states, weight, target, temperature=1.0, chunk_tokens=int(variant))
        logprob.sum().backward()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def in_own_process(variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    flags = [f"--{key}={value}" for key, value in vars(arguments).items() if key != "variant"]
    command = [sys.executable, "-m", "benchmarks.logprobs", f"--variant={variant}", *flags]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800).stdout)


def accuracy(hidden: int) -> tuple[float, float]:
    """Largest error, relative to the largest value, of float32 logprobs and gradients against float64."""
    states, weight, target = inputs(64, hidden, 8192, torch.float32)
    exact_inputs = [x.detach().double().requires_grad_() for x in (states, weight)]
    ours, _ = token_logprobs(states, weight, target, temperature=1.0, chunk_tokens=16)
    exact_logits = exact_inputs[0] @ exact_inputs[1].T
    exact = exact_logits.log_softmax(-1).gather(1, target[:, None])[:, 0]

    def error(a: Tensor, b: Tensor) -> float:
        return ((a.double() - b).abs().max() / b.abs().max()).item()

    gradients = zip(
        torch.autograd.grad(ours.sum(), (states, weight)), torch.autograd.grad(exact.sum(), exact_inputs), strict=True
    )
    return error(ours, exact), max(error(a, b) for a, b in gradients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(run_variant(arguments.variant, arguments)))
        return
    print(
        f"{arguments.tokens} tokens, hidden {arguments.hidden}, vocabulary {VOCAB:,}, {arguments.dtype}, "
        "forward + backward"
    )
    floor = in_own_process("nothing", arguments)["peak_mib"]
    naive = in_own_process("naive", arguments)
    naive_mib = naive["peak_mib"] - floor
    print(f"full logits          {naive_mib:8,.0f} MiB  {naive['seconds']:6.1f} s")
    for chunk in CHUNKS:
        ours = in_own_process(str(chunk), arguments)
        mib = ours["peak_mib"] - floor
        print(
            f"chunks of {chunk:5,}      {mib:8,.0f} MiB  {ours['seconds']:6.1f} s   "
            f"memory x{mib / naive_mib:.2f}, time x{ours['seconds'] / naive['seconds']:.2f}"
        )
    of_values, of_gradients = accuracy(arguments.hidden)
    print(f"error against float64, relative to the largest: logprobs {of_values:.1e}, gradients {of_gradients:.1e}")


if __name__ == "__main__":
    main()
