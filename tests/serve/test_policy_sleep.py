"""`hone serve policy --enable-sleep-mode`: asleep it refuses and says when to ask again, awake it says what it said."""

import asyncio

import httpx
import torch

from hone.assemble.policy_server import PolicySettings, loader
from hone.data.chat import character_tokenizer
from hone.model.load import init_model, save_hf
from hone.serve.http import BearerTokens, HttpSettings, Lifecycle
from hone.serve.openai import CompletionRequest
from hone.serve.policy import PolicyService
from hone.serve.policy_app import policy_app

ASKED = {"prompt": "1+", "max_tokens": 6, "seed": 3}


def save_tiny(folder):
    tokenizer = character_tokenizer("0123456789=+")
    config = {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32}
    model = init_model(config, vocab_size=len(tokenizer), seed=0, dtype=torch.float32, device="cpu")
    save_hf(folder, model.hf_config, model.named_weights(), tokenizer)
    return str(folder)


def asked_of(folder, scenario, *, may_sleep=True):
    """What a scenario gets from a client of a served model."""

    async def main():
        settings, lifecycle = HttpSettings(), Lifecycle()
        service = PolicyService(loader(save_tiny(folder), 0, "tiny", PolicySettings(threads=1)))
        app = policy_app(service, lifecycle, settings, BearerTokens(settings), may_sleep=may_sleep)
        await service.start()
        lifecycle.phase = "ready"
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
                return await scenario(client, service)
        finally:
            await service.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_asleep_it_refuses_and_awake_it_says_what_it_said(tmp_path):
    async def scenario(client, service):
        async def choices():
            return (await client.post("/v1/completions", json=ASKED)).json()["choices"]

        before, under_way = await choices(), asyncio.create_task(service.complete(CompletionRequest(**ASKED)))
        await asyncio.sleep(0)
        assert (await client.post("/sleep?level=1", json={})).json() == {"is_sleeping": True}
        assert under_way.done() and under_way.result().choices[0].text == before[0]["text"], "it was asked before"
        refused = await client.post("/v1/completions", json=ASKED)
        assert refused.status_code == 503 and refused.headers["Retry-After"] == "1"
        assert "until /wake_up" in refused.json()["detail"]
        assert (await client.get("/health")).status_code == 200, "it is well, and not started again"
        assert (await client.post("/wake_up", json={})).json() == {"is_sleeping": False}
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert await choices() == before

    asked_of(tmp_path / "tiny", scenario)


def test_what_it_was_not_started_for_it_does_not_do(tmp_path):
    async def scenario(client, service):
        assert (await client.post("/sleep", json={})).status_code == 404

    asked_of(tmp_path / "tiny", scenario, may_sleep=False)

    async def deeper(client, service):
        assert (await client.post("/sleep?level=2", json={})).status_code == 400

    asked_of(tmp_path / "tiny", deeper)
