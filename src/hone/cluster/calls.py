"""Calls of Ray actors, with deadlines, and with Hone's errors, which name the process that failed."""

from __future__ import annotations

import asyncio
import pickle
import re
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from hone.cluster.ray import lost, raylet_lost
from hone.errors import ClusterError, ClusterLost, HoneError, MemoryExhausted
from hone.memory.gauges import ran_out_of_memory

CALL_KEY, START_KEY = "cluster.call_timeout_s", "cluster.start_timeout_s"
BEAT_S = 2.0
"""A call that waits for news, `EngineActor.take` or `ServiceHostActor.ended`, returns without any after this time."""
GRACE_S = 5.0
"""How long to look for a dead process when another one reports a lost connection."""
DIRECT_BYTES = 64 << 10
"""Largest argument that is sent with the call; Ray itself puts those above 100 KiB into the object store."""

_killed: dict[str, str] = {}
"""Why this process killed an actor, by Ray's id of it; Ray itself reports only that it was killed."""


def kill(actor: Any, why: str) -> None:
    """End an actor's process. Calls that wait for it fail, and their errors say why."""
    _killed[actor._actor_id.hex()] = why
    ray.kill(actor)


def why_killed(actor: Any) -> str | None:
    """The reason given to `kill`, for failures that another process reports."""
    return _killed.get(actor._actor_id.hex())


def shared(value: Any) -> Any:
    """An argument for a call on several processes: large values are put into the object store once.

    Ray ends this process with exit code 1 when the object store ends during a put, so small values, which a call sends
    directly, are not put. Raises ClusterLost when the store is gone already.
    """
    if (why := raylet_lost()) is not None:
        raise ClusterLost(why)
    return value if len(pickle.dumps(value)) <= DIRECT_BYTES else ray.put(value)


def wait_for_all(calls: Mapping[str, ray.ObjectRef], what: str, timeout_s: float, key: str = CALL_KEY) -> list[Any]:
    """The results of one call on several processes, in their order.

    Args:
        calls: by the name of the process.
        what: is being done, for errors.
        key: of the run file that says how long it may take.
    Raises:
        HoneError: what one of them raised; ClusterError names one that died, failed otherwise, or gave no answer.
    """
    names, pending = {ref: name for name, ref in calls.items()}, list(calls.values())
    deadline = time.monotonic() + timeout_s
    while pending:
        done, pending = ray.wait(pending, timeout=max(deadline - time.monotonic(), 0), fetch_local=False)
        if not done:
            stuck = ", ".join(names[ref] for ref in pending)
            raise ClusterError(f"{what}: no answer from {stuck} within {timeout_s:g} s ({key}).")
        try:
            ray.get(done)
        except RayError as error:
            raise _first_death(names[done[0]], error, {names[ref]: ref for ref in pending}, what) from error
    return ray.get(list(calls.values()))


async def wait_for_one(name: str, call: ray.ObjectRef, what: str, timeout_s: float, key: str = CALL_KEY) -> Any:
    """Like `wait_for_all`, of one process, in the event loop."""
    waiting = asyncio.wrap_future(call.future())  # type: ignore[attr-defined]
    try:
        done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
        if not done:
            raise ClusterError(f"{what}: no answer from {name} within {timeout_s:g} s ({key}).")
        return waiting.result()
    except RayError as error:
        raise as_hone_error(name, error, what) from error
    finally:
        waiting.cancel()


def as_hone_error(name: str, error: RayError, what: str) -> HoneError:
    """Ray's error as one of Hone's: what the process itself raised, if that is a HoneError."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, HoneError):
        return cause
    if (why := lost()) is not None:
        return ClusterLost(f"{what}: {why}")
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # the remote traceback, coloured
    if isinstance(error, RayTaskError):
        if isinstance(cause, Exception) and ran_out_of_memory(cause):
            return MemoryExhausted(f"{what}: {name} ran out of memory: {cause}")
        # `traceback_str` is missing from errors that are of the cause's class as well, which are most.
        return ClusterError(f"{what}: {name} failed: {type(cause).__name__}: {cause}\n{text}")
    if isinstance(error, RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return ClusterError(f"{what}: {name} died. {_killed.get(error.actor_id) or ''.join(lines[-1:])}")
    return ClusterError(f"{what}: {name}: {type(error).__name__}: {text}")


def _first_death(name: str, error: RayError, others: Mapping[str, ray.ObjectRef], what: str) -> HoneError:
    """The process that failed first: ranks that wait for a dead one fail too, and often report earlier."""
    if isinstance(error, RayTaskError) and not isinstance(error.cause, HoneError) and others:
        refs = {ref: other for other, ref in others.items()}
        ended, _ = ray.wait(list(refs), num_returns=len(refs), timeout=GRACE_S, fetch_local=False)
        for ref in ended:
            try:
                ray.get(ref)
            except RayActorError as death:
                return as_hone_error(refs[ref], death, what)
            except RayTaskError as failure:
                if isinstance(failure.cause, HoneError):
                    return failure.cause
    return as_hone_error(name, error, what)
