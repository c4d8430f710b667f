"""The neutral file that a recipe is typed into: what it sets, and what it says about memory.

Nothing here is Hone's own configuration. Sizes that a recipe claims keep the unit that it used: `gb` is 10^9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from hone.config.run import Section, key
from hone.config.yaml_tree import Node, read_yaml
from hone.errors import ConfigError

Size = float | tuple[float, float]
"""One number, or from and to."""


class EngineRecipe(Section):
    """An inference engine, for the policy or for a judge."""

    model: str = key(...)
    """Known name, directory or config.json."""
    hardware: str = key("")
    """Device, if it is another one than the recipe's."""
    tensor_parallel: int = key(1, ge=1)
    memory_frac: float = key(0.9, gt=0, le=1)
    max_batched_tokens: int = key(8192, ge=1)
    max_samples: int = key(256, ge=1)
    prompt_tokens: int = key(0, ge=0)
    """Longest prompt that it is sent, all parts together."""
    response_tokens: int = key(0, ge=0)
    template_tokens: int = key(0, ge=0)
    """What a judge's own text adds."""
    max_model_tokens: int | None = key(None)
    """Longest sequence that it accepts; null: the sum of the lengths."""
    chunked_prefill: bool = key(True)
    sleeps: bool = key(False)
    """Gives its memory back while others work on the same devices."""

    @property
    def longest(self) -> int:
        return self.max_model_tokens or self.prompt_tokens + self.template_tokens + self.response_tokens


class TrainingRecipe(Section):
    """How a model is trained, as far as memory goes."""

    model: dict[str, Any] | str = key(...)
    """As `engines.*.model`, or nanochat's keys: model_type, n_layer, n_embd, n_head, vocab_size."""
    sequence_tokens: int = key(..., ge=1)
    device_batch: int = key(..., ge=1)
    """Sequences of one forward pass."""
    group_size: int = key(..., ge=1)
    prompts_per_step: int = key(..., ge=1)
    devices: int = key(1, ge=1)
    rows: int = key(0, ge=0)
    """Prompts of the data set."""


class PlacementRecipe(Section):
    """Roles, and devices that each asks for."""

    devices: int = key(..., ge=1)
    default: int = key(8, ge=1)
    """Devices of a role that is used but not sized (null)."""
    roles: dict[str, int | None] = key(...)
    colocated: tuple[tuple[str, ...], ...] = key(())
    """Groups of roles that share devices, each group asking for its own."""


class Claim(Section):
    """One sentence of the recipe about memory."""

    about: Literal[
        "kv_cache",
        "kv_cache_batches",
        "activations",
        "activations_of_passes",
        "static",
        "total",
        "grows_with",
        "utilisation",
        "weights",
        "fits",
        "shares_left",
        "out_of_memory_step",
        "out_of_memory_order",
    ] = key(...)
    of: str | None = key(None)
    """The engine that it is about; null: what is trained."""
    gb: Size | None = key(None, unit="10^9 bytes")
    mb: Size | None = key(None, unit="10^6 bytes")
    percent: Size | None = key(None)
    optimizer_gb: Size | None = key(None)
    weights_gb: Size | None = key(None)
    gradients_gb: Size | None = key(None)
    tensor_parallel: int | None = key(None)
    hardware: str | None = key(None)
    card_gb: float | None = key(None)
    """With `utilisation`: what the device's memory is called; null: what it is."""
    samples: int | None = key(None)
    tokens: int | None = key(None)
    """With `kv_cache`: of one sequence; null: the engine's longest."""
    batches: Size | None = key(None)
    passes: int | None = key(None)
    device_batch: int | None = key(None)
    setting: str | None = key(None)
    before: float | None = key(None)
    after: float | None = key(None)
    order: tuple[str, ...] = key(())

    @property
    def bytes(self) -> tuple[float, float] | None:
        """What it says, from and to, in bytes."""
        size, unit = (self.gb, 1e9) if self.gb is not None else (self.mb, 1e6)
        return None if size is None else tuple(unit * end for end in ends(size))  # type: ignore[return-value]


class Recipe(Section):
    """The whole file."""

    name: str = key(...)
    hardware: str = key(...)
    """Devices, as `hone plan --hardware` takes them."""
    engines: dict[str, EngineRecipe] = key({})
    """Engines by name; the shares of those on the same devices add up."""
    training: TrainingRecipe | None = key(None)
    placement: PlacementRecipe | None = key(None)
    claims: tuple[Claim, ...] = key(())


@dataclass(frozen=True)
class Read:
    """A recipe, and the lines that it was read from."""

    recipe: Recipe
    source: str
    tree: Node

    def where(self, path: str) -> str:
        """`practice-a.yaml:12` for a dotted path."""
        node = self.tree.find(path)
        return str(node.where) if node else self.source


def ends(size: Size) -> tuple[float, float]:
    """A number as a range of itself."""
    return (size, size) if isinstance(size, int | float) else (size[0], size[1])


def read_recipe(path: Path) -> Read:
    """Read a recipe.

    Raises:
        ConfigError: with every line that is wrong.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}  cannot be read: {error}"]) from error
    root, problems = read_yaml(text, str(path))
    if root is None or problems:
        raise ConfigError([str(problem) for problem in problems] or [f"{path}  is empty"])
    try:
        recipe = Recipe.model_validate(root.plain())
    except ValidationError as error:
        raise ConfigError([_problem(root, path, details) for details in error.errors(include_url=False)]) from None
    return Read(recipe, str(path), root)


def _problem(root: Node, path: Path, details: Any) -> str:
    keys = [str(part) for part in details["loc"]]
    while keys and root.find(".".join(keys)) is None:
        keys.pop()
    node = root.find(".".join(keys)) if keys else root
    where = str(node.where) if node else str(path)
    return f"{where}  {'.'.join(str(part) for part in details['loc'])}: {details['msg'].lower()}"
