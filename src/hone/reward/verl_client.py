"""A reward function for verl's trainer that asks a Hone reward service.

    custom_reward_function.path=pkg://hone.reward.verl_client
    custom_reward_function.name=compute_score
    +custom_reward_function.reward_kwargs.url=http://127.0.0.1:8899

It is async, so that verl's reward loop has many samples on their way at one time; connections are kept, retried and
spread over several URLs as in `http.py`. Needs neither torch nor verl.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from hone.errors import RewardError
from hone.reward.http import SERVER_SHARE, Endpoints, Refused, Unavailable, token_from
from hone.reward.strict_json import plain
from hone.reward.wire import Item, ItemResult, RewardReply, RewardRequest, sendable

_Place = tuple[tuple[str, ...], str | None]
_endpoints: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Place, Endpoints]] = WeakKeyDictionary()
"""Connections by event loop, URLs and token: verl calls a plain function, which has nowhere else to keep them."""


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str | Sequence[str],
    reward: str | None = None,
    token_env: str | None = None,
    deadline_s: float = 120.0,
    unscored: float | None = None,
    **_ignored: Any,
) -> dict[str, float]:
    """The reward of one response, with its components, always under the same names.

    Args:
        ground_truth, extra_info: as verl has them; NumPy numbers and arrays become numbers and lists.
        url: base URL of the service, or several that serve the same.
        reward: one of its components; None: the weighted whole.
        token_env: environment variable with the service's bearer token.
        deadline_s: for all tries, in seconds.
        unscored: number to give when the service answers that this sample cannot be scored; None, the honest default:
            raise. Other arguments that verl hands to reward functions (`reward_router_address`, ...) are ignored.
    Returns:
        `score`, `<component>_score` for each component with a weight, and `model_fault` (1: it broke a scorer).
    Raises:
        RewardError: no score, and why.
    """
    item = Item(
        id="item-0",
        data_source=None if data_source is None else str(data_source),
        solution_str=sendable(solution_str),
        ground_truth=plain(ground_truth, "ground_truth"),
        extra_info=plain(extra_info or {}, "extra_info"),
    )
    try:
        result = await _result(item, _endpoints_for(url, token_env), reward, deadline_s)
    except (Unavailable, Refused) as error:
        raise RewardError(f"the reward service gave no score: {error}") from error
    if result.error is not None and unscored is None:
        raise RewardError(f"the reward service could not score a sample: {result.error.fault}: {result.error.detail}")
    score = unscored if result.score is None else result.score
    assert score is not None  # an item without a score has an error
    weighted = {name: part for name, part in result.components.items() if part.weight}
    return {
        "score": score,
        **{f"{name}_score": score if part.score is None else part.score for name, part in weighted.items()},
        "model_fault": float("model_fault" in result.flags),
    }


async def _result(item: Item, endpoints: Endpoints, reward: str | None, deadline_s: float) -> ItemResult:
    """Asked again while the service says that it may be scored later. Raises what `Endpoints.post` raises."""
    call = endpoints.call(deadline_s=deadline_s)
    timeout_ms = max(1, int(1000 * SERVER_SHARE * call.try_s))
    body = RewardRequest(reward=reward, timeout_ms=timeout_ms, items=[item]).model_dump(mode="json")
    while True:
        (result,) = (await call.post("/v1/rewards", body, partial(RewardReply.to, [item]))).results
        if result.error is None or not result.error.retryable:
            return result
        await call.again(result.error.detail)


def _endpoints_for(url: str | Sequence[str], token_env: str | None) -> Endpoints:
    try:
        token = token_from(token_env, "token_env")
    except ValueError as error:
        raise RewardError(str(error)) from None
    place = ((url,) if isinstance(url, str) else tuple(url), token)
    known = _endpoints.setdefault(asyncio.get_running_loop(), {})
    if place not in known:
        known[place] = Endpoints(place[0], token=token, ready_path="/readyz")
    return known[place]
