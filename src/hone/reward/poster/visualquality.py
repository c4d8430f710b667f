"""VisualQuality-R1 (arXiv:2505.14460) over any OpenAI-compatible endpoint: a picture in, a rating from 1 to 5 out.

Asked in the model's own words for use as a reward, without reasoning. What it answers is parsed strictly: a rating
that has to be guessed is asked for again with another seed, and after that there is none. The model was trained to
rank photographs by their distortions; what it knows of graphic design is for the user to measure first.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import re
from collections.abc import Sequence
from typing import Any

import httpx

PROMPT = (
    "You are doing the image quality assessment task. Here is the question: "
    "What is your overall rating on the quality of this picture? The rating should be a float between 1 and 5, "
    "rounded to two decimal places, with 1 representing very poor quality and 5 representing excellent quality. "
    "Please only output the final answer with only one score in <answer> </answer> tags."
)
MAX_ANSWER_TOKENS = 16
ASKS = 3
"""Times that one vote is asked for, each with another seed, until it parses."""
TRIES = 4
"""Times that one question is sent, until the endpoint answers it."""
BACKOFF_S, MAX_BACKOFF_S = 0.5, 8.0
MAX_REPLY_BYTES = 1 << 20
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_RATING = re.compile(r"[1-5](?:\.\d+)?")
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class NoRating(Exception):
    """Why a picture has no rating: the endpoint failed, or did not give a number."""


class VisualQuality:
    """Rates pictures. Holds no connection between groups."""

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        votes: int = 1,
        timeout_s: float = 60.0,
        max_concurrent: int = 16,
        seed: int = 0,
        api_key_env: str | None = None,
    ) -> None:
        """
        Args:
            endpoint: base URL, such as `http://127.0.0.1:8000/v1`.
            votes: ratings to average; 1 is asked for greedily, several are sampled at temperature 1, and a majority
                of them must parse.
            timeout_s: for one picture, retries included.
            max_concurrent: pictures asked about at one time.
            api_key_env: environment variable that holds the key.
        Raises:
            ValueError: an argument is out of range, or the environment has no such variable.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {endpoint!r} is no http URL")
        if votes < 1 or timeout_s <= 0 or max_concurrent < 1:
            raise ValueError("votes, timeout_s and max_concurrent must be positive")
        if api_key_env is not None and api_key_env not in os.environ:
            raise ValueError(f"api_key_env: the environment has no {api_key_env}")
        self.url = endpoint.rstrip("/") + "/chat/completions"
        self.model, self.votes, self.timeout_s, self.seed = model, votes, timeout_s, seed
        self.max_concurrent = max_concurrent
        self._headers = {"Authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env is not None else {}

    async def rate(self, pictures_png: Sequence[bytes]) -> list[float | str]:
        """For each picture its rating from 1 to 5, or why it has none."""
        turn = asyncio.Semaphore(self.max_concurrent)
        # The endpoint is the user's own or an explicit one: a proxy from the environment has no business with it.
        async with httpx.AsyncClient(trust_env=False, timeout=self.timeout_s, headers=self._headers) as client:

            async def one(picture: bytes) -> float | str:
                async with turn:
                    try:
                        async with asyncio.timeout(self.timeout_s):
                            return await self._rating(client, picture)
                    except TimeoutError:
                        return f"{self.url} took longer than {self.timeout_s:g} s"
                    except NoRating as error:
                        return f"{self.url} {error}"

            return await asyncio.gather(*map(one, pictures_png))

    async def _rating(self, client: httpx.AsyncClient, picture: bytes) -> float:
        image = "data:image/png;base64," + base64.b64encode(picture).decode()
        votes = await asyncio.gather(*(self._vote(client, image, number) for number in range(self.votes)))
        valid = [vote for vote in votes if vote is not None]
        if 2 * len(valid) < self.votes or not valid:
            raise NoRating(f"gave a rating in {len(valid)} of {self.votes} votes, after {ASKS} seeds each")
        return sum(valid) / len(valid)

    async def _vote(self, client: httpx.AsyncClient, image: str, number: int) -> float | None:
        """One rating; None when no answer parses. Raises NoRating when the endpoint fails."""
        for ask in range(ASKS):
            sampled = self.votes > 1 or ask > 0  # asking again greedily would give the same answer again
            seed = self.seed + ASKS * number + ask
            rating = parse_rating(await self._post(client, self._question(image, float(sampled), seed)))
            if rating is not None:
                return rating
        return None

    def _question(self, image: str, temperature: float, seed: int) -> dict[str, Any]:
        content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": PROMPT}]
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": MAX_ANSWER_TOKENS,
            "temperature": temperature,
            "seed": seed,
        }

    async def _post(self, client: httpx.AsyncClient, question: dict[str, Any]) -> Any:
        """The endpoint's reply, as JSON or None. Raises NoRating when it refuses, or fails time and again."""
        problem, wait_s = "", 0.0
        for attempt in range(TRIES):
            await asyncio.sleep(wait_s)
            wait_s = random.uniform(0, min(MAX_BACKOFF_S, BACKOFF_S * 2**attempt))
            try:
                async with client.stream("POST", self.url, json=question) as response:
                    if response.status_code == 200:
                        return _json(await _body(response))
                    problem = f"answers {response.status_code}"
                    if response.status_code not in RETRIED:
                        raise NoRating(problem)
                    wait_s = max(wait_s, _retry_after_s(response))
            except httpx.TransportError as error:
                problem = f"cannot be reached: {type(error).__name__}: {error}"
        raise NoRating(f"{problem} ({TRIES} tries)")


def parse_rating(reply: Any) -> float | None:
    """The rating in a chat completion; None unless it ended by itself with one number from 1 to 5 in its tags."""
    match reply:
        case {"choices": [{"finish_reason": "stop", "message": {"content": str(text)}}, *_]}:
            answers = _ANSWER.findall(text.rpartition("</think>")[2])
        case _:
            return None
    rating = answers[-1].strip() if answers else ""
    return float(rating) if _RATING.fullmatch(rating) and float(rating) <= 5 else None


async def _body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_REPLY_BYTES:
            raise NoRating(f"answers with more than {MAX_REPLY_BYTES:,} bytes")
    return bytes(body)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _retry_after_s(response: httpx.Response) -> float:
    seconds = response.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else 0.0
