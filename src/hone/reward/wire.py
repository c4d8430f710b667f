"""Wire format of `POST /v1/rewards`: requests, responses, and groups from and to items.

Both ends use this file, so a reward scores the same in process and served. Models are strict: no unknown field, no text
for a number, nothing that is not finite. An item carries what a reward function may look at; of a sample's own columns
the service never sees the place in the run (`Prompt.index`). Not here: how bytes travel (`http.py`), limits and
routes (`hone.serve`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast, Field, FiniteFloat, model_validator

from hone.reward.strict_json import plain, printable
from hone.types import Fault, FinishReason, Group, Picture, Prompt, Sample, Score, Turn, version_spans

SCHEMA_VERSION = "1"
MAX_ID_CHARACTERS = 256
MAX_PICTURES = 64
"""Pictures of one item, at most."""
MAX_ITEMS = 4096
"""Items of one request, at most; a server's own limit is lower (`--max-items`)."""
SUM_TOLERANCE = 1e-6
"""How far a score may be from the weighted sum of its components, relative to their size where that is above 1."""

Mode = Literal["pointwise", "groupwise"]
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Float32 = Annotated[FiniteFloat, Field(ge=float(np.finfo(np.float32).min), le=float(np.finfo(np.float32).max))]

MAX_RESPONSE_TOKENS = 1 << 18
"""As many as a response of the longest text that is taken could have; each costs memory here."""
MAX_RESPONSE_BYTES = 1 << 20
"""No service scores a longer response. Of one, Hone sends so much that the service sees it is too long, and no more."""


class Wire(BaseModel):
    """Base of everything on the wire: closed, frozen, strict about types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class Message(Wire):
    """One message of a chat; what else it carries (a name, tool calls) is kept."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None


class TurnItem(Wire):
    """`types.Turn`: one turn of a sample that met an environment."""

    start: int = Field(ge=0)
    end: int = Field(ge=0)
    reward: FiniteFloat = 0.0
    metrics: dict[str, FiniteFloat] = {}


class Item(Wire):
    """One sample to score, with the row it answers."""

    id: str = Field(min_length=1, max_length=MAX_ID_CHARACTERS)
    """Echoed in the result; each once in a request."""
    group_id: str | None = Field(default=None, min_length=1, max_length=MAX_ID_CHARACTERS)
    """Samples of one prompt share it; `mode: groupwise` needs it. It is the prompt's id for rewards."""
    index: int | None = Field(default=None, ge=0)
    """Which sample of its prompt this is; null: its place among the items of its group."""
    data_source: str | None = None
    """Name of the data set; rewards find it among the columns."""
    prompt: str | list[Message] = ""
    """The rendered prompt, or its messages."""
    messages: list[Message] | None = None
    """The messages that a rendered `prompt` came from."""
    pictures: list[str] = Field(default=[], max_length=MAX_PICTURES)
    """Pictures of the prompt, in order: names in the request's `pictures`."""
    solution_str: str
    """The response, without special tokens."""
    ground_truth: Any = None
    """The row's answer, any JSON."""
    extra_info: dict[str, Any] = {}
    """Every other column of the row."""
    finish_reason: FinishReason = "stop"
    """`length`: the response was cut."""
    response_tokens: int | None = Field(default=None, ge=0, le=MAX_RESPONSE_TOKENS)
    """Length of the response, for those who do not send its ids."""
    response_token_ids: Annotated[list[Int32] | None, FailFast()] = None
    """Its tokens, in the policy's vocabulary."""
    prompt_token_ids: Annotated[list[Int32] | None, FailFast()] = None
    sampler_logprobs: Annotated[list[Float32] | None, FailFast()] = None
    versions: Annotated[list[Int32] | None, FailFast()] = None
    loss_mask: Annotated[list[bool] | None, FailFast()] = None
    turns: Annotated[list[TurnItem], FailFast()] = []

    @model_validator(mode="after")
    def _per_token_lists_fit(self) -> Self:
        ids = self.response_token_ids
        for name in ("sampler_logprobs", "versions", "loss_mask"):
            values = getattr(self, name)
            if values is not None and (ids is None or len(values) != len(ids)):
                raise ValueError(f"{name} needs response_token_ids of the same length")
        if ids is not None and self.response_tokens not in (None, len(ids)):
            raise ValueError(f"response_tokens is {self.response_tokens}, but there are {len(ids)} response_token_ids")
        return self


