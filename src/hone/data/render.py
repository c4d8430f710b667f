"""Prompt rendering: one row to the text of its prompt, by columns, templates and chat templates. No tokens.

Substitution is one pass over the template, so braces and placeholders inside the data are only text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.config.rules.data import flat
from hone.config.run import DataSection
from hone.data.chat import ChatMessage, TemplateRefusal, Tokenizer
from hone.data.picture_processors import PictureProcessor
from hone.data.pictures import BrokenPicture, source_of_picture
from hone.errors import DataError, nearest
from hone.types import Picture

_PLACEHOLDER = re.compile(r"\{\{(\w+(?:\.\w+)*)\}\}|\{(\w+(?:\.\w+)*)\}")


class Malformed(Exception):
    """A row does not fit the run file; `field` is the column at fault."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        super().__init__(problem)


def column(values: Mapping[str, Any], name: str) -> Any:
    """A column's value, or what is in it at a dotted name. Raises Malformed when it is missing or null."""
    if name not in values:
        values = flat(values)
    if name not in values:
        close = nearest(name, values, cutoff=60)
        hint = f" Did you mean {close}?" if close else ""
        raise Malformed(name, f"no such column; the row has {', '.join(map(str, values)) or 'none'}.{hint}".rstrip("."))
    value = values[name]
    if value is None:
        raise Malformed(name, "got null")
    return value


