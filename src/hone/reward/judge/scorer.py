"""The scorer of the `judge` reward: a group's responses to questions, questions to votes, votes to scores.

A score is the mean of the valid votes, as a share of the scale. Where too few are valid, whose fault is that? If the
judge is well, which it proves by scoring this response's siblings, the response broke it, and earns the least that
any of them did: being unreadable never pays. If no sibling could be scored either, the cause is unknown, and nothing is
scored.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from types import MappingProxyType
from typing import Any, Self

from hone.reward.args import address_of, settings_of
from hone.reward.http import Addresses, Counts, DeviceMemory
from hone.reward.judge.guard import FLAGS, Canaries, Flag, flags_of
from hone.reward.judge.parse import FAILURES, Reading
from hone.reward.judge.prompt import GRM, ByteBound, Counter, JudgeTemplate, Messages, TokenizerCounter, neutraliser
from hone.reward.judge.settings import JudgeSettings, length_problems, template_text
from hone.reward.judge.user import UserFunctions
from hone.reward.judge.votes import REFUSED, Asker, EngineFigures, Traffic, Vote
from hone.reward.openai import ChatAnswer, ChatClient
from hone.reward.picture_urls import ShownPictures
from hone.reward.pool import CallFailed
from hone.reward.resolve import Unusable
from hone.reward.signature import MayScoreSample, Range, all_faulty
from hone.runtime.user_code import DETAIL_CHARACTERS
from hone.types import Fault, Group, Prompt, Sample, Score


@dataclass(frozen=True, slots=True)
class Case:
    """One response as the judge is shown it."""

    text: str
    flags: frozenset[Flag]
    cut: bool
    """It was too long, and was made to fit."""
    verdict: Score | None = None
    """What it earns without being judged: it was too long, and the settings say what that means."""


@dataclass(frozen=True, slots=True)
class JudgeRow:
    """What all responses of a prompt share."""

    question: str
    reference: str | None
    item: Mapping[str, Any]
    """What functions of the user's are given."""
    pictures: tuple[str, ...] = ()
    """Data URLs of the prompt's pictures, where the judge is shown them."""


