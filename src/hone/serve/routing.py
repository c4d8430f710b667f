"""Routes with a model as body: strict JSON, at a bounded cost.

Python does one thing at a time: while a body is read, nothing else is answered. So nothing becomes a Python object
before it is known to fit: pydantic reads JSON text directly, stops at the first element of a list that does not fit
(`FailFast`, `max_length` in the models), and explains what is wrong only where explaining is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from hone.reward.strict_json import whole_characters
from hone.serve.problem import RESPONSES, HttpProblem

MAX_CONTAINERS = 1 << 20
"""Arrays and objects of a body, the costliest of JSON: half a second. Brackets in its texts count too."""
MAX_EXPLAINED = 1 << 16
"""A body with more objects, arrays and keys is refused without saying where it is wrong: pydantic makes Python objects
of what it refuses."""

ModelT = TypeVar("ModelT", bound=BaseModel)


class OrNone:
    """Annotation: a value that does not fit is None, and costs nothing."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_default_schema(handler(source), default=None, on_error="default")


def strict_router(limits: Mapping[str, int] = MappingProxyType({})) -> APIRouter:
    """A router for endpoints whose body is one model; see `parse`.

    Args:
        limits: most elements of a list in a body, by field.
    """

    class ReadRequest(Request):
        parsed: BaseModel

        async def json(self) -> BaseModel:
            return self.parsed

    class StrictRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handle = super().get_route_handler()
            assert self.body_field is not None, f"{self.path} takes no body"
            model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]

            async def handle_strictly(request: Request) -> Any:
                request = ReadRequest(request.scope, request.receive)
                request.parsed = parse(model, await request.body(), limits)
                return await handle(request)

            return handle_strictly

    return APIRouter(route_class=StrictRoute, responses=RESPONSES)


def parse(model: type[ModelT], body: bytes, limits: Mapping[str, int]) -> ModelT:
    """A body as its model.

    Half of a surrogate pair, which no UTF-8 text can hold, becomes U+FFFD, so that one odd item spoils nothing.
    Raises HttpProblem, and RequestValidationError for what does not fit the model.
    """
    containers = body.count(b"[") + body.count(b"{")
    if containers > MAX_CONTAINERS:
        detail = f"about {containers} arrays and objects; at most {MAX_CONTAINERS} in a body"
        raise HttpProblem(413, "too-many-values", detail)
    try:
        found = _read(model, body)
    except ValidationError as error:
        (wrong,) = error.errors(include_url=False, include_input=False)
        raise HttpProblem(400, "bad-json", f"the body is not JSON as RFC 8259 has it: {wrong['msg']}") from None
    if found is None:
        if containers + body.count(b":") > MAX_EXPLAINED:
            detail = "the body does not fit the schema; in a smaller one, this server says where"
            raise HttpProblem(422, "unprocessable-body", detail)
        found = _explained(model, body)
    for name, most in limits.items():
        if len(listed := vars(found).get(name) or ()) > most:
            raise HttpProblem(
                413, "too-many-items", f"{len(listed)} in {name}; at most {most} in a request (--max-items)"
            )
    return found


def _read(model: type[ModelT], body: bytes) -> ModelT | None:
    """None: it does not fit. Raises ValidationError for what is not JSON."""
    try:
        return _reader(model).validate_json(body)
    except ValidationError:
        repaired = whole_characters(body)
        if repaired is body:
            raise
        return _reader(model).validate_json(repaired)


@cache
def _reader(model: type[ModelT]) -> TypeAdapter[ModelT | None]:
    return TypeAdapter(Annotated[model, OrNone()])  # type: ignore[arg-type]


def _explained(model: type[ModelT], body: bytes) -> ModelT:
    """Raises RequestValidationError, for a body that does not fit."""
    try:
        return model.model_validate_json(whole_characters(body))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    too_long = next((found for found in errors if found["type"] == "too_long" and len(found["loc"]) == 1), None)
    if too_long is not None:
        raise HttpProblem(413, "too-many-items", f"{too_long['loc'][0]}: {too_long['msg']}")
    raise RequestValidationError([{**found, "loc": ("body", *found["loc"])} for found in errors])