class RewardRequest(Wire):
    """The body of `POST /v1/rewards`."""

    schema_version: Literal["1"] = SCHEMA_VERSION
    reward: str | None = None
    """A component's name; null: the weighted whole."""
    mode: Mode = "pointwise"
    """Whether each item is scored on its own, or the items of a `group_id` together."""
    timeout_ms: int | None = Field(default=None, ge=1)
    """What is not scored by then is an error with `retryable: true`; null: the server's own limit."""
    seed: int = 0
    """Part of an item's identity: another seed asks a sampled judge again."""
    pictures: dict[str, str] = {}
    """Pictures of items by name, so that those of several items are there once: data URLs, as in OpenAI's message
    parts (`data:image/jpeg;base64,...`)."""
    items: list[Item] = Field(fail_fast=True, max_length=MAX_ITEMS)

    @model_validator(mode="after")
    def _ids_are_unique_and_pictures_known(self) -> Self:
        seen: set[str] = set()
        for item in self.items:
            if item.id in seen:
                raise ValueError(f"id {item.id!r} is duplicated")
            seen.add(item.id)
            unknown = [name for name in item.pictures if name not in self.pictures]
            if unknown:
                raise ValueError(f"item {item.id!r} has picture {unknown[0]!r}, which is not in `pictures`")
        return self


class ComponentResult(Wire):
    """Verdict of one component on an item."""

    score: FiniteFloat | None
    weight: FiniteFloat
    fault: Fault | None = Field(default=None, strict=False)
    """`model`: the response broke the scorer and earned the minimum; `data` and `infra` come without a score. Neither
    score nor fault: it does not apply to this prompt."""
    detail: str = ""
    metrics: dict[str, FiniteFloat] = {}

    @model_validator(mode="after")
    def _score_or_fault(self) -> Self:
        if self.fault is not None and (self.score is None) == (self.fault is Fault.MODEL):
            raise ValueError(f"score {self.score} does not go with fault {self.fault}")
        return self


class ItemError(Wire):
    """Why an item has no score."""

    fault: Literal["data", "infra"]
    """Whether the row or the service is at fault."""
    retryable: bool
    """Whether the same item may be scored later; a broken row stays broken."""
    component: str | None = None
    """The first component without a score; null: the item did not come so far."""
    detail: str


class ItemResult(Wire):
    """The verdict on one item: a finite score in [min, max], or an error."""

    id: str
    status: Literal["ok", "error"]
    score: FiniteFloat | None
    """The weighted sum, or the score of the one component that was asked for."""
    min: FiniteFloat | None = None
    """Least that the reward can be; null: not declared."""
    max: FiniteFloat | None = None
    components: dict[str, ComponentResult] = {}
    metrics: dict[str, FiniteFloat | None] = {}
    """`<component>_<part>` of everything components measure: the same names in every result, null where unknown."""
    flags: list[str] = []
    """`truncated`: cut at the length limit; `model_fault`: it broke a scorer."""
    cached: bool = False
    """Whether it was scored before, for this or another request."""
    elapsed_ms: FiniteFloat = Field(default=0.0, ge=0)
    error: ItemError | None = None

    @model_validator(mode="after")
    def _score_iff_ok(self) -> Self:
        is_ok = self.status == "ok"
        if is_ok != (self.score is not None) or is_ok != (self.error is None):
            raise ValueError(f"status {self.status!r} with score {self.score} and error {self.error}")
        if self.score is None:
            return self
        score, low, high = self.score, self.min, self.max
        slack = SUM_TOLERANCE * max(1.0, abs(score))
        if (low is not None and score < low - slack) or (high is not None and score > high + slack):
            raise ValueError(f"score {score} is outside [{low}, {high}]")
        if self.components:
            terms = [c.weight * c.score for c in self.components.values() if c.weight and c.score is not None]
            total, scale = sum(terms), max(1.0, *(abs(term) for term in terms), abs(score))
            if not (math.isfinite(scale) and abs(score - total) <= SUM_TOLERANCE * scale):
                raise ValueError(f"score {score} is not the weighted sum of its components, {total}")
        return self


