"""`hone serve policy`: one model behind OpenAI's completions and chat completions, sampled by an engine of Hone's.

    service = PolicyService(load)              # `load` makes the engine; it runs once the port is open
    await serve(policy_app(service, lifecycle, settings, tokens), service, lifecycle, settings, name="policy")

Token in, token out underneath: text is tokenised here and nowhere below. The randomness of a token is a function of
the request's seed, the number of its choice within its prompt, and its place: what else is being served does not
change it (the rounding of sums may, where two tokens are next to equally likely). Not here: requests and replies as
such (`openai.py`), who may ask and how a server ends (`http.py`), loading a model (`hone.build`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from hone.data.chat import Tokenizer
from hone.errors import DataError, EngineError
from hone.reward.wire import Message
from hone.rollout import engine as rollout
from hone.rollout.engine import Engine, Sampling
from hone.serve.http import HttpSettings, Lifecycle, Tokens, guarded_app, strict_router, while_connected
from hone.serve.openai import (
    MAX_CHOICES,
    AnswerMessage,
    ChatChoice,
    ChatLogprobs,
    ChatReply,
    ChatRequest,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    CompletionRequest,
    ModelCard,
    ModelList,
    OpenAIProblem,
    SamplingRequest,
    Usage,
)
from hone.types import Prompt, Sample

RETRY_AFTER_S = 1.0
_UNIONS = {
    "prompt": "send one text, one list of token ids, or a list of either",
    "stop": "send one text, or a list of at most 16",
}


@dataclass(frozen=True)
class Policy:
    """A model that is ready to be sampled from."""

    name: str
    """What requests and replies call it."""
    engine: Engine
    tokenizer: Tokenizer
    context_tokens: int
    """Most tokens of a prompt and its sample together."""
    vocab_size: int


class PolicyService:
    """Samples for requests (`http.Service`).

    Args:
        load: makes the policy; runs in a thread.
        max_waiting_samples: samples that are being drawn or wait for it; requests beyond that are refused (503).
    """

    def __init__(self, load: Callable[[], Policy], *, max_waiting_samples: int = 4096) -> None:
        self._load, self._max_waiting = load, max_waiting_samples
        self._policy: Policy | None = None
        self._waiting = 0
        self._created = int(time.time())

    async def start(self) -> None:
        """Load the model, and prove that it samples."""
        self._policy = await asyncio.to_thread(self._load)
        greedy = Sampling(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, stop=(), stop_token_ids=())
        await self._draw([(self.policy.tokenizer.eos_id,)], greedy, num_samples=1, seed=0)

    async def close(self) -> None:
        if self._policy is not None:
            await self._policy.engine.close()

    @property
    def policy(self) -> Policy:
        assert self._policy is not None, "the guard lets nobody in before the start"
        return self._policy

    @property
    def is_loaded(self) -> bool:
        return self._policy is not None

    def models(self) -> ModelList:
        policy = self.policy
        card = ModelCard(
            id=policy.name,
            created=self._created,
            max_model_len=policy.context_tokens,
            weight_version=policy.engine.version,
        )
        return ModelList(data=[card])

    async def complete(self, asked: CompletionRequest) -> CompletionReply:
        """Answer `/v1/completions`. Raises OpenAIProblem."""
        prompts = [self._prompt_ids(prompt) for prompt in asked.prompts]
        if not prompts or len(prompts) * asked.n > MAX_CHOICES:
            raise _wrong("prompt", f"{len(prompts)} prompts x n = {asked.n}: need 1 to {MAX_CHOICES} samples")
        drawn = await self._sample(asked, prompts, asked.max_tokens)
        choices = [
            CompletionChoice(
                **self._choice(asked, number * asked.n + place, sample),
                text=_answer_text(sample, asked),
                logprobs=self._logprobs(sample) if asked.logprobs is not None else None,
                prompt_token_ids=list(ids) if asked.return_token_ids else None,
            )
            for number, (ids, samples) in enumerate(zip(prompts, drawn.samples, strict=True))
            for place, sample in enumerate(samples)
        ]
        return CompletionReply(choices=choices, **self._reply("cmpl", prompts, drawn))

    async def chat(self, asked: ChatRequest) -> ChatReply:
        """Answer `/v1/chat/completions`. Raises OpenAIProblem."""
        ids = self._chat_ids(asked.messages)
        limits = [limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None]
        drawn = await self._sample(asked, [ids], min(limits, default=None))
        choices = [
            ChatChoice(
                **self._choice(asked, number, sample),
                message=AnswerMessage(content=_answer_text(sample, asked)),
                logprobs=self._chat_logprobs(sample) if asked.logprobs else None,
            )
            for number, sample in enumerate(drawn.samples[0])
        ]
        shown = list(ids) if asked.return_token_ids else None
        return ChatReply(choices=choices, prompt_token_ids=shown, **self._reply("chatcmpl", [ids], drawn))

    # ---- prompts

    def _prompt_ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        tokenizer = self.policy.tokenizer
        if isinstance(prompt, str):
            try:
                ids = tokenizer.encode_prompts([prompt], rendered=False)[0]
            except DataError as error:
                raise _wrong("prompt", str(error)) from error
        else:
            ids, size = prompt, self.policy.vocab_size
            unknown = next((token for token in ids if not 0 <= token < size), None)
            if unknown is not None:
                raise _wrong("prompt", f"token {unknown} is not in the vocabulary of {size} tokens")
        if not ids:
            raise _wrong("prompt", "it has no tokens; there is nothing to predict from")
        return tuple(ids)

    def _chat_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        tokenizer = self.policy.tokenizer
        plain = [message.model_dump() | {"content": _text_of(message, at)} for at, message in enumerate(messages)]
        try:
            return tuple(tokenizer.encode_prompts([tokenizer.render(plain)], rendered=True)[0])
        except jinja2.TemplateError as error:
            raise _wrong("messages", f"the chat template refuses them: {error}") from error
        except DataError as error:
            raise _wrong("messages", str(error)) from error

    # ---- samples

    async def _sample(
        self, asked: SamplingRequest, prompts: Sequence[tuple[int, ...]], max_tokens: int | None
    ) -> Drawn:
        """Samples for each prompt; refuses what cannot be drawn before any is."""
        if asked.model not in (None, self.policy.name):
            raise OpenAIProblem(404, "model-not-found", f"this server has {self.policy.name!r} alone", param="model")
        room = self.policy.context_tokens - max(map(len, prompts))
        if (max_tokens or 1) > room:
            raise self._overflow(max(map(len, prompts)), max_tokens)
        sampling = _sampling(asked, max_tokens or room)
        seed = asked.seed if asked.seed is not None else secrets.randbits(48)
        samples = await self._draw(prompts, sampling, num_samples=asked.n, seed=seed)
        return Drawn(samples, seed)

    def _overflow(self, prompt_tokens: int, max_tokens: int | None) -> OpenAIProblem:
        context = self.policy.context_tokens
        wanted = f"max_tokens {max_tokens}" if max_tokens else "at least 1 for the answer"
        total = prompt_tokens + (max_tokens or 1)
        detail = f"prompt {prompt_tokens} + {wanted} = {total} tokens, more than the context of {context}"
        return OpenAIProblem(400, "context-length-exceeded", detail, param="max_tokens" if max_tokens else None)

    async def _draw(
        self, prompts: Sequence[tuple[int, ...]], sampling: Sampling, *, num_samples: int, seed: int
    ) -> list[tuple[Sample, ...]]:
        """`num_samples` of each prompt. All prompts are one engine's batch; cancelling frees its rows."""
        count = len(prompts) * num_samples
        if self._waiting and self._waiting + count > self._max_waiting:
            detail = f"{self._waiting} samples are waiting; {self._max_waiting} may"
            raise OpenAIProblem(503, "queue-full", detail, retryable=True, retry_after_s=RETRY_AFTER_S)
        self._waiting += count
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.policy.engine.generate(_request(ids, sampling, num_samples, seed)))
                    for ids in prompts
                ]
        except* EngineError as errors:
            raise OpenAIProblem(500, "engine-failed", str(errors.exceptions[0])) from errors
        finally:
            self._waiting -= count
        return [task.result() for task in tasks]

    # ---- replies

    def _reply(self, kind: str, prompts: Sequence[tuple[int, ...]], drawn: Drawn) -> dict[str, Any]:
        samples = [sample for group in drawn.samples for sample in group]
        prompt_tokens, tokens = sum(map(len, prompts)), sum(len(sample.token_ids) for sample in samples)
        return {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.policy.name,
            "usage": Usage(prompt_tokens=prompt_tokens, completion_tokens=tokens, total_tokens=prompt_tokens + tokens),
            "weight_version": max(sample.versions[-1] for sample in samples),
            "seed": drawn.seed,
        }

    def _choice(self, asked: SamplingRequest, index: int, sample: Sample) -> dict[str, Any]:
        told = {"token_ids": list(sample.token_ids), "weight_versions": list(sample.versions)}
        return {"index": index, "finish_reason": sample.finish_reason} | (told if asked.return_token_ids else {})

    def _logprobs(self, sample: Sample) -> CompletionLogprobs:
        tokens = self._token_texts(sample)
        starts = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
        return CompletionLogprobs(tokens=tokens, token_logprobs=list(sample.sampler_logprobs), text_offset=starts)

    def _chat_logprobs(self, sample: Sample) -> ChatLogprobs:
        pairs = zip(self._token_texts(sample), sample.sampler_logprobs, strict=True)
        content = [ChatTokenLogprob(token=text, logprob=value, bytes=list(text.encode())) for text, value in pairs]
        return ChatLogprobs(content=content)

    def _token_texts(self, sample: Sample) -> list[str]:
        backend = self.policy.tokenizer.hf.backend_tokenizer
        return [backend.decode([token], skip_special_tokens=False) for token in sample.token_ids]


