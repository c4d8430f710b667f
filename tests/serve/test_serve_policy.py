"""`hone serve policy` in a process of its own: token ids and logprobs against the engine and a float64 reference, and
what it refuses."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.assemble.policy_server import PolicySettings, find_weights, loader
from hone.data.chat import character_tokenizer
from hone.errors import DataError
from hone.model.load import init_model, save_hf
from hone.reward.judge.scorer import JudgeReward
from hone.rollout.engine import Request, Sampling
from hone.serve.openai import CompletionRequest
from hone.serve.policy import PolicyService
from hone.serve.streaming import GrowingText
from hone.types import Fault, Group, Prompt, Sample, Score, VersionSpan

CHARACTERS = "0123456789+-*/= abcdefghijklmnopqrstuvwxyz\n"
CONTEXT = 96


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """Two random layers, a tokenizer of characters, and a chat template that writes messages one after the other."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    config = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    model = init_model(config, vocab_size=len(tokenizer), seed=0, dtype=torch.float32, device="cpu")
    save_hf(folder, model.hf_config, model.named_weights(), tokenizer)
    return folder


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory) -> Path:
    """A model made by hand: each token has one that follows it, so that after a line it says `\\boxed{8}` and ends."""
    tokenizer = character_tokenizer("\n" + "".join(map(chr, range(32, 127))))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    size, says = 128, [*tokenizer.encode("\n\\boxed{8}"), tokenizer.eos_token_id]
    config = {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    model = init_model(config, vocab_size=len(tokenizer), seed=0, dtype=torch.float32, device="cpu")
    weights = dict(model.named_weights())
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] = torch.zeros_like(weights[name])  # what the token is, is all that is left
    weights["model.embed_tokens.weight"] = torch.eye(len(tokenizer), size)
    follows = torch.zeros(len(tokenizer), size)
    for token, following in itertools.pairwise(says):
        follows[following, token] = 10.0
    weights["lm_head.weight"] = follows
    folder = tmp_path_factory.mktemp("models") / "judge"
    save_hf(folder, model.hf_config, weights.items(), tokenizer)
    return folder


@pytest.fixture(scope="module")
def server(model_folder) -> Iterator[str]:
    """Its base URL; ended by SIGTERM, after which it has drained with 0."""
    with serving(model_folder) as (url, _):
        yield url


