"""Rules of the `lora` section."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.breach import Breach
from hone.config.derived import trains_adapter
from hone.config.run import RunConfig

NOT_HIDDEN = ("lm_head", "embed_out", "embed_tokens", "wte")
"""Usual names of output layers and embeddings."""


def adapter_settings_have_a_rank(config: RunConfig) -> Iterator[Breach]:
    lora = config.lora
    given = sorted(lora.model_fields_set)
    if given and "rank" not in given:
        keys = ("lora.rank", *(f"lora.{name}" for name in given))
        yield Breach(
            keys, f"is required with lora.{given[0]}: without it every weight is trained; 0 says that on purpose"
        )


def adapter_is_beside_linear_layers(config: RunConfig) -> Iterator[Breach]:
    """Logits are made from the output layer a chunk at a time, outside the model; often it is the embedding too."""
    found = [name for name in config.lora.targets or () if name in NOT_HIDDEN]
    if found:
        yield Breach(
            ("lora.targets",),
            f"may not name {', '.join(found)}: adapters are for the linear layers between embedding and output layer, "
            "which are often one matrix. Leave it out, or train every weight with lora.rank = 0",
        )


def adapter_has_a_stage(config: RunConfig) -> Iterator[Breach]:
    lora, stages = config.lora, config.stages
    if lora.rank and not any(trains_adapter(config, stage) for stage in stages):
        yield Breach(
            ("lora.stages", "lora.rank", "stages"),
            f"names {', '.join(lora.stages)}, and this run's stages are {', '.join(stages)}: none would train an "
            "adapter. Name one of them, or set lora.rank to 0",
        )


def adapter_is_beside_something_learnt(config: RunConfig) -> Iterator[Breach]:
    first = config.stages[0]
    if config.model.init is not None and trains_adapter(config, first):
        yield Breach(
            ("lora.stages", "lora.rank", "model.init", "stages"),
            f"includes {first}, which starts from random weights (model.init), and an adapter leaves those as they "
            "are. Start from model.path, or train every weight in a stage before",
        )


def reference_is_beneath_the_adapter(config: RunConfig) -> Iterator[Breach]:
    every = config.algorithm.reference_refresh_every
    if every and trains_adapter(config, "rl"):
        yield Breach(
            ("algorithm.reference_refresh_every", "lora.rank", "lora.stages"),
            f"= {every}, but with an adapter the reference is the model beneath it, which never changes. Set it to 0, "
            "or lora.rank to 0",
        )


LORA_RULES = (
    adapter_settings_have_a_rank,
    adapter_is_beside_linear_layers,
    adapter_has_a_stage,
    adapter_is_beside_something_learnt,
    reference_is_beneath_the_adapter,
)