@dataclass(frozen=True)
class Drawn:
    """The samples of each prompt, and the seed that they were drawn with."""

    samples: list[tuple[Sample, ...]]
    seed: int


def _request(ids: tuple[int, ...], sampling: Sampling, num_samples: int, seed: int) -> rollout.Request:
    # Index 0 for every prompt: a sample is the same whether its prompt was asked alone or with others.
    return rollout.Request(Prompt("request", 0, "", ids), num_samples, sampling, seed, "eval")


def _sampling(asked: SamplingRequest, max_tokens: int) -> Sampling:
    try:
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_k=max(0, asked.top_k or 0),
            top_p=1.0 if asked.top_p is None else asked.top_p,
            min_p=asked.min_p or 0.0,
            stop=asked.stop_texts,
            stop_token_ids=tuple(asked.stop_token_ids or ()),
        )
    except ValueError as error:
        raise OpenAIProblem(400, "bad-request", str(error)) from error


def _text_of(message: Message, at: int) -> str:
    """A message's content as one text. Raises OpenAIProblem for pictures and the like."""
    match message.content:
        case str(text):
            return text
        case [*parts] if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            return "".join(part["text"] for part in parts)
    raise _wrong(f"messages/{at}/content", "send text; this server reads no pictures, sounds or tool calls")


