"""Prompts of requests: text, token ids or conversations with pictures, tokenised without holding up other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hone.data.chat import TemplateRefusal, Tokenizer
from hone.data.pictures import BrokenPicture, with_picture_tokens
from hone.errors import DataError
from hone.reward.wire import Message
from hone.serve.openai import MAX_CHOICES, ChatRequest, CompletionRequest, OpenAIProblem
from hone.types import Picture, Prompt

TOKENIZED_AT_ONCE = 1 << 14
"""Characters or ids of a request: some 10 ms. More are tokenised in a thread, while others are answered."""

T = TypeVar("T")


class PromptReader:
    """Makes prompts for one model of what requests hold. All methods raise OpenAIProblem for what is not a prompt.

    Args:
        context_tokens: most tokens of a prompt and its sample together.
        picture: reads what a part of a message says that a picture is; raises BrokenPicture. None: no pictures.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context_tokens: int,
        vocab_size: int,
        picture: Callable[[Any], Picture] | None,
    ) -> None:
        self._tokenizer, self._context_tokens, self._vocab_size = tokenizer, context_tokens, vocab_size
        self._read_picture = picture
        self._longest_token = max(map(len, tokenizer.hf.get_vocab()))
        """In characters."""
        self._thread = ThreadPoolExecutor(1, "tokenizing")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self, asked: CompletionRequest) -> list[Prompt]:
        prompts = asked.prompts
        if not prompts or len(prompts) * asked.n > MAX_CHOICES:
            raise _wrong("prompt", f"{len(prompts)} prompts x n = {asked.n}: need 1 to {MAX_CHOICES} samples")
        for prompt in prompts:
            self._refuse_overlong("prompt", prompt)
        return await self._off_loop(sum(map(len, prompts)), lambda: [prompt_of(self._prompt_ids(p)) for p in prompts])

    def _refuse_overlong(self, param: str, prompt: str | list[int]) -> None:
        """Raises OpenAIProblem for what cannot fit into the context, whatever its tokens are."""
        context = self._context_tokens
        most, unit = (context * self._longest_token, "characters") if isinstance(prompt, str) else (context, "tokens")
        if len(prompt) > most:
            detail = f"{param}: {len(prompt)} {unit} do not fit into the context of {context} tokens"
            raise OpenAIProblem(400, "context-length-exceeded", detail, param=param)

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        """What `work` on `size` characters returns; above a bound it runs in a thread, one request at a time."""
        if size <= TOKENIZED_AT_ONCE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        tokenizer = self._tokenizer
        if isinstance(prompt, str):
            try:
                ids = tokenizer.encode_prompts([prompt], rendered=False)[0]
            except DataError as error:
                raise _wrong("prompt", str(error)) from error
        else:
            ids, size = prompt, self._vocab_size
            unknown = next((token for token in ids if not 0 <= token < size), None)
            if unknown is not None:
                raise _wrong("prompt", f"token {unknown} is not in the vocabulary of {size} tokens")
        if not ids:
            raise _wrong("prompt", "it has no tokens; there is nothing to predict from")
        return ids

    async def read_chat(self, asked: ChatRequest) -> Prompt:
        sees = self._read_picture is not None
        contents = [_parts_of(message, at, sees=sees) for at, message in enumerate(asked.messages)]
        self._refuse_overlong(
            "messages", "".join(part["text"] for parts in contents for part in parts if "text" in part)
        )
        size = sum(len(str(value)) for parts in contents for part in parts for value in part.values())
        return await self._off_loop(size + len(contents), partial(self._rendered, asked, contents))

    def _rendered(self, asked: ChatRequest, contents: Sequence[list[dict[str, Any]]]) -> Prompt:
        tokenizer, pictures, plain = self._tokenizer, list[Picture](), []
        for at, (message, parts) in enumerate(zip(asked.messages, contents, strict=True)):
            own = [self._picture(part["image"], at) for part in parts if part["type"] == "image"]
            shown = [{"type": "image"} if part["type"] == "image" else part for part in parts]
            content = shown if own else "".join(part["text"] for part in parts)
            plain.append(message.model_dump() | {"content": content})
            pictures += own
        try:
            (ids,) = tokenizer.encode_prompts([tokenizer.render(plain, asked.chat_template_kwargs)], rendered=True)
            if not pictures:
                return prompt_of(ids)
            return prompt_of(*with_picture_tokens(ids, pictures, tokenizer.picture_tokens))
        except (TemplateRefusal, DataError, BrokenPicture) as error:
            raise _wrong("messages", str(error)) from error

    def _picture(self, value: Any, at: int) -> Picture:
        assert self._read_picture is not None
        try:
            return self._read_picture(value)
        except BrokenPicture as error:
            raise _wrong(f"messages/{at}/content", f"picture: {error}") from error


def prompt_of(ids: Sequence[int], pictures: tuple[Picture, ...] = ()) -> Prompt:
    # Index 0 for every prompt: a sample is the same whether its prompt was asked alone or with others.
    return Prompt("request", 0, "", np.array(ids, np.int32), pictures=pictures)


def _parts_of(message: Message, at: int, *, sees: bool) -> list[dict[str, Any]]:
    """A message's content as parts {"type": "text", "text"} and {"type": "image", "image"}.

    Args:
        sees: whether the model reads pictures.
    Raises:
        OpenAIProblem: anything else, and pictures for a model that reads none.
    """
    if isinstance(message.content, str):
        return [{"type": "text", "text": message.content}]
    found: list[dict[str, Any]] = []
    for part in message.content if isinstance(message.content, list) else [None]:
        match part:
            case {"text": str(text)}:
                found.append({"type": "text", "text": text})
            case {"type": "image_url", "image_url": {"url": str(url)} | str(url)} if sees:
                found.append({"type": "image", "image": url})
            case {"type": "image", "image": str(url)} if sees:
                found.append({"type": "image", "image": url})
            case _:
                reads = "text and pictures; this server reads no" if sees else "text; this server reads no pictures,"
                raise _wrong(f"messages/{at}/content", f"send {reads} sounds or tool calls")
    return found


def _wrong(param: str, detail: str) -> OpenAIProblem:
    return OpenAIProblem(400, "bad-request", f"{param}: {detail}", param=param)
