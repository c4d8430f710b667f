"""Server of `hone ui`: pages and their data on this machine's own address, for browsers that have its token.

GET /                     all runs                GET /data/runs
GET /run?name=N           one run                 GET /data/run?name=N     GET /data/samples?name=N&stage=S&step=T
GET /compare?name=A&...   runs side by side       GET /data/compare?name=A&name=B
GET /changes?name=N       server-sent events: one whenever there is something new
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, urlencode

from fastapi import FastAPI, Header, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hone.errors import RunFolderError
from hone.observe.page import PageName, page
from hone.runtime.scratch import Scratch
from hone.serve.http import BearerTokens, HttpSettings, Lifecycle, guarded_app
from hone.serve.running import serve
from hone.services.state import TOKEN_FILE, write_token
from hone.ui.runs import Runs

POLL_S = 1.0
"""How often files are looked at, for pages that are open."""
DRAIN_S = 3.0

Names = Annotated[list[str], Query(alias="name")]


def run_ui(folder: Path, *, port: int) -> None:
    """Serve the pages until SIGINT or SIGTERM; prints the address with its token.

    Raises:
        DataError: the port cannot be had.
    """
    scratch = Scratch("hone-ui-")
    try:
        token = secrets.token_urlsafe(32)
        write_token(scratch.path, token)
        token_file = scratch.path / TOKEN_FILE
        settings = HttpSettings.model_validate({"port": port, "token_file": token_file, "drain_timeout_s": DRAIN_S})
        asyncio.run(_serve(Runs(folder), settings, token))
    finally:
        scratch.remove()


async def _serve(runs: Runs, settings: HttpSettings, token: str) -> None:
    lifecycle = Lifecycle()
    app = ui_app(runs, lifecycle, settings, token)
    print(f"ui: open the address below with /?token={token} behind it", flush=True)
    await serve(app, _Nothing(), lifecycle, settings, name="ui")


class _Nothing:
    """Pages need no start and no end."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


def ui_app(runs: Runs, lifecycle: Lifecycle, settings: HttpSettings, token: str) -> FastAPI:
    """The routes.

    Args:
        token: that of `settings.token_file`.
    """
    app = guarded_app("hone-ui", lifecycle, settings, BearerTokens(settings))
    app.add_middleware(_TokenInCookie, token=token)  # the last one added stands in front

    @app.exception_handler(RunFolderError)
    async def not_there(_: Request, error: RunFolderError) -> Response:
        return JSONResponse({"detail": str(error)}, 404)

    @app.get("/")
    async def all_runs() -> HTMLResponse:
        """The page of all runs."""
        return await asyncio.to_thread(_page, runs, "runs", [], lambda: ("Runs", runs.list()))

    @app.get("/run")
    async def one_run(name: str) -> HTMLResponse:
        """The page of one run."""

        def read() -> tuple[str, dict[str, Any]]:
            data = runs.run(name)
            return data["summary"]["title"], data

        return await asyncio.to_thread(_page, runs, "run", [name], read)

    @app.get("/compare")
    async def compare(names: Names) -> HTMLResponse:
        """The page of runs side by side."""
        return await asyncio.to_thread(
            _page, runs, "compare", names, lambda: ("Runs side by side", runs.comparison(names))
        )

    @app.get("/data/runs")
    async def runs_data() -> JSONResponse:
        """What the page of all runs shows."""
        return JSONResponse(await asyncio.to_thread(runs.list))

    @app.get("/data/run")
    async def run_data(name: str) -> JSONResponse:
        """What the page of one run shows."""
        return JSONResponse(await asyncio.to_thread(runs.run, name))

    @app.get("/data/samples")
    async def samples(name: str, stage: str, step: int) -> JSONResponse:
        """Samples of a step."""
        return JSONResponse(await asyncio.to_thread(runs.samples, name, stage, step))

    @app.get("/data/compare")
    async def compare_data(names: Names) -> JSONResponse:
        """What the page of runs side by side shows."""
        return JSONResponse(await asyncio.to_thread(runs.comparison, names))

    @app.get("/changes")
    async def changes(
        names: Annotated[list[str], Query(alias="name", default_factory=list)],
        seen: str,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> StreamingResponse:
        """An event whenever these runs have something new, or, without names, whenever any has.

        `seen` is the state that the page was made of; a browser that connects again names the last event instead.
        """
        for name in names:
            await asyncio.to_thread(runs.path, name)
        return StreamingResponse(
            _changes(runs, names, last_event_id or seen, lifecycle), media_type="text/event-stream"
        )

    return app


def _page(
    runs: Runs, name: PageName, names: Sequence[str], read: Callable[[], tuple[str, dict[str, Any]]]
) -> HTMLResponse:
    asked, seen = urlencode([("name", name) for name in names]), runs.state(names)  # before the data, so none is missed
    title, data = read()
    live = {"data": f"/data/{name}?{asked}", "changes": f"/changes?{asked}&seen={seen}"}
    if name == "run":
        live["samples"] = f"/data/samples?{asked}"
    html = page(title, data | {"live": live}, name, is_live=True)
    return HTMLResponse(html, headers={"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"})


_POLICY = (
    "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
)
"""Pages send requests to this server alone."""


async def _changes(runs: Runs, names: Sequence[str], seen: str, lifecycle: Lifecycle) -> AsyncIterator[bytes]:
    while lifecycle.phase != "draining":
        now = await asyncio.to_thread(runs.state, names)
        yield f"id: {now}\ndata: new\n\n".encode() if now != seen else b": \n\n"
        seen = now
        await asyncio.sleep(POLL_S)


class _TokenInCookie:
    """ASGI middleware: an address with `?token=` is answered with a cookie that only this server gets back, and the
    address without it. The guard behind finds the cookie's token as a bearer token."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app, self._token = app, token
        self._cookie = f"hone-ui-{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            asked = parse_qs(scope["query_string"].decode("latin-1"))
            if scope["method"] == "GET" and hmac.compare_digest(
                asked.pop("token", [""])[0].encode(), self._token.encode()
            ):
                response = RedirectResponse(f"{scope['path']}?{urlencode(asked, doseq=True)}".rstrip("?"), 303)
                response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
                await response(scope, receive, send)
                return
            scope = {**scope, "headers": [*scope["headers"], *self._bearer(scope)]}
        await self._app(scope, receive, send)

    def _bearer(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        cookies = SimpleCookie()
        for name, value in scope["headers"]:
            if name == b"cookie":
                try:
                    cookies.load(value.decode("latin-1"))
                except CookieError:
                    continue
        found = cookies.get(self._cookie)
        return [(b"authorization", f"Bearer {found.value}".encode("latin-1"))] if found else []
