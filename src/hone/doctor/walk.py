"""The walk through a run that does not learn: questions in order, answered from the metrics of its rl stage.

Alarms say what is abnormal; the walk says how far the chain from a right answer to a better policy holds. The table of
docs/doctor.md has the same questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hone.doctor.history import History
from hone.doctor.noise import advice_of
from hone.doctor.rule import shown
from hone.doctor.rules.common import (
    ANSWERS_PASS,
    EVAL,
    GAP,
    KL_UPDATE,
    NOISE_METRICS,
    NOISE_STEPS,
    PASS,
    SILENT,
    SURPRISE,
    TRUNCATED,
    WRONG,
    is_surprised,
    moves_far,
)

RECENT = 20
"""Steps that a figure is the mean of."""


@dataclass(frozen=True, slots=True)
class WalkStep:
    """One question."""

    question: str
    metric: str
    """Not logged: the answer is unknown."""
    holds: Callable[[History], bool]
    limit: str
    """What `holds` asks, in words."""
    otherwise: str
    """What to do if not."""
    figure: Callable[[History, str], float] = lambda h, metric: h.mean(metric, RECENT)
    """What is shown of the metric."""
    unknown: str = ""
    """What to do where the metric is not logged."""


@dataclass(frozen=True, slots=True)
class WalkAnswer:
    """A question with its answer."""

    question: str
    answer: Literal["yes", "no", "unknown"]
    found: str
    do: str
    """Empty where nothing is to be done."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What the answer rests on, where one figure is not enough."""


WALK: tuple[WalkStep, ...] = (
    WalkStep(
        "Do gold answers score 1?",
        ANSWERS_PASS,
        lambda h: h.first(ANSWERS_PASS) >= 0.9,
        "at least 0.9 in the first step",
        "hone check RUN.yaml names the rows: the reward, its parser or the answers are wrong, or a right response has "
        "more than the answer",
        figure=History.first,
        unknown="hone check RUN.yaml scores them",
    ),
    WalkStep(
        "Are right answers likelier than guesses?",
        SURPRISE,
        lambda h: not is_surprised(h),
        "below 0.6 in the first step",
        "the tokenizer, chat template and data.template that the model was trained with; a supervised stage",
        figure=History.first,
    ),
    WalkStep(
        "Does the start ever succeed?",
        PASS,
        lambda h: h.first(PASS) > 0,
        "above 0 in the first step",
        "easier prompts first, a supervised stage, or larger groups",
        figure=History.first,
    ),
    WalkStep(
        "Does the policy ever succeed?",
        PASS,
        lambda h: h.mean(PASS, RECENT) > 0 and not h.mean(WRONG, RECENT) >= 1,
        "above 0",
        "easier prompts, a supervised stage, larger groups; check the reward with hone check",
    ),
    WalkStep(
        "Does the reward vary within groups?",
        SILENT,
        lambda h: h.mean(SILENT, RECENT) < 0.6,
        "below 0.6",
        "temperature 1, larger groups, a finer reward, algorithm.drop_uninformative",
    ),
    WalkStep(
        "Do responses end?",
        TRUNCATED,
        lambda h: h.mean(TRUNCATED, RECENT) < 0.25,
        "below 0.25",
        "a larger rollout.max_response_tokens; the end token in the supervised stage",
    ),
    WalkStep(
        "Do sampler and trainer agree?",
        GAP,
        lambda h: h.mean(GAP, RECENT) < 0.03,
        "below 0.03",
        "the alarm `mismatch` has the causes",
    ),
    WalkStep(
        "Does an update change the policy?",
        KL_UPDATE,
        lambda h: h.mean(KL_UPDATE, RECENT) >= 1e-5,
        "at least 1e-5",
        "a higher train.optimizer.lr, or a lower KL coefficient",
    ),
    WalkStep(
        "Is an update small enough?",
        KL_UPDATE,
        lambda h: not moves_far(h),
        "at most 0.3 on average of three, 1 in the first ten steps",
        "a lower train.optimizer.lr",
        figure=lambda h, metric: h.mean(metric, 3),
    ),
    WalkStep(
        "Does evaluation follow?",
        EVAL,
        lambda h: h.count(EVAL) < 2 or h.now(EVAL) >= h.first(EVAL),
        "not below its first value",
        "leaked answers, memorised prompts, an exploited reward",
        figure=History.now,
    ),
)


MORE_SAMPLES = "Would more samples per step help?"
"""The last question. Its answer is no sign of health: it says what twice the samples are worth."""


def walk(settings: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> tuple[WalkAnswer, ...]:
    """Answers from the lines of metrics.jsonl; none for a run without an rl stage.

    Args:
        settings: the resolved run file, nested.
    """
    history = History("rl", settings)
    history.read(lines, {WRONG, *NOISE_METRICS, *(step.metric for step in WALK)})
    if not any(history.count(step.metric) for step in WALK):
        return ()
    answers: list[WalkAnswer] = []
    for step in WALK:
        value = step.figure(history, step.metric)
        if math.isnan(value):
            answers.append(WalkAnswer(step.question, "unknown", f"{step.metric} is not logged", step.unknown))
            continue
        holds, found = step.holds(history), f"{step.metric} = {shown(value)}; {step.limit}"
        answers.append(WalkAnswer(step.question, "yes" if holds else "no", found, "" if holds else step.otherwise))
    return (*answers, _more_samples(history))


def _more_samples(history: History) -> WalkAnswer:
    """From the gradient noise; twice the samples are worth more than 1.33 updates where its scale is above them."""
    advice = advice_of(history)
    if advice is None:
        if not history.count(NOISE_METRICS[0]):
            return WalkAnswer(MORE_SAMPLES, "unknown", f"{NOISE_METRICS[0]} is not logged", "")
        found = f"{NOISE_METRICS[0]} needs {NOISE_STEPS} steps, and a signal that is not lost in the noise"
        return WalkAnswer(MORE_SAMPLES, "unknown", found, "")
    helps = advice.scale > advice.samples
    do = "more train.prompts_per_step, as far as time and memory allow" if helps else ""
    return WalkAnswer(MORE_SAMPLES, "yes" if helps else "no", "; ".join(advice.lines), do, advice.as_dict())
