"""The transport against servers that fail on demand: what is tried again, where, when, how often, and what is not."""

import asyncio
import contextlib
import email.utils
import os
import shutil
import ssl
import subprocess
import time

import pytest
from faulty_server import SILENCE, Answer, FaultyServer, good_reply
from needs import needs

from hone.reward import http
from hone.reward.http import Endpoints, Refused, RetryBudget, RetryingCall, Unavailable
from hone.reward.response import RetryableFailure

BODY = {"items": [{"id": "a", "solution_str": "x"}]}


def ask(*servers, times=1, at_once=False, deadline_s=5.0, check=lambda answer: answer, **settings):
    """What `times` requests give: an answer, or the exception in its place; and the endpoints, closed."""

    async def go():
        urls = [server if isinstance(server, str) else server.url for server in servers]
        endpoints = Endpoints(urls, first_backoff_s=0.01, **settings)
        try:

            async def one():
                try:
                    return await endpoints.post("/v1/rewards", BODY, deadline_s=deadline_s, check=check)
                except (Unavailable, Refused) as error:
                    return error

            if at_once:
                return await asyncio.gather(*(one() for _ in range(times))), endpoints
            return [await one() for _ in range(times)], endpoints
        finally:
            await endpoints.close()

    return asyncio.run(go())


def first(count, answer):
    """Answer so to the first `count` requests."""
    return lambda request: answer if request.number <= count else None


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 507])
def test_what_may_go_better_is_tried_again(status):
    with FaultyServer(first(2, Answer(status))) as server:
        (answer,), endpoints = ask(server)
    assert answer == good_reply(BODY)
    assert server.faults == 2 and len(server.requests) == 3
    assert (endpoints.counts.requests, endpoints.counts.tries, endpoints.counts.failed) == (1, 3, 2)


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 405, 409, 413, 415, 422, 501])
def test_what_will_not_go_better_is_not(status):
    said = Answer.of({"title": "No", "detail": "the id is  missing\n", "retryable": False}, status)
    with FaultyServer(lambda request: said) as server:
        (error,), endpoints = ask(server)
    assert isinstance(error, Refused) and error.status == status
    assert str(error) == f"HTTP {status}: the id is missing ({server.url}/v1/rewards)"
    assert len(server.requests) == 1 and endpoints.counts.refused == 1


def test_what_an_openai_endpoint_says_is_passed_on():
    said = Answer.of({"error": {"message": "no such model", "type": "x"}}, 404)
    with FaultyServer(lambda request: said) as server:
        (error,), _ = ask(server)
    assert "no such model" in str(error)


def test_a_token_goes_to_the_endpoint_and_a_redirect_takes_it_nowhere(monkeypatch):
    with FaultyServer() as elsewhere:
        away = Answer(307, headers={"Location": elsewhere.url + "/v1/rewards"})
        with FaultyServer(lambda request: away) as server:
            monkeypatch.setenv("HTTP_PROXY", elsewhere.url)  # nor does a proxy of the environment
            (error,), _ = ask(server, token="secret")
    assert isinstance(error, Refused) and "secret" not in str(error)
    assert server.requests[0].headers["authorization"] == "Bearer secret"
    assert not elsewhere.requests


