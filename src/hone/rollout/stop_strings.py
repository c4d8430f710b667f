"""Stop strings: where a response ends because of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]


def stop_window(stop: tuple[str, ...]) -> int:
    """How many last tokens to decode to see a stop string that the newest one completes.

    A token is at least one byte of text; a few more stand at the left, where decoding may differ from the whole.
    """
    return max(len(string.encode()) for string in stop) + 8 if stop else 0


def text_up_to_stop(token_ids: Any, stop: tuple[str, ...], window: int, decode: Decode) -> str | None:
    """The text up to the end of its first stop string, if the newest token completed one.

    Only the tail that the new token can have changed is decoded at each step; a hit there is confirmed, and cut, in the
    whole text, because a tail may decode differently at its first character.

    Args:
        token_ids: all of the response so far, a list or an array.
        window: `stop_window(stop)`, which need not be computed for each token.
    """
    tail = decode([int(token) for token in token_ids[-window:]])
    if not any(string in tail for string in stop):
        return None
    text = decode([int(token) for token in token_ids])
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else None
