"""Errors of a server as RFC 9457 `application/problem+json`, FastAPI's and Starlette's own among them.

Beyond the standard's fields a body says whether the same request may succeed later (`retryable`), and for each thing
that is wrong with the body where it is (`errors`: JSON pointer and what is wrong). Nothing of what was sent is repeated
but the pointer, and no internals.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from hone.reward.strict_json import encode_json

MEDIA_TYPE = "application/problem+json"
MAX_ERRORS = 20
"""Problems of one body that are listed."""


class ProblemError(BaseModel):
    """One thing that is wrong with a request's body."""

    pointer: str
    """JSON pointer as a URI fragment, `#/items/3/id`; `#` is the whole body."""
    detail: str


class ProblemBody(BaseModel):
    """The body of every response that is an error."""

    type: str
    title: str
    status: int = Field(ge=400, le=599)
    detail: str
    instance: str
    retryable: bool
    errors: list[ProblemError]


_SCHEMA = ProblemBody.model_json_schema()
"""In one piece, for a description that knows nothing of `$defs`."""
_SCHEMA["properties"]["errors"]["items"] = _SCHEMA.pop("$defs")["ProblemError"]
RESPONSES: dict[int | str, dict[str, Any]] = {
    codes: {"description": meaning, "content": {MEDIA_TYPE: {"schema": _SCHEMA}}}
    for codes, meaning in (("4XX", "The request is wrong."), ("5XX", "It cannot be answered now."))
}
"""For the OpenAPI description of a route."""


class HttpProblem(HTTPException):
    """An error to answer with. Raise it anywhere while a request is handled."""

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        retryable: bool = False,
        retry_after_s: float | None = None,
        errors: Sequence[tuple[str, str]] = (),
        close: bool = False,
    ) -> None:
        """
        Args:
            kind: short name in words-and-dashes; the same for the same kind of mistake, for programs.
            retry_after_s: sent in whole seconds, rounded up; 429 and 503 always have one.
            errors: JSON pointer without the `#`, and what is wrong there.
            close: the connection cannot be used further.
        """
        super().__init__(status, detail)
        self.kind, self.retryable, self.errors = kind, retryable, tuple(errors)
        if retry_after_s is None and status in (429, 503):
            retry_after_s = 1.0
        self.extra_headers: dict[str, str] = {}
        if retry_after_s is not None:
            self.extra_headers["Retry-After"] = str(max(1, -int(-retry_after_s // 1)))
        if close:
            self.extra_headers["Connection"] = "close"
        if status == 401:
            self.extra_headers["WWW-Authenticate"] = "Bearer"

    def response(self, request_id: str) -> Response:
        body = ProblemBody(
            type=f"urn:hone:problem:{self.kind}",
            title=self.kind.replace("-", " ").capitalize(),
            status=self.status_code,
            detail=str(self.detail),
            instance=f"urn:hone:request:{request_id}",
            retryable=self.retryable,
            errors=[ProblemError(pointer=f"#{pointer}", detail=what) for pointer, what in self.errors[:MAX_ERRORS]],
        )
        content = encode_json(body.model_dump() | self.more_members())
        return Response(content, self.status_code, headers=self.extra_headers, media_type=MEDIA_TYPE)

    def more_members(self) -> dict[str, Any]:
        """Members of the body beyond RFC 9457's and ours, for clients that look for others."""
        return {}


def answer_with_problems(app: FastAPI) -> None:
    """Make every error of an app a problem: ours, Starlette's (404, 405) and FastAPI's refusal of a body (422)."""
    app.add_exception_handler(HttpProblem, _ours)
    app.add_exception_handler(StarletteHTTPException, _starlettes)
    app.add_exception_handler(RequestValidationError, _refused_body)


def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpProblem)
    return error.response(request.state.request_id)


def _starlettes(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    status = HTTPStatus(error.status_code)
    problem = HttpProblem(status.value, status.phrase.lower().replace(" ", "-"), f"{status.phrase}: {request.url.path}")
    problem.extra_headers |= dict(error.headers or {})  # 405 says what is allowed
    return problem.response(request.state.request_id)


def _refused_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors: list[tuple[str, str]] = []
    for details in error.errors():
        pointer = "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in details["loc"][1:])
        is_unknown = details["type"] == "extra_forbidden"
        errors.append((pointer, "unknown field" if is_unknown else details["msg"].removeprefix("Value error, ")))
    first = f"{errors[0][0].lstrip('/') or 'body'}: {errors[0][1]}" if errors else "the body does not fit"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return HttpProblem(422, "unprocessable-body", first + more, errors=errors).response(request.state.request_id)
