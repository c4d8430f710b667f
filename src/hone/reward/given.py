"""`use: given`: a function that a Python program handed to `hone.train`, called in that very process.

On a thread, one group at a time, so that a slow one holds up no sampling. Unlike one that can be imported it cannot be
killed: where it hangs, the run does.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Self

from hone.reward.foreign import Unfit, adapted
from hone.reward.resolve import Unusable
from hone.reward.signature import all_faulty, check_scores, declared_range
from hone.runtime.user_code import describe
from hone.types import Group, Score

GIVEN: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("GIVEN", default={})  # noqa: B039  never changed
"""The functions of the program that is training now, by name."""


class GivenReward:
    """A `Scorer` of such a function."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        try:
            self._function = adapted(function, name)
        except Unfit as error:
            raise Unusable(str(error)) from error
        self.hone_range = declared_range(function)
        self._turn = asyncio.Lock()

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """Raises Unusable where no program has handed over the function that the args name."""
        function = GIVEN.get().get(args.get("function", ""))
        if function is None:
            raise Unusable(
                f"{args.get('function')!r} is a function of the Python program that started this run. Continue there: "
                "hone.train(..., rewards=[...], resume=True); or move it to a file, and name that: file.py:function"
            )
        return cls(function, args["function"])

    async def start(self) -> list[str]:
        return []

    async def close(self) -> None:
        pass

    async def score(self, group: Group) -> tuple[Score, ...]:
        prompt = group.prompt
        row = {"answer": prompt.answer, "columns": prompt.columns, "messages": prompt.messages}
        async with self._turn:
            try:  # with a row of its own: what the function changes in it no other component sees
                own = replace(group, prompt=replace(prompt, **copy.deepcopy(row)))
                returned = await asyncio.to_thread(self._function, own)
                returned = await returned if inspect.isawaitable(returned) else returned
                return check_scores(returned, group, self.hone_range)
            except (Exception, SystemExit) as error:  # boundary: a user's function may raise anything
                return all_faulty(len(group.samples), f"raised {describe(error)}")
