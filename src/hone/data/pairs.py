"""Preference pairs: a chosen and a rejected conversation, and the margin between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.config.run import DataSection, PreferenceSection
from hone.data.cache import DEFAULT_CACHE, DataCache
from hone.data.chat import ChatMessage, Tokenizer
from hone.data.conversation import ConversationReader, UnreadableConversation
from hone.data.lazy import Facts, LazyRows, RowReading, SampleSize, load_lazily, or_problem, reading_of
from hone.data.prompts import hash_of, row_settings
from hone.data.render import Malformed, Renderer, as_text, column
from hone.data.sources import DataPart, SourceRow, source_of


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
    part: DataPart = "train",
    cache: DataCache = DEFAULT_CACHE,
    sample: SampleSize | None = None,
) -> LazyRows[PreferencePair]:
    """The pairs of one part of the data, in the order of the source.

    Args:
        folder: the run file's, for relative paths.
        max_tokens: of one conversation; a pair with a longer one is dropped and reported.
        sample: as of `load_lazily`.
    Raises:
        DataError: no source, nothing usable in it, or a malformed row that may not be skipped.
    """
    source = source_of(data, part, lacking="there are no held-out pairs to measure the reward model on")
    reading = reading_of(source, data, lambda own: _PairReading(own, rm, tokenizer))
    by = data.order_column if part == "train" else None
    return load_lazily(
        source, data, folder, reading, max_tokens=max_tokens, cache=cache, order_column=by, sample=sample
    )


class _PairReading(RowReading[PreferencePair]):
    """Rows to pairs."""

    def __init__(self, data: DataSection, rm: PreferenceSection, tokenizer: Tokenizer) -> None:
        self.data, self.rm, self.tokenizer = data, rm, tokenizer
        self.renderer = Renderer(data, tokenizer)
        self.reader = ConversationReader(tokenizer.hf, "chat" if data.chat else "text", clock=self.renderer.clock)

    @property
    def settings(self) -> dict[str, Any]:
        columns = [self.rm.chosen_column, self.rm.rejected_column, self.rm.margin_column]
        tokenizer = self.tokenizer.digest()
        return {"kind": "pairs", "columns": columns, "data": row_settings(self.data), "tokenizer": tokenizer}

    def read(self, rows: Sequence[SourceRow]) -> list[PreferencePair | Malformed]:
        return [or_problem(self.pair, row.values) for row in rows]

    def facts(self, item: PreferencePair, row: SourceRow) -> Facts:
        content = hash_of(*(np.array(side, np.int32).tobytes() for side in (item.chosen, item.rejected)))
        return Facts(max(len(item.chosen), len(item.rejected)), content, content)

    def is_repeatable(self) -> bool:
        return not self.renderer.clock

    def pair(self, values: Mapping[str, Any]) -> PreferencePair:
        """Raises Malformed, naming the column."""
        names = self.rm.chosen_column, self.rm.rejected_column
        if self.data.chat:
            question = self.renderer.messages(column(values, self.data.prompt_column))
        else:
            question = self.renderer.render(values).text
        chosen, rejected = (self.conversation(question, values, name) for name in names)
        if chosen == rejected:
            raise Malformed(names[1], f"is the same as {names[0]}: such a pair prefers nothing")
        return PreferencePair(chosen, rejected, self.margin(values))

    def conversation(self, question: str | list[ChatMessage], values: Mapping[str, Any], name: str) -> tuple[int, ...]:
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
