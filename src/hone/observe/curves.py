"""Curves of a page: columns of the metrics of each stage, with a bounded number of points.

Arrays are over the metrics (R, a row each) and over steps or bins of steps (N).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 1000
"""Per curve; longer ones show means of equal bins."""


def stages_of(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per stage, in the order run: columns of its steps and of its evaluations, and how long it took."""
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_stage.setdefault(line["stage"], []).append(line)
    stages, began_s = [], 0.0
    for name, found in by_stage.items():
        evals = [line for line in found if _is_evaluation(tuple(line))]
        steps = [line for line in found if not _is_evaluation(tuple(line))]
        ended_s = found[-1]["time_s"]
        stages.append(
            {
                "name": name,
                "last_step": max(line["step"] for line in found),
                "seconds": round(ended_s - began_s, 3),
                "steps": _columns(steps),
                "evals": _columns(evals),
            }
        )
        began_s = ended_s
    return stages


@lru_cache(maxsize=1024)
def _is_evaluation(keys: tuple[str, ...]) -> bool:
    """Of a line of metrics; lines have few different sets of keys."""
    return any(key.startswith("eval/") for key in keys)


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    with_keys = defaultdict[tuple[str, ...], list[int]](list)  # lines have few different sets of keys
    for place, line in enumerate(lines):
        with_keys[tuple(line)].append(place)
    names = sorted({name for keys in with_keys for name in keys if "/" in name})
    row_of = {name: row for row, name in enumerate(names)}
    value_RN = np.full((len(names), len(lines)), np.nan)
    for keys, places in with_keys.items():
        is_metric = [name in row_of for name in keys]
        values = [[*compress(lines[place].values(), is_metric)] for place in places]
        rows = [row_of[name] for name in compress(keys, is_metric)]
        value_RN[np.ix_(rows, places)] = np.array(values, np.float64).T  # None becomes NaN
    shown_RN = _short_values(_bin_means(value_RN, MAX_POINTS))
    return {
        "count": len(lines),
        "step": thin([line["step"] for line in lines], MAX_POINTS),
        "values": {name: _known(value_N) for name, value_N in zip(names, shown_RN, strict=True)},
    }


def _short_values(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of 5 digits: a whole number over a power of ten, which has a short text."""
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = 4 - np.floor(np.log10(np.abs(value)))
        up, down = 10.0 ** np.clip(digits, 0, 300), 10.0 ** np.clip(-digits, 0, 300)
        return np.where(np.isfinite(digits), np.rint(value * up / down) / up * down, value)


def thin(points: Sequence[float | None], most: int) -> list[float | None]:
    """At most `most` points: means of the known values in equal bins; None for a bin without any."""
    return _known(_bin_means(np.array([points], np.float64), most)[0])  # None becomes NaN


def _bin_means(value_RN: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Of each row means in equal bins, at most `most`; NaN for a bin without a finite value."""
    count = value_RN.shape[1]
    if count <= most:
        return value_RN
    is_known_RN = np.isfinite(value_RN)
    starts = np.round(np.arange(most) * (count / most)).astype(np.int64)
    sums = np.add.reduceat(np.where(is_known_RN, value_RN, 0.0), starts, axis=1)
    with np.errstate(invalid="ignore"):
        return sums / np.add.reduceat(is_known_RN.astype(np.int64), starts, axis=1)


def _known(value_N: NDArray[np.float64]) -> list[float | None]:
    values = value_N.tolist()
    return values if np.isfinite(value_N).all() else [value if math.isfinite(value) else None for value in values]
