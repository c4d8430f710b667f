"""`length` and `repetition`: penalties from 0 to -1, independent of content."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from hone.config.run import Section, key
from hone.reward.signature import reward
from hone.types import Fault, Group, Score


class LengthSettings(Section):
    """`args` of `length`: a bound, or a target."""

    max_tokens: int | None = key(None, unit="tokens", ge=1)
    """Longer responses earn -1."""
    buffer_tokens: int | None = key(None, unit="tokens", ge=1)
    """The penalty grows from 0 to -1 over this number of tokens before `max_tokens`."""
    target_tokens: int | None = key(None, unit="tokens", ge=1)
    """The length that earns 0."""
    tolerance_tokens: int | None = key(None, unit="tokens", ge=1)
    """A response this far from the target, or farther, earns -1; the penalty is proportional in between."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        bound = (self.max_tokens is not None, self.buffer_tokens is not None)
        target = (self.target_tokens is not None, self.tolerance_tokens is not None)
        if (bound, target) not in (((True, True), (False, False)), ((False, False), (True, True))):
            raise ValueError("give max_tokens and buffer_tokens, or target_tokens and tolerance_tokens")
        if self.max_tokens is not None and self.buffer_tokens is not None and self.buffer_tokens > self.max_tokens:
            raise ValueError("buffer_tokens must be at most max_tokens")
        return self

    def penalty(self, num_tokens: int) -> float:
        """0 to 1."""
        if self.max_tokens is not None and self.buffer_tokens is not None:
            excess = num_tokens - (self.max_tokens - self.buffer_tokens)
            return min(1.0, max(0, excess) / self.buffer_tokens)
        assert self.target_tokens is not None and self.tolerance_tokens is not None
        return min(1.0, abs(num_tokens - self.target_tokens) / self.tolerance_tokens)


@reward(minimum=-1.0, maximum=0.0, settings=LengthSettings)
def length(group: Group, settings: LengthSettings) -> list[Score]:
    """The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), or a distance from a target."""
    scores: list[Score] = []
    for sample in group.samples:
        if sample.text and not len(sample.token_ids):
            detail = "its tokens did not come with it, so its length is not known"
            scores.append(Score(None, Fault.INFRA, detail))
        else:
            penalty = settings.penalty(int(sample.is_written_T.sum()))
            truncated = float(sample.finish_reason == "length")
            scores.append(Score(0.0 - penalty, metrics={"truncated": truncated}))
    return scores


class RepetitionSettings(Section):
    """`args` of `repetition`."""

    ngram: int = key(3, unit="words or characters", ge=1)
    """How long the runs are that should not come again."""
    unit: Literal["words", "characters"] = key("words")
    """What a run is made of: `characters` for scripts without spaces."""


@reward(minimum=-1.0, maximum=0.0, settings=RepetitionSettings)
def repetition(group: Group, settings: RepetitionSettings) -> list[float]:
    """Minus the share of n-grams that were there before (arXiv:2502.03373, appendix C.2); 0 for shorter responses."""
    return [0.0 - _repeated(sample.text, settings) for sample in group.samples]


def _repeated(text: str, settings: RepetitionSettings) -> float:
    units = text.casefold().split() if settings.unit == "words" else "".join(text.split())
    total = len(units) - settings.ngram + 1
    if total < 2:
        return 0.0
    return 1 - len({tuple(units[place : place + settings.ngram]) for place in range(total)}) / total
