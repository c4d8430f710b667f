"""HTTP transport of reward clients: services, judges, remote sandboxes.

    endpoints = Endpoints(["http://a:8899", "http://b:8899"], token=token, ready_path="/readyz")
    reply = await endpoints.post("/v1/rewards", body, deadline_s=60, check=parse_reply)

One JSON body goes to one of several endpoints that give the same answers: to the less loaded of two drawn at random.
What may go better another time is tried again, elsewhere if there is an elsewhere, until the deadline; what is wrong
with the request itself is not. Scoring is pure, so that a request may be sent twice. What an answer means is the
caller's business (`check`); what it may never be is decided here: too long, not JSON, not finite.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import httpx

from hone.reward.response import Refused, RetryableFailure, TooLong, body_of, json_of, one_line
from hone.reward.strict_json import encode_json

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 5.0
"""Timeout of a readiness check of an endpoint."""
SERVER_SHARE = 0.9
"""Of the time of one try: what a service has not scored by then comes back as such, while the caller still waits."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Bounds of the random wait before another try, and of the rest of an endpoint that failed; they double each time."""
EJECT_AFTER = 3
"""Failures in a row that take an endpoint out of service until it proves well."""
RETRIES_PER_REQUEST, RETRIES_PER_S, MAX_SAVED_RETRIES = 0.1, 10.0, 100.0
"""The retry budget: what each request and each second add, and how much can be saved up."""
KEEPALIVE_S = 3.0
"""An idle connection is closed before usual servers close it (5 s), which would fail the request that reuses it."""
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}


DeviceMemory = Callable[[], Awaitable[tuple[int, int] | None]]
"""Bytes that are used of devices, by whatever process, and all of them; None: that is not known."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a service: base URLs of equivalent replicas, and the token to send."""

    urls: tuple[str, ...]
    token: str | None = field(default=None, repr=False)
    memory: DeviceMemory | None = field(default=None, repr=False, compare=False)
    """Of the devices that it runs on, where this run started it there."""


Addresses = Mapping[str, "str | Address"]
"""Addresses of running services, by name: one base URL or several."""


class Unavailable(Exception):
    """No valid answer was to be had before the deadline. An infra fault."""


@dataclass(slots=True)
class Counts:
    """What happened since the start; for metrics and tests."""

    requests: int = 0
    tries: int = 0
    """HTTP requests sent."""
    failed: int = 0
    """Tries without an answer: not connected, cut off, out of time, or an HTTP status that is tried again."""
    invalid: int = 0
    """Tries whose answer was not what it must be."""
    refused: int = 0
    unavailable: int = 0
    """Requests given up."""
    ejections: int = 0