class ServerInfo(Wire):
    """The responding server."""

    name: str
    version: str
    boot_id: str
    """New at every start of the server."""
    fingerprint: str
    """Hash of everything that a score depends on besides the item."""


class RewardSummary(Wire):
    n: int
    ok: int
    error: int


class RewardReply(Wire):
    """The answer to `POST /v1/rewards`: one result per item, in the order of the request."""

    schema_version: Literal["1"] = SCHEMA_VERSION
    server: ServerInfo
    results: list[ItemResult]
    summary: RewardSummary
    elapsed_ms: FiniteFloat = Field(ge=0)

    @classmethod
    def to(cls, items: Sequence[Item], answer: Any) -> Self:
        """The reply that an answer in JSON is. Raises ValueError unless it has one valid result per item, in order."""
        reply = cls.model_validate(answer)
        if len(reply.results) != len(items):
            raise ValueError(f"{len(reply.results)} results for {len(items)} items")
        for number, (result, item) in enumerate(zip(reply.results, items, strict=True)):
            if result.id != item.id:
                raise ValueError(f"result {number} is of item {result.id!r}, not of {item.id!r}")
        return reply


# ---- a group to items, items to groups


def items_of(group: Group, *, trace: bool = False, pictures: Sequence[str] = ()) -> list[Item]:
    """A group as items, whose ids are `<prompt id>:<sample index>`.

    Args:
        pictures: data URLs of the prompt's, which `request_parts` gives names.
        trace: also send what only rewards that look inside the sampling need, at several times the bytes: the prompt's
            tokens, and logprobs, versions, mask and turns of the response.
    Raises:
        ValueError: the row holds something that JSON cannot say.
    """
    prompt = group.prompt
    row: dict[str, Any] = {
        "group_id": prompt.id,
        "prompt": prompt.text,
        "messages": plain(prompt.messages, "messages"),
        "ground_truth": plain(prompt.answer, "answer"),
        "extra_info": plain(prompt.columns, "columns"),
        "pictures": list(pictures),
    }
    if trace:
        row["prompt_token_ids"] = prompt.token_ids.tolist()
    return [Item.model_validate(row | _sample_fields(sample, trace)) for sample in group.samples]


def request_parts(items: Sequence[Item]) -> dict[str, Any]:
    """`items` and `pictures` of a request, from items of `items_of`: each picture is sent once."""
    urls = dict.fromkeys(url for item in items for url in item.pictures)
    names = {url: str(number) for number, url in enumerate(urls)}
    named = [item.model_copy(update={"pictures": [names[url] for url in item.pictures]}) for item in items]
    return {"items": named, "pictures": {name: url for url, name in names.items()}}


def _sample_fields(sample: Sample, trace: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": f"{sample.prompt_id}:{sample.index}",
        "index": sample.index,
        "solution_str": sample.text,
        "finish_reason": sample.finish_reason,
        "response_token_ids": sample.token_ids.tolist(),
    }
    if (start := sendable(sample.text)) is not sample.text:
        return fields | {"solution_str": start, "response_token_ids": None}
    if trace:
        fields |= {
            "sampler_logprobs": sample.sampler_logprobs.tolist(),
            "versions": sample.token_versions(),
            "loss_mask": None if sample.loss_mask is None else sample.loss_mask.tolist(),
            "turns": [
                {"start": turn.start, "end": turn.end, "reward": turn.reward, "metrics": dict(turn.metrics)}
                for turn in sample.turns
            ],
        }
    return fields


def sendable(text: str) -> str:
    """A response; of one that is too long for any service, as much as shows that."""
    if len(text) <= MAX_RESPONSE_BYTES // 4 or len(encoded := printable(text).encode()) <= MAX_RESPONSE_BYTES:
        return text
    return encoded[: MAX_RESPONSE_BYTES + 4].decode(errors="ignore")


@dataclass(frozen=True, slots=True)
class Work:
    """A group made of items, and which items of the request they are."""

    group: Group
    places: tuple[int, ...]


