"""Settings of resolved inputs by their dotted keys: read one, change some. For what searches and what suggests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hone.plan.inputs import Inputs, checkpointing_of

Settings = Mapping[str, Any]
"""Values by key; keys under `placement.` belong to the placement, the others to the run file."""


def setting(inputs: Inputs, key: str) -> Any:
    """The value of a key, with what null stands for put in."""
    if key == "placement.checkpointing" and inputs.placement.checkpointing is None:
        return checkpointing_of(inputs)
    if key == "placement.engine.max_samples" and inputs.placement.engine.max_samples is None:
        return inputs.config.rollout.max_concurrent_samples
    here: Any = inputs.placement if key.startswith("placement.") else inputs.config
    for part in key.removeprefix("placement.").split("."):
        here = getattr(here, part)
    return here


def changed(inputs: Inputs, settings: Settings) -> Inputs:
    """The same inputs with other settings; only keys that the algorithm does not depend on."""
    config, placement = inputs.config, inputs.placement
    for key, value in settings.items():
        if key.startswith("placement."):
            placement = with_value(placement, key.removeprefix("placement.").split("."), value)
        else:
            config = with_value(config, key.split("."), value)
    return replace(inputs, config=config, placement=placement)


def with_value(section: Any, path: Sequence[str], value: Any) -> Any:
    """A section of the configuration with another value at a path below it."""
    first, *rest = path
    inner = with_value(getattr(section, first), rest, value) if rest else value
    return section.model_copy(update={first: inner})
