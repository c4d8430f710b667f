"""Remote sandbox: any service that speaks SandboxFusion's `POST /run_code`, one request for each run.

Attribution of failures: no answer, 429 and 5xx are faults of the service and retried until a deadline; other 4xx are
faults of this client and not retried; a run that ended badly is a fault of the program. After `SandboxError`, which can
be either, a known good program is sent: if it runs, the other program has broken its sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import httpx

from hone.reward.http import FIRST_BACKOFF_S, Endpoints, Refused, Unavailable
from hone.reward.sandbox import warden
from hone.reward.sandbox.base import (
    Call,
    Input,
    Limits,
    ProgramEnding,
    ProgramRun,
    SandboxFault,
    SandboxLost,
    SandboxUnavailable,
    Stdin,
)
from hone.reward.sandbox.probe import prove

TRIES = 4
GRACE_S = 10.0
PATH = "/run_code"
_TOO_LONG = "longer than any answer to a bounded output"
_CALLER = f"""
import json, os, sys

{inspect.getsource(warden.find_function)}

{inspect.getsource(warden.plain)}

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
    """Programs at a SandboxFusion-compatible service, `num_slots` at a time.

    The service isolates programs and limits memory; only time and output are limited here. The service is trusted.
    """

    name = "remote"

    def __init__(
        self,
        url: str,
        limits: Limits,
        *,
        num_slots: int,
        token: str | None = None,
        grace_s: float = GRACE_S,
        first_backoff_s: float = FIRST_BACKOFF_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """
        Args:
            grace_s: beyond a run's own time, for the network and the service's queue.
            first_backoff_s, transport: see `Endpoints`.
        """
        self._url = url
        self._limits = limits
        self._num_slots = num_slots
        self._token = token
        self._grace_s, self._first_backoff_s, self._transport = grace_s, first_backoff_s, transport
        self._endpoints: Endpoints | None = None
        self._free = asyncio.Semaphore(num_slots)

    async def start(self) -> None:
        await self.close()
        try:
            self._endpoints = Endpoints(
                [self._url],
                token=self._token,
                max_in_flight=self._num_slots,
                max_response_bytes=16 * self._limits.output_bytes + (1 << 16),  # JSON writes a byte in up to six; twice
                too_long=_TOO_LONG,
                first_backoff_s=self._first_backoff_s,
                transport=self._transport,
            )
        except ValueError as error:
            raise SandboxUnavailable(str(error)) from None
        try:
            await prove(self, isolated=False)
        except SandboxUnavailable:
            await self.close()
            raise

    @contextlib.asynccontextmanager
    async def open(self, source: str) -> AsyncIterator[RemoteSession]:
        if self._endpoints is None:
            raise SandboxFault("the sandbox was not started")
        async with self._free:
            yield RemoteSession(self._endpoints, source, self._limits, self._grace_s)

    async def close(self) -> None:
        endpoints, self._endpoints = self._endpoints, None
        if endpoints is not None:
            await endpoints.close()


class RemoteSession:
    """One program at the service; each run is a separate request."""

    def __init__(self, endpoints: Endpoints, source: str, limits: Limits, grace_s: float) -> None:
        self._endpoints = endpoints
        self._source = source
        self._limits, self._grace_s = limits, grace_s

    async def run(self, given: Input) -> ProgramRun:
        try:
            return await self._asked(given, TRIES)
        except _Broken as error:
            if await self._is_well():
                raise SandboxLost(f"the service runs other programs, but not this one: {error}") from None
            raise SandboxFault(str(error)) from None

    async def _asked(self, given: Input, max_tries: int) -> ProgramRun:
        """Raises SandboxFault, and _Broken when this program breaks the service's sandbox each time."""
        mark = secrets.token_hex(16)  # random, so that a program cannot print a forged value
        try_s = self._limits.wall_s * 2 + self._grace_s
        call = self._endpoints.call(deadline_s=TRIES * try_s, try_s=try_s, max_tries=max_tries)
        is_broken = False
        try:
            while True:
                run = await call.post(
                    PATH, self._request(given, mark), lambda answer: self._as_run(answer, given, mark)
                )
                if not isinstance(run, str):
                    return run
                is_broken = True
                await call.again(run)
        except Unavailable as error:
            raise _Broken(str(error)) if is_broken else SandboxFault(str(error)) from None
        except Refused as error:
            raise SandboxFault(f"{error}; is it the right address and token?") from None

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

    def _as_run(self, answer: Any, given: Input, mark: str) -> ProgramRun | str:
        """The run; or the service's message when its sandbox broke. Raises ValueError for an invalid answer."""
        if answer is _TOO_LONG:
            return ProgramRun(ProgramEnding.OUTPUT, b"")
        if not isinstance(answer, dict):
            raise ValueError("not an object")
        status, compiled, ran = answer.get("status"), answer.get("compile_result"), answer.get("run_result")
        if status == "SandboxError":
            return f"SandboxError: {str(answer.get('message'))[:100]}"
        result = ran if ran is not None else compiled
        if status not in ("Success", "Failed") or not isinstance(result, dict):
            raise ValueError(f"not an answer of run_code: status {str(status)[:40]!r}")
        elapsed_s, code = result.get("execution_time"), result.get("return_code")
        elapsed_s = float(elapsed_s) if isinstance(elapsed_s, int | float) else 0.0
        stderr = result.get("stderr")
        detail = stderr.strip().rpartition("\n")[2].strip()[-200:] if isinstance(stderr, str) else ""
        if result.get("status") == "TimeLimitExceeded":
            return ProgramRun(ProgramEnding.TIME, b"", detail, elapsed_s)
        if result.get("status") != "Finished" or not isinstance(code, int) or (code == 0) != (status == "Success"):
            raise ValueError("inconsistent answer: no return code, or one that contradicts the status")
        if code != 0 or ran is None:
            ending = ProgramEnding.MEMORY if detail.startswith("MemoryError") else ProgramEnding.CRASHED
            return ProgramRun(ending, b"", detail or f"exit code {code}", elapsed_s)
        stdout = result.get("stdout")
        if not isinstance(stdout, str):
            raise ValueError("it has no stdout")
        if isinstance(given, Call):
            _, found, stdout = stdout.rpartition(mark)
            if not found:
                return ProgramRun(ProgramEnding.CRASHED, b"", "ended before its function returned a value", elapsed_s)
        output = stdout.encode("utf-8", "replace")
        if len(output) > self._limits.output_bytes:
            return ProgramRun(ProgramEnding.OUTPUT, b"", "", elapsed_s)
        return ProgramRun(ProgramEnding.FINISHED, output, "", elapsed_s)

    async def _is_well(self) -> bool:
        """Whether the service currently runs a program that is known to be good."""
        try:
            well = RemoteSession(self._endpoints, "print('well')", self._limits, self._grace_s)
            run = await well._asked(Stdin(""), 1)
        except (_Broken, SandboxFault):
            return False
        return run.ending is ProgramEnding.FINISHED and run.output.strip() == b"well"


class _Broken(Exception):
    """The service's sandbox broke at every attempt to run this program."""
