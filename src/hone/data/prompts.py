"""Prompt stream: rows to prompts with stable ids, in a shuffled endless stream that one integer resumes.

What a malformed row is gets decided here, row by row; `data.on_bad_row` says what follows. Not here: reading files
(`sources.py`), turning text into tokens (`chat.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.config.run import DataSection, SftSection
from hone.data.chat import Message, Tokenizer, UnknownCharacter
from hone.data.pictures import BrokenPicture, with_picture_tokens
from hone.data.render import Malformed, Renderer, as_text, column
from hone.data.report import LoadReport, Tally, nothing_left
from hone.data.sources import BadRow, Part, SourceRow, read_rows, source_name, source_of
from hone.errors import DataError
from hone.types import Picture, Prompt, TokenIds, read_only


class SftRow(NamedTuple):
    """A prompt and its target response as token ids, EOS included."""

    prompt: TokenIds
    response: TokenIds
    loss_mask: NDArray[np.bool_] | None = None
    """Which response tokens are targets; None: all."""
    pictures: tuple[Picture, ...] = ()
    """Of the prompt."""


class PromptStream:
    """Prompts in an endless stream of epochs; position `index` is a function of (seed, index) alone.

    Attributes:
        report: what was read, dropped and skipped.
        where: file and line of each prompt's row, by the prompt's id.
    """

    def __init__(
        self, prompts: Sequence[Prompt], report: LoadReport, where: Mapping[str, str], *, seed: int, shuffle: bool
    ) -> None:
        if not prompts:
            raise DataError(nothing_left(report))
        self.report, self.where = report, where
        self._prompts = tuple(prompts)
        self._seed, self._shuffle = seed, shuffle

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._prompts)

    def rows(self) -> tuple[Prompt, ...]:
        """Every prompt once, in the order of the source, which is also its `index` here."""
        return self._prompts

    def starting_at(self, index: int) -> Iterator[Prompt]:
        """The endless stream from position `index` on; epoch `index // len(self)`, and so on."""
        first_epoch, position = divmod(index, len(self))
        for epoch in itertools.count(first_epoch):
            order = epoch_order(len(self), seed=self._seed, epoch=epoch) if self._shuffle else range(len(self))
            for place in range(position, len(self)):
                yield replace(self._prompts[order[place]], index=epoch * len(self) + place)
            position = 0


def load_prompts(
    data: DataSection, tokenizer: Tokenizer, folder: Path, *, seed: int, part: Part = "train"
) -> PromptStream:
    """Read, render and tokenise one part of the data.

    Args:
        folder: the run file's, for relative paths.
        part: `train` is shuffled when `data.shuffle` says so, `eval` never.
    Raises:
        DataError: no source, nothing usable in it, or a malformed row that may not be skipped.
    """
    source, split, rows = source_of(data, part, lacking="there is nothing to evaluate on")
    loading = _Loading(data, tokenizer, source_name(source), folder)
    prompts = loading.prompts(read_rows(source, folder, split=split, rows=rows))
    return PromptStream(prompts, loading.report(), loading.where, seed=seed, shuffle=data.shuffle and part == "train")


def load_sft_rows(
    data: DataSection, sft: SftSection, tokenizer: Tokenizer, folder: Path
) -> tuple[list[SftRow], LoadReport]:
    """Supervised rows in source order: prompts as in `load_prompts`, and responses with EOS.

    Raises DataError as `load_prompts` does, and without a response column.
    """
    if not (sft.response_column or data.answer_column or data.last_turn == "answer"):
        raise DataError(
            "sft.response_column: not set, and neither is data.answer_column; which column has the responses?"
        )
    source = sft.data or data.train
    loading = _Loading(data, tokenizer, source_name(source), folder, sft=sft)
    prompts = loading.prompts(read_rows(source, folder, split=data.train_split, rows=sft.rows))
    if not prompts:
        raise DataError(nothing_left(loading.report()))
    responses = tokenizer.encode_responses([loading.responses[prompt.id] for prompt in prompts])
    imitated = [
        SftRow(prompt.token_ids, read_only(ids, np.int32), pictures=prompt.pictures)
        for prompt, ids in zip(prompts, responses, strict=True)
    ]
    return imitated, loading.report()


def shortened(ids: Sequence[int], data: DataSection) -> Sequence[int]:
    """A prompt's tokens, cut to `data.max_prompt_tokens` on the side that `data.too_long` names."""
    limit = data.max_prompt_tokens
    if len(ids) <= limit or data.too_long == "drop":
        return ids
    if data.too_long == "left":
        return ids[-limit:]
    return [*ids[: limit - limit // 2], *ids[len(ids) - limit // 2 :]]


@lru_cache(maxsize=2)
def epoch_order(num_rows: int, *, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(num_rows) that is a function of (seed, epoch), on every machine and library version.

    Rows are sorted by a hash of their number (splitmix64, Steele et al., 2014), keyed by seed and epoch.
    """
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8).digest(), "little")
    x = np.uint64(key) + np.arange(1, num_rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return tuple(np.argsort(x ^ (x >> np.uint64(31)), kind="stable").tolist())


@dataclass(frozen=True, slots=True)
class _PromptDraft:
    """A row that is well-formed and rendered, not yet tokenised."""

    where: str
    id: str
    text: str
    answer: Any
    columns: dict[str, Any]
    messages: tuple[Message, ...] | None
    pictures: tuple[Picture, ...]


class _Loading(Tally):
    """One pass over one source, row by row."""

    def __init__(
        self,
        data: DataSection,
        tokenizer: Tokenizer,
        source: str,
        folder: Path,
        *,
        sft: SftSection | None = None,
    ) -> None:
        super().__init__(data, source, max_tokens=data.max_prompt_tokens)
        self.tokenizer = tokenizer
        self.renderer = Renderer(data, tokenizer, folder)
        self.sft = sft
        self.responses: dict[str, str] = {}
        """Prompt id -> target text, when `sft` is given."""
        self.where: dict[str, str] = {}
        """Prompt id -> file and line of its row."""
        self.repeats = Counter[str]()
        """Number of rows with the same content."""

    def prompts(self, rows: Iterable[SourceRow | BadRow]) -> list[Prompt]:
        """The well-formed rows that are short enough."""
        drafts = [draft for row in self.rows(rows) if (draft := self.draft(row)) is not None]
        whole_ids = self.tokenizer.encode_prompts([draft.text for draft in drafts], rendered=self.data.chat)
        prompts: list[Prompt] = []
        for draft, whole in zip(drafts, whole_ids, strict=True):
            ids, pictures = shortened(whole, self.data), draft.pictures
            if pictures:
                try:
                    ids, pictures = with_picture_tokens(whole, pictures, self.tokenizer.picture_id)
                except BrokenPicture as error:
                    self.reject(f"{draft.where} {self.data.prompt_column}: {error}")
                    continue
            if not ids:
                self.reject(f"{draft.where} {self.data.prompt_column}: the prompt is empty")
            elif self.fits(len(ids)):
                prompts.append(
                    Prompt(
                        draft.id,
                        len(prompts),
                        draft.text,
                        np.array(ids, np.int32),
                        answer=draft.answer,
                        columns=draft.columns,
                        messages=draft.messages,
                        pictures=pictures,
                    )
                )
        self.kept = len(prompts)
        return prompts

    def draft(self, row: SourceRow) -> _PromptDraft | None:
        data, values = self.data, row.values
        try:
            rendered = self.renderer.render(values)
            text = self.spelled(rendered.text, data.prompt_column, rendered=data.chat)
            answer = column(values, data.answer_column) if data.answer_column is not None else rendered.answer
            row_id = self.row_id(row, answer, rendered.pictures)
            if self.sft is not None:
                field = self.sft.response_column or data.answer_column or data.prompt_column
                response = column(values, field) if self.sft.response_column else answer
                self.responses[row_id] = self.spelled(as_text(response, field), field)
        except Malformed as error:
            return self.reject(f"{row.where} {error.field}: {error}")
        shown = {data.prompt_column, *data.image_columns}  # a reward sees pictures on the prompt
        others = {k: v for k, v in values.items() if k not in shown}
        return _PromptDraft(row.where, row_id, text, answer, others, rendered.messages, rendered.pictures)

    def spelled(self, text: str, field: str, *, rendered: bool = False) -> str:
        """`text`, after checking that the tokenizer can encode it."""
        try:
            self.tokenizer.check_characters(text, rendered=rendered)
        except UnknownCharacter as error:
            raise Malformed(field, str(error)) from error
        return text

    def row_id(self, row: SourceRow, answer: Any, pictures: Sequence[Picture]) -> str:
        """Stable: the id column, else a hash of what the row asks and answers; equal rows get `#2`, `#3`, ..."""
        name = self.data.id_column
        if name is not None:
            row_id = as_text(column(row.values, name), name)
            if row_id in self.where:
                raise Malformed(name, f"{row_id!r} is also the id of {self.where[row_id]}; ids must be unique")
        else:
            asks = [*self.renderer.asks(row.values), *(picture.digest for picture in pictures)]
            content = json.dumps([asks, answer], sort_keys=True, default=str)
            base = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
            self.repeats[base] += 1
            row_id = base if self.repeats[base] == 1 else f"{base}#{self.repeats[base]}"
        self.where[row_id] = row.where
        return row_id
