"""Response parsing of HTTP requests: a JSON value, a retryable failure, or a rejection."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from hone.reward.strict_json import decode_json
from hone.runtime.user_code import DETAIL_CHARACTERS

MAX_RETRY_AFTER_S = 300.0
"""An endpoint that asks for a longer rest, through a clock that is wrong for example, is tried again after this."""
_TRIED_AGAIN = frozenset({408, 425, 429})
_REASON_BYTES = 64 << 10


class Refused(Exception):
    """The endpoint says that the request is wrong, or not allowed; it will not be right another time."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"HTTP {status}: {detail}".rstrip(": "))
        self.status, self.detail = status, detail


class RetryableFailure(Exception):
    """One try failed in a way that another may not."""

    def __init__(
        self, why: str, *, rest_s: float | None = None, is_invalid: bool = False, is_cut: bool = False
    ) -> None:
        super().__init__(why)
        self.rest_s = rest_s
        """`Retry-After` of the answer; None: it had none."""
        self.is_invalid = is_invalid
        """It answered, but not with what an answer must be."""
        self.is_cut = is_cut
        """The deadline left less time than a try has."""


class TooLong(RetryableFailure):
    """The answer was cut off."""


async def json_of(response: httpx.Response, max_bytes: int) -> Any:
    """The decoded JSON of an answer of at most `max_bytes`. Raises RetryableFailure (also TooLong) and Refused."""
    if response.status_code != 200:
        raise _failure(response, _reason(await body_of(response, _REASON_BYTES)))
    body = await body_of(response, max_bytes)
    try:
        return decode_json(body)
    except ValueError as error:
        raise RetryableFailure(f"the answer is not JSON: {error}", is_invalid=True) from None


async def body_of(response: httpx.Response, max_bytes: int) -> bytes:
    """The body, as it came. Raises RetryableFailure when it is compressed, which was not asked for and could be a bomb,
    and TooLong."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise RetryableFailure("the answer is compressed, which was not asked for", is_invalid=True)
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > max_bytes:
            raise TooLong(f"the answer is longer than {max_bytes:,} bytes", is_invalid=True)
    return bytes(body)


def one_line(text: str) -> str:
    """As it can stand in an error message."""
    return " ".join(text.split())[:DETAIL_CHARACTERS]


def _failure(response: httpx.Response, reason: str) -> RetryableFailure | Refused:
    """What an HTTP status other than 200 means."""
    status = response.status_code
    if status in _TRIED_AGAIN or (status >= 500 and status != 501):
        rest_s = _retry_after_s(response.headers.get("Retry-After"))
        return RetryableFailure(
            f"HTTP {status}: {reason}".rstrip(": "), rest_s=0.0 if rest_s is None and status == 429 else rest_s
        )
    return Refused(status, f"{reason or response.headers.get('Location', '')} ({response.url})")


def _reason(body: bytes) -> str:
    """What an error's JSON says: `detail` or `title` (RFC 9457), or OpenAI's `error.message`; else nothing."""
    try:
        said = decode_json(body)
    except ValueError:
        return ""
    match said:
        case {"detail": str(reason)} | {"title": str(reason)} | {"error": {"message": str(reason)}}:
            return one_line(reason)
    return ""


def _retry_after_s(value: str | None) -> float | None:
    """Seconds from now, from a number of them or an HTTP date; None when there is neither."""
    if value is None:
        return None
    try:
        seconds = float(value) if value.strip().isdecimal() else parsedate_to_datetime(value).timestamp() - time.time()
    except ValueError:
        return None
    return min(MAX_RETRY_AFTER_S, max(0.0, seconds))
