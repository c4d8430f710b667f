"""One family of errors. Each message says what happened, where, what was got, and what to do.

The exit code belongs to the kind of failure, not to the place that raised it, so that a script can distinguish
"fix your file" from "the machine is too small". Failures of the world (a reward that cannot be had for one
sample) are not errors but data: see `types.Score`. What messages are made of is here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class HoneError(Exception):
    """Base of every error that Hone raises on purpose; printed without a traceback."""

    exit_code = 1

    @property
    def problems(self) -> Sequence[str]:
        """What is wrong, one message for each."""
        return [str(self)]


class ConfigError(HoneError):
    """The run file or an override is wrong. Carries every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems
        super().__init__("\n".join(problems))

    @property
    def problems(self) -> list[str]:
        """See `HoneError.problems`."""
        return self._problems


class DataError(HoneError):
    """A data set, tokenizer or model directory is missing, malformed or does not fit the run file."""

    exit_code = 2


class RunFolderError(HoneError):
    """The run's folder belongs to another run, is in use by one, or holds no valid checkpoint to resume."""

    exit_code = 2


class CheckpointError(HoneError):
    """A checkpoint could not be written or is not whole. The newest valid one is untouched."""

    exit_code = 1


class RewardError(HoneError):
    """A reward cannot be had, or fails more often than the run file allows."""

    exit_code = 3


class ServiceError(HoneError):
    """A service of the run file cannot be started or kept running. Holds the last lines of its log."""

    exit_code = 3


class GateError(HoneError):
    """Sampler and trainer disagree at step 0: training would learn from wrong ratios. Names the likely cause."""

    exit_code = 1


class MemoryExhausted(HoneError):
    """Out of memory, and no setting is left that would use less without changing the algorithm."""

    exit_code = 4


class Stopped(HoneError):
    """The user stopped the run; a clean checkpoint was written."""

    exit_code = 130


class StoppedByAlarm(Stopped):
    """An alarm named in `observe.stop_on` ended the run; a clean checkpoint was written."""

    exit_code = 6


class EngineError(HoneError):
    """The engine cannot serve a request: it is asleep, closed, stuck, or its worker failed. Names the cause."""

    exit_code = 1


class ClusterError(HoneError):
    """The cluster cannot be had in time, or a trainer's rank or an engine's process was lost or is stuck. Names it."""

    exit_code = 1


class ClusterLost(HoneError):
    """Ray itself ended under the run, and no process of it can be started again. The newest checkpoint is untouched."""

    exit_code = 3


class PlacementError(ClusterError):
    """The run file asks for devices that the cluster does not have."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """The first line of an error's message; where it has none, what kind of error it is."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(word: str, candidates: Iterable[str], cutoff: float = 72) -> str | None:
    """The candidate that is spelled most like `word`, if any is close.

    Args:
        cutoff: likeness that is close enough, from 0 to 100.
    """
    from rapidfuzz import fuzz, process

    found = process.extractOne(word, list(candidates), scorer=fuzz.ratio, processor=str.lower, score_cutoff=cutoff)
    return found[0] if found else None


def misspelled(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` is with at most two letters left out, added, exchanged or replaced, if there is one."""
    from rapidfuzz import process
    from rapidfuzz.distance import OSA

    found = process.extractOne(word, list(candidates), scorer=OSA.distance, score_cutoff=2)
    return found[0] if found else None
