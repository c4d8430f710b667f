"""The routes of `hone serve policy`.

app = policy_app(service, lifecycle, settings, tokens)
await serve(app, service, lifecycle, settings, name="policy")
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel

from hone.serve.http import BearerTokens, HttpSettings, Lifecycle, guarded_app, while_connected
from hone.serve.openai import (
    MAX_CHOICES,
    ChatReply,
    ChatRequest,
    CompletionReply,
    CompletionRequest,
    ModelList,
    OpenAIProblem,
)
from hone.serve.policy import PolicyService
from hone.serve.routing import strict_router
from hone.serve.streaming import as_events

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The reply, or its events."}
}
_UNIONS = {
    "prompt": f"send one text, one list of token ids, or a list of at most {MAX_CHOICES} of either",
    "stop": "send one text, or a list of at most 16",
}


def policy_app(
    service: PolicyService,
    lifecycle: Lifecycle,
    settings: HttpSettings,
    tokens: BearerTokens,
    *,
    may_sleep: bool = False,
) -> FastAPI:
    """The routes of a policy server.

    Args:
        may_sleep: have those that put the model to sleep and wake it, as vLLM's server with --enable-sleep-mode.
    """
    app, router = guarded_app("hone-policy", lifecycle, settings, tokens), strict_router()
    app.add_exception_handler(RequestValidationError, _refused_body)

    @router.post("/v1/completions", response_model=CompletionReply, responses=_STREAM)
    async def completions(asked: CompletionRequest, request: Request) -> CompletionReply | Response:
        """Samples that continue a text or token ids."""
        if asked.stream:
            return await _streamed(request, service.stream_completion(asked))
        return await while_connected(request, service.complete(asked))

    @router.post("/v1/chat/completions", response_model=ChatReply, responses=_STREAM)
    async def chat_completions(asked: ChatRequest, request: Request) -> ChatReply | Response:
        """Answers to a conversation, through the model's chat template."""
        if asked.stream:
            return await _streamed(request, service.stream_chat(asked))
        return await while_connected(request, service.chat(asked))

    @app.get("/v1/models")
    async def models() -> ModelList:
        """The one model that is served."""
        if not service.is_loaded:
            raise OpenAIProblem(503, "starting", "the model is being loaded", retryable=True, retry_after_s=2)
        return service.models()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Metrics in Prometheus' text format."""
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        """Liveness: the process responds."""
        return {"status": "alive"}

    @app.get("/health")
    @app.get("/readyz")
    async def health() -> Response:
        """200 once the model has sampled and until the server drains, else 503."""
        ready = lifecycle.phase == "ready"
        body = {
            "status": "healthy" if ready else lifecycle.phase,
            "model_loaded": service.is_loaded,
            "uptime_s": round(time.monotonic() - lifecycle.started_at, 1),
            "in_flight": lifecycle.in_flight,
        }
        return JSONResponse(body, 200 if ready else 503)

    app.include_router(router)
    if may_sleep:
        _add_sleep(app, service)
    return app


def _add_sleep(app: FastAPI, service: PolicyService) -> None:
    @app.post("/sleep")
    async def sleep(level: Annotated[int, Query(ge=1, le=1)] = 1) -> dict[str, bool]:
        """Free the device's memory once no request is being sampled; weights are kept on the host."""
        await service.sleep()
        return {"is_sleeping": service.is_asleep}

    @app.post("/wake_up")
    async def wake_up() -> dict[str, bool]:
        """Load weights and cache back onto the device."""
        await service.wake()
        return {"is_sleeping": service.is_asleep}

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Whether the model is asleep."""
        return {"is_sleeping": service.is_asleep}


async def _streamed(request: Request, chunks: AsyncGenerator[BaseModel, None]) -> Response:
    """The answer begins with the first chunk, so that what is refused has a status of its own."""
    first = await while_connected(request, anext(chunks))
    return StreamingResponse(as_events(first, chunks), media_type="text/event-stream")


def _refused_body(request: Request, error: Exception) -> Response:
    """What pydantic refuses is 400 here, as OpenAI's clients expect it."""
    assert isinstance(error, RequestValidationError)
    first, *others = error.errors()
    place = "/".join(str(part) for part in first["loc"][1:])
    said = "unknown field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    more = f" (and {len(others)} more)" if others else ""
    union = next((field for field in _UNIONS if place.startswith(f"{field}/")), None)
    if union is not None:  # pydantic says what is wrong with each of the forms
        place, said, more = union, _UNIONS[union], ""
    problem = OpenAIProblem(400, "bad-request", f"{place or 'body'}: {said}{more}", param=place or None)
    return problem.response(request.state.request_id)
