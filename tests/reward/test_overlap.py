"""Scoring starts as each sample finishes and overlaps generation; what is trained on is the same to the last bit."""

import asyncio
import json
import threading

import pytest
import torch
from faulty_server import Answer, FaultyServer, good_reply

from hone.cli.main import main
from hone.model.load import init_model
from hone.rollout.engine import Request, Sampling
from hone.rollout.local import LocalEngine
from hone.types import Group, Prompt

TINY = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SAMPLES = 6


class HoldsTheLast:
    """A `decode` that does not let the last sample finish before a request for a score has arrived."""

    def __init__(self, arrived: threading.Event) -> None:
        self.arrived, self.finished, self.overlapped = arrived, 0, False

    def __call__(self, token_ids):
        self.finished += 1
        if self.finished == SAMPLES:
            self.overlapped = self.arrived.wait(20)
        return "".join(chr(65 + token) for token in token_ids)


def score_while_generating(rewards, decode):
    """A group from a real engine, scored as the loop does it."""
    model = init_model(TINY, vocab_size=24, seed=0, dtype=torch.float32, device="cpu")
    sampling = Sampling(max_tokens=10, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=(1, 2))
    prompt = Prompt("p", 0, "ABC", (3, 4, 5))

    async def go():
        engine = LocalEngine(model, decode=decode, eos_ids=(0,), max_concurrent=8, timeout_s=30.0)
        try:
            async with rewards, rewards.begin(prompt) as scoring:
                request = Request(prompt, SAMPLES, sampling, 7, "train")
                return await scoring.finish(await engine.generate(request, scoring.on_sample))
        finally:
            await engine.close()

    return asyncio.run(go())


def test_the_first_score_is_asked_for_before_the_last_sample_is_finished(make_rewards):
    arrived = threading.Event()

    def seen(request):
        arrived.set()

    decode = HoldsTheLast(arrived)
    with FaultyServer(seen) as server:
        component = {"use": "service", "args": {"url": server.url}}
        group = score_while_generating(make_rewards(component), decode)
        assert decode.overlapped  # the witness: the engine was still holding the last sample
        assert sum(len(request.ids) for request in server.requests) == SAMPLES
        afterwards = asyncio.run(scored(make_rewards(component), group))
    assert group.rewards == afterwards.rewards
    assert group.scores == afterwards.scores


async def scored(rewards, group):
    async with rewards:
        return await rewards.score(Group(group.prompt, group.samples))


def test_a_group_that_is_scored_as_one_waits_for_its_last_sample(make_rewards):
    server = FaultyServer()
    asked_before: list[int] = []

    def decode(token_ids):
        asked_before.append(len(server.requests))
        return f"sample {len(asked_before)}"

    with server:
        component = {"use": "service", "args": {"url": server.url, "mode": "groupwise"}}
        score_while_generating(make_rewards(component), decode)
    assert [len(request.ids) for request in server.requests] == [SAMPLES]
    assert asked_before == [0] * SAMPLES


def test_what_is_still_being_scored_ends_with_the_generation(make_rewards, make_group):
    """A run that ends while samples are scored leaves nothing behind."""
    group = make_group("a", "b")

    async def go(rewards):
        before = asyncio.all_tasks()
        async with rewards:
            with pytest.raises(RuntimeError, match="engine"):
                async with rewards.begin(group.prompt) as scoring:
                    scoring.on_sample(group.samples[0])
                    await asyncio.to_thread(arrived.wait, 10)
                    raise RuntimeError("the engine ended")
            scoring.on_sample(group.samples[1])  # its last words
            assert asyncio.all_tasks() == before

    arrived = threading.Event()

    async def hang(request):
        arrived.set()
        await asyncio.sleep(30)

    with FaultyServer(hang) as server:
        asyncio.run(go(make_rewards({"use": "service", "args": {"url": server.url}})))
    assert len(server.requests) == 1


# ---- whole runs

RUN = """
run: {{dir: {folder}/run, steps: 3, threads: 1, device: cpu}}
model: {{characters: "0123456789+=", init: {init}}}
data: {{train: sums.jsonl, answer_column: answer, max_prompt_tokens: 8}}
reward: {{components: [{{use: service, args: {{url: "{url}", mode: {mode}, first_backoff_s: 0.01}}}}]}}
rollout: {{group_size: 4, max_response_tokens: 8, stop_token_ids: [3, 4]}}
train: {{prompts_per_step: 6, tokens_per_microbatch: 256, optimizer: {{lr: 1e-2}}}}
checkpoint: {{every: 0}}
observe: {{console: quiet, tensorboard: false, trace: false}}
"""
TIMED = ("time", "memory/", "rollout/tokens_per_s", "rollout/samples_per_s", "reward/service_http_")


def train(folder, url, mode="pointwise"):
    """A run with this service; its weights, and its metrics without what depends on the clock and on faults."""
    folder.mkdir()
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(RUN.format(folder=folder, init=json.dumps(TINY), url=url, mode=mode))
    assert main(["train", str(folder / "run.yaml")]) == 0
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]
    return (folder / "run" / "hf" / "model.safetensors").read_bytes(), metrics


@pytest.mark.slow("four runs")
def test_a_run_is_the_same_with_and_without_overlap_and_with_and_without_faults(tmp_path):
    kinds = [
        lambda request: Answer(503, headers={"Retry-After": "0"}),
        lambda request: Answer(body=json.dumps(good_reply(request.body)).encode()[:-9]),
        lambda request: Answer(reset=True),
    ]

    def every_second(request):
        return kinds[request.number // 2 % 3](request) if request.number % 2 == 0 else None

    with FaultyServer() as server:
        whole = train(tmp_path / "whole", server.url, "groupwise")
        assert {len(request.ids) for request in server.requests} == {4}
    with FaultyServer() as server:
        early = train(tmp_path / "early", server.url)
        assert sum(len(request.ids) for request in server.requests) == 3 * 6 * 4
        assert {len(request.ids) for request in server.requests} != {4}
    with FaultyServer(every_second) as server:
        faulty = train(tmp_path / "faulty", server.url)
        assert server.faults >= 3  # each kind
    assert whole == early == faulty
    assert {"reward/service_first_mean", "reward/service_second_mean"} <= early[1][-1].keys()  # each part by itself
