"""Search in all recorded samples of a run: words, and values such as `reward<0.5`.

Reads one file after the other, the newest step first, for a limited time, so that a page can show what is found so far
and ask for more. `pages/samples.js` reads queries the same way, for the samples that it has.
"""

from __future__ import annotations

import gzip
import json
import operator
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.observe.recorder import NOT_WHOLE, RecordedSample, decode_group, num_tokens, recorded_steps, samples_file

SECONDS = 1.0
"""Of one call; a step that was begun is searched to its end."""
MAX_FOUND = 320
"""Samples of one call. Of those in the last step it searches, more are counted."""
_TERM = re.compile(r"([\w.:-]+)(<=|>=|=|<|>)(-?\d*\.?\d+)")
_RELATIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, ">": operator.gt, "=": operator.eq, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip

RecordedStep = tuple[str, int]
"""A stage and a step of it."""


@dataclass(slots=True)
class SearchResult:
    """What one call found."""

    samples: list[RecordedSample] = field(default_factory=list)
    matches: int = 0
    """Samples that fit, of which `samples` has the first `MAX_FOUND`."""
    searched: int = 0
    """Steps whose samples were searched, those before this call included."""
    steps: int = 0
    """Steps with samples."""
    damaged: int = 0
    """Of the steps of this call, those whose file is not whole."""
    after: RecordedStep | None = None
    """Where to continue; None where nothing is left."""


def search_samples(
    run_folder: Path, query: str, *, after: RecordedStep | None = None, seconds: float = SECONDS
) -> SearchResult:
    """Samples that fit a query, the newest step of each stage first.

    Args:
        after: where the call before this one ended.
        seconds: how long it may take; at least one step is searched.
    """
    wanted, until_s = Query(query), time.monotonic() + seconds
    places = [(stage, step) for stage, steps in recorded_steps(run_folder).items() for step in steps][::-1]
    left = [place for place in places if after is None or place < after]
    found = SearchResult(searched=len(places) - len(left), steps=len(places))
    for place in left:
        if wanted.may_be_in(place[1]):
            _search_file(samples_file(run_folder / "samples", *place), place, wanted, found)
        found.searched += 1
        if place != left[-1] and (len(found.samples) >= MAX_FOUND or time.monotonic() > until_s):
            found.after = place
            break
    return found


def _search_file(path: Path, place: RecordedStep, wanted: Query, found: SearchResult) -> None:
    try:
        with gzip.open(path) as lines:
            for line in lines:
                if not wanted.may_fit(line):
                    continue
                group = json.loads(line)
                fitting = [i for i in range(len(group["index"])) if wanted.fits(group, i, place[1])]
                found.matches += len(fitting)
                if fitting and (room := MAX_FOUND - len(found.samples)) > 0:
                    samples = decode_group(group, *place)
                    found.samples += [samples[i] for i in fitting[:room]]
    except FileNotFoundError:
        return  # a run that is continued from a checkpoint removes what came after it
    except NOT_WHOLE:
        found.damaged += 1


class Query:
    """Terms of a search, all of which must hold."""

    def __init__(self, query: str) -> None:
        terms = query.split()
        words = [term.lower() for term in terms if not _TERM.fullmatch(term)]
        self._by_value = [match.groups() for term in terms if (match := _TERM.fullmatch(term))]
        self._words = [word for word in words if word != "fault"]
        self._asks_for_fault = "fault" in words
        self._bytes = [word.encode() for word in self._words if word.isascii() and json.dumps(word)[1:-1] == word]

    def may_be_in(self, step: int) -> bool:
        """Whether samples of a step may fit."""
        return all(name != "step" or _holds(step, relation, value) for name, relation, value in self._by_value)

    def may_fit(self, line: bytes) -> bool:
        """Whether samples of a group may fit, by the bytes of its line: far cheaper than to read it."""
        if self._asks_for_fault and b'"faults"' not in line:
            return False
        if not self._bytes:
            return True
        text = line.lower()
        return all(word in text for word in self._bytes)

    def fits(self, group: Mapping[str, Any], i: int, step: int) -> bool:
        """Whether the sample at place `i` of a recorded group fits."""
        faults = [by_index[str(i)] for by_index in group.get("faults", {}).values() if str(i) in by_index]
        if self._asks_for_fault and not faults:
            return False
        if self._words:
            text = "\n".join([group["prompt"], str(group["answer"]), group["response"][i], *faults]).lower()
            if not all(word in text for word in self._words):
                return False
        return all(
            any(_holds(found, relation, value) for found in _values(group, i, step, name))
            for name, relation, value in self._by_value
        )


def _values(group: Mapping[str, Any], i: int, step: int, name: str) -> list[Any]:
    """What a name stands for in a sample: several versions, or one value."""
    match name:
        case "version":
            versions = group["versions"][i]
            return versions if isinstance(versions, list) else [versions]
        case "tokens":
            return [num_tokens(group, i)]
        case "step":
            return [step]
        case "reward" | "advantage":
            column = group[f"{name}s"]
            return [column[i] if column else None]
        case _:
            return [group["scores"][name][i]] if name in group["scores"] else []


def _holds(found: Any, relation: str, value: str) -> bool:
    if found is None:
        return False
    rounded = float(f"{found:.5g}") if isinstance(found, float) else found  # as pages show it
    return _RELATIONS[relation](rounded, float(value))
