"""`hone serve reward`: rewards over HTTP, in Hone's protocol and in those of other trainers.

    POST /v1/rewards       batches, pointwise or by group                 docs/rewards-service.md
    POST /compute_reward   one item or several, flat: for curl and scripts
    POST /get_reward       OpenRLHF         POST /slime    slime
    GET  /health /readyz /livez /metrics /openapi.json

`?reward=NAME` asks the foreign routes for one component instead of the weighted whole. What scores, queues and
remembers is `scoring.py`; access is `http.py`, how the server starts and ends `running.py`.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ValidationError

import hone
from hone.config.load import Loaded
from hone.errors import ConfigError
from hone.reward.strict_json import decode_json, encode_json
from hone.reward.wire import Item, ItemResult, RewardReply, RewardRequest, RewardSummary, ServerInfo
from hone.serve.foreign import (
    ComputeRequest,
    OpenRlhfReply,
    OpenRlhfRequest,
    SlimeRequest,
    flat_result,
    part_or,
    scored_or,
)
from hone.serve.http import BearerTokens, HttpSettings, Lifecycle, guarded_app, refuse_open_door, while_connected
from hone.serve.problem import HttpProblem
from hone.serve.routing import strict_router
from hone.serve.running import serve
from hone.serve.scoring import ScoringService, ScoringSettings

NAME = "hone-reward"
Named = Annotated[str | None, Query(alias="reward", description="A component; left out: the weighted whole.")]


class Health(BaseModel):
    """The body of `/health`."""

    status: Literal["starting", "healthy", "degraded", "draining"]
    """`degraded`: the newest group of a component failed through a fault of ours."""
    model_loaded: bool
    uptime_s: float
    queue_depth: int
    """Items waiting or being scored."""
    components: dict[str, ComponentHealth]
    version: str
    boot_id: str
    fingerprint: str
    """Empty while starting."""


class ComponentHealth(BaseModel):
    status: Literal["healthy", "degraded"]
    last_fault: str


class RewardServer:
    """The routes, over one scoring service."""

    def __init__(self, scoring: ScoringService, settings: ScoringSettings, lifecycle: Lifecycle) -> None:
        self._scoring, self._settings, self._lifecycle = scoring, settings, lifecycle

    def app(self, http: HttpSettings, tokens: BearerTokens) -> FastAPI:
        metrics = self._scoring.metrics
        metrics.watch(ready=lambda: self._lifecycle.phase == "ready", in_flight=lambda: self._lifecycle.in_flight)
        app = guarded_app(NAME, self._lifecycle, http, tokens, on_done=metrics.responded)
        work = strict_router(dict.fromkeys(("items", "query"), self._settings.max_items))
        work.post("/v1/rewards", response_model=RewardReply)(self.rewards)
        work.post("/compute_reward")(self.compute_reward)
        work.post("/get_reward", response_model=OpenRlhfReply)(self.get_reward)
        work.post("/slime")(self.slime)
        app.include_router(work)
        app.get("/livez")(self.livez)
        app.get("/readyz")(self.readyz)
        app.get("/health", response_model=Health, responses={503: {"model": Health}})(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.prometheus)
        return app

    # ---- work

    async def rewards(self, body: RewardRequest, request: Request) -> Response:
        """Score a batch. One result per item, in order; an item that cannot be scored is an error of its own."""
        began = time.monotonic()
        results = await self._score(request, body)
        num_ok = sum(result.error is None for result in results)
        reply = RewardReply(
            server=ServerInfo(
                name=NAME,
                version=hone.__version__,
                boot_id=self._lifecycle.boot_id,
                fingerprint=self._scoring.fingerprint,
            ),
            results=results,
            summary=RewardSummary(n=len(results), ok=num_ok, error=len(results) - num_ok),
            elapsed_ms=(time.monotonic() - began) * 1000,
        )
        return _json(reply.model_dump_json().encode())

    async def compute_reward(self, body: ComputeRequest, request: Request, reward: Named = None) -> Response:
        """Score one response, or several as `items`. An item without a score has `score: null` in a list; alone, it is
        an error: 422 if the row is to blame, else 503."""
        allowed = self._settings.allow_request_weights
        weights = body.wanted_weights() if allowed and reward is None else {}
        items = body.all_items()
        # Numbered, since callers of foreign routes may use an id twice.
        numbered = [item.model_copy(update={"id": f"item-{number}"}) for number, item in enumerate(items)]
        results = await self._score(request, RewardRequest(reward=reward, items=numbered), weights or None)
        results = [result.model_copy(update={"id": item.id}) for result, item in zip(results, items, strict=True)]
        warnings = body.warnings(weights_allowed=allowed)
        if body.items is not None:
            return _json(encode_json({"results": [flat_result(result) for result in results], "warnings": warnings}))
        (result,) = results
        scored_or(result, None)
        return _json(encode_json(flat_result(result) | {"warnings": warnings}))

    async def get_reward(self, body: OpenRlhfRequest, request: Request, reward: Named = None) -> Response:
        """OpenRLHF's remote reward model (`--reward.remote_url`). No queries, no rewards: empty lists."""
        items = body.items()
        to_score = [item for item in items if isinstance(item, Item)]
        scored = iter(await self._score(request, RewardRequest(reward=reward, items=to_score)))
        results = [next(scored) if isinstance(item, Item) else item for item in items]
        constant = self._settings.unscored_constant
        scores = [scored_or(result, constant) for result in results]
        # A component that has a weight has a score wherever the whole has.
        weighted = [name for name, weight in self._scoring.asked(reward).weights.items() if weight]
        logs = {f"{name}_score": [part_or(result, name, constant) for result in results] for name in weighted}
        logs["model_fault"] = [float("model_fault" in result.flags) for result in results]
        return _json(OpenRlhfReply(rewards=scores, scores=scores, extra_logs=logs).model_dump_json().encode())

    async def slime(self, body: SlimeRequest, request: Request, reward: Named = None) -> Response:
        """slime's remote reward model (`--rm-type remote_rm`, with `--reward-key score`)."""
        (result,) = await self._score(request, RewardRequest(reward=reward, items=[body.item()]))
        constant = self._settings.unscored_constant
        weighted = [name for name, part in result.components.items() if part.weight]
        parts = {f"{name}_score": part_or(result, name, constant) for name in weighted}
        return _json(encode_json({**parts, "score": scored_or(result, constant)}))

    async def _score(
        self, request: Request, body: RewardRequest, weights: dict[str, float] | None = None
    ) -> list[ItemResult]:
        client = request.headers.get("authorization") or (request.client.host if request.client else "")
        return await while_connected(request, self._scoring.score(body, client=client, weights=weights))

    # ---- state

    async def livez(self) -> dict[str, str]:
        """Liveness: the process responds."""
        return {"status": "alive"}

    async def readyz(self) -> dict[str, str]:
        """200 while new work is accepted, else 503."""
        if self._lifecycle.phase != "ready":
            raise HttpProblem(503, self._lifecycle.phase, "no new work is taken", retryable=True)
        return {"status": "ready"}

    async def health(self) -> Response:
        """Health; 503 while no new work is accepted, so that `curl -f` waits for readiness."""
        phase = self._lifecycle.phase
        components = {
            name: ComponentHealth(status="degraded" if queue.last_fault else "healthy", last_fault=queue.last_fault)
            for name, queue in self._scoring.queues.items()
        }
        is_degraded = any(component.last_fault for component in components.values())
        health = Health(
            status=phase if phase != "ready" else "degraded" if is_degraded else "healthy",
            model_loaded=phase != "starting",
            uptime_s=time.monotonic() - self._lifecycle.started_at,
            queue_depth=self._scoring.pending_items,
            components=components,
            version=hone.__version__,
            boot_id=self._lifecycle.boot_id,
            fingerprint=self._scoring.fingerprint,
        )
        return _json(encode_json(health.model_dump()), 200 if phase == "ready" else 503)

    async def prometheus(self) -> PlainTextResponse:
        """Metrics in Prometheus' text format."""
        return PlainTextResponse(self._scoring.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def run(loaded: Loaded, http: HttpSettings, settings: ScoringSettings, *, warm_up: Path | None = None) -> None:
    """Serve a file's rewards until a signal ends it.

    Args:
        warm_up: JSON file with an item that must be scored before the service counts as ready.
    Raises:
        ConfigError: rewards that cannot be had, an open door, a warm-up item that is none.
        RewardError: the warm-up item could not be scored.
    """
    item = None
    if warm_up is not None:
        try:
            item = Item.model_validate({"id": "warm-up", **decode_json(warm_up.read_bytes())})
        except (OSError, ValueError, TypeError) as error:
            what = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
            raise ConfigError([f"--warm-up {warm_up}: not an item of /v1/rewards: {what}"]) from None
    tokens = BearerTokens(http)
    refuse_open_door(http, tokens)
    asyncio.run(_run(loaded, http, settings, tokens, item))


async def _run(
    loaded: Loaded, http: HttpSettings, settings: ScoringSettings, tokens: BearerTokens, warm_up: Item | None
) -> None:
    lifecycle = Lifecycle()
    scoring = ScoringService(loaded, settings, warm_up)
    app = RewardServer(scoring, settings, lifecycle).app(http, tokens)
    await serve(app, scoring, lifecycle, http, name=NAME)


def _json(content: bytes, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json")
