"""Supervised conversations: loss on the assistant's turns alone.

The assistant's part of the text is what the chat template marks with `{% generation %}`; without marks, what
the template adds when a turn is appended. Turns are tokenised apart, as they are when a policy writes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from hone.config.run import DataSection, SftSection
from hone.data.cache import DEFAULT_CACHE, DataCache
from hone.data.chat import ChatMessage, TemplateRefusal, Tokenizer, UnknownCharacter, rendering
from hone.data.lazy import Facts, LazyRows, RowReading, SampleSize, load_lazily, or_problem, reading_of
from hone.data.pictures import BrokenPicture, with_picture_tokens
from hone.data.prompts import SftRow, content_of, row_settings
from hone.data.render import Malformed, Renderer, column
from hone.data.sources import SourceRow, sft_source
from hone.errors import DataError
from hone.types import Picture, read_only

Segment = tuple[str, bool]
"""A stretch of a rendered conversation, and whether the assistant wrote it."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def load_chat_rows(
    data: DataSection,
    sft: SftSection,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    max_tokens: int,
    cache: DataCache = DEFAULT_CACHE,
    sample: SampleSize | None = None,
) -> LazyRows[SftRow]:
    """The conversations in `sft.messages_column`, in the order of the source.

    Args:
        max_tokens: of a whole conversation; longer ones are dropped and reported.
        sample: as of `load_lazily`.
    Raises:
        DataError: no chat template, one that does not mark the assistant's part, or as `load_prompts` does.
    """
    name = sft.messages_column
    assert name is not None, "the caller asks for chat rows only where the run file names their column"
    if tokenizer.hf.chat_template is None:
        raise DataError("sft.messages_column: the tokenizer has no chat template. Name one in model.chat_template.")
    source, by = sft_source(data, sft), data.order_column if sft.data is None else None
    reading = reading_of(source, data, lambda own: _ChatReading(own, name, tokenizer, folder))
    return load_lazily(
        source, data, folder, reading, max_tokens=max_tokens, cache=cache, order_column=by, sample=sample
    )


class _ChatReading(RowReading[SftRow]):
    """Rows to conversations."""

    def __init__(self, data: DataSection, name: str, tokenizer: Tokenizer, folder: Path) -> None:
        self.data, self.name, self.tokenizer = data, name, tokenizer
        self.renderer = Renderer(data, tokenizer, folder)
        self._had_pictures = False

    @property
    def settings(self) -> dict[str, Any]:
        tokenizer = self.tokenizer.digest()
        return {"kind": "chat", "column": self.name, "data": row_settings(self.data), "tokenizer": tokenizer}

    def read(self, rows: Sequence[SourceRow]) -> list[SftRow | Malformed]:
        return [or_problem(self.conversation, row.values) for row in rows]

    def conversation(self, values: Mapping[str, Any]) -> SftRow:
        """Raises Malformed, naming the column."""
        messages = self.renderer.messages(column(values, self.name), self.name, may_show=True)
        columns = [name for name in self.data.image_columns if name in values]  # those of prompts; rows may have none
        messages, pictures = self.renderer.with_pictures(messages, values, columns, self.name)
        self._had_pictures |= bool(pictures)
        answered = False
        for number, message in enumerate(messages, start=1):
            answered |= message["role"] == "assistant"
            if answered and isinstance(message["content"], list):  # what follows a prompt is computed as text
                raise Malformed(
                    self.name,
                    f"message {number} has a picture, and an answer stands before it or is it; pictures must stand in "
                    "front of the first answer. Split the conversation into rows, one for each answer after a picture",
                )
        segments = segments_of(self.tokenizer, messages, self.name, clock=self.renderer.clock)
        return tokenised(self.tokenizer, segments, self.name, pictures)

    def facts(self, item: SftRow, row: SourceRow) -> Facts:
        content = content_of(item)
        return Facts(len(item.prompt) + len(item.response), content, content)

    def is_repeatable(self) -> bool:
        return not self._had_pictures and not self.renderer.clock


