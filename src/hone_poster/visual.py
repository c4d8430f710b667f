"""Visual scorers of posters: the local lint, a vision-language model behind an endpoint, or none.

A scorer that fails returns a fault, never a number. Each states its name in the results, so that a run with the local
lint cannot be mistaken for one with a model.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.reward.openai import ChatAnswer, ChatClient, Refused, Unavailable, token_from
from hone_poster.lint import PARTS, lint, lint_score
from hone_poster.parse import Poster
from hone_poster.render import Rendering

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


@dataclass(frozen=True, slots=True)
class VisualResult:
    """The visual score of one picture."""

    score: float | None
    """In [0, 1]; None: the scorer failed."""
    fault: str = ""
    """Why it failed."""
    answered: bool = False
    """The model answered, without a rating: if it rates other posters of the group, the picture is at fault."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of the score, by the scorer's `part_names`."""


class VisualScorer(Protocol):
    """Scores pictures of posters."""

    @property
    def model(self) -> str:
        """Name of the scorer and its model, part of every result."""
        ...

    @property
    def part_names(self) -> Sequence[str]:
        """Keys of every result's `parts`."""
        ...

    async def score(self, posters: Sequence[tuple[Poster, Rendering]], gold: Rendering) -> list[VisualResult]:
        """One result per poster, in order; `gold` is the picture of the ground truth."""
        ...


class HeuristicScorer:
    """The local default: a lint of the picture, see `lint`."""

    model = "heuristic_v1"
    part_names = PARTS

    async def score(self, posters: Sequence[tuple[Poster, Rendering]], gold: Rendering) -> list[VisualResult]:
        parts = [lint(poster, rendering, gold) for poster, rendering in posters]
        return [VisualResult(lint_score(found), parts=found) for found in parts]


class ConstantScorer:
    """One score for every poster, for tests; fails for every poster if the value is None."""

    model = "constant"
    part_names = ()

    def __init__(self, value: float | None = 1.0) -> None:
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"value {value} is not in [0, 1]")
        self.result = VisualResult(value, "" if value is not None else "this scorer always fails")

    async def score(self, posters: Sequence[tuple[Poster, Rendering]], gold: Rendering) -> list[VisualResult]:
        return [self.result] * len(posters)


class NoRating(Exception):
    """Why a picture has no rating."""

    def __init__(self, why: str, *, answered: bool = False) -> None:
        super().__init__(why)
        self.answered = answered
        """The endpoint answered, so the picture may be the cause."""


class VisualQuality:
    """VisualQuality-R1 (arXiv:2505.14460), or a model with the same answer format, over an OpenAI-compatible endpoint.

    A picture in, a rating from 1 to 5 out, by the model's own prompt for rewards, without reasoning. Answers are parsed
    strictly: an ambiguous one is requested again with another seed, up to a limit. The model was trained to rank
    photographs by distortions; measure how it rates graphic design before you rely on it. Holds no connection between
    groups.
    """

    part_names = ()

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
            raise ValueError(f"endpoint {endpoint!r} is not an HTTP URL")
        if votes < 1 or timeout_s <= 0 or max_concurrent < 1:
            raise ValueError("votes, timeout_s and max_concurrent must be positive")
        self.url, self.votes, self.timeout_s, self.seed = endpoint, votes, timeout_s, seed
        self.model, self._model_of_requests = f"visualquality_r1 ({model})", model
        self.max_concurrent, self.first_backoff_s = max_concurrent, first_backoff_s
        self._token = token_from(api_key_env, "api_key_env")

    async def score(self, posters: Sequence[tuple[Poster, Rendering]], gold: Rendering) -> list[VisualResult]:
        ratings = await self.rate([rendering.png() for _, rendering in posters])
        return [
            VisualResult(None, str(r), r.answered) if isinstance(r, NoRating) else VisualResult((r - 1) / 4)
            for r in ratings
        ]

    async def rate(self, pictures_png: Sequence[bytes]) -> list[float | NoRating]:
        """For each picture its rating from 1 to 5, or why it has none."""
        turn = asyncio.Semaphore(self.max_concurrent)
        in_flight = self.max_concurrent * self.votes
        client = ChatClient(
            [self.url],
            model=self._model_of_requests,
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


def visual_scorer(name: str, args: Mapping[str, Any]) -> VisualScorer | None:
    """The scorer that a run file names; None for `none`.

    Raises:
        ValueError: no scorer of this name, or arguments that do not fit it.
    """
    if name not in _SCORERS:
        raise ValueError(f"visual: no scorer {name!r}; there is {', '.join(_SCORERS)}")
    make = _SCORERS[name]
    try:
        inspect.signature(make).bind(**args)
    except TypeError as error:
        raise ValueError(f"visual_args of {name}: {error}") from error
    return make(**args)


_SCORERS: dict[str, Callable[..., VisualScorer | None]] = {
    "heuristic_v1": HeuristicScorer,
    "visualquality_r1": VisualQuality,
    "constant": ConstantScorer,
    "none": lambda: None,
}
"""By the name in a run file; None: looks are not judged."""
