"""A small client of OpenAI-compatible chat completions, for judges: one question, one answer, as it was said.

    judge = ChatClient(["http://127.0.0.1:8000"], model="deepseek-grm")
    answer = await judge.ask([{"role": "user", "content": "..."}], {"temperature": 1.0, "seed": 7}, deadline_s=60)

What an answer means, and whether to ask again, is the caller's business; how requests travel is `http.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.reward.http import FIRST_BACKOFF_S, Counts, Endpoints, Refused, Unavailable, token_from

__all__ = ["ChatAnswer", "ChatClient", "Refused", "Unavailable", "token_from"]

CHAT_PATH = "/v1/chat/completions"
MAX_REPLY_BYTES = 8 << 20
METRICS_PATH, METRICS_TIMEOUT_S = "/metrics", 2.0


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One choice of a chat completion."""

    text: str
    """Empty when the model gave none, as in a refusal."""
    finish_reason: str | None
    prompt_tokens: int = 0
    """As the endpoint counts them; 0 where it does not say."""
    completion_tokens: int = 0


class ChatClient:
    """Asks one or several endpoints of the same model. Use in one event loop; `close` when done.

    Args:
        urls: base URLs; a `/v1` at their end is the same as none.
        model: as requests name it; None leaves it to the endpoint.
    Raises:
        ValueError: no URL, or one that cannot be used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str | None,
        token: str | None = None,
        max_in_flight: int = 64,
        first_backoff_s: float = FIRST_BACKOFF_S,
    ) -> None:
        bases = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._endpoints = Endpoints(
            bases,
            token=token,
            max_in_flight=max_in_flight,
            max_response_bytes=MAX_REPLY_BYTES,
            first_backoff_s=first_backoff_s,
        )
        self._named = {} if model is None else {"model": model}

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any], *, deadline_s: float
    ) -> ChatAnswer:
        """The answer to a conversation.

        Args:
            sampling: further fields of the request, such as temperature, max_tokens and seed.
        Raises:
            Unavailable: no chat completion was to be had before the deadline.
            Refused: the endpoint says that the request is wrong, such as too long.
        """
        body = {**self._named, "messages": list(messages), **sampling}
        return await self._endpoints.post(CHAT_PATH, body, deadline_s=deadline_s, check=parse_chat_answer)

    async def metrics(self) -> list[str]:
        """The Prometheus pages of the endpoints that have one."""
        return await self._endpoints.texts(METRICS_PATH, timeout_s=METRICS_TIMEOUT_S)

    @property
    def counts(self) -> Counts:
        """What happened on the way since the start."""
        return self._endpoints.counts

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        await self._endpoints.close()


def parse_chat_answer(reply: Any) -> ChatAnswer:
    """The first choice of a chat completion. Raises ValueError for anything else."""
    match reply:
        case {"choices": [{"message": {"content": str() | None as text}, **choice}, *_]}:
            finish = choice.get("finish_reason")
        case _:
            raise ValueError("not a chat completion")
    usage = reply.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (count if isinstance(count, int) and count >= 0 else 0 for count in counts)
    return ChatAnswer(text or "", finish if isinstance(finish, str) else None, prompt, completion)
