"""From `use: ...` in a run file to a reward function: a built-in name, `package.module:function`, `file.py:function`.

Finding a function and importing it are two things: the first needs no foreign code to run and happens anywhere, the
second happens in the process that will call it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hone.config.rewards import BUILTIN_REWARDS, registered_rewards
from hone.errors import ConfigError, nearest
from hone.reward.foreign import Unfit, adapted
from hone.reward.signature import RewardFunction
from hone.runtime.user_code import describe, import_module

if TYPE_CHECKING:
    from hone.config.run import RewardComponent
    from hone.reward.http import Addresses

_PATH = re.compile(r"(?P<place>.+):(?P<function>[A-Za-z_]\w*)")


class Unusable(Exception):
    """A reward that cannot be had, and why; a problem of the run file."""


@dataclass(frozen=True, slots=True)
class FunctionRef:
    """Where a reward function is."""

    place: str
    """A .py file's absolute path, or a module's name."""
    function: str


def resolve(use: str, folder: Path) -> FunctionRef:
    """Find what `use` names, without importing it.

    Args:
        folder: the run file's; a .py file is relative to it.
    Raises:
        Unusable: an unknown name or a missing file, with the nearest one that exists.
    """
    if use in BUILTIN_REWARDS:
        path = BUILTIN_REWARDS[use].path
    else:
        path = use if ":" in use else registered_rewards().get(use, use)
    match = _PATH.fullmatch(path)
    if match is None:
        named = (*BUILTIN_REWARDS, *registered_rewards())
        forms = f"By name: {', '.join(named)}; your own: package.module:function or file.py:function."
        raise Unusable(f"no reward {use!r}.{did_you_mean(use, named)} {forms}")
    place, function = match["place"], match["function"]
    if not place.endswith(".py"):
        return FunctionRef(place, function)
    path = (folder / Path(place).expanduser()).resolve()
    if not path.is_file():
        others = [other.name for other in path.parent.glob("*.py")]
        raise Unusable(f"no file {path}.{did_you_mean(path.name, others)}")
    return FunctionRef(str(path), function)


def load(target: FunctionRef, args: Mapping[str, Any]) -> RewardFunction:
    """Import a reward function and check that it takes `args`; its own `hone_check_args`, if it has one, looks closer.

    A function written for another trainer comes back in our own form (see `foreign`).
    Raises:
        Unusable: the import fails, the function is not there, or its signature does not fit.
    """
    name = target.function
    try:
        function = adapted(import_function(target), name)
    except Unfit as error:
        raise Unusable(str(error)) from error
    signature = inspect.signature(function)
    try:
        signature.bind(None, **args)
    except TypeError as error:
        names = [p for p in list(signature.parameters)[1:] if p not in args]
        unknown = [arg for arg in args if arg not in signature.parameters]
        hint = did_you_mean(unknown[0], names) if unknown else ""
        raise Unusable(f"{name}{signature} does not fit args {dict(args)}: {error}.{hint}") from error
    try:
        getattr(function, "hone_check_args", lambda _: None)(args)
    except ValueError as error:
        raise Unusable(f"args of {name}: {error}") from error
    return function


def load_stateful(
    name: str,
    args: Mapping[str, Any],
    *,
    folder: Path,
    timeout_s: float,
    services: Addresses = MappingProxyType({}),
) -> Any:
    """The scorer of a stateful built-in reward, made of the component's args; it is not started.

    Its `from_args` also gets the run file's `folder`, the component's `timeout_s` and the addresses of the running
    `services` by name, each if it takes them.
    Raises:
        Unusable: the args do not fit.
    """
    module, _, scorer = BUILTIN_REWARDS[name].path.partition(":")
    make = getattr(importlib.import_module(module), scorer).from_args
    context = {"folder": folder, "timeout_s": timeout_s, "services": services}
    return make(args, **{name: context[name] for name in context if name in inspect.signature(make).parameters})


def picture_of_responses(components: Sequence[RewardComponent]) -> Callable[[str, Any], bytes | None] | None:
    """Draws a response, given its text and the row's answer, as PNG bytes; None when no component's reward draws.

    Asks rewards that installed packages register; a user's own file is not imported in this process.
    Raises:
        ConfigError: a registered reward cannot be imported.
    """
    for number, component in enumerate(components):
        if ":" in component.use or component.use in BUILTIN_REWARDS:
            continue
        try:
            function = load(resolve(component.use, Path()), component.args)
        except Unusable as error:
            raise ConfigError([f"reward.components.{number}.use: {error}"]) from error
        if (picture := getattr(function, "hone_picture", None)) is not None:
            return partial(picture, **component.args)
    return None


def import_function(target: FunctionRef) -> Any:
    """The function as it is, a reward or not. Raises Unusable when the import fails or there is none."""
    try:
        module = import_module(target.place, "reward")
    except (Exception, SystemExit) as error:  # boundary: the user's module may raise anything while it is imported
        raise Unusable(f"{target.place} cannot be imported: {describe(error)}") from error
    found = getattr(module, target.function, None)
    if found is None:
        own = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise Unusable(f"{target.place} has no function {target.function!r}.{did_you_mean(target.function, own)}")
    if not callable(found):
        raise Unusable(f"{target.place}:{target.function} is {type(found).__name__}, not a function")
    return found


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing."""
    close = nearest(name, choices, cutoff=50)
    return f" Did you mean {close!r}?" if close else ""
