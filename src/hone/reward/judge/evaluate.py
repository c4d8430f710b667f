"""Evaluation of a judge on preference pairs.

A row has a prompt, a better and a worse response, and the answer where the judge is shown one. Each pair is judged as a
group, in both orders; canaries are judged beside the first prompts.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from hone.errors import DataError
from hone.reward.judge.scorer import JudgeReward
from hone.types import Group, Prompt, Sample, Score

PAIRS_AT_ONCE = 16
NO_TOKENS = np.empty(0, np.int32), np.empty(0, np.float32)
"""Ids and logprobs: a judge reads text."""
CANARY_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """One row."""

    prompt: Prompt
    chosen: str
    rejected: str

    def group(self, *, swapped: bool) -> Group:
        texts = (self.rejected, self.chosen) if swapped else (self.chosen, self.rejected)
        samples = (Sample(self.prompt.id, n, *NO_TOKENS, (), "stop", text) for n, text in enumerate(texts))
        return Group(self.prompt, tuple(samples))


@dataclass
class Figures:
    """What was found. Pairs that could not be scored are in no mean but the one that counts them."""

    pairs: int
    accuracies: list[float] = field(default_factory=list)
    """Of each judgement of a scored pair: 1 when the better response got more, 0.5 for a tie."""
    same: list[float] = field(default_factory=list)
    """Of each pair scored in both orders: 1 when both say the same of it."""
    margins: list[float] = field(default_factory=list)
    canaries: dict[str, list[float]] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """By name; what there is no value of is left out."""
        found = {"pairs": float(self.pairs), "unscored_frac": 1 - len(self.accuracies) / (2 * self.pairs)}
        if self.accuracies:
            accuracy = fmean(self.accuracies)
            found["pairwise_accuracy"] = accuracy
            found["pairwise_accuracy_stderr"] = math.sqrt(accuracy * (1 - accuracy) / self.pairs)
            found["tie_frac"] = fmean(value == 0.5 for value in self.accuracies)
            found["margin_mean"] = fmean(self.margins)
        if self.same:
            found["swap_consistency"] = fmean(self.same)
        return found | {f"canary_{name}": max(scores) for name, scores in self.canaries.items()}


async def evaluate_judge(judge: JudgeReward, pairs: Sequence[JudgedPair]) -> Figures:
    """Judge every pair in both orders, and the canaries."""
    figures, turn = Figures(len(pairs)), asyncio.Semaphore(PAIRS_AT_ONCE)

    async def one(pair: JudgedPair) -> None:
        async with turn:
            straight, swapped = [await judge.score(pair.group(swapped=swapped)) for swapped in (False, True)]
        verdicts = [_verdict(straight), _verdict(tuple(reversed(swapped)))]
        scored = [verdict for verdict in verdicts if verdict is not None]
        figures.accuracies += [0.5 + 0.5 * ((margin > 0) - (margin < 0)) for margin in scored]
        figures.margins += scored
        if len(scored) == 2:
            figures.same.append(float((scored[0] > 0) == (scored[1] > 0) and (scored[0] < 0) == (scored[1] < 0)))

    await asyncio.gather(*map(one, pairs))
    for pair in pairs[:CANARY_PROMPTS]:
        for name, value in (await judge.canary_scores(pair.prompt)).items():
            figures.canaries.setdefault(name, []).append(value)
    return figures


def read_pairs(path: Path) -> list[JudgedPair]:
    """Rows of a JSONL file with `prompt` (text or messages), `chosen`, `rejected` and, if the judge needs it, `answer`.

    Raises DataError for a row without them.
    """
    pairs: list[JudgedPair] = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list):
            raise DataError(f"{path}:{number}: no prompt; a row has prompt, chosen, rejected and perhaps answer")
        if not all(isinstance(row.get(name), str) for name in ("chosen", "rejected")):
            raise DataError(f"{path}:{number}: chosen and rejected must be texts")
        given = row["prompt"]
        text, messages = (given, None) if isinstance(given, str) else ("", tuple(given))
        prompt = Prompt(f"row {number}", number, text, NO_TOKENS[0], row.get("answer"), row, messages)
        pairs.append(JudgedPair(prompt, row["chosen"], row["rejected"]))
    if not pairs:
        raise DataError(f"{path}: no rows")
    return pairs


def _verdict(scores: Sequence[Score]) -> float | None:
    """By how much the better response got more; None when one of the two has no score of its own."""
    chosen, rejected = (score.value if score.fault is None else None for score in scores)
    return None if chosen is None or rejected is None else chosen - rejected
