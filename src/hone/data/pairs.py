"""Preference pairs: a chosen and a rejected conversation, and the margin between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hone.config.run import DataSection, PreferenceSection
from hone.data.chat import Message, Tokenizer
from hone.data.conversation import ConversationReader, UnreadableConversation
from hone.data.render import Malformed, Renderer, as_text, column
from hone.data.report import LoadReport, Tally, nothing_left
from hone.data.sources import Part, read_rows, source_name, source_of
from hone.errors import DataError


class PreferencePair(NamedTuple):
    """Two conversations that begin alike, as token ids."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float
    """Least difference wanted between the scores, in logits; at least 0."""


def load_pairs(
    data: DataSection,
    rm: PreferenceSection,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    max_tokens: int,
    part: Part = "train",
) -> tuple[list[PreferencePair], LoadReport]:
    """The pairs of one part of the data, in the order of the source.

    Args:
        folder: the run file's, for relative paths.
        max_tokens: of one conversation; a pair with a longer one is dropped and reported.
    Raises:
        DataError: no source, nothing usable in it, or a malformed row that may not be skipped.
    """
    source, split, rows = source_of(data, part, lacking="there are no held-out pairs to measure the reward model on")
    reading = _PairReading(data, rm, tokenizer)
    tally = Tally(data, source_name(source), max_tokens=max_tokens)
    pairs: list[PreferencePair] = []
    for row in tally.rows(read_rows(source, folder, split=split, rows=rows)):
        try:
            pair = reading.pair(row.values)
        except Malformed as error:
            tally.reject(f"{row.where} {error.field}: {error}")
            continue
        if tally.fits(max(len(pair.chosen), len(pair.rejected))):
            pairs.append(pair)
    tally.kept = len(pairs)
    if not pairs:
        raise DataError(nothing_left(tally.report()))
    return pairs, tally.report()


class _PairReading:
    """What a row becomes."""

    def __init__(self, data: DataSection, rm: PreferenceSection, tokenizer: Tokenizer) -> None:
        self.data, self.rm = data, rm
        self.renderer = Renderer(data, tokenizer)
        self.reader = ConversationReader(tokenizer.hf, "chat" if data.chat else "text")

    def pair(self, values: Mapping[str, Any]) -> PreferencePair:
        """Raises Malformed, naming the column."""
        names = self.rm.chosen_column, self.rm.rejected_column
        question = self.question(values)
        chosen, rejected = (self.conversation(question, values, name) for name in names)
        if chosen == rejected:
            raise Malformed(names[1], f"is the same as {names[0]}: such a pair prefers nothing")
        return PreferencePair(chosen, rejected, self.margin(values))

    def question(self, values: Mapping[str, Any]) -> str | list[Message]:
        if not self.data.chat:
            return self.renderer.render(values).text
        return self.renderer.messages(column(values, self.data.prompt_column))

    def conversation(self, question: str | list[Message], values: Mapping[str, Any], name: str) -> tuple[int, ...]:
        value = column(values, name)
        if not self.data.chat:
            answer = as_text(value, name)
        else:
            answer = value if isinstance(value, str) else self.renderer.messages(value, name)
        try:
            return tuple(self.reader.read(question, answer))
        except UnreadableConversation as error:
            raise Malformed(name, str(error)) from error

    def margin(self, values: Mapping[str, Any]) -> float:
        name = self.rm.margin_column
        if name is None:
            return 0.0
        value = column(values, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Malformed(name, f"got {type(value).__name__}; must be a number")
        if not math.isfinite(value) or value < 0:
            raise Malformed(name, f"got {value}; must be a finite number, at least 0")
        return float(value)