class JudgeReward:
    """The scorer (stateful, streaming, remote: see `rewards.py`). The judge may start later: questions wait for it."""

    hone_range = Range(0.0, 1.0)
    fingerprint: str | None = None
    """Never known: an endpoint does not say what its model is."""

    def __init__(
        self,
        settings: JudgeSettings,
        client: ChatClient,
        template: JudgeTemplate,
        counter: Counter,
        functions: UserFunctions | None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.settings, self.template, self.counter = settings, template, counter
        self._client, self.functions = client, functions
        self._traffic = Traffic(settings.log_every_s, EngineFigures(client, memory).read)
        self._asker = Asker(
            client,
            settings.sampling,
            seed=settings.seed,
            deadline_s=settings.deadline_s,
            cache_items=settings.cache_items,
            traffic=self._traffic,
        )
        self._pictures = ShownPictures(settings.picture_px)
        self._has_own_prompt = functions is not None and functions.has("preprocess")
        low, high = settings.scale
        self._reading = Reading(settings.methods, low, high, settings.choices)
        self._canaries = Canaries(settings.canary_every, settings.canary_threshold, high)

    @classmethod
    def from_args(
        cls,
        args: Mapping[str, Any],
        *,
        folder: Path,
        timeout_s: float,
        services: Addresses = MappingProxyType({}),
    ) -> Self:
        """Of a component's args. Raises Unusable when they do not fit, a sum of lengths included.

        `timeout_s`, the component's, is for each call of a function of the user's.
        """
        settings = settings_of(JudgeSettings, args, asks_engine=True)
        counter = ByteBound() if settings.tokenizer is None else TokenizerCounter(folder / settings.tokenizer)
        (low, high), method = settings.scale, settings.methods[0]
        text = template_text(settings, folder, GRM)
        template = JudgeTemplate(text, low, high, method, neutraliser(counter.special_tokens))
        template_tokens = settings.template_tokens
        if template_tokens is None:
            empty = template.messages("", [""], "" if settings.reference else None)
            template_tokens = counter.count(empty[0]["content"])
        if problems := length_problems(settings, template_tokens):
            raise Unusable("args of `judge`: " + " ".join(problems))
        processor = settings.data_processor_config
        functions = UserFunctions(processor, folder, timeout_s=timeout_s) if processor else None
        try:
            at = address_of(settings.url, settings.service, settings.token_env, services)
            client = ChatClient(
                at.urls,
                model=settings.model,
                token=at.token,
                max_in_flight=settings.max_in_flight,
                first_backoff_s=settings.first_backoff_s,
            )
        except ValueError as error:
            raise Unusable(f"args of `judge`: {error}") from None
        return cls(settings, client, template, counter, functions, at.memory)

    async def start(self) -> list[str]:
        """Import the user's functions. Returns what is wrong with them."""
        return await self.functions.start() if self.functions else []

    async def close(self) -> None:
        await self._asker.close()
        if self.functions:
            await self.functions.close()

    @property
    def counts(self) -> Counts:
        """See `RemoteScorer`."""
        return self._client.counts

    def begin(self, prompt: Prompt) -> MayScoreSample | None:
        """Samples that cannot be scored alone are left to `score`, which finds the answers cached."""

        async def score_sample(sample: Sample) -> Score | None:
            (score,) = await self.score(Group(prompt, (sample,)))
            return score if score.fault is None else None

        return score_sample if self.settings.mode == "pointwise" else None

    async def score(self, group: Group) -> tuple[Score, ...]:
        """One score per sample, in [0, 1]; canaries that are due are judged beside them."""
        began = time.monotonic()
        answer = group.prompt.answer
        if self.settings.reference and answer is None:
            return all_faulty(len(group.samples), "the row has no answer to show to the judge", Fault.DATA)
        row = await self._row(group.prompt)
        room = self._room(row)
        cases = [self._case(sample, room) for sample in group.samples]
        to_judge = [case.text for case in cases if case.verdict is None]
        canaries = self._canaries.due(row.question, [sample.text for sample in group.samples])
        votes, found = await asyncio.gather(self._votes(row, to_judge), self._judge_canaries(row, canaries))
        extra = self._canaries.report(found) | self._traffic.engine
        judged = iter(self._verdicts(votes, [case for case in cases if case.verdict is None], extra))
        scores = tuple(case.verdict or next(judged) for case in cases)
        texts = [sample.text for sample in group.samples]
        flags = [len(case.flags) for case in cases]
        self._traffic.judged(texts, flags, [score.value for score in scores], time.monotonic() - began)
        return scores

    async def canary_scores(self, prompt: Prompt) -> dict[str, float]:
        """Scores in [0, 1] of responses to a prompt that deserve nothing, by name; without those that have none."""
        row = await self._row(prompt)
        return await self._judge_canaries(row, self._canaries.of(row.question))

    async def _judge_canaries(self, row: JudgeRow, canaries: Mapping[str, str]) -> dict[str, float]:
        votes = await self._votes_apart(row, list(canaries.values()), count=1)
        return {name: self._share(vote.scores[0]) for name, (vote,) in zip(canaries, votes, strict=True) if vote.scores}

    # ---- what the judge is shown

    async def _row(self, prompt: Prompt) -> JudgeRow:
        question, messages, reference = prompt.text, prompt.messages, None
        if messages is not None:
            said = [(str(message.get("role", "")), _text_of(message)) for message in messages]
            question = "\n\n".join(f"{role.capitalize()}: {text}" for role, text in said)
            if len(messages) == 1 and messages[0].get("role") == "user":  # a single one of the user's stands for itself
                question = said[0][1]
        if prompt.answer is not None:
            reference = prompt.answer if isinstance(prompt.answer, str) else json.dumps(prompt.answer, default=str)
        item = {"question": question, "reference": prompt.answer, "columns": dict(prompt.columns)}
        pictures = await self._pictures.urls(prompt.pictures) if self.settings.pictures else ()
        return JudgeRow(question, reference if self.settings.reference else None, item, pictures)

    def _case(self, sample: Sample, room: int | None) -> Case:
        neutralise = self.template.neutralise
        flags = flags_of(sample.text, neutralise)
        if room is None or self.counter.count(neutralise(sample.text)) <= room:
            return Case(sample.text, flags, cut=False)
        policy, metrics = self.settings.overlong, _metrics(flags=flags, cut=True)
        if policy == "error":
            detail = f"too long for the judge: it has room for {room} tokens of a response"
            return Case("", flags, True, Score(None, Fault.DATA, detail, metrics))
        text = ""
        if policy != "min_score":  # first without its reasoning, then without its middle
            text = sample.text.rpartition("</think>")[2].strip()  # the whole, where reasoning is unfinished
            if self.counter.count(neutralise(text)) > room:
                # Neutral before it is cut: what keeps special tokens apart costs tokens too.
                text = self.counter.cut_middle(neutralise(text), room)
        if not text:
            detail = f"too long for the judge's {room} tokens"
            return Case("", flags, True, Score(0.0, Fault.MODEL, detail, metrics))
        return Case(text, flags, cut=True)

    def _room(self, row: JudgeRow) -> int | None:
        """Tokens of a response that fit beside this question; of two responses, where they are compared."""
        budget = self.settings.prompt_budget
        if budget is None or self._has_own_prompt:
            return None
        places = 1 if self.settings.mode == "pointwise" else 2
        around = self._prompt_tokens(row, [""] * places)
        return max(0, budget - around) // places

    def _prompt_tokens(self, row: JudgeRow, texts: Sequence[str]) -> int:
        text = self.template.messages(row.question, texts, row.reference)[0]["content"]
        return self.counter.count(text) + len(row.pictures) * self.settings.tokens_per_picture

    def _question(self, row: JudgeRow, texts: Sequence[str]) -> Messages:
        return self.template.messages(row.question, texts, row.reference, row.pictures)

    # ---- votes

    async def _votes(self, row: JudgeRow, texts: Sequence[str]) -> list[list[Vote]]:
        """All votes on each response."""
        if self.settings.mode == "pointwise" or len(texts) < 2:
            return await self._votes_apart(row, texts, self.settings.votes)
        ballots = await asyncio.gather(*(self._ballot(row, texts, number) for number in range(self.settings.votes)))
        return [
            [Vote((one.scores[place],) if one.scores else None, one.failures) for one in ballots]
            for place in range(len(texts))
        ]

    async def _votes_apart(self, row: JudgeRow, texts: Sequence[str], count: int) -> list[list[Vote]]:
        """`count` votes on each response by itself."""

        async def votes_on(text: str) -> list[Vote]:
            try:
                if self.functions and self._has_own_prompt:
                    messages = await self.functions.prompt({**row.item, "response": text})
                else:
                    messages = self._question(row, [text])
            except CallFailed as error:
                return [Vote(None, lost=f"data_processor_config: its function {error}")] * count

            async def read(answer: ChatAnswer) -> list[float]:
                if self.functions and self.functions.has("postprocess"):
                    score = await self.functions.score(answer.text, {**row.item, "response": text})
                    return self._reading.checked([score], 1)
                return self._reading.scores(answer, 1)

            asked = (self._asker.vote(messages, read, number) for number in range(count))
            return list(await asyncio.gather(*asked))

        return list(await asyncio.gather(*map(votes_on, texts)))

    async def _ballot(self, row: JudgeRow, texts: Sequence[str], number: int) -> Vote:
        """One vote that compares all responses, in an order of its own; in several windows if it must be."""
        order = self._asker.order(number, row.question, len(texts))
        windows = self._windows(row, texts, order)

        async def judge(window: Sequence[int]) -> Vote:
            shown = [texts[place] for place in window]

            async def read(answer: ChatAnswer) -> list[float]:
                return self._reading.scores(answer, len(shown))

            return await self._asker.vote(self._question(row, shown), read, number)

        votes = await asyncio.gather(*map(judge, windows))
        scored = [
            dict(zip(window, vote.scores, strict=True))
            for window, vote in zip(windows, votes, strict=True)
            if vote.scores
        ]
        return Vote(
            _on_one_scale(scored, len(texts)) if len(scored) == len(windows) else None,
            tuple(failure for vote in votes for failure in vote.failures),
            next((vote.lost for vote in votes if vote.lost), ""),
        )

    def _windows(self, row: JudgeRow, texts: Sequence[str], order: Sequence[int]) -> list[list[int]]:
        """The order cut into windows that fit the judge; the shortest response is in each, to compare them by."""
        budget = self.settings.prompt_budget
        if budget is None or self._prompt_tokens(row, texts) <= budget:
            return [list(order)]
        anchor = min(order, key=lambda place: (self.counter.count(texts[place]), place))
        windows: list[list[int]] = [[anchor]]
        for place in order:
            if place == anchor:
                continue
            wider = [*windows[-1], place]
            if len(windows[-1]) > 1 and self._prompt_tokens(row, [texts[p] for p in wider]) > budget:
                wider = [anchor, place]
                windows.append(wider)
            windows[-1] = wider
        return [[place for place in order if place in window] for window in windows]

    # ---- scores

    def _verdicts(self, votes: list[list[Vote]], cases: list[Case], extra: Mapping[str, float]) -> list[Score]:
        need = (self.settings.votes + 1) // 2
        valid = [[vote.scores[0] for vote in each if vote.scores] for each in votes]
        lost = [next((vote.lost for vote in each if vote.lost), "") for each in votes]
        values = [
            self._value(scores, case) if len(scores) >= need else None
            for scores, case in zip(valid, cases, strict=True)
        ]
        # The lowest score of an incomplete group is unknown.
        known = [] if any(lost) or self.settings.mode == "groupwise" else [v for v in values if v is not None]
        lowest = min(known, default=None)
        verdicts: list[Score] = []
        for case, each, scores, value, why in zip(cases, votes, valid, values, lost, strict=True):
            metrics = _metrics(scores, each, case.flags, case.cut) | dict(extra)
            if why:  # the mean of the other votes would be another score
                verdicts.append(Score(None, Fault.INFRA, why[:DETAIL_CHARACTERS], metrics))
            elif value is not None:
                verdicts.append(Score(value, metrics=metrics))
            else:
                fault = Fault.INFRA if lowest is None else Fault.MODEL
                failures = Tally(failure for vote in each for failure in vote.failures)
                causes = ", ".join(f"{number} {failure}" for failure, number in failures.most_common())
                detail = f"no score in the judge's answers: {causes}"[:DETAIL_CHARACTERS]
                verdicts.append(Score(lowest, fault, detail, metrics))
        return verdicts

    def _value(self, scores: Sequence[float], case: Case) -> float:
        cost = sum(self.settings.penalties.get(flag, 0.0) for flag in case.flags)
        share = self._share(fmean(scores)) - cost
        return min(1.0, max(0.0, share))  # a penalty, or the move of a window, may lead out of the scale

    def _share(self, score: float) -> float:
        low, high = self.settings.scale
        return (score - low) / (high - low)


def _on_one_scale(windows: Sequence[Mapping[int, float]], count: int) -> tuple[float, ...]:
    """Scores of all places, each window moved so that what they share has one score: the mean of what it was given."""
    shared = set.intersection(*(set(window) for window in windows)) if len(windows) > 1 else set()
    anchor = next(iter(shared), None)
    middle = fmean(window[anchor] for window in windows) if anchor is not None else 0.0
    scores: dict[int, float] = {}
    for window in windows:
        move = middle - window[anchor] if anchor is not None else 0.0
        scores |= {place: score + move for place, score in window.items()}
    return tuple(scores[place] for place in range(count))


def _metrics(
    scores: Sequence[float] = (),
    votes: Sequence[Vote] = (),
    flags: frozenset[Flag] = frozenset(),
    cut: bool = False,
) -> dict[str, float]:
    """The same keys for every response; what cannot be known of one is left out."""
    failures = Tally(failure for vote in votes for failure in vote.failures)
    found = {
        "truncated": float(cut),
        "invalid_votes_frac": sum(vote.scores is None for vote in votes) / len(votes) if votes else 0.0,
        "asked_again": float(sum(failures.values())),
        **{f"parse_{name}": float(failures[name]) for name in (*FAILURES, REFUSED)},
        **{f"flag_{flag}": float(flag in flags) for flag in FLAGS},
    }
    if scores:
        most = Tally(scores).most_common(1)[0][1]
        found |= {"raw": fmean(scores), "vote_std": pstdev(scores), "vote_agreement": most / len(scores)}
    return found


def _text_of(message: Mapping[str, Any]) -> str:
    """A message's text; a picture is `[picture]` in it."""
    content = message.get("content", "")
    if not isinstance(content, list):
        return str(content)
    return "".join("[picture]" if part.get("type") == "image" else str(part.get("text", "")) for part in content)
