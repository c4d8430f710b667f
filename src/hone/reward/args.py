"""A component's args as the settings of its reward, and as the address of the service that it asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hone.config.engine import EngineSection
from hone.reward.http import Address, Addresses, token_from
from hone.reward.resolve import Unusable, did_you_mean

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


def address_of(
    url: str | Sequence[str] | None, service: str | None, token_env: str | None, services: Addresses
) -> Address:
    """Where args say that a service is, and what it is shown. Raises ValueError unless exactly one of `url` and
    `service` says where, and for a token that is not there."""
    if (url is None) == (service is None):
        raise ValueError("give either url or service")
    token = token_from(token_env, "token_env")
    if service is None:
        return Address((url,) if isinstance(url, str) else tuple(url or ()), token)
    if service not in services:
        named = f" The run file's: {', '.join(services)}." if services else " The run file has no `services`."
        raise ValueError(f"no service {service!r}.{did_you_mean(service, services)}{named}")
    found = services[service]
    found = Address((found,)) if isinstance(found, str) else found
    return replace(found, token=token or found.token)