def _answer_text(sample: Sample, asked: SamplingRequest) -> str:
    """The sample's text, without the stop string that ended it: of several that end there, without the longest."""
    if asked.include_stop_str_in_output or sample.finish_reason != "stop":
        return sample.text
    ending = max((stop for stop in asked.stop_texts if sample.text.endswith(stop)), key=len, default="")
    return sample.text.removesuffix(ending)


def _wrong(param: str, detail: str) -> OpenAIProblem:
    return OpenAIProblem(400, "bad-request", f"{param}: {detail}", param=param)


def policy_app(service: PolicyService, lifecycle: Lifecycle, settings: HttpSettings, tokens: Tokens) -> FastAPI:
    """The routes of a policy server."""
    app, router = guarded_app("hone-policy", lifecycle, settings, tokens), strict_router()
    app.add_exception_handler(RequestValidationError, _refused_body)

    @router.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> CompletionReply:
        """Samples that go on from a text or from token ids."""
        return await while_connected(request, service.complete(asked))

    @router.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> ChatReply:
        """Answers to a conversation, through the model's chat template."""
        return await while_connected(request, service.chat(asked))

    @app.get("/v1/models")
    async def models() -> ModelList:
        """The one model that is served."""
        if not service.is_loaded:
            raise OpenAIProblem(503, "starting", "the model is being loaded", retryable=True, retry_after_s=2)
        return service.models()

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        """Whether the process answers at all."""
        return {"status": "alive"}

    @app.get("/health")
    @app.get("/readyz")
    async def health() -> Response:
        """200 once the model has sampled and until the server drains, else 503."""
        ready = lifecycle.phase == "ready"
        body = {
            "status": "healthy" if ready else lifecycle.phase,
            "model_loaded": service.is_loaded,
            "uptime_s": round(time.monotonic() - lifecycle.started_at, 1),
            "in_flight": lifecycle.in_flight,
        }
        return JSONResponse(body, 200 if ready else 503)

    app.include_router(router)
    return app


def _refused_body(request: Request, error: Exception) -> Response:
    """What pydantic refuses is 400 here, as OpenAI's clients expect it."""
    assert isinstance(error, RequestValidationError)
    first, *others = error.errors()
    place = "/".join(str(part) for part in first["loc"][1:])
    said = "unknown field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    more = f" (and {len(others)} more)" if others else ""
    union = next((field for field in _UNIONS if place.startswith(f"{field}/")), None)
    if union is not None:  # pydantic says what is wrong with each of the forms
        place, said, more = union, _UNIONS[union], ""
    problem = OpenAIProblem(400, "bad-request", f"{place or 'body'}: {said}{more}", param=place or None)
    return problem.response(request.state.request_id)
