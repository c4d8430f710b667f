"""The user's own functions around a judge, as practice with DeepSeek-GRM has them, in a process that can be killed.

    def preprocess(question, response, reference=None, columns=None): ...   -> a prompt, or a list of messages
    def postprocess(text, question=None, response=None, reference=None, columns=None): ...   -> a score on the scale

The first parameters may have any names; of the others, those that a function takes are given to it by name. A score
of None says that the text holds none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hone.reward.judge.parse import NoScores
from hone.reward.judge.prompt import Messages
from hone.reward.judge.settings import DataProcessorConfig
from hone.reward.pool import RewardPool, UserFunction
from hone.reward.resolve import FunctionRef, Unusable, import_function

HookRole = Literal["preprocess", "postprocess"]
_LEADING: dict[HookRole, tuple[str, ...]] = {"preprocess": ("question", "response"), "postprocess": ("text",)}
_BY_NAME = ("question", "response", "reference", "columns")


class UserFunctions:
    """The functions that the settings name; `None` for one that they do not."""

    def __init__(self, config: DataProcessorConfig, folder: Path, *, timeout_s: float) -> None:
        path = str((folder / Path(config.path).expanduser()).resolve())
        self._pool = RewardPool(num_workers=1, folder=folder)
        self._timeout_s = timeout_s
        names: dict[HookRole, str | None] = {
            "preprocess": config.preprocess_fn_name,
            "postprocess": config.postprocess_fn_name,
        }
        self._functions: dict[HookRole, int] = {}
        for role, name in names.items():
            if name is not None:
                args = {"path": path, "name": name, "role": role}
                function = UserFunction(
                    FunctionRef(__name__, call.__name__), args, f"data_processor_config.{role}_fn_name"
                )
                self._functions[role] = self._pool.add(function)

    def has(self, role: HookRole) -> bool:
        return role in self._functions

    async def start(self) -> list[str]:
        """Import the functions. Returns what is wrong with them."""
        return await self._pool.start()

    async def prompt(self, item: Mapping[str, Any]) -> Messages:
        """What `preprocess` makes of an item. Raises CallFailed."""
        made = await self._pool.call(self._functions["preprocess"], dict(item), timeout_s=self._timeout_s)
        return [{"role": "user", "content": made}] if isinstance(made, str) else made

    async def score(self, text: str, item: Mapping[str, Any]) -> float:
        """What `postprocess` makes of the judge's text. Raises CallFailed, or NoScores where that is None."""
        found = await self._pool.call(self._functions["postprocess"], {**item, "text": text}, timeout_s=self._timeout_s)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise NoScores("missing" if found is None else "malformed", f"postprocess gave {type(found).__name__}")
        return float(found)

    async def close(self) -> None:
        await self._pool.close()


def call(item: Mapping[str, Any], *, path: str, name: str, role: HookRole) -> Any:
    """In the worker: one of the functions, on one item. Raises ValueError for a prompt that is none."""
    function = _imported(path, name)
    leading = [item[known] for known in _LEADING[role]]
    returned = function(*leading, **{known: item[known] for known in _wanted(function, role)})
    is_text = isinstance(returned, str) and returned.strip()
    messages = returned if isinstance(returned, list) else []
    is_chat = messages and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    if role == "preprocess" and not (is_text or is_chat):
        raise ValueError(f"{name} must give a text or a list of messages with role and content, not {returned!r:.80}")
    return returned


def check(args: Mapping[str, Any]) -> None:
    """Raises ValueError when the file has no such function, or one that cannot be called."""
    try:
        function, role = _imported(args["path"], args["name"]), args["role"]
    except Unusable as error:
        raise ValueError(str(error)) from error
    try:
        inspect.signature(function).bind(*_LEADING[role], **dict.fromkeys(_wanted(function, role)))
    except TypeError as error:
        given = ", ".join((*_LEADING[role], *(name for name in _BY_NAME if name not in _LEADING[role])))
        raise ValueError(f"{args['name']}{inspect.signature(function)}: {error}; what it may take: {given}") from error


@lru_cache
def _imported(path: str, name: str) -> Callable[..., Any]:
    return import_function(FunctionRef(path, name))


def _wanted(function: Callable[..., Any], role: HookRole) -> list[str]:
    """Names of further parameters that it takes and is given."""
    parameters = list(inspect.signature(function).parameters)[len(_LEADING[role]) :]
    return [name for name in parameters if name in _BY_NAME]


call.hone_check_args = check  # type: ignore[attr-defined]
