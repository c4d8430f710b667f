"""The engine of a judge that the run starts: what its keys become, with a `vllm` that writes down how it was called,
and with Hone's own server. Rules of the keys: tests/config/test_rules.py."""

import asyncio
import json
import sys
from dataclasses import replace

import httpx
import pytest
import torch
from test_services import Watched

from hone.config.run import ServiceSection
from hone.data.chat import character_tokenizer
from hone.model.load import init_model, save_hf
from hone.reward.judge.scorer import JudgeReward
from hone.reward.judge.votes import EngineFigures, read_metrics
from hone.services.launch import engine_note
from hone.types import Group, Prompt, Sample

VLLM = """#!{python}
import http.server, json, pathlib, sys
pathlib.Path(__file__).with_name("called.json").write_text(json.dumps(sys.argv[1:]))
SAYS = {{"choices": [{{"finish_reason": "stop", "message": {{"content": "Scores: \\\\boxed{{8}}"}}}}]}}
METRICS = '''# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{engine="0"}} 500.0
vllm:prefix_cache_hits_total{{engine="1"}} 120.0
vllm:prefix_cache_queries_total{{engine="0"}} 600.0
vllm:prefix_cache_queries_total{{engine="1"}} 400.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
vllm:kv_cache_usage_perc{{engine="1"}} 0.25
'''
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(METRICS.encode() if self.path == "/metrics" else b"")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(json.dumps(SAYS).encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
ENGINE = {
    "tensor_parallel_size": 2,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 20480,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 20480,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "disable_log_stats": False,
}


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A program `vllm` on the PATH; the file with the words that it was called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "vllm").write_text(VLLM.format(python=sys.executable))
    (folder / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\nfor n in 0 1 2 3 4 5 6 7; do echo $n, GPU-$n$n, 4000$n, 81920; done\n")
    smi.chmod(0o755)
    return folder / "called.json"


def test_a_judges_keys_become_a_vllm_server_that_is_asked(tmp_path, vllm, capfd):
    watched = Watched(tmp_path, judge={"policy": "org/judge-16b", "devices": [4, 5, 6, 7], "engine": ENGINE})
    group = Group(Prompt("p", 0, "2+2=", (), "4"), (Sample("p", 0, (), (), (), "stop", "4"),))

    async def main():
        async with watched.services as services:
            await services.ready()
            args = {"service": "judge", "response_length": 64, "log_every_s": 0}
            judge = JudgeReward.from_args(args, folder=tmp_path, timeout_s=5, services=services.addresses)
            scores = await judge.score(group)
            while "Engine" not in (said := capfd.readouterr().err):
                await asyncio.sleep(0.02)
            scores += await judge.score(replace(group, prompt=replace(group.prompt, text="3+1=")))
            await judge.close()
            return scores, said

    (score, later), said = asyncio.run(asyncio.wait_for(main(), 60))
    assert score.value == pytest.approx(7 / 9)
    assert (later.metrics["prefix_hit_frac"], later.metrics["cache_used_frac"]) == (0.62, 0.375)
    used = (40004 + 40005 + 40006 + 40007) / 1024
    assert (later.metrics["device_used_gib"], later.metrics["device_total_gib"]) == (used, 4 * 80)
    figures = "prefix cache hits 62% of prompt tokens, KV cache 38% used, devices 156.3 / 320.0 GiB"
    assert f"[RewardModel] Engine: {figures}" in said
    words = json.loads(vllm.read_text())
    assert words == [
        *["serve", "org/judge-16b", "--host", "127.0.0.1", "--port", str(watched.port)],
        *["--tensor-parallel-size", "2", "--data-parallel-size", "2"],
        *["--max-num-seqs", "32", "--max-num-batched-tokens", "20480", "--gpu-memory-utilization", "0.3"],
        *["--no-enable-chunked-prefill", "--enable-prefix-caching", "--max-model-len", "20480", "--enforce-eager"],
    ]
    shown = "service judge: vLLM, 4 GPUs // tensor_parallel_size 2 = 2 replicas, of 32 sequences each"
    assert shown in watched.said


@pytest.mark.slow("starts a service that loads a model")
def test_without_vllm_hones_own_server_runs_and_says_what_it_does_not_heed(tmp_path):
    tokenizer = character_tokenizer("0123456789=+")
    config = {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32}
    model = init_model(config, vocab_size=len(tokenizer), seed=0, dtype=torch.float32, device="cpu")
    save_hf(tmp_path / "tiny", model.hf_config, model.named_weights(), tokenizer)
    watched = Watched(tmp_path, judge={"policy": "tiny", "engine": {"max_num_seqs": 8, "enforce_eager": True}})

    async def main():
        async with watched.services as services:
            await services.ready()
            judge = services.addresses["judge"]
            headers = {"Authorization": f"Bearer {judge.token}"}
            async with httpx.AsyncClient(base_url=judge.urls[0], timeout=30, headers=headers) as client:
                await client.post("/v1/completions", json={"prompt": "1+", "max_tokens": 4})
                return (await client.get("/metrics")).text

    found = read_metrics([asyncio.run(asyncio.wait_for(main(), 90))])
    assert found["policy_memory_bytes"][0] > 1e7 and found["policy_samples_total"] == [
        2.0
    ]  # its own first one, and ours
    assert watched.launches[0].command[-4:-2] == ("--max-concurrent", "8")
    note = "service judge: Hone's own engine, 8 sequences; without vLLM these do nothing: enforce_eager"
    assert note in watched.said


@pytest.mark.parametrize(("gpus", "size", "replicas"), [(0, 1, 1), (1, 1, 1), (7, 1, 7), (8, 2, 4), (8, 8, 1)])
def test_replicas_are_gpus_over_tensor_parallel(tmp_path, vllm, gpus, size, replicas):
    engine = {"tensor_parallel_size": size}
    service = ServiceSection(policy="a/b", devices=tuple(range(gpus)), engine=engine)
    said = f"{gpus} GPUs // tensor_parallel_size {size} = {replicas} replicas" if gpus else "1 replica"
    assert engine_note(service, tmp_path) == f"vLLM, {said}, of 64 sequences each"


def test_without_engine_nothing_is_said_and_nothing_changes(tmp_path, vllm):
    service = ServiceSection(policy="a/b")
    assert engine_note(service, tmp_path) == "" and service.engine is None


def test_figures_are_since_they_were_last_asked_for():
    pages = iter([[10, 100], [60, 200], [60, 200]])

    class Client:
        async def metrics(self):
            hits, queries = next(pages)
            return [
                f"vllm:prefix_cache_hits_total {hits}\nvllm:prefix_cache_queries_total {queries}\nbroken nonsense\n"
            ]

    async def main():
        figures = EngineFigures(Client())
        return [await figures.read() for _ in range(3)]

    assert asyncio.run(main()) == [{"prefix_hit_frac": 0.1}, {"prefix_hit_frac": 0.5}, {}]
