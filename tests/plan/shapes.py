"""Architectures of models that are shipped with Hone, by name."""

from hone.plan.architecture import Architecture
from hone.plan.known_models import MODELS, named_architecture


def shape(name: str) -> Architecture:
    return named_architecture(name, MODELS, key="model.path")
