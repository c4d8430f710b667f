"""JSON as RFC 8259 has it: finite numbers, whole characters, bounded depth; and data of rows that JSON can hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, NoReturn

MAX_JSON_DEPTH = 64
_BRACKETS_ONLY = re.compile(rb'"(?:[^"\\]|\\.)*+"|[^\[\]{}"]++', re.DOTALL)
_STEP = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}
_HIGH, _LOW = rb"u[dD][89abAB][\da-fA-F][\da-fA-F]", rb"u[dD][c-fC-F][\da-fA-F][\da-fA-F]"
_LONE_ESCAPE = re.compile(rb"\\(?<!\\\\)((?:\\\\)*)(?:%b(?!\\%b)|(?<!\\%b\\)%b)" % (_HIGH, _LOW, _HIGH, _LOW))
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def decode_json(body: bytes, *, max_depth: int = MAX_JSON_DEPTH) -> Any:
    """JSON text as Python data.

    Python's own reader takes `NaN`, `1e999` and nesting until the interpreter gives up; none of that is accepted here.
    Half of a surrogate pair, which no UTF-8 text can hold, becomes U+FFFD, so that one odd item spoils nothing.
    Raises:
        ValueError: not UTF-8, not JSON, a number that is not finite, nested deeper than `max_depth`.
    """
    brackets = _BRACKETS_ONLY.sub(b"", body)
    depth = max(accumulate(_STEP.get(bracket, 0) for bracket in brackets), default=0)
    if depth > max_depth:
        raise ValueError(f"nested {depth} deep; at most {max_depth} is allowed")
    text = whole_characters(body).decode("utf-8")
    return json.loads(text, parse_constant=refuse_constant, parse_float=finite)


def whole_characters(body: bytes) -> bytes:
    """JSON text with U+FFFD for each escape that is half of a surrogate pair; `body` itself where there is none."""
    return _LONE_ESCAPE.sub(rb"\1\\ufffd", body) if _LONE_ESCAPE.search(body) else body


def encode_json(value: Any) -> bytes:
    """Plain data as JSON text. Raises ValueError for a number that is not finite."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def printable(text: str) -> str:
    """Text that UTF-8 can hold: half of a surrogate pair becomes U+FFFD."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def plain(value: Any, path: str = "value") -> Any:
    """Data of a row as what JSON can say: NumPy numbers and arrays as numbers and lists, what is not finite as null.

    Raises:
        ValueError: something that has no JSON form, with its path.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if hasattr(value, "tolist"):  # NumPy and torch, without importing either
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int | str) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(child, f"{path}.{name}") for name, child in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [plain(child, f"{path}[{number}]") for number, child in enumerate(value)]
    raise ValueError(f"{path} is {type(value).__name__}, which JSON cannot represent; turn it into text or numbers")


def refuse_constant(name: str) -> NoReturn:
    """For `json.loads(parse_constant=...)`: NaN and infinities raise ValueError."""
    raise ValueError(f"{name} is not JSON")


def finite(text: str) -> float:
    """For `json.loads(parse_float=...)`: a number beyond the largest raises ValueError."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is out of range")
    return number


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=...)`: a repeated key raises ValueError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is duplicated")
    return found
