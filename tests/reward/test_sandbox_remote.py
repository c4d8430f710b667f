"""The client of a SandboxFusion-compatible service, against one that really runs programs and fails on demand."""

import asyncio
import dataclasses
import json
import subprocess
import sys

import httpx
import pytest

from hone.reward.code import CodeReward, CodeSettings
from hone.reward.sandbox.base import Call, Limits, ProgramEnding, SandboxFault, SandboxLost, SandboxUnavailable, Stdin
from hone.reward.sandbox.remote import TRIES, Remote
from hone.types import Fault, Score

LIMITS = Limits(cpu_s=1, wall_s=5.0, memory_bytes=256 << 20, processes=8, output_bytes=1000, disk_bytes=8 << 20)
WELL = {"status": "Success", "message": "", "compile_result": None}


class Service:
    """`/run_code` as SandboxFusion answers it. `fail` may answer instead: it gets the request and its number."""

    def __init__(self):
        self.requests = []
        self.fail = lambda request, number: None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append((request, body))
        failed = self.fail(body, len(self.requests))
        if isinstance(failed, Exception):
            raise failed
        if failed is not None:
            return failed
        command = [sys.executable, "-I", "-c", body["code"]]
        ran = subprocess.run(command, input=body["stdin"], capture_output=True, text=True)
        result = {
            "status": "Finished",
            "execution_time": 0.1,
            "return_code": ran.returncode,
            "stdout": ran.stdout,
            "stderr": ran.stderr,
        }
        return httpx.Response(
            200, json={**WELL, "status": "Failed" if ran.returncode else "Success", "run_result": result}
        )


@pytest.fixture
def service():
    return Service()


def at(service, url="http://sandbox", limits=LIMITS, **options):
    transport = httpx.MockTransport(service)
    return Remote(url, limits, **{"num_slots": 1, "first_backoff_s": 0.001, "transport": transport, **options})


@pytest.fixture
def run(service):
    def run_program(source, *inputs):
        async def go():
            sandbox = at(service, "http://sandbox:8080/", num_slots=2, token="t")
            await sandbox.start()
            service.requests.clear()
            try:
                async with sandbox.open(source) as session:
                    return [await session.run(given) for given in inputs]
            finally:
                await sandbox.close()

        return asyncio.run(go())

    return run_program


def after_start(answer):
    """Fail all requests but the first, which proves that the service works."""
    first = []

    def fail(request, number):
        if not first:
            first.append(number)
            return None
        return answer(request, number) if callable(answer) else answer

    return fail


def test_scripts_and_calls_run_as_they_do_here(run, service):
    runs = run("print(input()[::-1])", Stdin("abc\n"), Stdin(""))
    assert (runs[0].ending, runs[0].output) == (ProgramEnding.FINISHED, b"cba\n")
    assert (runs[1].ending, runs[1].detail) == (ProgramEnding.CRASHED, "EOFError: EOF when reading a line")
    source = "print('noise')\nclass Solution:\n    def f(self, x): return (x, {x})"
    runs = run(source, Call("f", (2,)), Call("g", ()))
    assert json.loads(runs[0].output) == [2, [2]]
    assert (runs[1].ending, runs[1].detail) == (
        ProgramEnding.CRASHED,
        "AttributeError: 'Solution' object has no attribute 'g'",
    )


def test_the_request_is_sandbox_fusions(run, service):
    run("pass", Stdin("x"))
    ((request, body),) = service.requests
    assert (request.method, str(request.url)) == ("POST", "http://sandbox:8080/run_code")
    assert request.headers["Authorization"] == "Bearer t"
    assert body == {
        "code": "pass",
        "language": "python",
        "stdin": "x",
        "compile_timeout": 5.0,
        "run_timeout": 5.0,
        "memory_limit_MB": 256,
    }


@pytest.mark.parametrize(
    "source", ["import os\ndef f(): os._exit(0)", "print('0' * 32 + '42')\ndef f(): raise SystemExit(0)"]
)
def test_a_value_that_was_not_returned_is_none(run, source):
    (ended,) = run(source, Call("f"))
    assert (ended.ending, ended.output) == (ProgramEnding.CRASHED, b"")


def test_time_memory_and_output(run, service):
    def limits(request, number):
        late = {"status": "TimeLimitExceeded", "execution_time": 5.0, "return_code": None, "stdout": "", "stderr": ""}
        if "slow" in request["code"]:
            return httpx.Response(200, json={**WELL, "status": "Failed", "run_result": late})
        if "huge" in request["code"]:
            return httpx.Response(200, content=b" " * 10**6)
        return None

    service.fail = limits
    assert run("slow", Stdin(""))[0].ending is ProgramEnding.TIME
    assert run("huge", Stdin(""))[0].ending is ProgramEnding.OUTPUT
    assert run("print('y' * 2000)", Stdin(""))[0].ending is ProgramEnding.OUTPUT
    assert run("raise MemoryError", Stdin(""))[0].ending is ProgramEnding.MEMORY


