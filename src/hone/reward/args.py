"""A component's args as the settings of its reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hone.config.engine import EngineSection
from hone.reward.resolve import Unusable

SettingsT = TypeVar("SettingsT", bound=BaseModel)


def settings_of(kind: type[SettingsT], args: Mapping[str, Any], *, asks_engine: bool = False) -> SettingsT:
    """A component's args as its settings.

    Args:
        asks_engine: of another service, so that settings of the engine are looked for among the args.
    Raises:
        Unusable: every problem of them.
    """
    try:
        return kind.model_validate(dict(args))
    except ValidationError as error:
        raise Unusable("; ".join(_problem(one, asks_engine=asks_engine) for one in error.errors())) from None


def _problem(error: Mapping[str, Any], *, asks_engine: bool) -> str:
    place, said = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    if asks_engine and error["type"] == "extra_forbidden" and place in EngineSection.model_fields:
        return f"args.{place}: a setting of the engine; set it where it is started (services.NAME.engine)"
    return f"args.{place}: {said} (got {error['input']!r})" if place else f"args: {said}"
