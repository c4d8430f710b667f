"""`json_schema`: 1 when the response is JSON that a schema allows; else 0.

The JSON is all that follows the reasoning, or its one fenced block. It is parsed strictly: no NaN or infinite
numbers, no duplicate keys. `format` is asserted for the formats in FORMATS, others are ignored. Schemas are in the run
file or in the row; they may refer to their own parts only, so nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Self

import jsonschema
from jsonschema.validators import validator_for
from pydantic import model_validator
from referencing import Registry
from referencing.exceptions import Unresolvable

from hone.config.run import Section, key
from hone.reward.rules.answer import after_reasoning
from hone.reward.signature import all_faulty, reward
from hone.reward.strict_json import each_key_once, finite, refuse_constant
from hone.runtime.user_code import DETAIL_CHARACTERS
from hone.types import Fault, Group, Score

_FENCED = re.compile(
    r"\s*(?P<fence>`{3,}|~{3,})[ \t]*(?:json|\{\s*\.?json\s*\})?[ \t]*\n(?P<inside>.*?)\n?(?P=fence)\s*",
    re.DOTALL | re.IGNORECASE,
)


_DATE_TIME = re.compile(r"(\d{4}-\d{2}-\d{2})[Tt](.+)")
_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?:[!#$&-;=?-Z_a-z~\[\]]|%[0-9A-Fa-f]{2})*")
_HOSTNAME = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*", re.I
)
FORMATS = jsonschema.FormatChecker(("date", "email", "idn-email", "ipv4", "ipv6", "regex", "uuid"))


@FORMATS.checks("date-time")
def _is_date_time(value: object) -> bool:
    found = _DATE_TIME.fullmatch(value) if isinstance(value, str) else None
    return not isinstance(value, str) or (
        found is not None and FORMATS.conforms(found[1], "date") and _TIME.fullmatch(found[2]) is not None
    )


for _name, _form in (("time", _TIME), ("uri", _URI), ("hostname", _HOSTNAME)):
    FORMATS.checks(_name)(lambda value, form=_form: not isinstance(value, str) or form.fullmatch(value) is not None)


class BadSchema(ValueError):
    """An invalid schema."""


class SchemaSettings(Section):
    """`args` of `json_schema`: one schema for all rows, or a column with the row's own."""

    schema_: dict[str, Any] | None = key(None, alias="schema")
    """JSON Schema, of the draft that its `$schema` names, 2020-12 without one."""
    column: str | None = key(None)
    """Column with each row's schema, an object or its JSON text."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.schema_ is None) == (self.column is None):
            raise ValueError("give one of schema and column")
        if self.schema_ is not None:
            validator(self.schema_)
        return self


@reward(minimum=0.0, maximum=1.0, overrun=Fault.MODEL, settings=SchemaSettings)
def json_schema(group: Group, settings: SchemaSettings) -> list[Score] | tuple[Score, ...]:
    """1 for JSON that the schema allows, 0 for other JSON or none."""
    schema = settings.schema_ if settings.column is None else group.prompt.columns.get(settings.column)
    try:
        check = validator(schema)
    except BadSchema as error:
        return all_faulty(len(group.samples), str(error), Fault.DATA)
    return [_score(sample.text, check) for sample in group.samples]


def _score(text: str, check: Any) -> Score:
    text = after_reasoning(text)
    fenced = _FENCED.fullmatch(text)
    try:
        value = json.loads(
            fenced["inside"] if fenced else text,
            parse_constant=refuse_constant,
            parse_float=finite,
            object_pairs_hook=each_key_once,
        )
    except (ValueError, RecursionError) as error:
        return Score(0.0, Fault.MODEL, f"not JSON: {error}"[:DETAIL_CHARACTERS])
    try:
        broken = next(check.iter_errors(value), None)
    except Unresolvable as error:
        return Score(None, Fault.DATA, f"the schema refers to what is not in it: {error}"[:DETAIL_CHARACTERS])
    except RecursionError:
        return Score(0.0, Fault.MODEL, "too deep to be checked")
    if broken is None:
        return Score(1.0)
    return Score(0.0, detail=f"{broken.json_path}: {broken.message}"[:DETAIL_CHARACTERS])


def validator(schema: Any) -> Any:
    """A validator of values. Raises BadSchema."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadSchema(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise BadSchema(f"the schema is {type(schema).__name__}, not an object")
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(dict(schema))
    except jsonschema.SchemaError as error:
        raise BadSchema(f"not a JSON Schema: {error.json_path}: {error.message}") from error
    return kind(
        schema, registry=Registry(), format_checker=FORMATS
    )  # an empty registry: references outside of it are not looked up
