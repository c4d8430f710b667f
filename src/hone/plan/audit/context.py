"""What the checks of an audit share: the recipe, its devices, and its models by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hone.errors import DataError
from hone.plan.architecture import Architecture, architecture_from
from hone.plan.audit.nanochat import Nanochat
from hone.plan.audit.recipe import EngineRecipe, Read
from hone.plan.engine import EnginePlan, EngineSettings
from hone.plan.hardware import Hardware, find_hardware
from hone.plan.presets import named_architecture


@dataclass(frozen=True)
class Context:
    """A recipe with everything in it looked up."""

    read: Read
    hardware: Hardware
    engines: Mapping[str, EnginePlan]
    model: Architecture | Nanochat | None
    """What is trained."""

    @classmethod
    def of(cls, read: Read) -> Context:
        """Raises DataError for a device or a model that is not known."""
        recipe, folder = read.recipe, Path(read.source).parent
        hardware = find_hardware(recipe.hardware)
        engines = {
            name: _engine(name, engine, folder, find_hardware(engine.hardware) if engine.hardware else hardware)
            for name, engine in recipe.engines.items()
        }
        model: Architecture | Nanochat | None = None
        if recipe.training is not None:
            wanted = recipe.training.model
            if isinstance(wanted, str):
                model = named_architecture(wanted, folder, key="training.model")
            elif wanted.get("model_type") == "nanochat":
                try:
                    model = Nanochat.from_config(wanted)
                except KeyError as error:
                    raise DataError(f"{read.where('training.model')}  training.model: {error} is missing") from error
            else:
                model = architecture_from(wanted, source=read.where("training.model"))
        return cls(read, hardware, engines, model)

    @property
    def nanochat(self) -> Nanochat | None:
        return self.model if isinstance(self.model, Nanochat) else None


def _engine(name: str, recipe: EngineRecipe, folder: Path, hardware: Hardware) -> EnginePlan:
    architecture = named_architecture(recipe.model, folder, key=f"engines.{name}.model")
    settings = EngineSettings(
        architecture=architecture,
        tensor_parallel=recipe.tensor_parallel,
        memory_frac=recipe.memory_frac,
        max_batched_tokens=recipe.max_batched_tokens,
        max_samples=recipe.max_samples,
        longest=recipe.longest,
        graphs=False,  # not every recipe captures them; what is impossible without them is so with them
        section=f"engines.{name}",
        frac_key="memory_frac",
        split_key="tensor_parallel",
        tokens_key="max_batched_tokens",
    )
    return EnginePlan(settings, hardware.memory_bytes)