def as_text(value: Any, field: str) -> str:
    """Text as it is, numbers as Python writes them. Raises Malformed for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    raise Malformed(field, f"got {type(value).__name__}; must be text or a number")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def _parts(content: Any, field: str) -> list[dict[str, Any]]:
    """A message's content as parts {"type": "text", "text"} and {"type": "image", "image"}; an image that comes from a
    column is None. Raises Malformed for parts of another type."""
    if isinstance(content, str):
        pieces = content.split(PLACE)
        parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}]
        for piece in pieces[1:]:
            parts += [{"type": "image", "image": None}, {"type": "text", "text": piece}]
        return [part for part in parts if part.get("text") != ""] or parts
    found: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            found.append({"type": "text", "text": part["text"]})
        elif kind == "image_url":
            url = part.get("image_url")
            found.append({"type": "image", "image": url.get("url") if isinstance(url, Mapping) else url})
        elif kind == "image":
            found.append({"type": "image", "image": next((part[k] for k in IMAGE_KEYS if part.get(k)), None)})
        else:
            raise Malformed(field, f"a part of type {kind!r}; text, image and image_url can be read")
    return found


def _plain(message: ChatMessage) -> ChatMessage:
    """The message with its content as text, if that is all it has: some templates take nothing else."""
    content = message["content"]
    is_text = all(part["type"] == "text" for part in content)
    return {**message, "content": "".join(part["text"] for part in content)} if is_text else message


PLACE = "<image>"
"""Where a text says that a picture stands, as in datasets of other tools."""
IMAGE_KEYS = ("image", "url", "path", "base64")
"""Where a part {"type": "image"} of a message may have its picture."""


class RowTemplate:
    """`Q: {question}`: a name in single braces is a column; `{{name}}` stands for `{name}`; other braces are text.

    `{prompt}` is always the prompt column, whatever that is called.
    """

    def __init__(self, text: str, *, prompt_column: str) -> None:
        self.parts: list[tuple[str, str | None]] = []
        """Literal text, then the column that follows it."""
        literal, end = "", 0
        for match in _PLACEHOLDER.finditer(text):
            literal += text[end : match.start()]
            end = match.end()
            if match[1] is not None:
                literal += "{" + match[1] + "}"
            else:
                self.parts.append((literal, prompt_column if match[2] == "prompt" else match[2]))
                literal = ""
        if not self.parts:
            raise DataError(f"data.template: {text!r} names no column, so every prompt would be the same")
        self.parts.append((literal + text[end:], None))

    def fill(self, values: Mapping[str, Any]) -> str:
        """One pass over the parts. Raises Malformed for a missing column or one that is not text or a number."""
        pieces: list[str] = []
        for literal, name in self.parts:
            pieces.append(literal)
            if name is not None:
                pieces.append(as_text(column(values, name), name))
        return "".join(pieces)


class Rendered(NamedTuple):
    """The prompt of one row."""

    text: str
    """With one picture token for each picture."""
    messages: tuple[ChatMessage, ...] | None = None
    """What `text` renders, with `data.chat`."""
    answer: str | None = None
    """The removed assistant turn, with `data.last_turn: answer`."""
    pictures: tuple[Picture, ...] = ()
    """In the order of `text`, not placed yet."""


class Renderer:
    """A row to the text of its prompt, as `data` says."""

    def __init__(self, data: DataSection, tokenizer: Tokenizer, folder: Path = Path()) -> None:
        """`folder` is the run file's, for paths of pictures."""
        self.data, self.tokenizer = data, tokenizer
        self.image_root = folder / Path(data.image_root or "").expanduser()
        self.clock = (
            {"strftime_now": datetime.now().strftime} if "strftime_now" in str(tokenizer.hf.chat_template) else {}
        )
        """As a row is rendered when it is first read and again when it is needed."""
        self.system = [{"role": "system", "content": data.system}] if data.system is not None else []
        self.template = (
            RowTemplate(data.template, prompt_column=data.prompt_column) if data.template is not None else None
        )

    def render(self, values: Mapping[str, Any]) -> Rendered:
        """Raises Malformed, naming the column."""
        name = self.data.prompt_column
        if self.template is not None:
            return Rendered(self.template.fill(values))
        value = column(values, name)
        if not self.data.chat:
            if not isinstance(value, str):
                raise Malformed(name, f"got {type(value).__name__}; must be text (messages need data.chat=true)")
            return Rendered(value)
        messages, answer = self._without_answer(self.messages(value, may_show=True))
        messages, pictures = self.with_pictures(messages, values, self.data.image_columns)
        try:
            return Rendered(self.tokenizer.render(messages, self.clock), tuple(messages), answer, pictures)
        except TemplateRefusal as error:
            raise Malformed(name, str(error)) from error

    def _without_answer(self, messages: list[ChatMessage]) -> tuple[list[ChatMessage], str | None]:
        """The messages of a prompt, and the answer after them with `data.last_turn: answer`."""
        name, takes_answer = self.data.prompt_column, self.data.last_turn == "answer"
        ends_in_answer = messages[-1]["role"] == "assistant"
        if ends_in_answer and not takes_answer:
            raise Malformed(
                name,
                "the last message is the assistant's, so the prompt would contain the answer. Set "
                "data.last_turn=answer to take it off the prompt and use it as the gold answer",
            )
        if not takes_answer:
            return messages, None
        if not ends_in_answer:
            raise Malformed(
                name, f"the last message is of role {messages[-1]['role']}; data.last_turn=answer needs the assistant's"
            )
        if not messages[:-1]:
            raise Malformed(name, "holds the assistant's message alone, so there is no prompt")
        return messages[:-1], as_text(messages[-1]["content"], name)

    def asks(self, values: Mapping[str, Any]) -> list[Any]:
        """The values that the prompt is made of, before any template; equal for equal questions."""
        names = [name for _, name in self.template.parts] if self.template is not None else [self.data.prompt_column]
        return [column(values, name) for name in names if name is not None]

    @cached_property
    def processor(self) -> PictureProcessor:
        """Of the model's pictures. Raises DataError for a model that has none, or another family's."""
        return PictureProcessor.of(self.tokenizer.processor, most_pixels=self.data.max_image_pixels)

    def with_pictures(
        self, messages: list[ChatMessage], values: Mapping[str, Any], columns: Sequence[str], name: str | None = None
    ) -> tuple[list[ChatMessage], tuple[Picture, ...]]:
        """The messages with a part `{"type": "image"}` for each picture, and the pictures in their order.

        Args:
            columns: with pictures that stand where the text says so.
            name: column of the messages (by default the prompt's).
        Raises Malformed, naming the column.
        """
        name = name or self.data.prompt_column
        own = [(name, value) for name in columns for value in _listed(column(values, name))]
        if not own and not any(isinstance(message["content"], list) for message in messages):
            return messages, ()
        waiting = deque(own)
        messages = [{**message, "content": _parts(message["content"], name)} for message in messages]
        places = [part for message in messages for part in message["content"] if part["type"] == "image"]
        if waiting and not any(part.get("image") is None for part in places):
            first = next((m for m in messages if m["role"] == "user"), messages[0])
            new = [{"type": "image", "image": None} for _ in waiting]
            first["content"] = [*new, *first["content"]]
            places = [part for message in messages for part in message["content"] if part["type"] == "image"]
        pictures: list[Picture] = []
        for part in places:
            field, value = (name, part.pop("image", None))
            if value is None:
                if not waiting:
                    raise Malformed(name, f"has more places for pictures than data.image_columns give ({len(own)})")
                field, value = waiting.popleft()
            try:
                pictures.append(self.processor.picture(source_of_picture(value, self.image_root)))
            except BrokenPicture as error:
                raise Malformed(field, f"picture {len(pictures) + 1}: {error}") from error
        if waiting:
            raise Malformed(
                waiting[0][0], f"{len(waiting)} of {len(own)} pictures have no place: the text says <image> less often"
            )
        return [_plain(message) for message in messages], tuple(pictures)

    def picture_files(self, values: Mapping[str, Any], *others: str) -> list[Path]:
        """Files of the pictures that a row names: in columns of pictures, and in the messages of the prompt and of
        `others`. None without a chat template, and of a malformed row."""
        if not self.data.chat:
            return []
        given, texts = (
            [name for name in names if name.partition(".")[0] in values]
            for names in (self.data.image_columns, (self.data.prompt_column, *others))
        )
        try:
            found = [value for name in given for value in _listed(column(values, name))]
            for name in texts:
                for message in self.messages(column(values, name), name, may_show=True):
                    found += [part.get("image") for part in _parts(message["content"], name)]
            sources = [source_of_picture(value, self.image_root) for value in found if value is not None]
        except (Malformed, BrokenPicture):
            return []
        return [source for source in sources if isinstance(source, Path)]

    def messages(self, value: Any, name: str | None = None, *, may_show: bool = False) -> list[ChatMessage]:
        """Text as one user message, or the row's own messages; the system message first unless they bring one.

        Args:
            may_show: messages may have parts that are pictures.
        Raises Malformed for anything else, naming column `name` (by default the prompt's).
        """
        name = name or self.data.prompt_column
        messages: Any = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if not isinstance(messages, list) or not messages:
            raise Malformed(name, f"got {type(value).__name__}; must be text or a list of {{role, content}} messages")
        for number, message in enumerate(messages, start=1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise Malformed(name, f"message {number} is no {{role, content}} object")
            if not isinstance(message.get("content"), str | list):
                got = (
                    "no content"
                    if message.get("content") is None
                    else f"{type(message['content']).__name__} as content"
                )
                raise Malformed(name, f"message {number} has {got}; must be text or a list of parts")
            if not may_show and any(part["type"] == "image" for part in _parts(message["content"], name)):
                raise Malformed(name, f"message {number} has a picture, which a pair of a reward model cannot have")
        return messages if messages[0]["role"] == "system" else [*self.system, *messages]