def segments_of(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    field: str = "messages",
    *,
    clock: Mapping[str, Any] = MappingProxyType({}),
) -> list[Segment]:
    """A rendered conversation, cut where the assistant's part begins and ends.

    Args:
        field: column of the messages, for errors.
        clock: as `render.Renderer.clock`.
    Raises:
        Malformed: no turn of the assistant's, or messages that the template refuses.
        DataError: a template without marks that rewrites earlier turns when later ones follow.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise Malformed(field, "has no message of the assistant's, so there is nothing to train on")
    template = tokenizer.hf.get_chat_template()
    try:
        marked = _MARKS.search(template) is not None
        with rendering():
            if marked:
                text, spans = _marked(tokenizer, template, messages, clock)
            else:
                text, spans = _appended(tokenizer, messages, clock)
    except TemplateRefusal as error:
        raise Malformed(field, str(error)) from error
    segments: list[Segment] = []
    done = 0
    for start, end in spans:
        segments += [(text[done:start], False), (text[start:end], True)]
        done = end
    return segments


def tokenised(
    tokenizer: Tokenizer, segments: Sequence[Segment], field: str = "messages", pictures: Sequence[Picture] = ()
) -> SftRow:
    """Token ids up to the end of the last turn, and which are targets: each turn up to and including its EOS.

    Args:
        pictures: in the first segment, in their order.
    Raises:
        Malformed: nothing stands before the first turn, or a character cannot be spelled.
        DataError: a turn has no EOS: a policy trained on it would never stop.
    """
    try:
        pieces = tokenizer.encode_prompts([text for text, _ in segments], rendered=True)
    except UnknownCharacter as error:
        raise Malformed(field, str(error)) from error
    prompt, placed = pieces[0], tuple[Picture, ...]()
    if pictures:
        try:
            prompt, placed = with_picture_tokens(prompt, pictures, tokenizer.picture_tokens)
        except BrokenPicture as error:
            raise Malformed(field, str(error)) from error
    response, mask = list[int](), list[bool]()
    if not prompt:
        raise Malformed(field, "the assistant speaks first, and the chat template puts nothing in front")
    for ids, (text, learned) in zip(pieces[1:], segments[1:], strict=True):
        ends = [position for position, token in enumerate(ids, start=1) if token in tokenizer.eos_ids]
        if learned and not ends:
            raise DataError(
                f"sft.messages_column: the chat template ends the assistant's turn {text[-40:]!r} without an EOS token "
                f"({tokenizer.hf.eos_token}), so a policy would not learn to stop. Name another template in "
                "model.chat_template, or set the tokenizer's eos_token to what ends a turn."
            )
        stop = ends[-1] if learned else 0
        response += ids
        mask += [position < stop for position in range(len(ids))]
    last = max(position for position, wanted in enumerate(mask) if wanted)
    targets = read_only(mask[: last + 1], np.bool_)
    return SftRow(read_only(prompt, np.int32), read_only(response[: last + 1], np.int32), targets, placed)


def _marked(
    tokenizer: Tokenizer, template: str, messages: Sequence[ChatMessage], clock: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    names: Any = tokenizer.hf.special_tokens_map
    rendered: Any = render_jinja_template(
        conversations=[list(messages)],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **names,
        **clock,
    )
    (text,), (spans,) = rendered
    if not spans:
        raise DataError("sft.messages_column: the chat template's {% generation %} marks nothing in a conversation")
    return text, [(start, end) for start, end in spans]


def _appended(
    tokenizer: Tokenizer, messages: Sequence[ChatMessage], clock: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Each turn of the assistant's is what rendering one message more adds behind the opening of the answer."""

    def render(count: int, *, opening: bool) -> str:
        text = tokenizer.hf.apply_chat_template(
            list(messages[:count]), tokenize=False, add_generation_prompt=opening, **clock
        )
        assert isinstance(text, str)
        return text

    text, spans = render(len(messages), opening=False), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(number, opening=True), render(number + 1, opening=False)
        if not (after.startswith(before) and text.startswith(after)):
            raise DataError(
                f"sft.messages_column: the chat template rewrites what stands before message {number + 1} when it is "
                "added (or what it says when others follow), so the assistant's part cannot be found. Put "
                "{% generation %} marks around it in a copy of the template, and name that in model.chat_template."
            )
        spans.append((len(before), len(after)))
    return text, spans
