"""vLLM by itself, without Hone, stops where an exported policy ends."""

import json
import os
import subprocess
import sys

import pytest
from tiny_engines import EOS, generate, request
from vllm_engines import model_for_vllm

from hone.model.load import save_hf
from hone.rollout.vllm_args import CPU_ENVIRONMENT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, prompt = sys.argv[1], json.loads(sys.argv[2])
    sizes = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20, "gpu_memory_utilization": 0.1}
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, **sizes)
    greedy = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy)
    print(json.dumps([list(output.outputs[0].token_ids), output.outputs[0].finish_reason]))
"""


def test_vllm_stops_at_the_eos_of_an_export(tmp_path):
    model = model_for_vllm()
    prompts = [[number, 6, 7] for number in range(1, 30)]
    samples = generate(model, [request(prompt, temperature=0.0, max_tokens=12) for prompt in prompts])
    responses = zip(prompts, (sample.token_ids.tolist() for (sample,) in samples), strict=True)
    prompt, ids = next((p, ids) for p, ids in responses if EOS not in ids and ids[3] not in ids[:3])
    save_hf(tmp_path / "hf", model.hf_config, model.named_weights(), eos_ids=(EOS, ids[3]))
    (tmp_path / "generate.py").write_text(GENERATE)
    words = [sys.executable, str(tmp_path / "generate.py"), str(tmp_path / "hf"), json.dumps(prompt)]
    environment = os.environ | CPU_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    found = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads(found.stdout.splitlines()[-1]) == [list(ids[:4]), "stop"]
