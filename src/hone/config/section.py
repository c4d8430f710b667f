"""Base class of the sections of a run file, and `key`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: closed to unknown keys, frozen, documented by the string under each key."""

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Names that people write here and that are not keys -> what to use instead."""
    short_key: ClassVar[str] = ""
    """In lists of these sections: the key that an entry sets that is only text; "": there are no such entries."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # keys have no infinities, but what free mappings hold is kept
        protected_namespaces=(),
    )


def key(default: Any = ..., *, unit: str = "", is_path: bool = False, **bounds: Any) -> Any:
    """A key with a unit and bounds (ge, gt, le, lt, min_length). `...` as default: the run file must set it.

    Args:
        is_path: it may name a file or directory, relative to the folder of the file that it is written in.
    """
    return Field(default, json_schema_extra={"unit": unit, "is_path": is_path}, **bounds)
