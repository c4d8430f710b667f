"""The part of `hone check` that tries rewards: on gold answers, as if the policy had written them.

Prompts are those that training loads, and groups are of `rollout.group_size`: the row's gold answer, and beside it
another row's as a wrong one. A reward that scores the two alike has nothing to teach.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hone.config.derived import component_name, has_answers, service_uses, services_of
from hone.config.rewards import builtin_reward
from hone.config.run import RewardComponent, RunConfig
from hone.data.chat import Tokenizer, UnknownCharacter
from hone.data.lazy import spread
from hone.data.prompts import PromptStream
from hone.data.report import LoadProgress, on_stderr
from hone.errors import ConfigError
from hone.reward.http import Address
from hone.reward.rewards import Rewards
from hone.run.report import CheckReport
from hone.types import Fault, Group, Prompt, Sample, Score, version_spans

MAX_SAMPLES_OF_USER_REWARDS = 1024
"""A user's reward may be slow or cost money; the pure built-in ones see every row, and give gold answers one score."""
MOST_TRIED = 20_000
"""Rows of a source that rewards are tried on; of larger ones at even distances."""
MIN_ROWS = 16
MAX_TIMEOUTS = 3
POLL_S = 1.0
KINDS = {int: "integers", float: "numbers", str: "text"}
EXAMPLES = 3
"""Kinds of failure of a reward that are shown, the most frequent first."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A row whose gold answer is scored beside a wrong one."""

    prompt: Prompt
    where: str
    """File and line of the row."""
    gold: str
    other: str | None
    """Another row's answer; None where no row has another one."""


class Judged(NamedTuple):
    """What one trial gave: each component's scores and the reward, of the gold answer and of the other one."""

    trial: Trial
    gold: Mapping[str, Score]
    other: Mapping[str, Score]
    gold_reward: float | None
    other_reward: float | None


async def check_rewards(
    config: RunConfig,
    folder: Path,
    streams: Sequence[PromptStream],
    tokenizer: Tokenizer | None,
    services: Mapping[str, Address],
    findings: CheckReport,
    *,
    most_tried: int,
) -> None:
    """Score each gold answer, and another row's in the same group, by every reward that can be asked from here."""
    components = checkable(config, services, findings)
    if not any(component.weight for component in components):
        return
    if tokenizer is None or not streams:
        findings.not_checked.append("rewards: there are no prompts to try them on")
        return
    trials = trials_of(config, streams, components, most_tried)
    there_are = sum(stream.report.of or len(stream.rows()) for stream in streams)
    if len(trials) < there_are:
        findings.lines.append(f"rewards: tried on {len(trials):,} of {there_are:,} rows")
    tokens, unwritable = token_ids(tokenizer, (trial.gold for trial in trials))
    settings = config.reward.model_copy(
        update={"components": components, "max_unscored_frac": 1.0, "min_valid_per_group": 1}
    )
    group_size = config.rollout.group_size
    samples = len(trials) * group_size
    try:
        async with Rewards.from_config(settings, folder, window_samples=samples, services=services) as rewards:
            results: list[Judged] = []
            progress = LoadProgress(
                f"scoring with {', '.join(map(component_name, components))}", on_stderr, total=len(trials)
            )
            judge = partial(
                judged, rewards, group_size=group_size, tokens=tokens, waiting=lambda: progress.at(len(results))
            )
            for trial in trials:
                result = await judge(trial)
                if result is None or rewards.timeouts >= MAX_TIMEOUTS:
                    users = [c for c in components if builtin_reward(c.use).runs != "in process"]
                    limits = ", ".join(f"{component_name(c)} {c.timeout_s:g} s" for c in users)
                    findings.problems.append(
                        f"reward: a user function took longer than its timeout_s {MAX_TIMEOUTS} times ({limits}), so "
                        f"the check of rewards stopped after {len(results)} of {len(trials)} rows. Make it faster, or "
                        "raise timeout_s."
                    )
                    return
                if not results and (away := services_away(result.gold, config)):
                    findings.not_checked += away
                    return
                results.append(result)
            report_faults(components, results, findings)
            if results and has_answers(config):
                report_gold(components, results, findings)
                await report_total(config, components, results, judge, findings)
    except ConfigError as error:
        findings.problems += error.problems
        return
    if has_answers(config):
        report_unwritable(components, trials, unwritable, findings)


