"""A sandbox somewhere else: any service that speaks SandboxFusion's `POST /run_code`, one request for each run.

Whose fault a failure is, is read from where it happened: no answer, 429 and 5xx are the service's and tried again
until a deadline; another 4xx is ours and is not; a run that ended badly is the program's. `SandboxError` can be
either, so a program of our own is sent along: if that one runs, the other has broken its sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import random
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import httpx

from hone.reward.sandbox import inside
from hone.reward.sandbox.base import (
    Call,
    Ending,
    Input,
    Limits,
    Run,
    SandboxFault,
    SandboxLost,
    SandboxUnavailable,
    Stdin,
)
from hone.reward.sandbox.probe import prove

TRIES = 4
CONNECT_TIMEOUT_S = 5.0
ANSWER_GRACE_S = 10.0
"""Beyond a run's own time: for its way there and back, and a place in the service's queue."""
FIRST_WAIT_S, MAX_WAIT_S = 0.25, 8.0
"""Bounds of the random wait before another try; it doubles each time."""
_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_CALLER = f"""
import json, os, sys

{inspect.getsource(inside.find_function)}

{inspect.getsource(inside.plain)}

given = json.loads(sys.stdin.read())
sys.stdin = open(os.devnull)
module = type(sys)("__main__")
sys.modules["__main__"] = module
exec(compile(given["source"], "program.py", "exec", dont_inherit=True), vars(module))
value = find_function(vars(module), given["call"])(*given["args"], **given["kwargs"])
sys.set_int_max_str_digits(0)
sys.stdout.flush()
print("\\n" + given["mark"] + json.dumps(value, default=plain))
"""


class Remote:
    """Programs at a SandboxFusion-compatible service, `num_places` at a time.

    The service isolates and limits; here only time and output are. Its address and token are ours to trust.
    """

    name = "remote"

    def __init__(
        self,
        url: str,
        limits: Limits,
        *,
        num_places: int,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._limits = limits
        self._num_places = num_places
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._free = asyncio.Semaphore(num_places)

    async def start(self) -> None:
        await self.close()
        self._client = httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(self._limits.wall_s + ANSWER_GRACE_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=self._num_places),
            transport=self._transport,
            trust_env=False,
        )
        try:
            await prove(self, isolated=False)
        except SandboxUnavailable:
            await self.close()
            raise

    @contextlib.asynccontextmanager
    async def open(self, source: str) -> AsyncIterator[RemoteSession]:
        if self._client is None:
            raise SandboxFault("the sandbox was not started")
        async with self._free:
            yield RemoteSession(self._client, f"{self._url}/run_code", source, self._limits)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


class RemoteSession:
    """One program at the service, which sees each run as a program of its own."""

    def __init__(self, client: httpx.AsyncClient, url: str, source: str, limits: Limits) -> None:
        self._client = client
        self._url = url
        self._source = source
        self._limits = limits

    async def run(self, given: Input) -> Run:
        mark = secrets.token_hex(16)  # not to be guessed, so that nothing a program prints is taken for a value
        deadline = time.monotonic() + TRIES * (self._limits.wall_s + ANSWER_GRACE_S)
        request = self._request(given, mark)
        for wait_s in (*(random.uniform(0, min(MAX_WAIT_S, FIRST_WAIT_S * 2**n)) for n in range(TRIES - 1)), None):
            try:
                return self._as_run(await self._ask(request, deadline), given, mark)
            except _Again as error:
                if wait_s is None or time.monotonic() + max(wait_s, error.retry_after_s) >= deadline:
                    await self._give_up(error, deadline)
                else:
                    await asyncio.sleep(max(wait_s, error.retry_after_s))
        raise AssertionError("the last try returns or gives up")

    async def _give_up(self, error: _Again, deadline: float) -> NoReturn:
        if error.by_program and await self._is_well(deadline):
            raise SandboxLost(f"the service runs other programs, but not this one: {error}")
        raise SandboxFault(f"{self._url}: {error}")

    def _request(self, given: Input, mark: str) -> dict[str, Any]:
        match given:
            case Stdin(text):
                code, stdin = self._source, text
            case Call(function, args, kwargs):
                parts = {"source": self._source, "call": function, "args": list(args), "kwargs": dict(kwargs)}
                code, stdin = _CALLER, json.dumps({**parts, "mark": mark})
        return {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": self._limits.wall_s,
            "run_timeout": self._limits.wall_s,
            "memory_limit_MB": self._limits.memory_bytes >> 20,
        }

    async def _ask(self, request: dict[str, Any], deadline: float) -> dict[str, Any] | None:
        """The service's answer; None when it is longer than any answer to a bounded output.

        Raises _Again for what may go better another time, SandboxFault for what may not.
        """
        most = 16 * self._limits.output_bytes + (1 << 16)  # JSON writes a byte in up to six; two streams
        try:
            async with (
                asyncio.timeout(min(self._limits.wall_s * 2 + ANSWER_GRACE_S, deadline - time.monotonic())),
                self._client.stream("POST", self._url, json=request) as response,
            ):
                if response.status_code in _TRY_AGAIN:
                    raise _Again(f"HTTP {response.status_code}", retry_after_s=_retry_after_s(response))
                if response.status_code != 200:
                    raise SandboxFault(f"{self._url}: HTTP {response.status_code}; is it the right address and token?")
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > most:
                        return None
        except TimeoutError:
            raise _Again("no answer in time") from None
        except httpx.HTTPError as error:
            raise _Again(f"{type(error).__name__}: {error}") from error
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            raise _Again("the answer is not JSON") from None
        if not isinstance(answer, dict):
            raise _Again("the answer is not an object")
        return answer

    def _as_run(self, answer: dict[str, Any] | None, given: Input, mark: str) -> Run:
        if answer is None:
            return Run(Ending.OUTPUT, b"")
        status, compiled, ran = answer.get("status"), answer.get("compile_result"), answer.get("run_result")
        if status == "SandboxError":
            raise _Again(f"SandboxError: {str(answer.get('message'))[:100]}", by_program=True)
        result = ran if ran is not None else compiled
        if status not in ("Success", "Failed") or not isinstance(result, dict):
            raise _Again(f"not an answer of run_code: status {str(status)[:40]!r}")
        elapsed_s, code = result.get("execution_time"), result.get("return_code")
        elapsed_s = float(elapsed_s) if isinstance(elapsed_s, int | float) else 0.0
        detail = _last_line(result.get("stderr"))
        if result.get("status") == "TimeLimitExceeded":
            return Run(Ending.TIME, b"", detail, elapsed_s)
        if result.get("status") != "Finished" or not isinstance(code, int) or (code == 0) != (status == "Success"):
            raise _Again("the answer contradicts itself: no return code, or one that does not fit the status")
        if code != 0 or ran is None:
            ending = Ending.MEMORY if detail.startswith("MemoryError") else Ending.CRASHED
            return Run(ending, b"", detail or f"exit code {code}", elapsed_s)
        stdout = result.get("stdout")
        if not isinstance(stdout, str):
            raise _Again("the answer has no stdout")
        if isinstance(given, Call):
            _, found, stdout = stdout.rpartition(mark)
            if not found:
                return Run(Ending.CRASHED, b"", "ended before its function returned a value", elapsed_s)
        output = stdout.encode("utf-8", "replace")
        if len(output) > self._limits.output_bytes:
            return Run(Ending.OUTPUT, b"", "", elapsed_s)
        return Run(Ending.FINISHED, output, "", elapsed_s)

    async def _is_well(self, deadline: float) -> bool:
        """Whether the service runs a program that breaks nothing, just now."""
        control = RemoteSession(self._client, self._url, "print('well')", self._limits)
        try:
            run = control._as_run(await control._ask(control._request(Stdin(""), ""), deadline), Stdin(""), "")
        except (_Again, SandboxFault):
            return False
        return run.ending is Ending.FINISHED and run.output.strip() == b"well"


class _Again(Exception):
    """The service failed in a way that another try may mend."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0, by_program: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.by_program = by_program


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("Retry-After", "0")))
    except ValueError:  # a date: our own waits will do
        return 0.0


def _last_line(stderr: Any) -> str:
    lines = stderr.split("\n") if isinstance(stderr, str) else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[-200:]


def token_from(variable: str | None) -> str | None:
    """The value of an environment variable; None without a name. Raises SandboxUnavailable when it is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise SandboxUnavailable(f"the environment variable {variable} with the sandbox's token is not set")
    return os.environ[variable]
