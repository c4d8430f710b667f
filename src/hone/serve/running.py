"""Lifecycle of a server: listens, starts, drains and ends. Its app has the routes.

SIGTERM or SIGINT drains: readiness turns 503, new work is refused (by `http.RequestGuard`), what is in flight may
finish, then the process ends with 0; a second signal cancels it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from hone.errors import DataError, Stopped
from hone.runtime.processes import stop_signals_handled
from hone.serve.access import log
from hone.serve.http import HttpSettings, Lifecycle

_CANCEL_TIMEOUT_S = 2
"""For requests that were cancelled to come to their end."""


class Servable(Protocol):
    """What a server serves: made ready after the port is open, ended after the last request."""

    async def start(self) -> None:
        """Start; may take as long as it needs. An error of Hone's ends the server with its message."""
        ...

    async def close(self) -> None:
        """Release all resources, within seconds; may be called without a start."""
        ...


async def serve(
    app: FastAPI, service: Servable | None, lifecycle: Lifecycle, settings: HttpSettings, *, name: str
) -> None:
    """Listen, start the service if there is one, serve until SIGTERM or SIGINT, drain.

    Prints `NAME: listening on URL`, then `NAME: ready`. Health is answered from the first moment.
    Raises:
        DataError: the port cannot be had.
        Stopped: a second signal cancelled what was in flight.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")  # a server's log is its stderr
    log.setLevel(logging.INFO)
    listener = _listen(settings)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    _say(f"{name}: listening on http://{host}:{listener.getsockname()[1]}")
    if not (settings.token_env or settings.token_file):
        log.warning("no token: every program of this machine may ask; --token-file or --token-env bounds that")
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", server_header=False, ws="none")
    # uvicorn calls it as it calls a class
    config.http = partial(Connection, settings=settings, waiting={})  # type: ignore[assignment]
    config.timeout_graceful_shutdown, config.timeout_keep_alive = _CANCEL_TIMEOUT_S, math.ceil(settings.keep_alive_s)
    server = _Server(config)
    stop = _Stop(lifecycle, server, settings.drain_timeout_s)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(_start(service, lifecycle, name))
    try:
        with stop_signals_handled(stop.signalled):
            await asyncio.wait((serving, starting), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await starting  # raises what went wrong
            await serving
    finally:
        starting.cancel()
        server.should_exit = True
        await asyncio.gather(serving, starting, return_exceptions=True)
        if service is not None:
            await service.close()
    if stop.forced:
        raise Stopped(f"{name}: requests in flight were cancelled")
    _say(f"{name}: drained")


async def _start(service: Servable | None, lifecycle: Lifecycle, name: str) -> None:
    if service is not None:
        await service.start()
    if lifecycle.phase == "starting":
        lifecycle.phase = "ready"
        _say(f"{name}: ready")


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which stops listening before `/readyz` can say that the server is ending."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stop:
    """What signals do: the first drains, the second cancels."""

    def __init__(self, lifecycle: Lifecycle, server: uvicorn.Server, drain_timeout_s: float) -> None:
        self._lifecycle, self._server, self._drain_timeout_s = lifecycle, server, drain_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self.forced = False

    def signalled(self, _: signal.Signals) -> None:
        if self._draining is None:
            self._lifecycle.phase = "draining"
            self._draining = asyncio.create_task(self._drain())
        else:
            self.forced = self._server.force_exit = self._server.should_exit = True

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self._lifecycle.idle()
        except TimeoutError:
            log.warning("%d requests did not finish in time and are cancelled", self._lifecycle.in_flight)
        self._server.should_exit = True


def _say(line: str) -> None:
    """A line on standard output, at once. A disk that is full keeps no server from going on, or from its exit code."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _listen(settings: HttpSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With its protocol named, asyncio sends at once (TCP_NODELAY); else each answer waits 40 ms for the asker's ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise DataError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}. "
            "Stop what is there, or choose another port (--port 0 takes a free one)."
        ) from None
    return listener


class Connection(H11Protocol):
    """A client's connection: uvicorn's, with bounds for clients that connect and send too little.

    Between requests, and until a request's headers are complete, a connection has `keep_alive_s`; a body has the
    guard's own time limit. At most `max_waiting_connections` may wait for their client: beyond that, the one that has
    waited longest is closed, so that there is always room for the next.

    Args:
        settings: of the server.
        waiting: connections of the same server that wait for their client, the longest first.
    """

    def __init__(self, *args: Any, settings: HttpSettings, waiting: dict[Connection, None], **more: Any) -> None:
        super().__init__(*args, **more)
        self._settings, self._all_waiting = settings, waiting
        self._seen: RequestResponseCycle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._all_waiting.pop(self, None)
        self._stop_timer()

    def _look(self) -> None:
        """Note what it waits for now."""
        request = self.cycle
        if request is not self._seen:  # a new one
            self._seen = request
            self._all_waiting.pop(self, None)
        is_between = request is None or request.response_complete
        if not is_between:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._settings.keep_alive_s, self.transport.close)
        if is_between or request.more_body:
            self._all_waiting.setdefault(self)
        else:
            self._all_waiting.pop(self, None)
        while len(self._all_waiting) > self._settings.max_waiting_connections:
            longest = next(iter(self._all_waiting))
            del self._all_waiting[longest]
            longest.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
