"""Prompt stream: rows to prompts with stable ids, in an endless stream that one integer resumes.

What a malformed row is gets decided here, row by row; `data.max_bad_rows` says what follows. Not here: reading files
(`sources.py`), which rows are kept and which of them are in memory (`lazy.py`), in which order they come (`order.py`),
turning text into tokens (`chat.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.config.run import DataSection, SftSection
from hone.data.cache import DEFAULT_CACHE, DataCache
from hone.data.chat import Tokenizer, UnknownCharacter
from hone.data.lazy import Facts, LazyRows, RowReading, SampleSize, load_lazily, or_problem, reading_of
from hone.data.order import RowOrder
from hone.data.pictures import BrokenPicture, with_picture_tokens
from hone.data.render import Malformed, Renderer, as_text, column
from hone.data.sources import DataPart, SourceRow, sft_source, source_of
from hone.errors import DataError
from hone.types import Picture, Prompt, TokenIds, read_only

_JSON = json.JSONEncoder(sort_keys=True, default=str)
MADE_AHEAD = 16
"""Prompts of a stream that are tokenised together."""


class SftRow(NamedTuple):
    """A prompt and its target response as token ids, EOS included."""

    prompt: TokenIds
    response: TokenIds
    loss_mask: NDArray[np.bool_] | None = None
    """Which response tokens are targets; None: all."""
    pictures: tuple[Picture, ...] = ()
    """Pictures of the prompt."""


class PromptStream:
    """Prompts in an endless stream, read and tokenised when they are asked for.

    Attributes:
        report: what was read, dropped and skipped.
        order: which row stands at each position.
    """

    def __init__(self, prompts: LazyRows[Prompt], order: RowOrder) -> None:
        self.report, self.order, self._prompts = prompts.report, order, prompts

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self.order)

    def rows(self) -> LazyRows[Prompt]:
        """Every prompt once, in the order of the source, which is also its `index` here."""
        return self._prompts

    def starting_at(self, index: int) -> Iterator[Prompt]:
        """The endless stream from position `index` on."""
        together = 1 if self.order.is_measured else MADE_AHEAD
        for start in itertools.count(index, together):
            prompts = self._prompts.at(self.order.at(start, start + together).tolist())
            for position, prompt in enumerate(prompts, start=start):
                yield replace(prompt, index=position)


def seen_frac(rows: LazyRows[Prompt], among: LazyRows[Prompt]) -> float:
    """Share of the rows whose prompt is also that of a row of `among`."""
    return float(np.isin(rows.content, among.content).mean())


def load_prompts(
    data: DataSection,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    seed: int,
    part: DataPart = "train",
    cache: DataCache = DEFAULT_CACHE,
    sample: SampleSize | None = None,
) -> PromptStream:
    """Read, render and tokenise one part of the data, unless a cache knows what comes of it.

    Args:
        folder: the run file's, for relative paths.
        part: `train` comes in the order that `data.order` says, `eval` as in the source.
        sample: as of `load_lazily`.
    Raises:
        DataError: no source, nothing usable in it, or a malformed row that may not be skipped.
    """
    source = source_of(data, part, lacking="there is nothing to evaluate on")
    reading = reading_of(source, data, lambda own: _PromptReading(own, tokenizer, folder))
    by = data.order_column if part == "train" else None
    limit = data.max_prompt_tokens
    prompts = load_lazily(source, data, folder, reading, max_tokens=limit, cache=cache, order_column=by, sample=sample)
    as_is = RowOrder(prompts.sources, seed=seed, order="source")
    return PromptStream(prompts, prompts.order(data, seed=seed, in_rl=True) if part == "train" else as_is)


def load_sft_rows(
    data: DataSection,
    sft: SftSection,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    cache: DataCache = DEFAULT_CACHE,
    sample: SampleSize | None = None,
) -> LazyRows[SftRow]:
    """Supervised rows in source order: prompts as in `load_prompts`, and responses with EOS. `sample`: as of
    `load_lazily`.

    Raises DataError as `load_prompts` does, and without a response column.
    """
    source, limit = sft_source(data, sft), data.max_prompt_tokens
    reading = reading_of(source, data, lambda own: _SftReading(own, sft, tokenizer, folder))
    by = data.order_column if sft.data is None else None
    return load_lazily(source, data, folder, reading, max_tokens=limit, cache=cache, order_column=by, sample=sample)


def shortened(ids: Sequence[int], data: DataSection) -> Sequence[int]:
    """A prompt's tokens, cut to `data.max_prompt_tokens` on the side that `data.too_long` names."""
    limit = data.max_prompt_tokens
    if len(ids) <= limit or data.too_long == "drop":
        return ids
    if data.too_long == "left":
        return ids[-limit:]
    return [*ids[: limit - limit // 2], *ids[len(ids) - limit // 2 :]]


class _PromptReading(RowReading[Prompt]):
    """Rows to prompts. Ids of rows that ask and answer the same are equal until they are
    `finished`, then the second is `...#2`."""

    def __init__(self, data: DataSection, tokenizer: Tokenizer, folder: Path) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.renderer = Renderer(data, tokenizer, folder)
        self._had_pictures = False

    def id_column(self, row: SourceRow) -> str | None:
        return self.data.id_column

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": "prompts", "data": row_settings(self.data), "tokenizer": self.tokenizer.digest()}

    def read(self, rows: Sequence[SourceRow]) -> list[Prompt | Malformed]:
        drafts = [or_problem(self.draft, row) for row in rows]
        texts = [draft.text for draft in drafts if isinstance(draft, Prompt)]
        ids = iter(self.tokenizer.encode_prompts(texts, rendered=self.data.chat))
        return [draft if isinstance(draft, Malformed) else self.prompt(draft, next(ids)) for draft in drafts]

    def draft(self, row: SourceRow) -> Prompt:
        """A prompt that is rendered, not yet tokenised. Raises Malformed, naming the column."""
        data, values = self.data, row.values
        rendered = self.renderer.render(values)
        text = spelled(self.tokenizer, rendered.text, data.prompt_column, rendered=data.chat)
        answer = column(values, data.answer_column) if data.answer_column is not None else rendered.answer
        if data.id_column is None:  # a hash of what the row asks and answers
            asks = [*self.renderer.asks(values), *(picture.digest for picture in rendered.pictures)]
            row_id = hashlib.blake2b(_JSON.encode([asks, answer]).encode(), digest_size=8).hexdigest()
        else:
            row_id = as_text(column(values, data.id_column), data.id_column)
        self._had_pictures |= bool(rendered.pictures)
        shown = {data.prompt_column, *data.image_columns}  # a reward sees pictures on the prompt
        others = {k: v for k, v in values.items() if k not in shown}
        return Prompt(
            row_id, 0, text, np.empty(0, np.int32), answer=answer, columns=others, messages=rendered.messages,
            pictures=rendered.pictures, source=row.source,
        )  # fmt: skip

    def prompt(self, draft: Prompt, whole: list[int]) -> Prompt | Malformed:
        ids, pictures, name = shortened(whole, self.data), draft.pictures, self.data.prompt_column
        if pictures:
            try:
                ids, pictures = with_picture_tokens(whole, pictures, self.tokenizer.picture_tokens)
            except BrokenPicture as error:
                return Malformed(name, str(error))
        if not ids:
            return Malformed(name, "the prompt is empty")
        return replace(draft, token_ids=np.array(ids, np.int32), pictures=pictures)

    def facts(self, item: Prompt, row: SourceRow) -> Facts:
        row_id = int(item.id, 16) if self.data.id_column is None else hash_of(item.id.encode())
        return Facts(len(item.token_ids), row_id, hash_of(item.token_ids.tobytes(), *_placed(item.pictures)))

    def finished(self, item: Prompt, row: SourceRow, place: int, repeat: int) -> Prompt:
        is_first = repeat == 1 or self.data.id_column is not None
        return replace(item, id=item.id if is_first else f"{item.id}#{repeat}", index=place)

    def is_repeatable(self) -> bool:
        return not self._had_pictures and not (self.data.chat and self.renderer.clock)


class _SftReading(RowReading[SftRow]):
    """Rows to prompts and responses."""

    def __init__(self, data: DataSection, sft: SftSection, tokenizer: Tokenizer, folder: Path) -> None:
        """Raises DataError without a response column."""
        if not (sft.response_column or data.answer_column or data.last_turn == "answer"):
            raise DataError(
                "sft.response_column: not set, and neither is data.answer_column; which column has the responses?"
            )
        self.prompts, self.tokenizer = _PromptReading(data, tokenizer, folder), tokenizer
        self.response_column = sft.response_column
        self.answer_name = data.answer_column or data.prompt_column

    def id_column(self, row: SourceRow) -> str | None:
        return self.prompts.id_column(row)

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.prompts.settings, "kind": "sft", "responses": self.response_column}

    def read(self, rows: Sequence[SourceRow]) -> list[SftRow | Malformed]:
        prompts = self.prompts.read(rows)
        texts = [or_problem(self.response, row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
        responses = iter(self.tokenizer.encode_responses([text for text in texts if isinstance(text, str)]))
        items: list[SftRow | Malformed] = []
        for prompt, text in zip(prompts, texts, strict=True):
            if isinstance(prompt, Malformed):
                items.append(prompt)
            elif isinstance(text, Malformed):
                items.append(text)
            else:
                response = read_only(next(responses), np.int32)
                items.append(SftRow(prompt.token_ids, response, pictures=prompt.pictures))
        return items

    def response(self, row: SourceRow, prompt: Prompt | Malformed) -> str:
        """The response that SFT trains on. Raises Malformed, naming the column."""
        if isinstance(prompt, Malformed):
            raise prompt
        name = self.response_column or self.answer_name
        response = column(row.values, name) if self.response_column else prompt.answer
        return spelled(self.tokenizer, as_text(response, name), name)

    def facts(self, item: SftRow, row: SourceRow) -> Facts:
        content = content_of(item)
        return Facts(len(item.prompt), content, content)

    def is_repeatable(self) -> bool:
        return self.prompts.is_repeatable()


def row_settings(data: DataSection) -> dict[str, Any]:
    """Those keys of `data` that decide what a row becomes."""
    places = {"train", "train_split", "train_rows", "eval", "eval_split", "eval_rows"}
    order = {"order", "order_column", "pass_rate_bounds"}
    return data.model_dump(mode="json", exclude=places | order | {"max_bad_rows"})


def spelled(tokenizer: Tokenizer, text: str, field: str, *, rendered: bool = False) -> str:
    """`text`, after checking that the tokenizer can encode it. Raises Malformed."""
    try:
        tokenizer.check_characters(text, rendered=rendered)
    except UnknownCharacter as error:
        raise Malformed(field, str(error)) from error
    return text


def content_of(row: SftRow) -> int:
    """Unsigned 64-bit hash, equal for rows that are the same to the model."""
    return hash_of(row.prompt.tobytes(), row.response.tobytes(), *_placed(row.pictures))


def _placed(pictures: Sequence[Picture]) -> list[bytes]:
    return [f"{picture.digest} {picture.start}".encode() for picture in pictures]


def hash_of(*parts: bytes) -> int:
    """Unsigned 64-bit hash of some bytes."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(hashed.digest(), "little")
