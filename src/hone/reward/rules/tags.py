r"""`format` and `strict_format`: whether a response is exactly its tagged sections, and nothing else.

The whole response must be the sections in order, with white space between them. Each tag may occur once in all of it:
repeated, nested or quoted tags, or text after the last one, score nothing. The content of sections is not judged, but
each must have visible characters.
"""

from __future__ import annotations

import re
import unicodedata

from pydantic import field_validator

from hone.config.run import Section, key
from hone.reward.rules.answer import BOX, last_boxed
from hone.reward.signature import reward
from hone.types import Group

_NAME = re.compile(r"[A-Za-z][\w-]*")
_BOXED = re.compile(BOX)
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and signs that show nothing."""


class TagSettings(Section):
    """`args` of `format` and `strict_format`."""

    tags: tuple[str, ...] = key(("think", "answer"), min_length=1)
    """Sections of a response, in order."""
    opened: bool = key(False)
    """The prompt ends with the first opening tag, so that the response starts inside its section."""

    @field_validator("tags")
    @classmethod
    def _check_tags(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_NAME.fullmatch(tag) for tag in tags) or len(set(tags)) < len(tags):
            raise ValueError("must be different names, without the angle brackets")
        return tags


@reward(minimum=0.0, maximum=1.0, settings=TagSettings)
def format(group: Group, settings: TagSettings) -> list[float]:
    """1 when the response is its sections, none of them empty; else 0."""
    return [float(sections(sample.text, settings) is not None) for sample in group.samples]


@reward(minimum=-0.5, maximum=1.0, settings=TagSettings)
def strict_format(group: Group, settings: TagSettings) -> list[float]:
    r"""1 when the last section also has the response's one `\boxed{}`; else -0.5."""
    return [1.0 if is_strict(sample.text, settings) else -0.5 for sample in group.samples]


def is_strict(text: str, settings: TagSettings) -> bool:
    found = sections(text, settings)
    if found is None or not len(_BOXED.findall(text)) == len(_BOXED.findall(found[-1])) == 1:
        return False
    return _shows(last_boxed(found[-1]) or "")


def sections(text: str, settings: TagSettings) -> list[str] | None:
    """What each section of a response holds; None when it is not exactly its sections."""
    rest = f"<{settings.tags[0]}>{text}" if settings.opened else text
    if any(rest.count(mark) != 1 for tag in settings.tags for mark in (f"<{tag}>", f"</{tag}>")):
        return None
    found: list[str] = []
    for tag in settings.tags:
        rest = rest.strip()
        inner, closed, after = rest.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not rest.startswith(f"<{tag}>") or not closed or not _shows(inner):
            return None
        found.append(inner)
        rest = after
    return found if not rest.strip() else None


def _shows(text: str) -> bool:
    """Whether there is a visible character: neither white space nor of zero width."""
    return any(unicodedata.category(one)[0] in "LNPS" and one not in _BLANK for one in text)
