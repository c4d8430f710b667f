"""The vLLM side of `benchmarks/generation.py`: a process that generates a workload on each request.

    python benchmarks/vllm/run_vllm.py --model MODEL_DIR --dtype float32 --threads 1

Runs in an environment of its own, which `side.py` makes. Each line of standard input is a workload as JSON, each line
of standard output its answer: tokens, seconds on the wall and of CPU, and the first response with its logprobs, by
which the caller knows that both sides hold the same weights. What vLLM prints goes to standard error.

The settings are the fastest of those tried for such a batch on a CPU: all sequences at once, prompts as token ids, no
text made of the responses, the logprob of the sampled token only, compiled (4 to 9% faster than eager), and cache
blocks of 32 tokens, so that short prompts too are shared between samples (9% faster than the default of 128).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as the other sides: a thread bound to a core loses to a busy neighbour
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--set", type=json.loads, default={}, help="arguments of LLM() to try, as JSON")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    os.environ |= ENVIRONMENT | {"OMP_NUM_THREADS": str(options.threads)}
    from vllm import LLM  # reads the environment

    settings = {
        "dtype": options.dtype,
        "block_size": 32,
        "max_model_len": 512,
        "max_num_seqs": 512,
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.1,  # of the RAM that must be free, on a CPU
    }
    llm = LLM(options.model, **(settings | options.set))
    for line in sys.stdin:
        print(json.dumps(generate(llm, json.loads(line))), file=answers, flush=True)


def generate(llm: Any, work: dict[str, Any]) -> dict[str, Any]:
    """Everything that `work` asks for, in one call."""
    from vllm import SamplingParams

    started = time.perf_counter(), time.process_time()
    prompts = [{"prompt_token_ids": work["prompts"][piece["prompt"]]} for piece in work["pieces"]]
    sampling = [
        SamplingParams(
            n=piece["num_samples"],
            max_tokens=piece["max_tokens"],
            stop_token_ids=work["stop_token_ids"],
            temperature=1.0,
            logprobs=0,
            detokenize=False,
        )
        for piece in work["pieces"]
    ]
    responses = [response for result in llm.generate(prompts, sampling, use_tqdm=False) for response in result.outputs]
    wall_s, cpu_s = time.perf_counter() - started[0], time.process_time() - started[1]
    first = responses[0]
    return {
        "tokens": sum(len(response.token_ids) for response in responses),
        "seconds": {"wall": wall_s, "cpu": cpu_s},
        "token_ids": list(first.token_ids),
        "logprobs": [found[token].logprob for token, found in zip(first.token_ids, first.logprobs, strict=True)],
    }


if __name__ == "__main__":
    main()
