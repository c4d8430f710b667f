"""Protocol adapters: rewards for other trainers' requests (OpenRLHF, slime, flat JSON).

`/compute_reward` is a plain single item for curl and scripts, `/get_reward` OpenRLHF's remote reward model, `/slime`
slime's. Each becomes items of our own and gets our own results; only the outside differs. These callers send what they
always send, so fields that mean nothing here are ignored. What cannot be scored is an HTTP error: none of these shapes
has a place for "no score", and a number in its place would be a lie.

OpenRLHF and slime decode responses with their special tokens: those at the end are not part of the response. OpenRLHF
sends prompt and response as one text, decoded from tokens: the prompt in it may have lost its beginning, have a BOS in
front, or other white space.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from hone.reward.strict_json import decode_json, printable
from hone.reward.wire import MAX_ITEMS, Item, ItemError, ItemResult, Message
from hone.serve.problem import HttpProblem
from hone.serve.routing import OrNone

_IGNORED = "jsonl_file_path"
_SPECIAL = (
    r"(?:<\|[^|<>\n]{1,64}\|>|<｜[^｜<>\n]{1,64}｜>|\[\|[^|\[\]\n]{1,64}\|\]"  # <|im_end|>, [|endofturn|]
    r"|</?(?:s|bos|eos|eod|eot|pad|unk|start_of_turn|end_of_turn|end_of_utterance|turn\|)>|<\|turn>)"
)
"""What tokenizers call their special tokens."""
_LEADING = re.compile(rf"(?:\s*{_SPECIAL})+")
_TRAILING = re.compile(rf"{_SPECIAL}\s{{0,8}}\Z")
_TRAILING_CHARACTERS = 80
_SURE_CHARACTERS = 16
"""Less of a prompt than this may stand at the beginning of a response by chance."""
_MOST_PLACES = 64


class Foreign(BaseModel):
    """Base of what others send: types are checked, unknown fields ignored."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ComputeItem(Foreign):
    """One response to score."""

    solution_str: str
    """The response."""
    ground_truth: Any = None
    """The row's answer; a text that is a JSON object is taken as that object."""
    extra_info: dict[str, Any] | None = None
    """Every other column of the row."""
    data_source: str | None = None
    prompt: str | list[Message] = ""
    id: str | None = Field(default=None, min_length=1, max_length=256)

    def item(self, number: int) -> Item:
        return Item(
            id=self.id or f"item-{number}",
            solution_str=self.solution_str,
            ground_truth=_object_of(self.ground_truth),
            extra_info=self.extra_info or {},
            data_source=self.data_source,
            prompt=self.prompt,
        )


class ComputeRequest(Foreign):
    """The body of `POST /compute_reward`: one response, or `items`."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": True})
    __pydantic_extra__: dict[str, Annotated[float | None, OrNone()]]  # pyright: ignore[reportIncompatibleVariableOverride]

    solution_str: str | None = None
    ground_truth: Any = None
    extra_info: dict[str, Any] | None = None
    data_source: str | None = None
    prompt: str | list[Message] = ""
    id: str | None = Field(default=None, min_length=1, max_length=256)
    items: list[ComputeItem] | None = Field(None, fail_fast=True, max_length=MAX_ITEMS)
    """Several responses; the answer then has a list of results."""
    weights: dict[str, FiniteFloat] | None = None
    """Component -> weight, where the server allows it; `<component>_weight` beside the other fields says the same."""

    @model_validator(mode="after")
    def _one_or_many(self) -> ComputeRequest:
        if (self.solution_str is None) == (self.items is None):
            raise ValueError("give solution_str, or items")
        return self

    def all_items(self) -> list[Item]:
        if self.items is not None:
            return [item.item(number) for number, item in enumerate(self.items)]
        assert self.solution_str is not None  # validated
        single = ComputeItem(
            solution_str=self.solution_str,
            ground_truth=self.ground_truth,
            extra_info=self.extra_info,
            data_source=self.data_source,
            prompt=self.prompt,
            id=self.id,
        )
        return [single.item(0)]

    def wanted_weights(self) -> dict[str, float]:
        """Raises HttpProblem for a weight that is not a number."""
        weights = dict(self.weights or {})
        for name, value in (self.model_extra or {}).items():
            if name.endswith("_weight"):
                if value is None:
                    raise HttpProblem(
                        422, "unprocessable-body", f"{name}: not a number", errors=[(f"/{name}", "not a number")]
                    )
                weights[name.removesuffix("_weight")] = value
        return weights

    def warnings(self, *, weights_allowed: bool) -> list[str]:
        """Fields of the request that are not used and that a caller may rely on."""
        found = []
        if _IGNORED in (self.model_extra or {}):
            found.append(f"{_IGNORED} is ignored: no path from a request is ever opened")
        if not weights_allowed and self.wanted_weights():
            found.append("weights are ignored: the server was not started with --allow-request-weights")
        return found


def flat_result(result: ItemResult) -> dict[str, Any]:
    """A result of `/compute_reward`: the score, and each component's score and metrics as `<name>_score`."""
    parts = {name: value for part in result.components.values() for name, value in part.metrics.items()}
    parts |= {name: part.score for name, part in result.components.items()}
    error = None if result.error is None else f"{result.error.fault} fault: {result.error.detail}"
    return {
        "id": result.id,
        "score": result.score,
        **{f"{name}_score": value for name, value in parts.items()},
        "components": {name: part.model_dump(mode="json") for name, part in result.components.items()},
        "metrics": result.metrics,
        "flags": result.flags,
        "error": error,
    }