class serving:
    """`hone serve policy` on a free port, ready."""

    def __init__(self, folder: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "hone.cli.main",
            "serve",
            "policy",
            str(folder),
            "--port",
            "0",
            "--threads",
            "1",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def __enter__(self) -> tuple[str, subprocess.Popen]:
        lines = self.process.stdout
        assert lines is not None
        url = lines.readline().rpartition(" ")[2].strip()
        assert lines.readline() == "policy: ready\n"
        return url, self.process

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        said, _ = self.process.communicate(timeout=30)
        assert (self.process.returncode, said) == (0, "policy: drained\n")


def complete(server: str, **body: object) -> dict:
    return httpx.post(f"{server}/v1/completions", json=body, timeout=30).raise_for_status().json()


def chat(server: str, content: object, **body: object) -> dict:
    messages = [{"role": "user", "content": content}]
    body = {"messages": messages, **body}
    return httpx.post(f"{server}/v1/chat/completions", json=body, timeout=30).raise_for_status().json()


def reference_logprobs(
    folder: Path, prompt: list[int], tokens: list[int], temperature: float, top_k: int
) -> list[float]:
    """Transformers' own class in float64, and the textbook's formula."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double() / temperature
    if top_k:
        logits[logits < logits.topk(top_k).values[:, -1:]] = -math.inf
    return logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.3, 5)])
def test_tokens_are_the_engines_and_logprobs_those_of_a_float64_reference(server, model_folder, temperature, top_k):
    how = {"temperature": temperature, "top_k": top_k, "max_tokens": 20, "n": 3, "seed": 5, "logprobs": 0}
    reply = complete(server, prompt="48/2=", return_token_ids=True, **how)
    prompt = reply["choices"][0]["prompt_token_ids"]

    async def in_process() -> tuple[Sample, ...]:
        policy = loader(str(model_folder), 0, "tiny", PolicySettings(threads=1))()
        sampling = Sampling(20, temperature, top_k, 1.0, 0.0, (), ())
        request = Request(Prompt("p", 0, "", tuple(prompt)), 3, sampling, 5, "eval")
        try:
            return await policy.engine.generate(request)
        finally:
            await policy.engine.close()

    for choice, sample in zip(reply["choices"], asyncio.run(in_process()), strict=True):
        logprobs = choice["logprobs"]["token_logprobs"]
        assert choice["token_ids"] == list(sample.token_ids)
        assert choice["text"] == sample.text
        assert choice["finish_reason"] == sample.finish_reason
        assert logprobs == pytest.approx(sample.sampler_logprobs, abs=1e-5)
        expected = reference_logprobs(model_folder, prompt, choice["token_ids"], temperature, top_k)
        assert logprobs == pytest.approx(expected, abs=2e-5)
        assert choice["weight_versions"] == [0] * len(sample.token_ids)
    assert reply["weight_version"] == 0
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": sum(len(choice["token_ids"]) for choice in reply["choices"]),
        "total_tokens": 5 + sum(len(choice["token_ids"]) for choice in reply["choices"]),
    }


def test_greedy_takes_the_likeliest_token_of_the_reference(server, model_folder):
    reply = complete(server, prompt="1+2=", temperature=0, max_tokens=8, return_token_ids=True, logprobs=0)
    (choice,) = reply["choices"]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    ids = list(choice["prompt_token_ids"])
    for token in choice["token_ids"]:
        with torch.no_grad():
            assert model(torch.tensor([ids])).logits[0, -1].argmax().item() == token
        ids.append(token)
    found = choice["logprobs"]["token_logprobs"]
    assert found == pytest.approx(
        reference_logprobs(model_folder, choice["prompt_token_ids"], choice["token_ids"], 1, 0)
    )


def test_a_seed_makes_the_same_samples_whatever_else_is_asked(server):
    alone = complete(server, prompt="abc", seed=9, n=2)
    together = complete(server, prompt=["abc", "xy=", "abc"], seed=9, n=2)
    texts = [choice["text"] for choice in together["choices"]]
    assert [choice["text"] for choice in alone["choices"]] == texts[:2] == texts[4:]
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert alone["seed"] == 9
    drawn = complete(server, prompt="abc", n=2)
    again = complete(server, prompt="abc", n=2, seed=drawn["seed"])
    assert again["choices"] == drawn["choices"]


def test_token_ids_text_and_chat_ask_the_same_thing(server):
    text = complete(server, prompt="12\n", seed=1, return_token_ids=True)
    ids = text["choices"][0]["prompt_token_ids"]
    assert complete(server, prompt=ids, seed=1)["choices"][0]["text"] == text["choices"][0]["text"]
    talked = chat(server, "12", seed=1, max_tokens=16, return_token_ids=True)
    assert talked["prompt_token_ids"] == ids
    assert talked["choices"][0]["token_ids"] == text["choices"][0]["token_ids"]
    assert talked["choices"][0]["message"] == {"role": "assistant", "content": text["choices"][0]["text"]}
    parts = chat(server, [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}], seed=1, max_tokens=16)
    assert parts["choices"][0]["message"] == talked["choices"][0]["message"]


def test_a_stop_string_ends_a_sample_and_is_left_out_unless_asked_for(server):
    whole = complete(server, prompt="ab", seed=2, max_tokens=40)["choices"][0]["text"]
    assert len(whole) > 4
    stop = whole[2:4]
    cut = complete(server, prompt="ab", seed=2, max_tokens=40, stop=[stop, "never this"])["choices"][0]
    first = whole.index(stop)
    assert (cut["text"], cut["finish_reason"]) == (whole[:first], "stop")
    kept = complete(server, prompt="ab", seed=2, max_tokens=40, stop=stop, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == whole[:first] + stop


def test_chat_logprobs_are_returned_token_by_token(server):
    (choice,) = chat(server, "1+1=", seed=4, max_tokens=5, logprobs=True)["choices"]
    content = choice["logprobs"]["content"]
    assert (
        "".join(token["token"] for token in content if not token["token"].startswith("<"))
        == choice["message"]["content"]
    )
    assert all(token["logprob"] <= 0 and bytes(token["bytes"]).decode() == token["token"] for token in content)


def test_models_and_health(server):
    (card,) = httpx.get(f"{server}/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["weight_version"]) == ("tiny", CONTEXT, 0)
    assert complete(server, prompt="1", model="tiny")["model"] == "tiny"
    for path in ("/health", "/readyz", "/livez"):
        assert httpx.get(server + path).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "param", "what"),
    [
        ({"prompt": "1+2=", "max_tokens": 93}, 400, "max_tokens", "prompt 4 + max_tokens 93 = 97 tokens, more than"),
        ({"prompt": "1" * 96, "max_tokens": None}, 400, None, "prompt 96 + at least 1 for the answer = 97 tokens"),
        ({"prompt": "1", "model": "gpt-4"}, 404, "model", "this server only has 'tiny'"),
        ({"prompt": "é"}, 400, "prompt", "character 'é'"),
        ({"prompt": ""}, 400, "prompt", "it has no tokens"),
        ({"prompt": []}, 400, "prompt", "0 prompts"),
        ({"prompt": [1, 999]}, 400, "prompt", "token 999 is not in the vocabulary"),
        ({"prompt": ["a", 3]}, 400, "prompt", "send one text"),
        ({}, 400, "prompt", "Field required"),
        ({"prompt": "1", "n": 0}, 400, "n", "greater than or equal to 1"),
        ({"prompt": ["1"] * 600, "n": 2}, 400, "prompt", "600 prompts x n = 2"),
        ({"prompt": "1", "temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ({"prompt": "1", "temperature": "hot"}, 400, "temperature", "valid number"),
        ({"prompt": "1", "stop": ""}, 400, None, "an empty stop string"),
        ({"prompt": "1", "logprobs": 5}, 400, "logprobs", "leave it out or send 0"),
        ({"prompt": "1", "frequency_penalty": 0.5}, 400, "frequency_penalty", "leave it out or send 0"),
        ({"prompt": "1", "echo": True}, 400, "echo", "leave it out or send False"),
        ({"prompt": "1", "best_of": 3}, 400, "best_of", "leave it out or send 1"),
        ({"prompt": "1", "temprature": 1}, 400, "temprature", "unknown field"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server, body, status, param, what):
    reply = httpx.post(f"{server}/v1/completions", json=body)
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/problem+json"
    problem = reply.json()
    assert what in problem["detail"]
    assert problem["error"]["message"] == problem["detail"]
    assert (problem["error"]["param"], problem["status"]) == (param, status)


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "at least 1"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "reads no pictures"),
        ([{"role": "user", "content": None}], "send text"),
        ([{"content": "1"}], "Field required"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(server, messages, what):
    reply = httpx.post(f"{server}/v1/chat/completions", json={"messages": messages})
    assert reply.status_code == 400
    assert what in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("completions", {"prompt": "1" * 4_000_000}, "prompt: 4000000 characters do not fit into the context"),
        ("completions", {"prompt": [2] * 1_000_000}, "prompt: 1000000 tokens do not fit into the context"),
        ("completions", {"prompt": ["1" * 80] * 1000, "n": 2}, "1000 prompts x n = 2"),
        ("completions", {"prompt": ["1" * 4000] * 1025}, "a list of at most 1024"),
        ("chat/completions", {"messages": [{"role": "user", "content": "1" * 4_000_000}]}, "4000000 characters do not"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenised(server, path, body, what):
    """Its characters, prompts or token ids are counted; a tokenised one would be told its tokens."""
    reply = httpx.post(f"{server}/v1/{path}", json=body, timeout=60)
    assert reply.status_code == 400 and what in reply.json()["error"]["message"]


def test_others_are_answered_while_a_long_prompt_is_tokenised(model_folder, monkeypatch):
    policy = loader(str(model_folder), 0, "tiny", PolicySettings(threads=1))()
    tokenizer = policy.tokenizer
    begun, may_end = threading.Event(), threading.Event()
    encode = tokenizer.encode_prompts

    def waits(texts, **how):
        begun.set()
        assert may_end.wait(60), "nothing else ran meanwhile"
        return encode(["1" for _ in texts], **how)

    async def main():
        service = PolicyService(lambda: policy)
        await service.start()
        monkeypatch.setattr(tokenizer, "encode_prompts", waits)
        asked = CompletionRequest(prompt=["1" * 90] * 200, max_tokens=1)
        answer = asyncio.create_task(service.complete(asked))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        may_end.set()
        assert len((await answer).choices) == 200
        await service.close()

    asyncio.run(main())


def test_a_neutral_value_of_what_cannot_be_done_is_taken(server):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": 1, "stream": False, "top_k": -1}
    assert complete(server, prompt="1", user="me", **neutral)["choices"]


# ---- streams


def streamed(server: str, path: str, **body: object) -> list[dict]:
    """The chunks of a stream; that it says so, and that it ends as it must."""
    body = {"stream": True, **body}
    with httpx.stream("POST", f"{server}{path}", json=body, timeout=30) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        *events, last = reply.read().decode().split("\n\n")[:-1]
    assert last == "data: [DONE]" and all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def of_choice(chunks: list[dict], index: int) -> list[dict]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


@pytest.mark.parametrize("stop", [["2"], ["12", "1234567"], ["no such text"], None])
def test_a_streamed_completion_is_the_same_piece_by_piece(server, stop):
    how = {"prompt": ["abc", "48/2="], "n": 2, "seed": 9, "max_tokens": 40, "logprobs": 0, "return_token_ids": True}
    whole = complete(server, stop=stop, **how)
    chunks = streamed(server, "/v1/completions", stop=stop, stream_options={"include_usage": True}, **how)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]} and chunks[0]["object"] == "text_completion"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert {(chunk["seed"], chunk["model"]) for chunk in chunks} == {(9, whole["model"])}
    for choice in whole["choices"]:
        pieces = of_choice(chunks, choice["index"])
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for name in ("token_ids", "weight_versions"):
            assert [value for piece in pieces for value in piece.get(name, ())] == choice[name]
        for name in ("tokens", "token_logprobs", "text_offset"):
            told = [value for piece in pieces if "logprobs" in piece for value in piece["logprobs"][name]]
            assert told == choice["logprobs"][name]
        assert len(pieces) > 2  # token by token, not all at the end


def test_a_streamed_chat_is_the_same_piece_by_piece(server):
    how = {"messages": [{"role": "user", "content": "48/2="}], "seed": 4, "max_tokens": 12, "logprobs": True}
    whole = chat(server, "48/2=", seed=4, max_tokens=12, logprobs=True)["choices"][0]
    chunks = streamed(server, "/v1/chat/completions", **how)
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    pieces = of_choice(chunks, 0)
    assert [piece["delta"].get("role") for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    assert "".join(piece["delta"]["content"] for piece in pieces) == whole["message"]["content"]
    assert [told for p in pieces if "logprobs" in p for told in p["logprobs"]["content"]] == whole["logprobs"][
        "content"
    ]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("wrong", [{"prompt": "1" * 200}, {"prompt": "1", "model": "another"}, {"prompt": []}])
def test_a_stream_that_cannot_begin_is_an_error_and_no_stream(server, wrong):
    reply = httpx.post(f"{server}/v1/completions", json={"stream": True, **wrong})
    assert reply.status_code in (400, 404) and reply.json()["error"]["message"]


def test_stream_options_are_for_streams(server):
    reply = httpx.post(f"{server}/v1/completions", json={"prompt": "1", "stream_options": {"include_usage": True}})
    assert (reply.status_code, "stream: true" in reply.json()["error"]["message"]) == (400, True)


def test_who_leaves_a_stream_frees_its_rows(server):
    """A thousand samples take many times as long as their first token."""
    body = {"prompt": "1", "n": 1024, "max_tokens": 90, "stream": True}
    with httpx.stream("POST", f"{server}/v1/completions", json=body, timeout=30) as reply:
        lines = reply.iter_lines()  # whose end would end the reply
        assert next(lines).startswith("data: ")
        assert httpx.get(f"{server}/health").json()["in_flight"] == 1
    began = time.monotonic()
    while httpx.get(f"{server}/health").json()["in_flight"]:
        assert time.monotonic() - began < 60
        time.sleep(0.02)
    complete(server, prompt="1", max_tokens=2)


def test_text_that_was_reported_stays():
    """Of `é` in two tokens and of `stop` in four, nothing is told before it is certain."""
    tokens = [b"a", b"\xc3", b"\xa9", b"s", b"t", b"a", b"s", b"t", b"o", b"p"]
    text = GrowingText(lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace"), ["stop", "zzz"])
    assert [text.more(place) for place in range(10)] == ["a", "", "é", "", "", "sta", "", "", "", ""]
    assert text.rest("aésta") == "" and text.rest("aéstasto") == "sto"


@pytest.mark.slow("starts a service that loads a model, and scores with it")
def test_a_served_model_judges_end_to_end(judge_folder, tmp_path):
    """Its questions are the built-in ones, through its chat template; its answers are parsed as any judge's."""
    prompt = Prompt("p", 0, "2+2=", (5,), answer="4")
    group = Group(
        prompt,
        tuple(Sample("p", i, (5,), (-0.1,), (VersionSpan(0, 1),), "stop", text) for i, text in enumerate(["4", "5"])),
    )

    async def score(url: str, **args: object) -> tuple[Score, ...]:
        settings = {"url": url, "response_length": 32, "reference": True, **args}
        reward = JudgeReward.from_args(settings, folder=tmp_path, timeout_s=5)
        try:
            return await reward.score(group)
        finally:
            await reward.close()

    with serving(judge_folder) as (url, _):
        scores = asyncio.run(score(url, votes=2, tokenizer=str(judge_folder), max_model_len=4096))
        assert [score.value for score in scores] == [7 / 9, 7 / 9]
        assert {score.metrics["raw"] for score in scores} == {8.0}
        scores = asyncio.run(score(url, response_length=4))
        assert {(score.value, score.fault) for score in scores} == {(None, Fault.INFRA)}
        assert scores[0].metrics["parse_cut"] == 3
        scores = asyncio.run(score(url, mode="groupwise"))  # it gives one score for two responses
        assert {(score.value, score.metrics["parse_count"]) for score in scores} == {(None, 3.0)}


def test_a_run_without_final_weights_is_not_served(tmp_path):
    (tmp_path / ".identity.json").write_text("{}")
    with pytest.raises(DataError, match="no final weights yet"):
        find_weights(str(tmp_path))
    assert find_weights("some/model") == ("some/model", 0)
