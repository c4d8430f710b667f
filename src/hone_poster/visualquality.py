"""VisualQuality-R1 (arXiv:2505.14460) over any OpenAI-compatible endpoint: a picture in, a rating from 1 to 5 out.

It uses the model's own prompt for rewards, without reasoning. Answers are parsed strictly: an ambiguous one is
requested again with another seed, up to a limit. The model was trained to rank photographs by distortions; measure how
it rates graphic design before you rely on it.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Sequence
from typing import Any

from hone.reward.openai import ChatAnswer, ChatClient, Refused, Unavailable, token_from

PROMPT = (
    "You are doing the image quality assessment task. Here is the question: "
    "What is your overall rating on the quality of this picture? The rating should be a float between 1 and 5, "
    "rounded to two decimal places, with 1 representing very poor quality and 5 representing excellent quality. "
    "Please only output the final answer with only one score in <answer> </answer> tags."
)
MAX_ANSWER_TOKENS = 16
ASKS = 3
"""Attempts at one vote, each with another seed, until it parses."""
ONE_PICTURES_DOING = frozenset({400, 413, 422})
"""HTTP statuses that a picture itself may cause."""
_RATING = re.compile(r"[1-5](?:\.\d+)?")
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class NoRating(Exception):
    """Why a picture has no rating."""

    def __init__(self, why: str, *, answered: bool = False) -> None:
        super().__init__(why)
        self.answered = answered
        """The endpoint answered, so the picture may be the cause."""


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
        first_backoff_s: float = 0.5,
    ) -> None:
        """
        Args:
            endpoint: base URL, such as `http://127.0.0.1:8000/v1`.
            votes: ratings to average; 1 is asked for greedily, several are sampled at temperature 1, and a majority
                of them must parse.
            timeout_s: for one picture, retries included.
            max_concurrent: pictures asked about at one time.
            api_key_env: environment variable that holds the key.
            first_backoff_s: bound of the random wait before the first retry; it doubles with each further one.
        Raises:
            ValueError: an argument is out of range, or the environment has no such variable.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {endpoint!r} is no http URL")
        if votes < 1 or timeout_s <= 0 or max_concurrent < 1:
            raise ValueError("votes, timeout_s and max_concurrent must be positive")
        self.url, self.model, self.votes, self.timeout_s, self.seed = endpoint, model, votes, timeout_s, seed
        self.max_concurrent, self.first_backoff_s = max_concurrent, first_backoff_s
        self._token = token_from(api_key_env, "api_key_env")

    async def rate(self, pictures_png: Sequence[bytes]) -> list[float | NoRating]:
        """For each picture its rating from 1 to 5, or why it has none."""
        turn = asyncio.Semaphore(self.max_concurrent)
        in_flight = self.max_concurrent * self.votes
        client = ChatClient(
            [self.url],
            model=self.model,
            token=self._token,
            max_in_flight=in_flight,
            first_backoff_s=self.first_backoff_s,
        )

        async def one(picture: bytes) -> float | NoRating:
            async with turn:
                try:
                    async with asyncio.timeout(self.timeout_s):
                        return await self._rating(client, picture)
                except TimeoutError:
                    return NoRating(f"{self.url} took longer than {self.timeout_s:g} s")
                except Unavailable as error:
                    return NoRating(str(error))  # names the URL itself
                except Refused as error:
                    return NoRating(f"{self.url}: {error}", answered=error.status in ONE_PICTURES_DOING)
                except NoRating as error:
                    return error

        try:
            return await asyncio.gather(*map(one, pictures_png))
        finally:
            await client.close()

    async def _rating(self, client: ChatClient, picture: bytes) -> float:
        image = "data:image/png;base64," + base64.b64encode(picture).decode()
        votes = await asyncio.gather(*(self._vote(client, image, number) for number in range(self.votes)))
        valid = [vote for vote in votes if vote is not None]
        if 2 * len(valid) < self.votes or not valid:
            detail = f"{self.url}: gave a rating in {len(valid)} of {self.votes} votes, after {ASKS} seeds each"
            raise NoRating(detail, answered=True)
        return sum(valid) / len(valid)

    async def _vote(self, client: ChatClient, image: str, number: int) -> float | None:
        """One rating; None when no answer parses."""
        content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": PROMPT}]
        for ask in range(ASKS):
            sampling: dict[str, Any] = {
                "max_tokens": MAX_ANSWER_TOKENS,
                # Asking again greedily would give the same answer again.
                "temperature": float(self.votes > 1 or ask > 0),
                "seed": self.seed + ASKS * number + ask,
            }
            messages = [{"role": "user", "content": content}]
            rating = parse_rating(await client.ask(messages, sampling, deadline_s=self.timeout_s))
            if rating is not None:
                return rating
        return None


def parse_rating(answer: ChatAnswer) -> float | None:
    """The rating in an answer; None unless it ended by itself with one number from 1 to 5 in its tags."""
    if answer.finish_reason != "stop":
        return None
    answers = _ANSWER.findall(answer.text.rpartition("</think>")[2])
    rating = answers[-1].strip() if answers else ""
    return float(rating) if _RATING.fullmatch(rating) and float(rating) <= 5 else None
