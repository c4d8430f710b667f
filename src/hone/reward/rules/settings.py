"""The `args` of a rule, as one frozen object that was checked before the run started."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from hone.config.run import Section
from hone.reward.signature import RewardFunction
from hone.types import Group, Score

S = TypeVar("S", bound=Section)
Rule = Callable[[Group, S], Sequence[float | Score]]


def takes(settings: type[S]) -> Callable[[Rule[S]], RewardFunction]:
    """Make a rule `f(group, settings)` a reward `f(group, **args)`. Wrong args are problems of the run file.

    Put `reward(...)` above it, for what is declared of a rule belongs to the reward.
    """

    def decorate(rule: Rule[S]) -> RewardFunction:
        @functools.wraps(rule)
        def score(group: Group, **args: Any) -> Sequence[float | Score]:
            return rule(group, settings.model_validate(args))

        group = inspect.Parameter("group", inspect.Parameter.POSITIONAL_ONLY)
        score.__signature__ = inspect.Signature([group, *inspect.signature(settings).parameters.values()])  # type: ignore[attr-defined]
        score.hone_check_args = functools.partial(_check, settings)  # type: ignore[attr-defined]
        return score

    return decorate


def _check(settings: type[Section], args: Mapping[str, Any]) -> None:
    """Raises ValueError with every problem of the args."""
    try:
        settings.model_validate(dict(args))
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, e['loc'])) or 'together'}: {e['msg']} (got {e['input']!r})" for e in error.errors()
        ]
        raise ValueError("; ".join(problems)) from None
