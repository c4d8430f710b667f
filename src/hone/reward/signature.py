"""Signature of reward functions: a group in, one score per sample out; its declaration and its checks.

    def f(group: Group, **args) -> list, tuple, array or tensor of float | Score | None        (or async)

`None` says that a sample could not be scored through no fault of its own. A `Score` can say more: a fault of the data,
or a fault of the model, which earns the declared minimum whatever value it carries. Anything that is not a finite
number in the declared range is a fault of ours, never a number: group-relative credit would read a made-up 0 as a
verdict. Used on both sides of the process boundary, so it imports nothing heavy; a tensor is known by its `tolist`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

from hone.runtime.user_code import DETAIL_CHARACTERS
from hone.types import Fault, Group, Sample, Score

Scores = Sequence[float | Score | None]
RewardFunction = Callable[..., Scores | Awaitable[Scores]]
ScoreSample = Callable[[Sample], Awaitable[Score]]
"""Scores one sample of a prompt that was given before, without its siblings."""
MayScoreSample = Callable[[Sample], Awaitable[Score | None]]
"""The same; None for a sample whose siblings matter after all."""


@dataclass(frozen=True, slots=True)
class Range:
    """What a reward function promises of its values. The minimum is what a fault of the model earns."""

    minimum: float | None = None
    maximum: float | None = None

    def problem(self, value: float) -> str | None:
        """Why `value` is not a score, or None."""
        if not math.isfinite(value):
            return f"gave {value}, not a finite number"
        if self.minimum is not None and value < self.minimum:
            return f"gave {value:g}, below its declared minimum {self.minimum:g}"
        if self.maximum is not None and value > self.maximum:
            return f"gave {value:g}, above its declared maximum {self.maximum:g}"
        return None


def reward(
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    overrun: Fault = Fault.INFRA,
    settings: Callable[..., Any] | None = None,
    picture: Callable[..., bytes | None] | None = None,
) -> Callable[[RewardFunction], RewardFunction]:
    """Declare what a reward function promises.

    Args:
        minimum, maximum: of its values; what lies outside is then a fault, not a score.
        overrun: whose fault it is that the function does not come back. INFRA, the default: ours, and the whole group
            goes without scores. MODEL: it only computes, on one response at a time, so a response that it hangs on or
            crashes over has done that, and earns the minimum. It is then called with groups of one sample, after a
            group of none: what hangs there is the row.
        settings: a pydantic model or dataclass of the component's `args`. The function is then `f(group, settings)`,
            and args that the class refuses with a ValueError are problems of the run file.
        picture: `picture(text, answer, settings)` draws a response as PNG bytes for the report; None: no picture. Used
            for rewards that an installed package registers.
    """
    bounds = [bound for bound in (minimum, maximum) if bound is not None]
    if not all(isinstance(bound, Real) and not math.isnan(bound) for bound in bounds) or bounds != sorted(bounds):
        raise ValueError(
            f"minimum={minimum!r}, maximum={maximum!r}: must be numbers, the minimum not above the maximum"
        )
    if overrun is Fault.DATA or (overrun is Fault.MODEL and minimum is None):
        raise ValueError(f"overrun={overrun}: choose Fault.INFRA, or Fault.MODEL with the minimum that it earns")

    def declare(function: RewardFunction) -> RewardFunction:
        declared = _from_args(function, settings) if settings is not None else function
        declared.hone_range = Range(minimum, maximum)  # type: ignore[attr-defined]
        declared.hone_overrun = overrun  # type: ignore[attr-defined]
        if settings is not None:
            group = inspect.Parameter("group", inspect.Parameter.POSITIONAL_ONLY)
            names = [group, *inspect.signature(settings).parameters.values()]
            declared.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
            declared.hone_check_args = functools.partial(_check_args, settings)  # type: ignore[attr-defined]
        if picture is not None:
            declared.hone_picture = _from_args(picture, settings) if settings is not None else picture  # type: ignore[attr-defined]
        return declared

    return declare


def _from_args(function: Callable[..., Any], settings: Callable[..., Any]) -> Callable[..., Any]:
    """`f(..., settings)` as `f(..., **args)`."""

    @functools.wraps(function)
    def called(*given: Any, **args: Any) -> Any:
        return function(*given, settings(**args))

    return called


def _check_args(settings: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raises ValueError with every problem of the args."""
    from pydantic import ValidationError  # here, as the module is imported where nothing is installed, too

    try:
        settings(**args)
    except ValueError as error:
        if not isinstance(error, ValidationError):
            raise
        problems = [
            f"{'.'.join(map(str, e['loc'])) or 'together'}: {e['msg']} (got {e['input']!r})" for e in error.errors()
        ]
        raise ValueError("; ".join(problems)) from None


def declared_range(function: RewardFunction) -> Range:
    return getattr(function, "hone_range", Range())


def overrun_score(function: RewardFunction) -> float | None:
    """What a response earns that the function never comes back from; None when that is no fault of the response."""
    blames_response = getattr(function, "hone_overrun", Fault.INFRA) is Fault.MODEL
    return declared_range(function).minimum if blames_response else None


def check_scores(returned: Any, group: Group, declared: Range) -> tuple[Score, ...]:
    """One valid Score per sample, from whatever a reward function returned."""
    num_samples, values = len(group.samples), plain_values(returned)
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or not (
        hasattr(values, "__len__") and hasattr(values, "__iter__")
    ):
        return all_faulty(num_samples, f"returned {type(returned).__name__}, not one score per sample")
    if len(values) != num_samples:
        return all_faulty(num_samples, f"returned {len(values)} scores for {num_samples} samples")
    return tuple([_check_score(value, declared) for value in values])


def plain_values(values: Any) -> Any:
    """A list of plain values, of a list, an array or a tensor of them; anything else as it came."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return [plain_value(value) for value in values] if isinstance(values, list | tuple) else values


def plain_value(value: Any) -> Any:
    """A plain value, of a list, an array or a tensor that holds just one; anything else as it came."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return plain_value(value[0]) if isinstance(value, list) and len(value) == 1 else value


def all_faulty(num_samples: int, detail: str, fault: Fault = Fault.INFRA) -> tuple[Score, ...]:
    """The same fault for every sample of a group."""
    return (Score(None, fault, detail[:DETAIL_CHARACTERS]),) * num_samples


def _check_score(value: Any, declared: Range) -> Score:
    if type(value) is float:
        return _plain(value, declared)
    if value is None:
        return Score(None, Fault.INFRA, "returned None")
    if isinstance(value, Real):
        return _plain(float(value), declared)
    if not isinstance(value, Score):
        return Score(None, Fault.INFRA, f"gave {type(value).__name__}, not a number")
    score, value = value, value.value
    if score.fault is Fault.MODEL and declared.minimum is not None:
        value = declared.minimum
    if value is not None and (problem := declared.problem(value)) is not None:
        return Score(None, Fault.INFRA, problem)
    # Rebuilt of plain values: a user's own number type would not cross to a process that cannot import it.
    metrics = {str(name): float(number) for name, number in score.metrics.items()}
    return Score(None if value is None else float(value), score.fault, str(score.detail)[:DETAIL_CHARACTERS], metrics)


@lru_cache(maxsize=4096)
def _plain(value: float, declared: Range) -> Score:
    """Scores are immutable and few values repeat, so one object serves for all equal ones."""
    problem = declared.problem(value)
    return Score(value) if problem is None else Score(None, Fault.INFRA, problem)
