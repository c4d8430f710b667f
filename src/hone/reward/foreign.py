"""Reward functions written for other trainers, called as they are: TRL's, OpenRLHF's and verl's.

The form of a function is recognised by the names of its parameters:

| form | recognised by | called with |
|---|---|---|
| ours | a first parameter of any other name | the group, `args` |
| TRL | `completions`, `completion_ids` | `prompts`, both of these, columns of the row, `log_metric`, `args` |
| OpenRLHF | `queries` | `queries` (prompt and response), `prompts`, `labels` (answers), `args` |
| verl | `solution_str` | for each sample `data_source`, `solution_str`, `ground_truth`, `extra_info`, `args` |

`adapted` makes any of them one of our own form. Of what there is, a function is given what it takes; it may be async.
Numbers of any type become plain floats; `signature.check_scores` refuses what is not a number.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from numbers import Real
from typing import Any

from hone.reward.signature import RewardFunction, all_faulty, plain_value, plain_values
from hone.runtime.user_code import describe
from hone.types import Fault, Group, Score

FORMS = (
    "A reward is one of: f(group, **args), ours; f(prompts, completions, **columns), TRL's; "
    "reward_func(queries, prompts, labels), OpenRLHF's; "
    "compute_score(data_source, solution_str, ground_truth, extra_info), verl's."
)


class Unfit(ValueError):
    """A function's parameters are none of the forms, or several."""


@dataclass(frozen=True, slots=True)
class _ForeignCall:
    """One call of a user's function."""

    offered: Mapping[str, Any]
    """What it may be given, by name."""
    logged: dict[str, Any] = field(default_factory=dict)
    """What it reports beside what it returns."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How one trainer calls its rewards, and what comes back."""

    offered: frozenset[str]
    """Parameters that are given by name, besides columns of the row and `args`."""
    calls: Callable[[Group, Mapping[str, Any]], Sequence[_ForeignCall]]
    read: Callable[[Group, Sequence[_ForeignCall], Sequence[Any]], Any]
    """Scores of a group, from what each call returned; a call that failed returned a Score that says so."""
    takes_columns: bool = False


def adapted(function: Callable[..., Any], name: str) -> RewardFunction:
    """The function in our own form; itself if it has that.

    Raises:
        Unfit: its parameters fit none of the forms, or several of them.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # a built-in function, for one
        raise Unfit(f"{name} names no parameters that Python can read: {error}. {FORMS}") from error
    forms = {_FORMS[mark]: mark for mark in _FORMS if mark in parameters}
    if len(forms) > 1:
        raise Unfit(f"{name} has parameters of several forms, {' and '.join(forms.values())}. {FORMS}")
    if not forms:
        first = next(iter(parameters.values()), None)
        if first is None or first.kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD) or first.name in _OF_OTHERS:
            raise Unfit(f"{name}({', '.join(map(str, parameters.values()))}) has no known form. {FORMS}")
        return function
    if any(parameter.kind is Parameter.POSITIONAL_ONLY for parameter in parameters.values()):
        raise Unfit(f"{name} has parameters that cannot be given by name. {FORMS}")
    (form,) = forms

    @functools.wraps(function)  # keeps a declared range, and a check of args of its own
    def score(group: Group, **args: Any) -> Any:
        calls = form.calls(group, args)
        returned = [_attempt(function, parameters, call.offered) for call in calls]
        if any(map(inspect.isawaitable, returned)):
            return read_settled(group, calls, returned)
        return form.read(group, calls, returned)

    async def read_settled(group: Group, calls: Sequence[_ForeignCall], returned: Sequence[Any]) -> Any:
        return form.read(group, calls, await asyncio.gather(*map(_settled, returned)))

    others = [p for p in parameters.values() if p.name not in form.offered and p.kind is not Parameter.VAR_POSITIONAL]
    left = [_left(parameter, form) for parameter in others]
    score.__signature__ = inspect.Signature([Parameter("group", Parameter.POSITIONAL_ONLY), *left])  # type: ignore[attr-defined]
    return score


def _left(parameter: Parameter, form: _Form) -> Parameter:
    """A parameter that only the run file's `args`, or a column of the row, can fill."""
    if parameter.kind is Parameter.VAR_KEYWORD:
        return parameter
    may_be_column = form.takes_columns and parameter.name not in _OF_TRL_ALONE
    is_optional = may_be_column and parameter.default is Parameter.empty
    return parameter.replace(kind=Parameter.KEYWORD_ONLY, default=None if is_optional else parameter.default)


def _attempt(function: Callable[..., Any], parameters: Mapping[str, Parameter], offered: Mapping[str, Any]) -> Any:
    """The call's return value (may be awaitable), or a Score with the fault if it cannot be called."""
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, parameter in parameters.items():
        if name not in offered and parameter.default is Parameter.empty and parameter.kind not in _VARIABLE:
            lacks = "responses came without" if name == "completion_ids" else "row has no column"
            return Score(None, Fault.DATA, f"the {lacks} {name!r}, which the reward asks for")
    try:
        return function(**{name: value for name, value in offered.items() if takes_all or name in parameters})
    except Exception as error:  # boundary: a user's function may raise anything
        return Score(None, Fault.INFRA, f"raised {describe(error)}")


async def _settled(returned: Any) -> Any:
    try:
        return await returned if inspect.isawaitable(returned) else returned
    except Exception as error:  # boundary, as above
        return Score(None, Fault.INFRA, f"raised {describe(error)}")


