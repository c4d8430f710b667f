"""Server of `hone ui`: pages and their data on this machine's own address, for browsers that have its token.

GET /                     all runs                GET /data/runs
GET /run?name=N           one run                 GET /data/run?name=N     GET /data/samples?name=N&stage=S&step=T
GET /compare?name=A&...   runs side by side       GET /data/compare?name=A&name=B
GET /data/search?name=N&query=Q    samples of all steps, in parts
GET /changes?name=N       server-sent events: one whenever there is something new
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, urlencode

from fastapi import FastAPI, Header, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hone.errors import RunFolderError
from hone.observe.page import PageName, page
from hone.observe.recorder import recorded_steps
from hone.observe.report import (
    MAX_LINES,
    RunSummary,
    alarms_of_run,
    report_data,
    sample_rows,
    step_samples,
    thumbnails_of,
)
from hone.observe.search import search_samples
from hone.run.comparison import comparison_data
from hone.run.folder import RunFolder
from hone.run.status import described, read_status
from hone.runtime.scratch import Scratch
from hone.serve.http import BearerTokens, HttpSettings, Lifecycle, guarded_app
from hone.serve.running import serve
from hone.services.log import last_lines
from hone.services.state import FILE as SERVICES_FILE
from hone.services.state import TOKEN_FILE, read_state, write_token

POLL_S = 1.0
"""How often files are looked at, for pages that are open."""
DRAIN_S = 3.0
MAX_DEPTH = 3
"""Of run folders below the folder that is shown."""
LOG_LINES = 100
"""Of the end of each log."""
MAX_LOGS = 12
"""training.log, and those of engines and services that changed last."""
LISTED = ("eval/accuracy", "rollout/reward_mean", "sft/loss", "rm/eval_accuracy")
"""Metrics of a run in the list, as far as they are logged."""

NameQuery = Annotated[list[str], Query(alias="name")]
QueryText = Annotated[str, Query(max_length=1000)]


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
    await serve(app, None, lifecycle, settings, name="ui")


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
    async def compare(names: NameQuery) -> HTMLResponse:
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

    @app.get("/data/search")
    async def search(name: str, query: QueryText, after: str = "") -> JSONResponse:
        """Samples of all recorded steps that fit; `after` is that of the answer before."""
        return JSONResponse(await asyncio.to_thread(runs.search, name, query, after))

    @app.get("/data/compare")
    async def compare_data(names: NameQuery) -> JSONResponse:
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
        live |= {what: f"/data/{what}?{asked}" for what in ("samples", "search")}
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


# ---- what the pages show


class Runs:
    """Runs in a folder, or the run that the folder is.

    Args:
        folder: may be without runs yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Their paths below the folder, newest first; `.` is the folder itself."""
        found: list[Path] = []
        for path, folders, _ in os.walk(self.folder):
            place = Path(path)
            is_run = (place / ".identity.json").is_file()
            if is_run:
                found.append(place)
            if is_run or len(place.relative_to(self.folder).parts) >= MAX_DEPTH:
                folders.clear()
        found.sort(key=_changed_s, reverse=True)
        return [str(place.relative_to(self.folder)) for place in found]

    def path(self, name: str) -> Path:
        """Of one of them. Raises RunFolderError: no run has this name; nothing else is ever read."""
        if name not in self.names():
            raise RunFolderError(f"{name}: there is no such run in {self.folder}.")
        return self.folder / name

    def list(self) -> dict[str, Any]:
        """The page of all runs, as JSON values."""
        return {"folder": str(self.folder.resolve()), "runs": [self._entry(name) for name in self.names()]}

    def run(self, name: str) -> dict[str, Any]:
        """The page of one run: that of its report, and what is happening now. Raises RunFolderError."""
        path = self.path(name)
        folder = RunFolder.read(path)
        status = read_status(folder)
        now = asdict(status) | {"recent": [described(event) for event in status.recent]}
        data = report_data(path, running=status.running)
        if status.running:
            data["summary"] |= {"outcome": "running", "ended_unix_s": None}
        return data | {
            "now": now,
            "services": _services(path),
            "logs": _logs(folder.logs),
            "recorded": recorded_steps(path),
        }

    def samples(self, name: str, stage: str, step: int) -> list[dict[str, Any]]:
        """Recorded samples of a step. Raises RunFolderError."""
        path = self.path(name)
        if not (samples := step_samples(path, stage, step)):
            raise RunFolderError(f"{name}: samples of {stage} step {step} are not there.")
        return sample_rows(samples, {}, thumbnails_of(path, samples))

    def search(self, name: str, query: str, after: str) -> dict[str, Any]:
        """What one call of a search in the samples finds. Raises RunFolderError.

        Args:
            after: that of the call before; empty at the beginning, and in what is returned at the end.
        """
        path = self.path(name)
        stage, _, step = after.rpartition("/")
        found = search_samples(path, query, after=(stage, int(step)) if step.isdecimal() else None)
        return {
            "samples": sample_rows(found.samples, {}, thumbnails_of(path, found.samples)),
            "matches": found.matches,
            "searched": found.searched,
            "steps": found.steps,
            "damaged": found.damaged,
            "after": "" if found.after is None else "/".join(map(str, found.after)),
        }

    def comparison(self, names: Sequence[str]) -> dict[str, Any]:
        """The page of runs side by side. Raises RunFolderError."""
        return comparison_data([self.path(name) for name in names], max_lines=MAX_LINES)

    def state(self, names: Sequence[str]) -> str:
        """A hash that differs when something changed in these runs, or, without names, in the list of them."""
        files = ("metrics.jsonl", "events.jsonl", SERVICES_FILE)
        sizes = [(name, *(_size(self.folder / name / file) for file in files)) for name in names or self.names()]
        return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]

    def _entry(self, name: str) -> dict[str, Any]:
        """A row of the list. A run that cannot be read has a reason instead, and the others are shown all the same."""
        try:
            return self._read_entry(name)
        except Exception as error:  # boundary: files of any age, damaged ones too
            why = str(error) if isinstance(error, RunFolderError) else f"{type(error).__name__}: {error}"
            return {"name": name, "unreadable": why, "changed_unix_s": _changed_s(self.folder / name)}

    def _read_entry(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        folder = RunFolder.read(path)
        status = read_status(folder)
        summary = RunSummary.read(path)
        last = status.last or {}
        active = [alarm for alarm in alarms_of_run(path, None, running=status.running) if alarm.ended is None]
        return {
            "name": name,
            "title": summary.title,
            "group": summary.group,
            "tags": list(summary.tags),
            "running": status.running,
            "outcome": status.outcome,
            "stage": status.stage,
            "step": status.step,
            "steps": status.steps,
            "eta_s": status.eta_s,
            "changed_unix_s": _changed_s(path),
            "metrics": {metric: last[metric] for metric in LISTED if last.get(metric) is not None},
            "alarms": [alarm.name for alarm in active if not alarm.is_advice],
            "advice": [alarm.name for alarm in active if alarm.is_advice],
        }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _changed_s(path: Path) -> float:
    """Unix seconds of the last metrics, or of the start."""
    for name in ("metrics.jsonl", ".identity.json"):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _services(path: Path) -> list[dict[str, Any]]:
    """The services of a run, as their supervisor last wrote of them; `ended` where it is gone."""
    found = read_state(path)
    if found is None:
        return []
    is_there = found.process() is not None
    return [
        {"name": one.name, "state": one.state if is_there else "ended", "url": one.url, "restarts": one.restarts}
        for one in found.services
    ]


def _logs(folder: Path) -> dict[str, str]:
    """Name -> the end of a log; that of the run first, then those that changed last."""
    try:
        found = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime, reverse=True)
    except OSError:  # one went meanwhile
        found = []
    found.sort(key=lambda log: log.name != "training.log")
    return {log.name: "\n".join(last_lines(log, count=LOG_LINES)) for log in found[:MAX_LOGS]}