def checkable(config: RunConfig, services: Mapping[str, Address], findings: CheckReport) -> tuple[RewardComponent, ...]:
    """The components that a gold answer says something about, and that can be asked; the others are named."""
    waiting = {name for _, name in service_uses(config)} - services.keys()
    findings.not_checked += [
        f"rewards of service {name}: it is started with the run; `hone check --services` starts it" for name in waiting
    ]
    asked: list[RewardComponent] = []
    for component in config.reward.components:
        if component.use == "reward_model" and config.cluster.backend != "local":
            findings.not_checked.append(f"reward {component_name(component)}: its model is for the cluster's devices")
        elif builtin_reward(component.use).scores_form:
            findings.not_checked.append(
                f"reward {component_name(component)}: a gold answer alone says nothing about it"
            )
        elif not any(name in waiting for _, name in services_of(component)):
            asked.append(component)
    if asked and not has_answers(config):
        findings.not_checked.append(
            "rewards: data.answer_column is not set, so they were tried on prompts instead of gold answers"
        )
    return tuple(asked)


def trials_of(
    config: RunConfig, streams: Sequence[PromptStream], components: Sequence[RewardComponent], most: int
) -> list[Trial]:
    """The rows to try, each with what to score; without gold answers the prompts' own texts."""
    places = [(stream.rows(), place) for stream in streams for place in spread(len(stream.rows()), most)]
    if any(builtin_reward(component.use).runs != "in process" for component in components):
        places = places[: max(MIN_ROWS, MAX_SAMPLES_OF_USER_REWARDS // config.rollout.group_size)]
    rows = [
        (prompt, source.where(prompt.index))
        for source, own in groupby(places, itemgetter(0))
        for prompt in source.at([place for _, place in own])
    ]
    prompts = [prompt for prompt, _ in rows]
    if not has_answers(config):
        return [Trial(prompt, where, prompt.text, None) for prompt, where in rows]
    gold = gold_response(components)
    others = [None if answer is None else gold(answer) for answer in answers_of_others(prompts)]
    return [
        Trial(prompt, where, gold(prompt.answer), other) for (prompt, where), other in zip(rows, others, strict=True)
    ]


def gold_response(components: Sequence[RewardComponent]) -> Callable[[Any], str]:
    """Writes a row's answer as the response that the first reward with a form of its own expects."""
    golds = (builtin_reward(component.use).gold for component in components)
    gold = next((gold for gold in golds if gold is not None), lambda answer: answer)

    def text(answer: Any) -> str:
        response = gold(answer)
        return json.dumps(response) if isinstance(response, dict | list) else str(response)

    return text


def is_decided_by_answer(config: RunConfig) -> bool:
    """Whether a row's answer as the response decides its reward: nothing scores form, and nothing but functions scores.

    A user's function may still expect more than the answer.
    """
    rewards = [builtin_reward(component.use) for component in config.reward.components if component.weight]
    of_answers = all(reward.runs != "stateful" and not reward.scores_form for reward in rewards)
    return of_answers and config.rollout.environment.use is None


def answers_of_others(prompts: Sequence[Prompt]) -> list[Any | None]:
    """For each prompt the answer of another one that ends in another word, so that none is right by chance.

    Sorted by their last word and moved by the size of the largest set of equals, no answer meets its equal, unless
    more than half of them are equal: None then stands where no other answer is left.
    """
    words = [(str(prompt.answer).split() or [""])[-1].strip("$.").replace(",", "") for prompt in prompts]
    order = sorted(range(len(prompts)), key=words.__getitem__)
    shift = max(Counter(words).values(), default=0)
    answers: list[Any | None] = [None] * len(prompts)
    for place, row in enumerate(order):
        other = order[(place + shift) % len(order)]
        answers[row] = prompts[other].answer if words[other] != words[row] else None
    return answers


def token_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Token ids of responses, and why some of them cannot be written."""
    unwritable: dict[str, str] = {}
    unique = list(dict.fromkeys(texts))
    for text in unique:
        try:
            tokenizer.check_characters(text)
        except UnknownCharacter as error:
            unwritable[text] = str(error)
    fine = [text for text in unique if text not in unwritable]
    tokens = {text: tuple(ids) for text, ids in zip(fine, tokenizer.encode_responses(fine), strict=True)}
    unknown = tokenizer.hf.unk_token_id
    unwritable |= {
        text: f"the tokenizer spells it with {tokenizer.hf.unk_token}"
        for text, ids in tokens.items()
        if unknown in ids and unknown not in tokenizer.eos_ids
    }
    return tokens, unwritable


async def judged(
    rewards: Rewards,
    trial: Trial,
    *,
    group_size: int,
    tokens: Mapping[str, tuple[int, ...]],
    waiting: Callable[[], object],
) -> Judged | None:
    """One trial, scored in a group as training makes them; None when user functions took too long too often.

    Args:
        waiting: called every `POLL_S` until the scores are there.
    """
    other = trial.gold if trial.other is None else trial.other
    texts = [trial.gold, *[other] * max(group_size - 1, 1)]
    samples: list[Sample] = []
    for number, text in enumerate(texts):
        ids = np.array(tokens.get(text, ()), np.int32)
        nothing_L, versions = np.zeros(len(ids), np.float32), version_spans([0] * len(ids))
        samples.append(Sample(trial.prompt.id, number % group_size, ids, nothing_L, versions, "stop", text))
    groups: list[Group] = []
    for start in range(0, len(samples), group_size):
        scoring = asyncio.ensure_future(rewards.score(Group(trial.prompt, tuple(samples[start : start + group_size]))))
        while not scoring.done():
            await asyncio.wait({scoring}, timeout=POLL_S)
            waiting()
            if rewards.timeouts >= MAX_TIMEOUTS and not scoring.done():
                scoring.cancel()
                await asyncio.wait({scoring})
                return None
        groups.append(scoring.result())
    scores = {name: [score for group in groups for score in group.scores[name]] for name in groups[0].scores}
    given = [reward for group in groups for reward in group.rewards]
    has_other = trial.other is not None
    return Judged(
        trial,
        {name: found[0] for name, found in scores.items()},
        {name: found[1] for name, found in scores.items()} if has_other else {},
        given[0],
        given[1] if has_other else None,
    )


def services_away(scores: Mapping[str, Score], config: RunConfig) -> list[str]:
    """Faults of built-in rewards whose service is not running: it may be started with the run, or after this check."""
    components = [c for c in config.reward.components if ":" not in c.use and builtin_reward(c.use).runs == "in worker"]
    ours = [component_name(component) for component in components]
    return [
        f"reward {name}: {scores[name].detail}" for name in ours if name in scores and scores[name].fault is Fault.INFRA
    ]


def report_faults(components: Sequence[RewardComponent], results: Sequence[Judged], findings: CheckReport) -> None:
    """Each way in which a reward could not score a response, once, with the first row where that happened."""
    for name in map(component_name, components):
        scored = [(r.trial.where, r.trial.gold, r.gold[name], True) for r in results]
        scored += [(r.trial.where, r.trial.other, r.other[name], False) for r in results if name in r.other]
        failed: dict[str, list[str]] = {}
        for where, text, score, is_gold in scored:
            if score.fault is not None and (is_gold or score.fault is not Fault.MODEL):
                failed.setdefault(f"{score.fault}: {score.detail}", []).append(f"{text!r:.60} under {where}")
        by_count = sorted(failed.items(), key=lambda found: -len(found[1]))
        for cause, responses in by_count[:EXAMPLES]:
            findings.problems.append(
                f"reward {name}: {len(responses)} of {len(scored)} responses could not be scored, the first is "
                f"{responses[0]}: {cause}"
            )
        if rest := sum(len(responses) for _, responses in by_count[EXAMPLES:]):
            findings.problems.append(f"reward {name}: {rest} more responses could not be scored, for other causes")


def report_gold(components: Sequence[RewardComponent], results: Sequence[Judged], findings: CheckReport) -> None:
    """Figures of each component, and where one that compares with the answer misjudges it."""
    findings.figures["gold answers"] = len(results)
    for component in components:
        name = component_name(component)
        values = [(result, value) for result in results if (value := result.gold[name].value) is not None]
        others = [s.value for result in results if (s := result.other.get(name)) is not None and s.value is not None]
        findings.figures[f"{name}: gold answers score"] = mean([value for _, value in values], "nothing")
        findings.figures[f"{name}: shuffled answers score"] = mean(others, "nothing")
        best = max((value for _, value in values), default=0.0)
        missed = [result.trial for result, value in values if value < best]
        if builtin_reward(component.use).gold and missed:
            findings.problems.append(
                f"reward {name}: {len(missed)} of {len(results)} gold answers do not earn the full score, the first is "
                f"{missed[0].where}: {str(missed[0].prompt.answer)[-80:]!r}. The policy could not earn it there either."
            )


async def report_total(
    config: RunConfig,
    components: Sequence[RewardComponent],
    results: Sequence[Judged],
    judge: Any,
    findings: CheckReport,
) -> None:
    """A problem when gold answers earn no more than wrong ones; most often numbers are compared with text."""
    left_out = [
        c
        for c in config.reward.components
        if c.weight and c not in components and not builtin_reward(c.use).scores_form
    ]
    gain = advantage(results)
    if left_out or gain is None or gain > 1e-9:
        return
    gold = mean([result.gold_reward for result in results if result.gold_reward is not None])
    other = mean([result.other_reward for result in results if result.other_reward is not None])
    problem = (
        f"reward: gold answers earn {gold:.4g} on average and other rows' answers {other:.4g}, so the policy could not "
        "learn from it what is right."
    )
    trials = [result.trial for result in results[:MIN_ROWS]]
    changed = [(trial, other) for trial in trials if (other := with_other_type(trial)) is not None]
    again = [result for _, other in changed if (result := await judge(other)) is not None]
    if (advantage(again) or 0.0) > 1e-9:
        was, now = (trial.prompt.answer for trial in changed[0])
        problem += (
            f" The data's answers are {KINDS[type(was)]} ({was!r}), but the reward compares with {KINDS[type(now)]}: "
            f"given as {now!r} they earn more. Change them in the data, or convert them in the reward."
        )
    else:
        problem += (
            f" The first answer is {trials[0].prompt.answer!r:.80} ({trials[0].where}). Leave data.answer_column out "
            "if the reward is not meant to compare with it."
        )
    findings.problems.append(problem)


def advantage(results: Sequence[Judged]) -> float | None:
    """By how much gold answers earn more than wrong ones; None when no row has both."""
    pairs = [(r.gold_reward, r.other_reward) for r in results]
    differences = [gold - other for gold, other in pairs if gold is not None and other is not None]
    return float(np.mean(differences)) if differences else None


def with_other_type(trial: Trial) -> Trial | None:
    """The trial with a number as text for an answer, or a text as the number that it spells; None for other answers."""
    answer = trial.prompt.answer
    if isinstance(answer, bool) or not isinstance(answer, int | float | str):
        return None
    try:
        other = (float(answer) if "." in answer else int(answer)) if isinstance(answer, str) else str(answer)
    except ValueError:
        return None
    columns = {n: other if type(v) is type(answer) and v == answer else v for n, v in trial.prompt.columns.items()}
    return replace(trial, prompt=replace(trial.prompt, answer=other, columns=columns))


def report_unwritable(
    components: Sequence[RewardComponent],
    trials: Sequence[Trial],
    unwritable: Mapping[str, str],
    findings: CheckReport,
) -> None:
    """Gold answers that the policy could not write, where it has to write them: a reward compares with them."""
    lost = [trial for trial in trials if trial.gold in unwritable]
    if lost and any(builtin_reward(component.use).gold for component in components):
        findings.problems.append(
            f"the tokenizer cannot write {len(lost)} of {len(trials)} gold answers, the first is {lost[0].where}: "
            f"{unwritable[lost[0].gold]}. The policy could never give them."
        )


def mean(values: Sequence[float], nothing: Any = 0.0) -> Any:
    return float(np.mean(values)) if values else nothing