def _trl_calls(group: Group, args: Mapping[str, Any]) -> Sequence[_ForeignCall]:
    """One call for the group. Of a chat, prompts are lists of messages and so are completions."""
    prompt, samples, logged = group.prompt, group.samples, {}
    gold = {} if prompt.answer is None else {"answer": prompt.answer}
    columns = {name: [value] * len(samples) for name, value in {**gold, **prompt.columns}.items()}
    offered = {
        "prompts": [[dict(m) for m in prompt.messages] if prompt.messages else prompt.text for _ in samples],
        "completions": [
            [{"role": "assistant", "content": sample.text}] if prompt.messages else sample.text for sample in samples
        ],
        "log_metric": logged.__setitem__,
        "log_extra": logged.__setitem__,
    }
    # A service may be sent a response without its tokens, or with their number alone.
    if all(not sample.text or (len(sample.token_ids) and sample.token_ids.min() >= 0) for sample in samples):
        offered["completion_ids"] = [sample.token_ids.tolist() for sample in samples]
    return [_ForeignCall({**columns, **offered, **args}, logged)]


def _read_trl(group: Group, calls: Sequence[_ForeignCall], returned: Sequence[Any]) -> Any:
    """A number for each sample, or None: it does not apply (`aggregate.py`)."""
    if isinstance(returned[0], Score):
        return [returned[0]] * len(group.samples)
    values = plain_values(returned[0])
    if not isinstance(values, list):
        return values
    return _with_metrics([NOT_APPLIED if value is None else value for value in values], calls[0].logged)


def _openrlhf_calls(group: Group, args: Mapping[str, Any]) -> Sequence[_ForeignCall]:
    prompt, samples = group.prompt, group.samples
    queries = [prompt.text + sample.text for sample in samples]
    each = len(samples)
    return [
        _ForeignCall({"queries": queries, "prompts": [prompt.text] * each, "labels": [prompt.answer] * each, **args})
    ]


def _read_openrlhf(group: Group, calls: Sequence[_ForeignCall], returned: Sequence[Any]) -> Any:
    """Numbers, or a dictionary with them as `rewards`; its `scores` and `extra_logs` become metrics."""
    if isinstance(returned[0], Score):
        return [returned[0]] * len(group.samples)
    if not isinstance(returned[0], Mapping):
        return plain_values(returned[0])
    if "rewards" not in returned[0]:
        return all_faulty(len(group.samples), f"returned a dictionary without 'rewards': {_names(returned[0])}")
    values = plain_values(returned[0]["rewards"])
    logged = {"scores": returned[0].get("scores"), **(returned[0].get("extra_logs") or {})}
    return _with_metrics(values, logged) if isinstance(values, list) else values


def _verl_calls(group: Group, args: Mapping[str, Any]) -> Sequence[_ForeignCall]:
    """One call for each sample. A row without `extra_info` gives all its columns as that."""
    columns, truth = group.prompt.columns, group.prompt.answer
    if truth is None and isinstance(columns.get("reward_model"), Mapping):
        truth = columns["reward_model"].get("ground_truth")
    extra = columns["extra_info"] if isinstance(columns.get("extra_info"), Mapping) else columns
    row = {"data_source": columns.get("data_source", ""), "ground_truth": truth}
    return [
        _ForeignCall({**row, "solution_str": sample.text, "extra_info": dict(extra), **args})
        for sample in group.samples
    ]


def _read_verl(group: Group, calls: Sequence[_ForeignCall], returned: Sequence[Any]) -> Any:
    """A number each, or a dictionary with it as `score`, whose other numbers become metrics."""
    scores: list[Any] = []
    for found in returned:
        if not isinstance(found, Mapping):
            scores.append(plain_value(found))
        elif "score" not in found:
            scores.append(Score(None, Fault.INFRA, f"returned a dictionary without 'score': {_names(found)}"))
        else:
            others = {name: value for name, value in found.items() if name != "score"}
            scores += _with_metrics([plain_value(found["score"])], others)
    return scores


_TRL = _Form(
    frozenset({"prompts", "completions", "completion_ids", "log_metric", "log_extra"}),
    _trl_calls,
    _read_trl,
    takes_columns=True,
)
_FORMS = {
    "completion_ids": _TRL,
    "completions": _TRL,
    "queries": _Form(frozenset({"queries", "prompts", "labels"}), _openrlhf_calls, _read_openrlhf),
    "solution_str": _Form(
        frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}), _verl_calls, _read_verl
    ),
}
"""By the parameter that marks the form."""
_OF_TRL_ALONE = {"trainer_state", "environments"}
"""What TRL gives beyond the row and Hone has not."""
_OF_OTHERS = frozenset().union(*(form.offered for form in _FORMS.values())) | {
    *("completion", "data_sources", "ground_truths", "prompt", "response", "responses", "solution_strs")
}
"""First parameters that no function of our form has: such a one was written for something else."""
_VARIABLE = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
NOT_APPLIED = Score(None)


def _with_metrics(values: Sequence[Any], logged: Mapping[str, Any]) -> list[Any]:
    """Scores that carry what was logged: of a list of as many, each its own number; of one number, all the same."""
    metrics: list[dict[str, float]] = [{} for _ in values]
    for name, found in logged.items():
        found = plain_values(found)
        each = found if isinstance(found, list) and len(found) == len(values) else [plain_value(found)] * len(values)
        for own, value in zip(metrics, each, strict=True):
            if isinstance(value, Real) and math.isfinite(value):
                own[str(name)] = float(value)
    return [
        Score(float(value), metrics=own) if isinstance(value, Real) and math.isfinite(value) else value
        for value, own in zip(values, metrics, strict=True)
    ]


def _names(returned: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, returned)) or "it is empty"
