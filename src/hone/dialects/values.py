"""Values as foreign files write them: text to plain data, and plain data to the types of our keys."""

from __future__ import annotations

from typing import Any

from hone.config.yaml_tree import read_yaml, scalar


def plain_value(text: str) -> Any:
    """A value as Hydra and YAML read it; text that is neither stays text."""
    stripped = text.strip()
    while len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        inner = stripped[1:-1]
        if stripped[0] in inner:
            break
        stripped = inner.strip()
        if not stripped.startswith(("[", "{")):
            return _scalar(stripped)
    if not stripped.startswith(("[", "{")):
        return _scalar(stripped)
    node, problems = read_yaml(stripped, "value", first_line=None)
    if problems or node is None:
        return [_scalar(part.strip().strip("'\"")) for part in stripped.strip("[]").split(",") if part.strip()]
    return node.plain()


def _scalar(text: str) -> Any:
    return None if text in ("null", "None", "none", "~", "") else scalar(text)


# ---- conversions; each raises ValueError for what it cannot convert


def number(value: Any) -> float:
    """Of text too: flags of a command line, and `1e-6`, which YAML reads as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError("must be a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return value


def whole(value: Any) -> int:
    value = number(value)
    if value != int(value):
        raise ValueError("must be a whole number")
    return int(value)


def positive(value: Any) -> int | None:
    """-1, 0 and null: off."""
    return None if value is None or number(value) <= 0 else whole(value)


def zero_if_off(value: Any) -> int:
    """-1 and 0: off."""
    return 0 if number(value) < 0 else whole(value)


def truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return value.lower() in ("true", "yes", "on")
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise ValueError("must be true or false")


def text(value: Any) -> str:
    if isinstance(value, dict | list):
        raise ValueError("must be text")
    return str(value)


def names(value: Any) -> list[str]:
    """A list of text, or text with commas."""
    if isinstance(value, str):
        value = [part.strip() for part in value.replace(" ", ",").split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of names")
    return value


def numbers(value: Any) -> list[float]:
    """A list of numbers, or text with commas or blanks."""
    return [number(part) for part in (value if isinstance(value, list) else str(value).replace(",", " ").split())]


def pair(value: Any) -> list[float]:
    """Two numbers."""
    found = numbers(value)
    if len(found) != 2:
        raise ValueError("must be two numbers")
    return found