class Endpoints:
    """One or more base URLs behind one pool of connections. Use in one event loop; `close` when done.

    Args:
        urls: http or https, such as `http://127.0.0.1:8899`; a path in them is kept in front of each request's.
        token: sent as a bearer token to these URLs, and nowhere else: redirects are not followed.
        max_in_flight: requests at one time, for each endpoint.
        ready_path: answers 200 when the endpoint can be used; asked before an ejected endpoint is used again. None:
            the next request is the proof.
        max_response_bytes: a longer answer is cut off.
        too_long: what `check` gets in its place; None: it counts as invalid.
        first_backoff_s: bound of the random wait before the first retry; it doubles with each further one.
        ca_file: PEM file with the authorities to trust for https; None: the usual public ones.
        transport: what carries the requests, in tests.
    Raises:
        ValueError: no URL, or one that cannot be used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        max_in_flight: int = 64,
        ready_path: str | None = None,
        max_response_bytes: int = 32 << 20,
        too_long: Any = None,
        first_backoff_s: float = FIRST_BACKOFF_S,
        ca_file: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not urls:
            raise ValueError("no URL")
        self._endpoints = [Endpoint(_base_url(url), max_in_flight) for url in urls]
        self._ready_path, self._max_response_bytes, self._too_long = ready_path, max_response_bytes, too_long
        self.budget, self._first_backoff_s = RetryBudget(), first_backoff_s
        self._news = asyncio.Event()
        self.counts = Counts()
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),  # each try as a whole has a deadline
            limits=httpx.Limits(max_keepalive_connections=max_in_flight * len(urls), keepalive_expiry=KEEPALIVE_S),
            verify=_tls(ca_file),
            transport=transport,
            trust_env=False,  # a proxy from the environment has no business between a run and its services
        )

    async def post(
        self,
        path: str,
        body: Any,
        *,
        deadline_s: float,
        check: Callable[[Any], T],
        try_s: float | None = None,
    ) -> T:
        """The answer to `body`, as `check` returns it.

        Args:
            deadline_s: for all tries and the waits between them. Waiting for the requests in front of this one does
                not count while an endpoint is in service.
            check: gets the decoded JSON; raises ValueError when that is not a valid answer, which is tried again.
            try_s: for one try; None: half of the deadline, so that one hang is survived.
        Raises:
            Unavailable: no valid answer before the deadline.
            Refused: an endpoint refused the request: 4xx but 408, 425 and 429, a redirect, or 501.
            ValueError: `body` cannot be written as JSON.
        """
        return await self.call(deadline_s=deadline_s, try_s=try_s).post(path, body, check)

    def call(self, *, deadline_s: float, try_s: float | None = None, max_tries: float = math.inf) -> RetryingCall:
        """For what takes several posts under one deadline: `call.post`, `call.again`, `call.post` of the rest."""
        return RetryingCall(self, deadline_s, try_s or deadline_s / 2, max_tries)

    async def texts(self, path: str, *, timeout_s: float) -> list[str]:
        """What the endpoints answer to a GET, of those that do with 200 in time: for figures, which nothing needs."""

        async def text(endpoint: Endpoint) -> str:
            try:
                async with (
                    asyncio.timeout(timeout_s),
                    self._client.stream("GET", endpoint.url + path, headers=_HEADERS) as response,
                ):
                    body = await body_of(response, self._max_response_bytes) if response.status_code == 200 else b""
                    return body.decode("utf-8", "replace")
            except (TimeoutError, httpx.HTTPError, RetryableFailure):
                return ""

        return list(filter(None, await asyncio.gather(*map(text, self._endpoints))))

    def __len__(self) -> int:
        return len(self._endpoints)

    async def close(self) -> None:
        """Close the connections; requests in flight fail. May be called twice."""
        await self._client.aclose()

    # ---- for RetryingCall

    @contextlib.asynccontextmanager
    async def place(self, call: RetryingCall) -> AsyncIterator[Endpoint]:
        """A place in flight at an endpoint in service. The call's clock starts when it is had, or cannot be had."""
        while True:
            endpoint = self._choose(call.last)
            if endpoint is None:
                call.start_clock()
                await self._wait_for_service(call)
                continue
            with self._standing_in_line(endpoint) as is_trial:
                async with endpoint.places:
                    if endpoint.is_resting() or (endpoint.ejected and not is_trial):
                        continue  # it failed while this call stood in line
                    call.start_clock()
                    call.last, started = endpoint, time.monotonic()
                    if started >= call.deadline:
                        call.give_up(f"{call.address(endpoint)}: {endpoint.problem or 'no place was free in time'}")
                    if endpoint.ejected and self._ready_path is not None:
                        if not await self._is_ready(endpoint, self._ready_path, call.deadline - started):
                            not_ready = f"; {self._ready_path} does not answer 200 since then"
                            self.failed(endpoint, started, endpoint.problem.removesuffix(not_ready) + not_ready)
                            continue
                        self._back_in_service(endpoint, failures=EJECT_AFTER - 1)  # once more, and it is out again
                    yield endpoint
                    return

    async def send(self, endpoint: Endpoint, path: str, content: bytes) -> Any:
        """One try: the decoded answer. Raises RetryableFailure and Refused; bounding its time is the caller's."""
        try:
            async with self._client.stream("POST", endpoint.url + path, content=content, headers=_HEADERS) as response:
                return await json_of(response, self._max_response_bytes)
        except TooLong:
            if self._too_long is None:
                raise
            return self._too_long
        except httpx.HTTPError as error:
            raise RetryableFailure(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    def succeeded(self, endpoint: Endpoint) -> None:
        """Reset the failure count after a success."""
        endpoint.falls = 0
        self._back_in_service(endpoint, failures=0)

    def failed(self, endpoint: Endpoint, started: float, why: str) -> None:
        """Count a try that began at `started` against the endpoint; several in a row take it out of service."""
        endpoint.problem = why
        if started < endpoint.ejected_at:
            return  # it was in flight when the endpoint fell: one fall, however many saw it
        endpoint.failures += 1
        if endpoint.failures >= EJECT_AFTER:
            self.counts.ejections += not endpoint.ejected
            endpoint.ejected, endpoint.ejected_at = True, time.monotonic()
            endpoint.rest(self.backoff_s(endpoint.falls))
            endpoint.falls += 1

    def backoff_s(self, failures: int) -> float:
        """Full jitter: uniform up to a bound that doubles, so that what failed together does not return together."""
        return random.uniform(0, min(MAX_BACKOFF_S, self._first_backoff_s * 2 ** min(failures, 32)))

    def _back_in_service(self, endpoint: Endpoint, *, failures: int) -> None:
        endpoint.failures = failures
        if endpoint.ejected:
            endpoint.ejected = False
            self._wake_waiting()

    def _choose(self, avoid: Endpoint | None) -> Endpoint | None:
        """The less loaded of two of the endpoints in service, drawn at random; `avoid` when there is no other."""
        in_service = [e for e in self._endpoints if not e.is_resting() and not (e.ejected and e.on_trial)]
        others = [endpoint for endpoint in in_service if endpoint is not avoid] or in_service
        two = random.sample(others, min(2, len(others)))
        return min(two, key=lambda endpoint: endpoint.load, default=None)

    @contextlib.contextmanager
    def _standing_in_line(self, endpoint: Endpoint) -> Iterator[bool]:
        """Counts as load. Whether this is the one call that tries an ejected endpoint."""
        is_trial = endpoint.ejected
        endpoint.on_trial |= is_trial
        endpoint.load += 1
        try:
            yield is_trial
        finally:
            endpoint.load -= 1
            if is_trial:
                endpoint.on_trial = False
                self._wake_waiting()

    async def _wait_for_service(self, call: RetryingCall) -> None:
        """Return when an endpoint may be in service. Raises Unavailable when none will be before the deadline."""
        now = time.monotonic()
        resting = [endpoint.resting_until for endpoint in self._endpoints if endpoint.is_resting()]
        none_on_trial = len(resting) == len(self._endpoints)
        if now >= call.deadline or (none_on_trial and min(resting) >= call.deadline):
            call.give_up("; ".join(f"{call.address(endpoint)}: {endpoint.problem}" for endpoint in self._endpoints))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min([*resting, call.deadline]) - now):
                await self._news.wait()

    def _wake_waiting(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _is_ready(self, endpoint: Endpoint, path: str, seconds: float) -> bool:
        try:
            async with (
                asyncio.timeout(min(READY_TIMEOUT_S, seconds)),
                self._client.stream("GET", endpoint.url + path) as response,
            ):
                return response.status_code == 200
        except (TimeoutError, httpx.HTTPError):
            return False


class RetryingCall:
    """A call with retries until a deadline."""

    def __init__(self, endpoints: Endpoints, deadline_s: float, try_s: float, max_tries: float) -> None:
        self._endpoints, self._deadline_s, self.try_s, self._max_tries = endpoints, deadline_s, try_s, max_tries
        self._failures, self._path = 0, ""
        self.deadline = math.inf
        """On the clock of `time.monotonic`; infinite until the clock is started."""
        self.last: Endpoint | None = None
        """Where the last try went; the next one goes elsewhere if it can."""

    def start_clock(self) -> None:
        self.deadline = min(self.deadline, time.monotonic() + self._deadline_s)

    async def post(self, path: str, body: Any, check: Callable[[Any], T]) -> T:
        """See `Endpoints.post`."""
        content, self._path = encode_json(body), path
        self._endpoints.counts.requests += 1
        self._endpoints.budget.earn()
        problem = ""
        while True:
            async with self._endpoints.place(self) as endpoint:
                try:
                    return await self._try(endpoint, path, content, check)
                except RetryableFailure as failure:
                    if not (failure.is_cut and problem):  # what went wrong before says more
                        problem = f"{self.address(endpoint)}: {failure}"
            await self.again(problem)

    def address(self, endpoint: Endpoint) -> str:
        """The call's request, for messages."""
        return endpoint.url + self._path

    async def again(self, problem: str) -> None:
        """Wait before another try, within the retry budget. Raises Unavailable when the deadline comes first."""
        self._failures += 1
        if self._failures >= self._max_tries:
            self.give_up(problem)
        wait_s = max(self._endpoints.backoff_s(self._failures - 1), self._endpoints.budget.spend())
        if time.monotonic() + wait_s >= self.deadline:
            self.give_up(problem)
        await asyncio.sleep(wait_s)

    def give_up(self, problem: str) -> NoReturn:
        """Raises Unavailable."""
        self._endpoints.counts.unavailable += 1
        raise Unavailable(f"{problem} (failed {self._failures} times; {self._deadline_s:g} s allowed)")

    async def _try(self, endpoint: Endpoint, path: str, content: bytes, check: Callable[[Any], T]) -> T:
        """Raises RetryableFailure and Refused, both counted."""
        counts, started = self._endpoints.counts, time.monotonic()
        counts.tries += 1
        seconds = min(self.try_s, self.deadline - started)
        try:
            try:
                async with asyncio.timeout(seconds):
                    answer = await self._endpoints.send(endpoint, path, content)
            except TimeoutError:
                raise RetryableFailure(f"no answer in {seconds:.3g} s", is_cut=seconds < self.try_s) from None
            try:
                result = check(answer)
            except ValueError as error:
                raise RetryableFailure(f"not a valid answer: {one_line(str(error))}", is_invalid=True) from error
        except RetryableFailure as failure:
            counts.invalid += failure.is_invalid
            counts.failed += not failure.is_invalid
            if failure.rest_s is not None:
                endpoint.rest(failure.rest_s)  # it is well enough to say when
                endpoint.problem = str(failure)
            else:
                self._endpoints.failed(endpoint, started, str(failure))
            raise
        except Refused:
            counts.refused += 1
            self._endpoints.succeeded(endpoint)
            raise
        self._endpoints.succeeded(endpoint)
        return result


class Endpoint:
    """State of one base URL."""

    def __init__(self, url: str, max_in_flight: int) -> None:
        self.url = url
        self.places = asyncio.Semaphore(max_in_flight)
        self.load = 0
        """Calls in flight and in line here."""
        self.failures = 0
        """In a row."""
        self.ejected = False
        self.ejected_at = 0.0
        self.falls = 0
        """Times it was ejected, or failed its trial, since it last answered; its rests grow with them."""
        self.on_trial = False
        """A call is finding out whether it is well again."""
        self.resting_until = 0.0
        self.problem = ""
        """Message of the last failure."""

    def is_resting(self) -> bool:
        return time.monotonic() < self.resting_until

    def rest(self, seconds: float) -> None:
        self.resting_until = max(self.resting_until, time.monotonic() + seconds)


class RetryBudget:
    """Bounds retries to a share of the requests and a small rate, so that retrying never keeps a service down.

    A retry beyond it waits for its turn; failing it instead would leave a sample without its reward.
    """

    def __init__(self) -> None:
        self._saved, self._at = RETRIES_PER_S, time.monotonic()

    def earn(self) -> None:
        """For a request made."""
        self._saved = min(MAX_SAVED_RETRIES, self._saved + RETRIES_PER_REQUEST)

    def spend(self) -> float:
        """Take a retry; returns the seconds until it may be made."""
        now = time.monotonic()
        self._saved = min(MAX_SAVED_RETRIES, self._saved + (now - self._at) * RETRIES_PER_S) - 1
        self._at = now
        return max(0.0, -self._saved / RETRIES_PER_S)


@lru_cache
def _tls(ca_file: str | None) -> ssl.SSLContext:
    """Made once, because reading the public authorities takes longer than many requests."""
    return ssl.create_default_context(cafile=ca_file) if ca_file else httpx.create_ssl_context(trust_env=False)


def token_from(variable: str | None, key: str) -> str | None:
    """The value of the environment variable that `key` names; None without a name. Raises ValueError without one."""
    if variable is not None and not os.environ.get(variable):
        raise ValueError(f"{key}: the environment variable {variable} is not set")
    return None if variable is None else os.environ[variable]


def _base_url(url: str) -> str:
    parsed = httpx.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is not an HTTP URL; write it like http://127.0.0.1:8899")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError(f"{parsed.host}: a base URL has no password, query or fragment; a token goes with the request")
    return url.rstrip("/")