class Disagreement(ValueError):
    """Items of one group that say different things of its prompt; `place` is the first that does."""

    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place


def groups_of(items: Sequence[Item], mode: Mode, pictures: Mapping[str, Picture] = MappingProxyType({})) -> list[Work]:
    """The groups that items ask to have scored: one per item, or in `groupwise` mode one per `group_id`.

    Args:
        pictures: of the request, by name.
    Raises:
        Disagreement: an item without `group_id` in `groupwise` mode, or unlike its group's first.
    """
    if mode == "pointwise":
        return [Work(_group([item], pictures), (place,)) for place, item in enumerate(items)]
    places: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        if item.group_id is None:
            raise Disagreement(place, "mode groupwise needs a group_id")
        places.setdefault(item.group_id, []).append(place)
    for same in places.values():
        first = _row(items[same[0]])
        for place in same[1:]:
            differing = [name for name, value in _row(items[place]).items() if value != first[name]]
            if differing:
                raise Disagreement(place, f"differs from the first item of its group in {', '.join(differing)}")
    return [Work(_group([items[place] for place in same], pictures), tuple(same)) for same in places.values()]


_ROW_FIELDS = ("data_source", "prompt", "messages", "pictures", "ground_truth", "extra_info", "prompt_token_ids")


def _row(item: Item) -> dict[str, Any]:
    return {name: getattr(item, name) for name in _ROW_FIELDS}


def _group(items: Sequence[Item], pictures: Mapping[str, Picture]) -> Group:
    prompt = _prompt(items[0], pictures)
    return Group(prompt, tuple(_sample(item, prompt.id, place) for place, item in enumerate(items)))


def _prompt(item: Item, pictures: Mapping[str, Picture]) -> Prompt:
    given = item.messages if isinstance(item.prompt, str) else item.prompt
    messages = None if given is None else tuple(message.model_dump() for message in given)
    text = item.prompt if isinstance(item.prompt, str) else "\n\n".join(str(m.content) for m in item.prompt)
    source = {} if item.data_source is None else {"data_source": item.data_source}
    return Prompt(
        id=item.group_id or item.id,
        index=0,
        text=text,
        token_ids=np.array(item.prompt_token_ids or (), np.int32),
        answer=item.ground_truth,
        columns={**item.extra_info, **source},
        messages=messages,
        pictures=tuple(pictures[name] for name in item.pictures),
    )


def _sample(item: Item, prompt_id: str, place: int) -> Sample:
    ids = item.response_token_ids
    if ids is None:
        ids = [UNKNOWN_TOKEN] * (item.response_tokens or 0)
    return Sample(
        prompt_id=prompt_id,
        index=place if item.index is None else item.index,
        token_ids=np.array(ids, np.int32),
        sampler_logprobs=np.array(item.sampler_logprobs or [0.0] * len(ids), np.float32),
        versions=version_spans(item.versions or [0] * len(ids)),
        finish_reason=item.finish_reason,
        text=item.solution_str,
        loss_mask=None if item.loss_mask is None else np.array(item.loss_mask, np.bool_),
        turns=tuple(Turn(turn.start, turn.end, turn.reward, turn.metrics) for turn in item.turns),
    )


UNKNOWN_TOKEN = -1
"""Stands for each token of a response of which only the length was sent."""


# ---- verdicts


def component_result(score: Score, weight: float) -> ComponentResult:
    """A component's score as it is sent; what it measured that is not finite is left out."""
    metrics = {name: value for name, value in score.metrics.items() if math.isfinite(value)}
    return ComponentResult(
        score=score.value, weight=weight, fault=score.fault, detail=printable(score.detail), metrics=metrics
    )


def score_of(result: ItemResult) -> Score:
    """A result as the score of one component: the whole of what was served, with everything it measured."""
    if result.error is not None:
        return Score(None, Fault(result.error.fault), result.error.detail)
    broken = [part.detail for part in result.components.values() if part.fault is Fault.MODEL]
    metrics = {name: value for name, value in result.metrics.items() if value is not None}
    detail = "; ".join(part.detail for part in result.components.values() if part.detail)
    return Score(result.score, Fault.MODEL if broken else None, detail, metrics)
