"""Sections of data sources: the entries of `data.train`, `data.eval` and `sft.data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, PlainSerializer, model_serializer

from hone.config.section import Section, key

LastTurn = Literal["prompt", "answer"]


class SourceSection(Section):
    """One source of rows. Keys that are null are as in `data`."""

    short_key: ClassVar[str] = "path"
    elsewhere: ClassVar[Mapping[str, str]] = {
        "rows": "data.train_rows, data.eval_rows and sft.rows cut the sources of a list together",
        "template_args": "data.template_args is of the tokenizer, and so of all sources",
    }

    path: str = key(..., is_path=True)
    """A .jsonl, .json, .csv (each also .gz) or .parquet file, a pattern such as `train-*.jsonl`, a folder that
    `save_to_disk` made, or a Hugging Face dataset name."""
    name: str | None = key(None, min_length=1)
    """Name in metrics; null: the last part of `path`."""
    weight: float | None = key(None, ge=0)
    """Share of the prompts from this source in `data.train`, relative to the other sources, which then need a weight
    too; 0 leaves it out. null for all: every row counts the same, so that larger sources have larger shares."""
    split: str | None = key(None)
    """Split of a Hugging Face dataset; null: that of the list, such as `data.train_split`."""
    prompt_column: str | None = key(None)
    """`data.prompt_column` of these rows."""
    answer_column: str | None = key(None)
    """`data.answer_column` of these rows."""
    id_column: str | None = key(None)
    """`data.id_column` of these rows."""
    image_columns: tuple[str, ...] | None = key(None)
    """`data.image_columns` of these rows."""
    template: str | None = key(None)
    """Prompt template of these rows, in place of `data.template` or `data.chat`."""
    chat: bool | None = key(None)
    """Whether the chat template renders these rows; true replaces `data.template`."""
    system: str | None = key(None)
    """`data.system` of these rows."""
    last_turn: LastTurn | None = key(None)
    """`data.last_turn` of these rows."""

    @model_serializer
    def as_written(self) -> Any:
        """The path alone where nothing else is set, else what is set."""
        written = {name: getattr(self, name) for name in type(self).model_fields}
        written = {name: value for name, value in written.items() if value is not None}
        return self.path if list(written) == ["path"] else written


OF_A_SOURCE = (
    "prompt_column",
    "answer_column",
    "id_column",
    "image_columns",
    "template",
    "chat",
    "system",
    "last_turn",
)
"""Keys that `data` and its sources have."""


def _sections(value: Any) -> Any:
    """Text as a list of one source, and text in a list as a source."""
    if not isinstance(value, str | Sequence):
        return value
    entries = [value] if isinstance(value, str) else value
    return tuple({"path": entry} if isinstance(entry, str) else entry for entry in entries)


def _as_written(sources: Sequence[SourceSection] | None) -> Any:
    written = [source.as_written() for source in sources or ()]
    return None if sources is None else written[0] if len(written) == 1 and isinstance(written[0], str) else written


_TEXT_OR_LIST = (BeforeValidator(_sections), PlainSerializer(_as_written, return_type=Any))
TrainSources = Annotated[tuple[SourceSection, ...], *_TEXT_OR_LIST]
Sources = Annotated[tuple[SourceSection, ...] | None, *_TEXT_OR_LIST]
