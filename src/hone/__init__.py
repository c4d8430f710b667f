"""Hone: RL post-training for language models. Start at `hone --help`, `hone.train` or docs/architecture.md."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hone.api import Run, check, train

    __all__ = ["Run", "check", "train"]


class _Package(ModuleType):
    """Has the Python API, not imported yet. A class, because importing the package `hone.train` sets that name here."""

    @property
    def train(self) -> Any:
        from hone import api

        return api.train

    @train.setter
    def train(self, package: ModuleType) -> None:
        pass

    @property
    def check(self) -> Any:
        from hone import api

        return api.check

    @property
    def Run(self) -> Any:
        from hone import api

        return api.Run


sys.modules[__name__].__class__ = _Package
