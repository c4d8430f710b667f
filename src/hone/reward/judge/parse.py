"""Strict parsing of a judge's response to scores.

Only what follows the reasoning counts, and only of an answer that ended by itself. Parsers are tried in the order of
the settings; the first whose mark is there decides, and if it marks no list of scores, nothing else is tried.
A judge that writes two different verdicts of one form has given none. A score is a plain number inside the scale. It is
never clipped, and never searched for in a sentence.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hone.reward.openai import ChatAnswer
from hone.reward.strict_json import each_key_once, refuse_constant

Method = Literal["grm_boxed", "json", "answer_tag", "choice"]
Failure = Literal["empty", "cut", "reasoning", "missing", "malformed", "count", "range"]
FAILURES: tuple[Failure, ...] = ("empty", "cut", "reasoning", "missing", "malformed", "count", "range")

_NUMBER = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?")
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*)\n[ \t]*```\s*", re.DOTALL)
_LEAD = re.compile(r"(?:(?:final )?(?:answer|verdict|grade|judgement|judgment)\s*:)?\s*", re.IGNORECASE)
_WRAP = "*_`\"' \t"


class NoScores(Exception):
    """An answer holds no scores, and in which way."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure: Failure = failure


@dataclass(frozen=True)
class Reading:
    """How to read a judge's answers."""

    parsers: Sequence[Method]
    low: float
    high: float
    choices: Mapping[str, float] = field(default_factory=dict)
    """Of `choice`: the words that are verdicts, and the score of each."""

    def scores(self, answer: ChatAnswer, count: int) -> list[float]:
        """`count` scores on the judge's scale, in the order that they stand in. Raises NoScores."""
        if answer.finish_reason != "stop":
            raise NoScores("cut", f"the answer did not end by itself ({answer.finish_reason})")
        _, ended, text = answer.text.rpartition("</think>")
        if not ended and "<think>" in answer.text:
            raise NoScores("reasoning", "its reasoning is not closed")
        if not text.strip():
            raise NoScores("empty", "the answer is empty")
        for method in self.parsers:
            found = _PARSERS[method](text, self)
            if found is not None:
                return self.checked(found, count)
        raise NoScores("missing", "no mark of a score")

    def checked(self, scores: Sequence[float], count: int) -> list[float]:
        """The scores, if they are as many and as large as they may be. Raises NoScores."""
        if len(scores) != count:
            raise NoScores("count", f"{len(scores)} scores for {count} responses")
        outside = next((score for score in scores if not self.low <= score <= self.high), None)
        if outside is not None:
            raise NoScores("range", f"{outside:g} is not in {self.low:g} to {self.high:g}")
        return list(scores)


def _boxed(text: str, reading: Reading) -> list[float] | None:
    r"""The last `\boxed{8}` or `\boxed{8, 7}`."""
    *others, last = [rest.lstrip(" ") for rest in text.split("\\boxed")]
    if not others:
        return None
    if not last.startswith("{") or "}" not in last:
        raise NoScores("malformed", "the last \\boxed has no closed braces")
    return _one_verdict([rest[1:].partition("}")[0] for rest in (*others[1:], last) if rest.startswith("{")])


def _answer_tag(text: str, reading: Reading) -> list[float] | None:
    """The last `<answer>8</answer>`."""
    if "<answer>" not in text and "</answer>" not in text:
        return None
    answers = _ANSWER.findall(text)
    if not answers or text.rfind("<answer>") > text.rfind("</answer>"):
        raise NoScores("malformed", "the last <answer> is not closed")
    return _one_verdict(answers)


def _one_verdict(marked: Sequence[str]) -> list[float]:
    """The last list of scores. Raises NoScores when another of as many scores differs: which of them is meant?"""
    verdict = _numbers(marked[-1])
    for other in marked[:-1]:
        with contextlib.suppress(NoScores):
            numbers = _numbers(other)
            if len(numbers) == len(verdict) and numbers != verdict:
                break
    else:
        return verdict
    raise NoScores("malformed", f"two verdicts: {numbers} and {verdict}")


def _json_object(text: str, reading: Reading) -> list[float] | None:
    """The whole text, or one fenced block of it, is an object with `score` or `scores`; other keys are its own."""
    fenced = _FENCED.fullmatch(text)
    body = fenced[1] if fenced else text.strip()
    if not body.startswith("{"):
        return None
    try:
        found = json.loads(body, object_pairs_hook=each_key_once, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise NoScores("malformed", f"no JSON object: {error}") from None
    match found:
        case {"score": _, "scores": _}:
            raise NoScores("malformed", "both score and scores")
        case {"score": value}:
            return [_json_number(value)]
        case {"scores": [*values]}:
            return [_json_number(value) for value in values]
    raise NoScores("malformed", "the object has no score")


def _choice(text: str, reading: Reading) -> list[float] | None:
    """The last line is one of the words, alone or after `Verdict:`; case does not matter."""
    *others, last = [line.strip(_WRAP) for line in text.splitlines() if line.strip()]
    found = _verdict(last, reading)
    led = {_verdict(line, reading) for line in others if _LEAD.match(line)[0].strip()}  # type: ignore[index]  # matches
    if found is not None and led - {None, found}:
        raise NoScores("malformed", "two verdicts")
    return None if found is None else [found]


def _verdict(line: str, reading: Reading) -> float | None:
    word = line[_LEAD.match(line).end() :].strip(_WRAP + ".").casefold()  # type: ignore[union-attr]  # it may be empty
    found = [score for choice, score in reading.choices.items() if choice.casefold() == word]
    return found[0] if len(found) == 1 else None


_PARSERS: dict[Method, Callable[[str, Reading], list[float] | None]] = {
    "grm_boxed": _boxed,
    "json": _json_object,
    "answer_tag": _answer_tag,
    "choice": _choice,
}


def _numbers(text: str) -> list[float]:
    """`8` or `8, 7.5`, each a plain number and nothing else. Raises NoScores."""
    parts = [part.strip() for part in text.replace("，", ",").split(",")]
    wrong = next((part for part in parts if not _NUMBER.fullmatch(part)), None)
    if wrong is not None:
        raise NoScores("malformed", f"{wrong[:20]!r} is not a number")
    return [float(part) for part in parts]


def _json_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoScores("malformed", "a score in the object is not a number")
    if abs(value) >= 1e6:
        raise NoScores("range", "a score in the object is out of any scale")
    return float(value)