PASSING = [
    httpx.Response(502),
    httpx.Response(503, headers={"Retry-After": "0"}),
    httpx.Response(429),
    httpx.Response(200, content=b'{"status": "Succ'),
    httpx.Response(200, content=b"<html>"),
    httpx.Response(200, json=[1]),
    httpx.Response(200, json={"status": "Success"}),
    httpx.Response(200, json={**WELL, "run_result": {"status": "Finished", "return_code": 0, "stdout": None}}),
    httpx.Response(200, json={**WELL, "run_result": {"status": "Finished", "return_code": 1, "stdout": "7"}}),
    httpx.Response(200, json={**WELL, "run_result": {"status": "Finished", "return_code": None, "stdout": "7"}}),
    httpx.Response(200, json={**WELL, "status": "SandboxError", "message": "no disk"}),
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("slow"),
    httpx.RemoteProtocolError("died"),
]


@pytest.mark.parametrize("failure", PASSING, ids=repr)
def test_a_failure_of_the_service_is_tried_again_and_never_a_verdict(run, service, failure):
    service.fail = after_start(lambda request, number: failure if number <= 2 else None)
    (ended,) = run("print(7)", Stdin(""))
    assert (ended.ending, ended.output) == (ProgramEnding.FINISHED, b"7\n")
    assert len(service.requests) == 3  # witness: two failed


@pytest.mark.parametrize("failure", [f for f in PASSING if b"SandboxError" not in getattr(f, "content", b"")], ids=repr)
def test_a_failure_that_stays_is_an_infra_fault(run, service, failure):
    service.fail = after_start(failure)
    with pytest.raises(SandboxFault, match="http://sandbox:8080/run_code: "):
        run("print(7)", Stdin(""))
    assert len(service.requests) == TRIES


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_request_that_is_refused_is_not_repeated(run, service, status):
    service.fail = after_start(httpx.Response(status))
    with pytest.raises(SandboxFault, match=f"HTTP {status}"):
        run("print(7)", Stdin(""))
    assert len(service.requests) == 1


def test_a_request_that_breaks_the_service_is_distinguished_from_a_broken_service(run, service):
    error = httpx.Response(200, json={**WELL, "status": "SandboxError", "message": "undecodable"})
    service.fail = after_start(lambda request, number: error if "bad" in request["code"] else None)
    with pytest.raises(SandboxLost, match="not this one"):
        run("bad", Stdin(""))
    service.fail = after_start(error)
    with pytest.raises(SandboxFault, match="SandboxError"):
        run("bad", Stdin(""))


def test_a_service_that_never_answers_is_waited_for_so_long():
    limits = dataclasses.replace(LIMITS, wall_s=0.01)

    async def never(request):
        await asyncio.sleep(60)
        raise AssertionError("not cancelled")

    sandbox = at(never, limits=limits, grace_s=0.03)
    with pytest.raises(SandboxUnavailable, match=r"no answer in 0\.0"):
        asyncio.run(sandbox.start())


def test_a_service_that_does_not_work_is_unavailable(run, service):
    service.fail = lambda request, number: httpx.ConnectError("refused")
    with pytest.raises(SandboxUnavailable, match="refused"):
        run("print(7)", Stdin(""))


# As the reward


@pytest.fixture
def reward(service):
    settings = CodeSettings(remote_url="http://sandbox:8080")
    return CodeReward(settings, sandboxes=[at(service, limits=settings.limits(), num_slots=32)])


@pytest.mark.parametrize("failure", [None, *PASSING], ids=repr)
def test_scores_are_the_same_with_and_without_faults(reward, service, failure, make_group):
    """Every other request fails; the scores are bit-equal to those without a fault."""
    service.fail = lambda request, number: failure if number % 2 == 0 else None
    programs = ("print(sum(map(int, input().split())))", "print(7)", "1/0")
    group = make_group(*(f"```\n{p}\n```" for p in programs), answer=[{"stdin": "3 4", "stdout": "7"}] * 2)

    async def go():
        await reward.start()
        scores = await reward.score(group)
        await reward.close()
        return scores

    scores = asyncio.run(go())
    assert [s.value for s in scores] == [1.0, 1.0, 0.0]
    assert [s.fault for s in scores] == [None, None, Fault.MODEL]
    assert len(service.requests) >= 6 if failure is None else len(service.requests) > 6


def test_a_token_that_is_not_set_is_named(make_group):
    reward = CodeReward.from_args({"remote_url": "http://x", "remote_token_env": "HONE_NO_SUCH_TOKEN"})
    (scored,) = asyncio.run(reward.score(make_group("```\n1\n```", answer=[{"stdin": "", "stdout": ""}])))
    assert scored == Score(None, Fault.INFRA, scored.detail)
    assert "HONE_NO_SUCH_TOKEN" in scored.detail
