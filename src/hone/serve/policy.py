"""`hone serve policy`: one model behind OpenAI's completions and chat completions, sampled by an engine of Hone's.

    service = PolicyService(load)              # `load` makes the engine; it runs once the port is open
    reply = await service.complete(CompletionRequest(prompt="48/2="))

Token in, token out underneath: text is tokenised here and nowhere below. The randomness of a token is a function of
the request's seed, the number of its choice within its prompt, and its place: what else is being served does not
change it (the rounding of sums may, where two tokens are next to equally likely). Not here: requests and replies as
such (`openai.py`), routes (`policy_app.py`), access (`http.py`), loading a model (`hone.assemble`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from hone.data.chat import Tokenizer
from hone.errors import EngineError
from hone.rollout import engine as rollout
from hone.rollout.engine import Sampling, Token, TokenwiseEngine
from hone.serve.metrics import PolicyMetrics
from hone.serve.openai import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    ChatRequest,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionReply,
    CompletionRequest,
    Delta,
    ModelCard,
    ModelList,
    OpenAIProblem,
    SamplingRequest,
    Usage,
)
from hone.serve.prompt_reader import PromptReader, prompt_of
from hone.serve.streaming import GrowingText, News, OnPart, StreamedChoice, as_drawn
from hone.types import Picture, Prompt, Sample

RETRY_AFTER_S = 1.0
SLEEP_POLL_S = 0.01


@dataclass(frozen=True)
class Policy:
    """A model that is ready to be sampled from."""

    name: str
    """What requests and replies call it."""
    engine: TokenwiseEngine
    tokenizer: Tokenizer
    context_tokens: int
    """Most tokens of a prompt and its sample together."""
    vocab_size: int
    memory_bytes: Callable[[], float]
    """Memory that it holds now, on its device."""
    move: Callable[[bool], None]
    """Put the weights on its device (True) or on the host; in a thread, while nothing is drawn."""
    picture: Callable[[Any], Picture] | None = None
    """Reads what a part of a message says that a picture is; raises BrokenPicture. None: prompts cannot have any."""


class PolicyService:
    """Samples for requests (`running.Servable`).

    Args:
        load: makes the policy; runs in a thread.
        max_waiting_samples: samples that are being drawn or wait for it; requests beyond that are refused (503).
    """

    def __init__(self, load: Callable[[], Policy], *, max_waiting_samples: int = 4096) -> None:
        self._load, self._max_waiting = load, max_waiting_samples
        self._policy: Policy | None = None
        self._reader: PromptReader | None = None
        self._waiting = 0
        self.is_asleep = False
        self._moving = asyncio.Lock()
        self._created = int(time.time())
        self.metrics = PolicyMetrics(
            memory_bytes=lambda: self.policy.memory_bytes() if self.is_loaded else 0.0, waiting=lambda: self._waiting
        )

    async def start(self) -> None:
        """Load the model and sample once."""
        policy = self._policy = await asyncio.to_thread(self._load)
        self._reader = PromptReader(
            policy.tokenizer,
            context_tokens=policy.context_tokens,
            vocab_size=policy.vocab_size,
            picture=policy.picture,
        )
        greedy = Sampling(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, stop=(), stop_token_ids=())
        await self._draw([prompt_of([policy.tokenizer.eos_id])], greedy, num_samples=1, seed=0)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._policy is not None:
            await self._policy.engine.close()

    async def sleep(self) -> None:
        """Give the device's memory back once everything that is being drawn is: what is asked from now on is refused
        (503). Weights wait on the host."""
        async with self._moving:
            self.is_asleep = True
            while self._waiting:
                await asyncio.sleep(SLEEP_POLL_S)
            await self.policy.engine.sleep()
            await asyncio.to_thread(self.policy.move, False)

    async def wake(self) -> None:
        """Restore the model onto the device."""
        async with self._moving:
            await asyncio.to_thread(self.policy.move, True)
            await self.policy.engine.wake()
            self.is_asleep = False

    @property
    def policy(self) -> Policy:
        assert self._policy is not None, "requests are rejected before the start"
        return self._policy

    @property
    def reader(self) -> PromptReader:
        assert self._reader is not None, "requests are rejected before the start"
        return self._reader

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
        prompts = await self.reader.read(asked)
        drawn, seed = await self._sample(asked, prompts, asked.max_tokens)
        choices = [
            CompletionChoice(
                **self._choice(asked, number * asked.n + place, sample),
                text=_answer_text(sample, asked),
                logprobs=self._logprobs(_tokens(sample)) if asked.logprobs is not None else None,
                prompt_token_ids=prompt.token_ids.tolist() if asked.return_token_ids else None,
            )
            for number, (prompt, samples) in enumerate(zip(prompts, drawn, strict=True))
            for place, sample in enumerate(samples)
        ]
        return CompletionReply(choices=choices, **self._reply("cmpl", prompts, drawn, seed))

    async def chat(self, asked: ChatRequest) -> ChatReply:
        """Answer `/v1/chat/completions`. Raises OpenAIProblem."""
        prompt = await self.reader.read_chat(asked)
        drawn, seed = await self._sample(asked, [prompt], _chat_limit(asked))
        choices = [
            ChatChoice(
                **self._choice(asked, number, sample),
                message=AnswerMessage(content=_answer_text(sample, asked)),
                logprobs=self._chat_logprobs(_tokens(sample)) if asked.logprobs else None,
            )
            for number, sample in enumerate(drawn[0])
        ]
        shown = prompt.token_ids.tolist() if asked.return_token_ids else None
        return ChatReply(choices=choices, prompt_token_ids=shown, **self._reply("chatcmpl", [prompt], drawn, seed))

    async def stream_completion(self, asked: CompletionRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Answer `/v1/completions` piece by piece. Raises OpenAIProblem, before the first piece if it can."""
        prompts = await self.reader.read(asked)
        head: dict[str, Any] = {"id": f"cmpl-{uuid.uuid4().hex}"}
        async for news, common in self._stream(asked, prompts, asked.max_tokens, head):
            fields = self._chunk_fields(asked, news)
            if asked.logprobs is not None and news.tokens:
                fields["logprobs"] = self._logprobs(news.tokens, news.text_before)
            if asked.return_token_ids and news.is_first:
                fields["prompt_token_ids"] = prompts[news.index // asked.n].token_ids.tolist()
            choice = CompletionChunkChoice(text=news.text, **fields)
            yield CompletionChunk(object="text_completion", choices=[choice], **common)
        if asked.stream_options and asked.stream_options.include_usage:
            yield CompletionChunk(object="text_completion", choices=[], **head)

    async def stream_chat(self, asked: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        """Answer `/v1/chat/completions` piece by piece. Raises as `stream_completion`."""
        prompt = await self.reader.read_chat(asked)
        head: dict[str, Any] = {"id": f"chatcmpl-{uuid.uuid4().hex}"}
        async for news, common in self._stream(asked, [prompt], _chat_limit(asked), head):
            role: dict[str, Any] = {"role": "assistant"} if news.is_first else {}
            fields = self._chunk_fields(asked, news)
            if asked.logprobs and news.tokens:
                fields["logprobs"] = self._chat_logprobs(news.tokens)
            if asked.return_token_ids and news.is_first:
                common["prompt_token_ids"] = prompt.token_ids.tolist()
            choice = ChatChunkChoice(delta=Delta(content=news.text, **role), **fields)
            yield ChatChunk(object="chat.completion.chunk", choices=[choice], **common)
        if asked.stream_options and asked.stream_options.include_usage:
            yield ChatChunk(object="chat.completion.chunk", choices=[], **head)

    async def _stream(
        self, asked: SamplingRequest, prompts: Sequence[Prompt], max_tokens: int | None, head: dict[str, Any]
    ) -> AsyncIterator[tuple[News, dict[str, Any]]]:
        """News of each choice, and what their chunks have in common; `head` is filled with that, at last with usage."""
        sampling, seed = self._sampling(asked, prompts, max_tokens)
        head |= {"created": int(time.time()), "model": self.policy.name, "seed": seed}
        stop = () if asked.include_stop_str_in_output else asked.stop_texts
        choices = [
            StreamedChoice(index, GrowingText(self.policy.tokenizer.decode, stop))
            for index in range(len(prompts) * asked.n)
        ]
        num_tokens = 0

        async def draw(on_part: OnPart) -> None:
            await self._draw(prompts, sampling, num_samples=asked.n, seed=seed, on_part=on_part)

        async with aclosing(as_drawn(draw)) as drawn:
            async for number, what in drawn:
                if isinstance(what, Sample):
                    choice = choices[number * asked.n + what.index]
                    num_tokens += len(what.token_ids)
                    yield (
                        choice.end(what, _answer_text(what, asked)),
                        head | {"weight_version": what.versions[-1].version},
                    )
                    continue
                choice = choices[number * asked.n + what.sample_index]
                if (news := choice.token(what, self._token_texts([what.id])[0])) is not None:
                    yield news, head | {"weight_version": what.version}
        head["usage"] = _usage(prompts, num_tokens)

    def _chunk_fields(self, asked: SamplingRequest, news: News) -> dict[str, Any]:
        """Fields that both kinds of chunk share."""
        fields: dict[str, Any] = {"index": news.index, "finish_reason": news.finish_reason}
        if asked.return_token_ids and news.tokens:
            fields["token_ids"] = [token.id for token in news.tokens]
            fields["weight_versions"] = [token.version for token in news.tokens]
        return fields

    # ---- samples

    async def _sample(
        self, asked: SamplingRequest, prompts: Sequence[Prompt], max_tokens: int | None
    ) -> tuple[list[tuple[Sample, ...]], int]:
        """The samples of each prompt, and the seed that they were drawn with."""
        sampling, seed = self._sampling(asked, prompts, max_tokens)
        return await self._draw(prompts, sampling, num_samples=asked.n, seed=seed), seed

    def _sampling(
        self, asked: SamplingRequest, prompts: Sequence[Prompt], max_tokens: int | None
    ) -> tuple[Sampling, int]:
        """How to draw what is asked for, and the seed. Raises OpenAIProblem for what cannot be drawn."""
        if asked.model not in (None, self.policy.name):
            raise OpenAIProblem(404, "model-not-found", f"this server only has {self.policy.name!r}", param="model")
        longest = max(len(prompt.token_ids) for prompt in prompts)
        room = self.policy.context_tokens - longest
        if (max_tokens or 1) > room:
            wanted = f"max_tokens {max_tokens}" if max_tokens else "at least 1 for the answer"
            total, context = longest + (max_tokens or 1), self.policy.context_tokens
            detail = f"prompt {longest} + {wanted} = {total} tokens, more than the context of {context}"
            raise OpenAIProblem(400, "context-length-exceeded", detail, param="max_tokens" if max_tokens else None)
        try:
            sampling = Sampling(
                max_tokens=max_tokens or room,
                temperature=1.0 if asked.temperature is None else asked.temperature,
                top_k=max(0, asked.top_k or 0),
                top_p=1.0 if asked.top_p is None else asked.top_p,
                min_p=asked.min_p or 0.0,
                stop=asked.stop_texts,
                stop_token_ids=tuple(asked.stop_token_ids or ()),
            )
        except ValueError as error:
            raise OpenAIProblem(400, "bad-request", str(error)) from error
        return sampling, asked.seed if asked.seed is not None else secrets.randbits(48)

    async def _draw(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_samples: int,
        seed: int,
        on_part: OnPart | None = None,
    ) -> list[tuple[Sample, ...]]:
        """`num_samples` of each prompt; `on_part` gets each token and sample with the number of its prompt.

        All prompts are one engine's batch; cancelling frees its rows.
        """
        count = len(prompts) * num_samples
        if self.is_asleep:
            detail = "the model's memory is in use by another role until /wake_up"
            raise OpenAIProblem(503, "asleep", detail, retryable=True, retry_after_s=RETRY_AFTER_S)
        if self._waiting and self._waiting + count > self._max_waiting:
            detail = f"{self._waiting} samples are waiting; {self._max_waiting} may"
            raise OpenAIProblem(503, "queue-full", detail, retryable=True, retry_after_s=RETRY_AFTER_S)
        self._waiting += count
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self.policy.engine.generate(
                            rollout.Request(prompt, num_samples, sampling, seed, "eval"),
                            on_sample=partial(on_part, number) if on_part else None,
                            on_token=partial(on_part, number) if on_part else None,
                        )
                    )
                    for number, prompt in enumerate(prompts)
                ]
        except* EngineError as errors:
            raise OpenAIProblem(500, "engine-failed", str(errors.exceptions[0])) from errors
        finally:
            self._waiting -= count
        drawn = [task.result() for task in tasks]
        samples = [sample for group in drawn for sample in group]
        self.metrics.answered(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            completion_tokens=sum(len(sample.token_ids) for sample in samples),
            samples=len(samples),
        )
        return drawn

    # ---- replies

    def _reply(
        self, kind: str, prompts: Sequence[Prompt], drawn: Sequence[tuple[Sample, ...]], seed: int
    ) -> dict[str, Any]:
        samples = [sample for group in drawn for sample in group]
        return {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.policy.name,
            "usage": _usage(prompts, sum(len(sample.token_ids) for sample in samples)),
            "weight_version": max(sample.versions[-1].version for sample in samples),
            "seed": seed,
        }

    def _choice(self, asked: SamplingRequest, index: int, sample: Sample) -> dict[str, Any]:
        fields = {"token_ids": sample.token_ids.tolist(), "weight_versions": sample.token_versions()}
        return {"index": index, "finish_reason": sample.finish_reason} | (fields if asked.return_token_ids else {})

    def _logprobs(self, tokens: Sequence[Token], text_before: int = 0) -> CompletionLogprobs:
        texts = self._token_texts([token.id for token in tokens])
        starts = [text_before + sum(map(len, texts[:place])) for place in range(len(texts))]
        return CompletionLogprobs(
            tokens=texts, token_logprobs=[token.logprob for token in tokens], top_logprobs=None, text_offset=starts
        )

    def _chat_logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs:
        texts = self._token_texts([token.id for token in tokens])
        return ChatLogprobs(
            content=[
                ChatTokenLogprob(token=text, logprob=token.logprob, bytes=list(text.encode()), top_logprobs=[])
                for text, token in zip(texts, tokens, strict=True)
            ]
        )

    def _token_texts(self, ids: Sequence[int]) -> list[str]:
        backend = self.policy.tokenizer.hf.backend_tokenizer
        return [backend.decode([token], skip_special_tokens=False) for token in ids]


def _tokens(sample: Sample) -> list[Token]:
    per_token = zip(sample.token_ids.tolist(), sample.sampler_logprobs.tolist(), sample.token_versions(), strict=True)
    return [Token(sample.index, place, *values) for place, values in enumerate(per_token)]


def _usage(prompts: Sequence[Prompt], tokens: int) -> Usage:
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=tokens, total_tokens=prompt_tokens + tokens)


def _chat_limit(asked: ChatRequest) -> int | None:
    limits = [limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None]
    return min(limits, default=None)


def _answer_text(sample: Sample, asked: SamplingRequest) -> str:
    """The sample's text, without the stop string that ended it: of several that end there, without the longest."""
    if asked.include_stop_str_in_output or sample.finish_reason != "stop":
        return sample.text
    ending = max((stop for stop in asked.stop_texts if sample.text.endswith(stop)), key=len, default="")
    return sample.text.removesuffix(ending)
