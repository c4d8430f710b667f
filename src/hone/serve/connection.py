"""A client's connection to a server: uvicorn's, with bounds for clients that connect and send too little.

Between requests, and until a request's headers are whole, a connection has `keep_alive_s`; a body has the guard's own
time limit. And no more than `max_waiting_connections` may wait for their client: beyond that, the one that waits
longest is closed, so that there is always room for the next.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from hone.serve.http import HttpSettings


class Connection(H11Protocol):
    """See the module.

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
