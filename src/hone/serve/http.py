"""HTTP layer shared by all servers: authentication and limits; running them is `running.py`.

    app = guarded_app("hone-reward", lifecycle, settings)
    ... routes ...
    await running.serve(app, service, lifecycle, settings, name="hone-reward")

`RequestGuard` stands in front of an app: no web pages, request id, bearer token, body limit while it streams in (after
inflating too), no new work while starting or draining, a log of what was answered (`access.py`). Routes and what
they do are their servers' own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import re
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import hone
from hone.errors import ConfigError
from hone.serve.access import AccessLog, Answered, log
from hone.serve.problem import HttpProblem, answer_with_problems

T = TypeVar("T")

_REQUEST_ID = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_TRACEPARENT = re.compile(rb"(?!ff)[\da-f]{2}-(?!0{32})[\da-f]{32}-(?!0{16})[\da-f]{16}-[\da-f]{2}")
"""As W3C's Trace Context has it."""
_HEALTH = frozenset({"/livez", "/readyz", "/health"})
"""Routes that need no token, are answered at any time and are not logged while all is well."""
_CHUNK_BYTES = 1 << 18


class HttpSettings(BaseModel):
    """Settings of a server itself; the one place of their defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    host: str = "127.0.0.1"
    """Address to listen on. Others than this machine's own need a token."""
    port: int = Field(8899, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    token_env: str | None = None
    """Environment variable with the bearer tokens that are accepted, separated by spaces or commas."""
    token_file: Path | None = None
    """File with bearer tokens, one a line; read again when it changes: without a token in it, everything is refused."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may call this server by (`Host`), and whose pages may ask it (`Origin`), besides addresses
    and localhost. Elsewhere than on this machine's own address, none means any name: a token is needed there."""
    open_metrics: bool = False
    """Answer /metrics without a token."""
    max_body_mib: float = Field(32.0, gt=0)
    """Largest body of a request, in MiB, also after it is inflated."""
    body_timeout_s: float = Field(30.0, gt=0)
    """Time for a body to arrive, in seconds."""
    keep_alive_s: float = Field(30.0, gt=0)
    """For the next request, and for a request's headers to arrive, in seconds. Trainers pause between steps, and a new
    connection costs more than an idle one."""
    max_waiting_connections: int = Field(512, ge=1)
    """Connections that may wait for their client: half of the files that a process may usually open."""
    drain_timeout_s: float = Field(30.0, ge=0)
    """Time for requests in flight to finish after SIGTERM, in seconds."""


class BearerTokens:
    """Bearer tokens that are accepted. Where no place for tokens is named, every client is accepted."""

    def __init__(self, settings: HttpSettings) -> None:
        """Raises ConfigError when a place for tokens is named and holds none."""
        self._file = settings.token_file
        self._of_env = _words(os.environ.get(settings.token_env, "")) if settings.token_env else []
        self._of_file: list[bytes] = []
        self._file_stamp: tuple[int, ...] | None = None
        self.required = bool(settings.token_env or settings.token_file)
        if settings.token_env and not self._of_env:
            raise ConfigError([f"--token-env: the environment has no {settings.token_env}, or it is empty; set it."])
        self._read_file()
        if self._file is not None and not self._of_file:
            raise ConfigError([f"--token-file: {self._file} is not there or holds no token; write one a line."])

    def accepts(self, authorization: bytes) -> bool:
        """Whether an Authorization header carries one of the tokens; takes the same time for any wrong one."""
        if not self.required:
            return True
        self._read_file()
        scheme, _, given = authorization.partition(b" ")
        matches = [hmac.compare_digest(given.strip(), token) for token in (*self._of_env, *self._of_file)]
        return scheme.lower() == b"bearer" and any(matches)

    def _read_file(self) -> None:
        """Without tokens, or without the file, every request is rejected: that is how tokens are revoked."""
        if self._file is None:
            return
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            if stamp != self._file_stamp:
                self._of_file, self._file_stamp = _words(self._file.read_text("utf-8")), stamp
        except (OSError, UnicodeError):
            self._of_file, self._file_stamp = [], None


def _words(text: str) -> list[bytes]:
    return [word.encode() for word in text.replace(",", " ").split()]


def refuse_open_door(settings: HttpSettings, tokens: BearerTokens) -> None:
    """Raises ConfigError when others than this machine could ask without a token."""
    if not tokens.required and not _is_loopback(settings.host):
        raise ConfigError(
            [
                f"--host {settings.host}: other machines can reach it, so it needs a token. Put one in a file or the "
                "environment and name it with --token-file or --token-env, or listen on 127.0.0.1."
            ]
        )


@lru_cache
def _host_of(address: bytes) -> str:
    """The host in an `Origin`, or in a `Host` with `//` in front; empty when there is none."""
    try:
        return urlsplit(address.decode("ascii")).hostname or ""
    except ValueError:
        return ""


@lru_cache
def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


class Lifecycle:
    """Where a server is between its start and its end, and how many requests it is working on."""

    def __init__(self) -> None:
        self.phase: Literal["starting", "ready", "draining"] = "starting"
        self.in_flight = 0
        self.started_at = time.monotonic()
        self.boot_id = uuid.uuid4().hex
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()


def guarded_app(
    title: str,
    lifecycle: Lifecycle,
    settings: HttpSettings,
    tokens: BearerTokens,
    *,
    on_done: Callable[[str, int], None] = lambda route, status: None,
) -> FastAPI:
    """An app without routes that answers errors as problems, with a guard in front.

    Args:
        on_done: called with the route's path (`other` where there is none) and the status of every response.
    """
    app = FastAPI(title=title, version=hone.__version__, docs_url=None, redoc_url=None)
    answer_with_problems(app)
    app.add_middleware(RequestGuard, lifecycle=lifecycle, settings=settings, tokens=tokens, on_done=on_done)
    return app


class RequestGuard:
    """ASGI middleware; see the module."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        lifecycle: Lifecycle,
        settings: HttpSettings,
        tokens: BearerTokens,
        on_done: Callable[[str, int], None],
    ) -> None:
        self._app, self._lifecycle, self._tokens, self._on_done = app, lifecycle, tokens, on_done
        self._max_body_bytes = int(settings.max_body_mib * (1 << 20))
        self._body_timeout_s = settings.body_timeout_s
        self._routes: frozenset[str] | None = None
        self._log = AccessLog()
        self._open = _HEALTH | ({"/metrics"} if settings.open_metrics else frozenset())
        self._allowed_hosts = frozenset(map(str.lower, settings.allowed_hosts))
        self._any_host = not settings.allowed_hosts and not _is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        try:
            self._admit(scope, exchange)
            if scope["path"] in _HEALTH:
                await self._app(scope, receive, exchange.send)
            else:
                with self._lifecycle.working():
                    await self._app(scope, await self._with_body(scope, receive, exchange), exchange.send)
        except ClientGone:
            exchange.status = 499  # as others log a client that hung up; nothing can be sent
        except HttpProblem as problem:
            await problem.response(exchange.request_id)(scope, receive, exchange.send)
        except asyncio.CancelledError:  # the server ends before the request could
            if not exchange.started:
                problem = HttpProblem(
                    503, "cancelled", "the server is shutting down", retryable=True, retry_after_s=5, close=True
                )
                await problem.response(exchange.request_id)(scope, receive, exchange.send)
            raise
        except Exception:  # boundary: a mistake in a server must not take the answer's form and the log line with it
            log.exception("request %s failed", exchange.request_id)
            if not exchange.started:
                problem = HttpProblem(
                    500, "internal-error", "internal server error; see the server's log", retryable=True
                )
                await problem.response(exchange.request_id)(scope, receive, exchange.send)
        finally:
            # The path if it is one of the app's, so that clients cannot fill metrics with names.
            if self._routes is None:
                self._routes = frozenset(scope["app"].openapi()["paths"])
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._on_done(route, exchange.status)
            if scope["path"] not in _HEALTH or exchange.status not in (200, 503):
                self._log.write(exchange.answered(scope["method"], route))

    def _admit(self, scope: Scope, exchange: _Exchange) -> None:
        path = scope["path"]
        headers = exchange.headers
        # A web page must not ask through its reader's browser: as a name that was made to mean this machine's address
        # (`Host`), or directly (`Origin`).
        host = _host_of(b"//" + headers.get(b"host", b"localhost"))
        if not (self._any_host or host == "localhost" or _is_address(host) or host in self._allowed_hosts):
            detail = "this server is not known by that name; ask it by its address, or start it with --allowed-host"
            raise HttpProblem(403, "unknown-host", detail, close=True)
        if b"origin" in headers and _host_of(headers[b"origin"]) not in self._allowed_hosts:
            detail = "web pages may not ask this server; start it with --allowed-host to let those of a host"
            raise HttpProblem(403, "unknown-origin", detail, close=True)
        if path not in self._open and not self._tokens.accepts(headers.get(b"authorization", b"")):
            raise HttpProblem(401, "unauthorized", "send one of the server's tokens: Authorization: Bearer TOKEN")
        if scope["method"] != "POST" or path in _HEALTH:
            return
        if self._lifecycle.phase == "draining":
            raise HttpProblem(
                503, "draining", "the server is shutting down", retryable=True, retry_after_s=5, close=True
            )
        if self._lifecycle.phase == "starting":
            raise HttpProblem(503, "starting", "the server is not ready yet", retryable=True, retry_after_s=2)
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            shown = kind.decode("latin-1")[:60] or "nothing"
            raise HttpProblem(415, "not-json", f"send Content-Type: application/json (got {shown})", close=True)
        if headers.get(b"content-encoding", b"identity").lower() not in (b"identity", b"gzip"):
            raise HttpProblem(415, "unknown-encoding", "Content-Encoding may be gzip or identity", close=True)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise self._too_large()

    async def _with_body(self, scope: Scope, receive: Receive, exchange: _Exchange) -> Receive:
        """A `receive` that gives the whole body at once, inflated, and then waits for the client to hang up."""
        if scope["method"] != "POST":
            return receive
        try:
            async with asyncio.timeout(self._body_timeout_s):
                is_gzip = exchange.headers.get(b"content-encoding", b"").lower() == b"gzip"
                body = await self._read(_inflated(_chunks(receive)) if is_gzip else _chunks(receive))
        except TimeoutError:
            raise HttpProblem(
                408, "body-too-slow", "the body did not arrive in time", retryable=True, close=True
            ) from None
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        return receive_whole

    async def _read(self, parts: AsyncIterator[bytes]) -> bytes:
        body = bytearray()
        async for part in parts:
            body += part
            if len(body) > self._max_body_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> HttpProblem:
        return HttpProblem(413, "body-too-large", f"a body has at most {self._max_body_bytes} bytes", close=True)


class _Exchange:
    """One request and its answer, as far as the guard is concerned."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self._is_named = _REQUEST_ID.fullmatch(given) is not None
        self.request_id = given if self._is_named else uuid.uuid4().hex
        traceparent = self.headers.get(b"traceparent", b"")
        self.traceparent = traceparent if _TRACEPARENT.fullmatch(traceparent) else b""
        self.status, self.started = 0, False
        self._send, self._began = send, time.monotonic()
        scope.setdefault("state", {})["request_id"] = self.request_id

    def answered(self, method: str, route: str) -> Answered:
        """For the log; what its sender named by an id will be looked for there."""
        return Answered(
            f"{method} {route} {self.status}",
            (time.monotonic() - self._began) * 1000,
            self.request_id,
            self.traceparent.decode("latin-1"),
            is_remarkable=self.status >= 400 or self._is_named or bool(self.traceparent),
        )

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            extra = [(b"x-request-id", self.request_id.encode())]
            if self.traceparent:
                extra.append((b"traceparent", self.traceparent))
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await self._send(message)


class ClientGone(Exception):
    """The client disconnected."""


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _inflated(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Gzip, in bounded pieces: a small body must not become a large one before its size is looked at."""
    inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        async for chunk in chunks:
            while chunk:
                yield inflate.decompress(chunk, _CHUNK_BYTES)
                await asyncio.sleep(0)  # a small chunk may become a large one
                chunk = inflate.unconsumed_tail
        if not inflate.eof or inflate.unused_data:
            raise HttpProblem(400, "bad-gzip", "the body is not one whole gzip stream")
    except zlib.error:
        raise HttpProblem(400, "bad-gzip", "the body is not gzip") from None


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it when the client hangs up.

    Raises ClientGone, which the guard takes as the end of the request. Call it once the body has been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
