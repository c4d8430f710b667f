"""Read and change settings of a plan's inputs by their dotted run-file keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hone.config.engine import EngineSection
from hone.config.section import Section
from hone.config.topology import topology_of
from hone.plan.inputs import Inputs

Settings = Mapping[str, Any]
"""Values by dotted key."""


def setting(inputs: Inputs, key: str) -> Any:
    """The value of a key."""
    here: Any = inputs.config
    for part in key.split("."):
        here = EngineSection() if here is None else here  # the one section that may be null
        here = here[part] if isinstance(here, Mapping) else getattr(here, part)
    return here


def plain(value: Any) -> Any:
    """A value as JSON and YAML have it."""
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return value.model_dump(mode="json") if isinstance(value, Section) else value


def changed(inputs: Inputs, settings: Settings) -> Inputs:
    """The same inputs with other settings; only keys that the algorithm does not depend on."""
    config = inputs.config
    for key, value in settings.items():
        config = with_value(config, key.split("."), value)
    if any(key.startswith(("cluster.", "services.")) for key in settings):
        return replace(inputs, config=config, topology=topology_of(config, inputs.hardware.per_node))
    return replace(inputs, config=config)


def with_value(section: Any, path: Sequence[str], value: Any) -> Any:
    """A section of the configuration with another value at a path below it."""
    first, *rest = path
    section = EngineSection() if section is None else section
    is_open = isinstance(section, Mapping)
    inner = with_value(section[first] if is_open else getattr(section, first), rest, value) if rest else value
    return {**section, first: inner} if is_open else section.model_copy(update={first: inner})