class OpenRlhfRequest(Foreign):
    """The body of `POST /get_reward`: lists of one length, often of one entry, sometimes of none."""

    query: list[str] = Field(fail_fast=True, max_length=MAX_ITEMS)
    """Prompt and response in one text, with special tokens."""
    prompts: list[str] | None = Field(None, fail_fast=True)
    """What each query begins with; left out: the queries are responses alone."""
    labels: list[Any] | None = None
    """The rows' answers."""

    @model_validator(mode="after")
    def _one_length(self) -> OpenRlhfRequest:
        for name in ("prompts", "labels"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.query):
                raise ValueError(f"{len(values)} {name} for {len(self.query)} queries")
        return self

    def items(self) -> list[Item | ItemResult]:
        """What is to be scored; where prompt and response cannot be separated, an error that says so."""
        num = len(self.query)
        rows = zip(self.query, self.prompts or [""] * num, self.labels or [None] * num, strict=True)
        found: list[Item | ItemResult] = []
        for number, (query, prompt, label) in enumerate(rows):
            name, response = f"item-{number}", response_of(query, prompt)
            if response is not None:
                found.append(Item(id=name, prompt=prompt, solution_str=response, ground_truth=_object_of(label)))
                continue
            detail = f"the query does not begin with its prompt, so its response is not known: {query[:40]!r}"
            error = ItemError(fault="data", retryable=False, detail=printable(detail))
            found.append(ItemResult(id=name, status="error", score=None, error=error))
        return found


def response_of(query: str, prompt: str) -> str | None:
    """What follows the prompt in a query, without the special tokens at its end; None where that is not sure."""
    if query.startswith(prompt):
        return without_end(query[len(prompt) :])
    query, prompt = without_start(query), without_start(prompt)
    words, wanted = "".join(query.split()), "".join(prompt.split())
    length = len(wanted) if words.startswith(wanted) else _overlap(wanted, words)
    if length is None:
        return None
    rest = query[_end_of(query, length) :].removeprefix(prompt[len(prompt.rstrip()) :])
    return without_end(rest)


def without_start(text: str) -> str:
    """Without the special tokens at its beginning, and the rest of a character that was cut there."""
    found = _LEADING.match(text)
    return text[found.end() if found else 0 :].lstrip("\ufffd")


def without_end(text: str) -> str:
    """Without the special tokens at its end."""
    end = len(text)
    while found := _TRAILING.search(text, max(0, end - _TRAILING_CHARACTERS), end):
        end = found.start()
    return text[:end]


def _overlap(prompt: str, query: str) -> int | None:
    """Characters of the one end of the prompt that the query begins with, as it does after truncation from the left;
    None where there is no such end, or several."""
    head, lengths = query[:_SURE_CHARACTERS], []
    place = prompt.find(head) if len(head) == _SURE_CHARACTERS else -1
    for _ in range(_MOST_PLACES):
        if place < 0:
            return lengths[0] if len(lengths) == 1 else None
        if query.startswith(prompt[place:]):
            lengths.append(len(prompt) - place)
        place = prompt.find(head, place + 1)
    return None


def _end_of(text: str, length: int) -> int:
    """Where the first `length` characters end, white space not counted."""
    for word in re.finditer(r"\S+", text):
        if length <= len(word[0]):
            return word.start() + length
        length -= len(word[0])
    return len(text)


class OpenRlhfReply(BaseModel):
    """What OpenRLHF reads; `extra_logs` becomes tensors, so it holds numbers only, and the same names each time."""

    rewards: list[FiniteFloat]
    scores: list[FiniteFloat]
    extra_logs: dict[str, list[FiniteFloat]]


class SlimeRequest(Foreign):
    """The body of `POST /slime`."""

    prompt: str | list[Message] = ""
    response: str
    label: Any = None

    def item(self) -> Item:
        response = without_end(self.response)
        return Item(id="item-0", prompt=self.prompt, solution_str=response, ground_truth=_object_of(self.label))


def scored_or(result: ItemResult, constant: float | None) -> float:
    """The score, else the constant. Raises HttpProblem when there is neither: 422 if the row is to blame, else 503."""
    if result.score is not None:
        return result.score
    if constant is not None:
        return constant
    assert result.error is not None  # there is a score or an error
    detail = f"{result.id} was not scored: {result.error.detail}"
    if result.error.fault == "data":
        raise HttpProblem(422, "unusable-row", detail)
    raise HttpProblem(503, "unscored", detail, retryable=True, retry_after_s=1)


def part_or(result: ItemResult, name: str, constant: float | None) -> float:
    """A component's score, else as `scored_or`."""
    part = result.components.get(name)
    return part.score if part is not None and part.score is not None else scored_or(result, constant)


def _object_of(ground_truth: Any) -> Any:
    """A JSON object written as text, as an object; any other text is what it is: "007" is not a number here."""
    if isinstance(ground_truth, str) and ground_truth.lstrip()[:1] == "{":
        try:
            return decode_json(ground_truth.encode())
        except ValueError:
            return ground_truth
    return ground_truth