BROKEN = {
    "not JSON": Answer(body=b"<html>all is well</html>"),
    "cut JSON": Answer(body=b'{"results": [1, 2'),
    "NaN": Answer(body=b'{"score": NaN}'),
    "infinity": Answer(body=b'{"score": 1e999}'),
    "deep": Answer(body=b"[" * 100_000 + b"]" * 100_000),
    "not UTF-8": Answer(body=b'"\xff"'),
    "nothing": Answer(),
    "compressed": Answer(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
    "too long": Answer(body=b" " * 5000),
    "too long, in parts of no known length": Answer(body=[b" " * 1000] * 5, headers={"Content-Length": "99999"}),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_an_answer_that_is_none_is_asked_for_again(broken):
    with FaultyServer(first(1, broken)) as server:
        (answer,), endpoints = ask(server, max_response_bytes=4000)
    assert answer == good_reply(BODY)
    assert server.faults == 1 and endpoints.counts.invalid == 1


def test_what_the_caller_finds_wrong_is_asked_for_again_elsewhere():
    def check(answer):
        if answer == [1]:
            raise ValueError("a list of one")
        return "fine"

    with FaultyServer(lambda request: Answer.of([1])) as wrong, FaultyServer() as right:
        answers, endpoints = ask(wrong, right, times=12, check=check)
    assert answers == ["fine"] * 12
    assert 0 < len(wrong.requests) == endpoints.counts.invalid
    assert len(right.requests) == 12


@pytest.mark.parametrize("broken", [Answer(reset=True), Answer(close=True, headers={"Content-Length": "10"})])
def test_a_connection_that_breaks_is_made_again(broken):
    with FaultyServer(first(1, broken)) as server:
        (answer,), _ = ask(server)
    assert answer == good_reply(BODY) and server.faults == 1


@pytest.mark.parametrize(
    "hanging", [SILENCE, Answer(body=[b" "] * 1000, pause_s=0.02)], ids=["never answers", "trickles"]
)
def test_one_that_hangs_costs_half_of_the_deadline(hanging):
    """The other half is left for an answer, which is there before the deadline."""
    for deadline_s in (0.8, 20.0):  # on a busy machine the first may be too short for any answer
        with FaultyServer(first(1, hanging)) as server:
            started = time.monotonic()
            (answer,), _ = ask(server, deadline_s=deadline_s)
            took_s = time.monotonic() - started
        if not isinstance(answer, Unavailable):
            break
    assert answer == good_reply(BODY) and server.faults == 1
    assert took_s >= deadline_s / 2


def test_the_deadline_holds_and_says_why():
    for deadline_s in (0.3, 10.0):  # on a busy machine the first may be over before the second try
        with FaultyServer(lambda request: Answer(502)) as server:
            (error,), endpoints = ask(server, deadline_s=deadline_s)
        if len(server.requests) > 1:
            break
    assert isinstance(error, Unavailable) and str(error).startswith(f"{server.url}")
    assert "HTTP 502" in str(error) and f"{deadline_s:g} s allowed" in str(error)
    assert endpoints.counts.unavailable == 1 and len(server.requests) > 1


def test_no_process_there():
    with FaultyServer() as gone:
        pass
    (error,), _ = ask(gone, deadline_s=0.2)
    assert isinstance(error, Unavailable) and "ConnectError" in str(error)


def test_a_last_try_that_the_deadline_cut_hides_no_earlier_failure():
    failures = [RetryableFailure("HTTP 500"), RetryableFailure("no answer in 0.001 s", is_cut=True)]

    class Scripted(RetryingCall):
        async def _try(self, *_):
            raise failures.pop(0)

    async def go():
        endpoints = Endpoints(["http://127.0.0.1:1"])
        try:
            await Scripted(endpoints, 60.0, 30.0, max_tries=2).post("/v1/rewards", BODY, lambda answer: answer)
        finally:
            await endpoints.close()

    with pytest.raises(Unavailable, match="HTTP 500"):
        asyncio.run(go())


def test_a_rest_that_is_asked_for_is_kept_by_all():
    busy = Answer(503, headers={"Retry-After": "1"})
    with FaultyServer(first(1, busy)) as server:
        answers, _ = ask(server, times=4, at_once=True, max_in_flight=1)
    assert answers == [good_reply(BODY)] * 4
    times = [request.time for request in server.requests]
    assert len(times) == 5 and times[1] - times[0] >= 0.99  # nobody came in between


def test_a_rest_until_a_date_is_kept():
    def busy(request):
        until = email.utils.formatdate(time.time() + 1.5, usegmt=True)  # whole seconds: half a second away, or more
        return Answer(429, headers={"Retry-After": until}) if request.number == 1 else None

    with FaultyServer(busy) as server:
        (answer,), _ = ask(server)
    assert answer == good_reply(BODY)
    assert server.requests[1].time - server.requests[0].time >= 0.4


@pytest.mark.parametrize("header", ["soon", "-5", "nan", "Thu, 01 Jan 1970 00:00:00 GMT", "Wed, 99 Foo"])
def test_a_rest_that_cannot_be_read_is_none(header):
    with FaultyServer(first(1, Answer(503, headers={"Retry-After": header}))) as server:
        (answer,), _ = ask(server)
    assert answer == good_reply(BODY) and server.faults == 1


def test_a_rest_beyond_the_deadline_is_not_waited_for():
    with FaultyServer(lambda request: Answer(503, headers={"Retry-After": "3600"})) as server:
        answers, endpoints = ask(server, times=3, deadline_s=200)  # longer than a test may take
    assert all(isinstance(answer, Unavailable) for answer in answers)
    assert all(str(answer).startswith(f"{server.url}/v1/rewards: ") for answer in answers), "also those not tried"
    assert endpoints.counts.tries == 1, "the others did not try an endpoint that rests"
    assert len(server.requests) == 1  # the others were spared the way


def test_load_goes_where_there_is_less_of_it():
    async def slow(request):
        await asyncio.sleep(0.2)

    with FaultyServer(slow) as busy, FaultyServer() as idle:
        answers, _ = ask(busy, idle, times=1, max_in_flight=8)  # warm-up of nothing; both are fine
        answers, _ = ask(busy, idle, times=40, at_once=True, max_in_flight=8)
    assert answers == [good_reply(BODY)] * 40
    assert busy.most_open <= 8 and idle.most_open <= 8
    assert len(busy.requests) + len(idle.requests) == 41
    assert len(busy.requests) > 8 and len(idle.requests) > 8


def test_no_more_are_in_flight_than_allowed_and_standing_in_line_costs_no_deadline():
    async def slow(request):
        await asyncio.sleep(0.1)

    with FaultyServer(slow) as server:
        answers, _ = ask(server, times=60, at_once=True, max_in_flight=2, deadline_s=2.5)  # 3 s in all
    assert answers == [good_reply(BODY)] * 60
    assert server.most_open == 2


def test_an_endpoint_that_does_not_become_ready_is_named_with_its_first_failure():
    async def go(url):
        endpoints = Endpoints([url], ready_path="/readyz", first_backoff_s=0.001)
        for _ in range(3):
            with pytest.raises(Unavailable) as raised:
                await endpoints.post("/v1/rewards", BODY, deadline_s=0.3, check=lambda answer: answer)
        await endpoints.close()
        return str(raised.value)

    with FaultyServer(lambda request: Answer(504), ready=lambda: False) as broken:
        message = asyncio.run(go(broken.url))
    assert "HTTP 504" in message and message.count("/readyz does not answer 200") == 1


def test_an_endpoint_that_fails_is_left_alone_until_it_is_ready():
    well = []
    broken = FaultyServer(lambda request: None if well else Answer(500), ready=lambda: bool(well))

    async def go(good):
        endpoints = Endpoints([broken.url, good.url], ready_path="/readyz", first_backoff_s=0.1)
        with contextlib.suppress(asyncio.CancelledError):
            for _ in range(60):
                await endpoints.post("/v1/rewards", BODY, deadline_s=5, check=lambda answer: answer)
                await asyncio.sleep(0.005)
            failed = len(broken.requests)
            well.append(True)
            deadline = time.monotonic() + 60
            while len(broken.requests) == failed and time.monotonic() < deadline:
                await endpoints.post("/v1/rewards", BODY, deadline_s=5, check=lambda answer: answer)
                await asyncio.sleep(0.01)
        await endpoints.close()
        return failed, endpoints

    with broken, FaultyServer() as good:
        failed, endpoints = asyncio.run(go(good))
    assert failed == http.EJECT_AFTER  # no request more
    assert broken.ready_asked  # it was asked instead
    assert endpoints.counts.ejections == 1
    assert len(broken.requests) > failed  # and used again once it said so


def test_without_a_ready_path_one_request_is_the_proof():
    calls = iter(range(1000))
    with FaultyServer(lambda request: Answer(500) if next(calls) < 6 else None) as server:
        answers, endpoints = ask(server, times=20, at_once=True, max_in_flight=20, deadline_s=30)
    assert answers == [good_reply(BODY)] * 20
    assert endpoints.counts.ejections >= 1


def test_many_that_fall_at_once_are_one_fall():
    """A burst in flight when a server dies must not put it away for half a minute, which is beyond the deadline."""
    with FaultyServer(first(30, Answer(reset=True))) as server:
        answers, endpoints = ask(server, times=30, at_once=True, deadline_s=20)
    assert answers == [good_reply(BODY)] * 30
    assert endpoints.counts.ejections == 1


def test_retries_beyond_the_budget_wait_for_their_turn():
    budget = RetryBudget()
    waits = [budget.spend() for _ in range(30)]
    assert waits[:10] == [0.0] * 10
    assert waits[29] == pytest.approx(2.0, abs=0.1)  # 20 beyond it, 10 a second
    for _ in range(100):
        budget.earn()
    assert budget.spend() == pytest.approx(1.1, abs=0.1)  # 100 requests earned 10


def test_backoff_is_random_up_to_a_bound_that_doubles():
    endpoints = Endpoints(["http://127.0.0.1:1"])
    for failures, bound in ((0, 0.5), (1, 1.0), (4, 8.0), (6, 30.0), (5000, 30.0)):
        waits = [endpoints.backoff_s(failures) for _ in range(200)]
        assert 0.8 * bound < max(waits) <= bound
        assert min(waits) < 0.2 * bound


def test_who_gives_up_leaves_no_place_taken():
    async def go(server):
        endpoints = Endpoints([server.url], max_in_flight=1)
        post = endpoints.post("/v1/rewards", BODY, deadline_s=20, check=lambda answer: answer)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post, 0.1)
        answer = await endpoints.post("/v1/rewards", BODY, deadline_s=5, check=lambda answer: answer)
        await endpoints.close()
        await endpoints.close()
        return answer

    with FaultyServer(first(1, SILENCE)) as server:
        assert asyncio.run(go(server)) == good_reply(BODY)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "no URL"),
        (["127.0.0.1:8899"], "not an HTTP URL"),
        (["ftp://x"], "not an HTTP URL"),
        (["http://user:pw@host:1"], "token"),
        (["http://host/?a=1"], "query"),
    ],
)
def test_urls_that_cannot_be_used(urls, message):
    with pytest.raises(ValueError, match=message) as caught:
        Endpoints(urls)
    assert "pw" not in str(caught.value)


@needs("openssl", shutil.which("openssl"))
def test_https_with_an_authority_of_ones_own(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
        env={"PATH": os.environ["PATH"]},
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with FaultyServer(tls=context) as server:
        (answer,), _ = ask(server, ca_file=str(certificate))
        (error,), _ = ask(server, deadline_s=0.3)
    assert answer == good_reply(BODY)
    assert isinstance(error, Unavailable) and "certificate" in str(error).lower()


def test_where_a_long_answer_means_something_it_is_not_asked_for_again():
    with FaultyServer(lambda request: Answer(body=b" " * 5000)) as server:
        (answer,), endpoints = ask(server, max_response_bytes=4000, too_long="too long")
    assert answer == "too long"
    assert len(server.requests) == 1 and endpoints.counts.invalid == 0


def test_tries_may_be_counted():
    async def go(server):
        endpoints = Endpoints([server.url])
        try:
            await endpoints.call(deadline_s=20, max_tries=2).post("/", BODY, lambda answer: answer)
        finally:
            await endpoints.close()

    with FaultyServer(lambda request: Answer(502)) as server, pytest.raises(Unavailable, match="failed 2 times"):
        asyncio.run(go(server))
    assert len(server.requests) == 2
