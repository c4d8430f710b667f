"""From the bytes of a request's body to its checked model: here if it is small, in a process beside if it is large.

Python does one thing at a time, whatever the number of threads: while it parses 30 MiB of JSON (0.4 s; made to be
slow, 8 s) nothing else is answered, `/health` included. So another process parses and checks what is large, and hands
the model over in pieces, between which the event loop has its turn. What does not come apart into small pieces, such
as a single item of many MiB, is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from hone import process
from hone.reward.wire import decode_json
from hone.serve.problem import Problem

LARGE_BODY_BYTES = 1 << 18
"""Larger ones are read by the process: 256 KiB take some 5 ms."""
PIECE_BYTES = 1 << 18
MAX_PIECE_BYTES = 2 << 20
"""Of one element of a list, or of any other field: 20 ms to take over, 0.1 s if it is made to be slow. The trace of a
response of 64k tokens is 1 MiB."""
READ_TIMEOUT_S = 60.0
"""Until a process that reads a body is given up."""
MAX_ERRORS = 1000
"""More mistakes than this are not told one by one."""

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A field of the model, or some elements of one that is a list."""

    field: str
    value: Any
    is_slice: bool


@dataclass(frozen=True, slots=True)
class _Whole:
    """All pieces were sent; those fields were given by the client."""

    given: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Refused:
    """What a Problem is made of; of a body that does not fit its model, pydantic's list of errors."""

    status: int
    kind: str
    detail: str
    errors: Sequence[Any] = ()

    def error(self) -> Exception:
        return RequestValidationError(self.errors) if self.errors else Problem(self.status, self.kind, self.detail)


class _Refusal(Exception):
    def __init__(self, refused: _Refused) -> None:
        super().__init__(refused.detail)
        self.refused = refused


def parse(model: type[ModelT], body: bytes, limits: Mapping[str, int]) -> ModelT:
    """A body as its model; raises _Refusal.

    Args:
        limits: most elements of a list, by field. Looked at first: to check a million items takes seconds.
    """
    try:
        value = decode_json(body)
    except ValueError as error:
        raise _Refusal(_Refused(400, "bad-json", f"the body is not JSON as RFC 8259 has it: {error}")) from None
    for name, most in limits.items():
        listed = value.get(name) if isinstance(value, dict) else None
        if isinstance(listed, list) and len(listed) > most:
            detail = f"{len(listed)} in {name}; at most {most} in a request (--max-items)"
            raise _Refusal(_Refused(413, "too-many-items", detail))
    try:
        return model.model_validate(value)
    except ValidationError as error:
        if error.error_count() > MAX_ERRORS:
            detail = f"{error.error_count()} things are wrong with it"
            raise _Refusal(_Refused(422, "unprocessable-body", detail)) from None
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        located = [{**found, "loc": ("body", *found["loc"])} for found in errors]
        raise _Refusal(_Refused(422, "unprocessable-body", "", located)) from None


class BodyReader:
    """Reads bodies; its process starts with the first large one. Use in one event loop; `close` when done."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()  # held while a large body is read; the next waits

    async def read(self, model: type[ModelT], body: bytes, limits: Mapping[str, int]) -> ModelT:
        """The model. Raises Problem and RequestValidationError."""
        if len(body) <= LARGE_BODY_BYTES:
            try:
                return parse(model, body, limits)
            except _Refusal as refusal:
                raise refusal.refused.error() from None
        async with self._turn:
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    return await self._read_apart(model, body, limits)
            except (TimeoutError, ConnectionError):
                await self.close()
                raise Problem(503, "body-not-read", "the body could not be read in time", retryable=True) from None
            except asyncio.CancelledError:
                await self.close()  # it is busy with a body that nobody waits for
                raise

    async def _read_apart(self, model: type[ModelT], body: bytes, limits: Mapping[str, int]) -> ModelT:
        if self._streams is None:
            self._process, channel = process.start(__name__)
            self._streams = await asyncio.open_connection(sock=channel)
        reader, writer = self._streams
        writer.write(process.framed((model, body, dict(limits))))
        await writer.drain()
        fields: dict[str, Any] = {}
        while True:
            match await process.receive_async(reader):
                case _Piece(field, value, is_slice):
                    fields[field] = [*fields.get(field, ()), *value] if is_slice else value
                case _Whole(given):
                    return model.model_construct(set(given), **fields)
                case _Refused() as refused:
                    raise refused.error()
                case None:
                    raise ConnectionError("the process that reads bodies ended")
            await asyncio.sleep(0)  # what came while the piece was unpacked has its turn now

    async def close(self) -> None:
        """End the process. The next large body starts another."""
        running, streams = self._process, self._streams
        self._process = self._streams = None
        if streams is not None:
            streams[1].close()
            with contextlib.suppress(ConnectionError):
                await streams[1].wait_closed()
        if running is not None:
            await process.kill(running)


# ---- in the process


def main(channel_fd: int, parent_pid: int) -> None:
    """Read bodies until the server closes the channel."""
    process.begin(parent_pid)
    with socket.socket(fileno=channel_fd) as channel:
        while (asked := process.receive(channel)) is not None:
            for message in _answers(*asked):
                channel.sendall(process.with_header(message))


def _answers(model: type[BaseModel], body: bytes, limits: Mapping[str, int]) -> Iterator[bytes]:
    """The pickled messages about a body: pieces and `_Whole`, or `_Refused`."""
    try:
        pieces = _pieces(parse(model, body, limits))
    except _Refusal as refusal:
        pieces = [pickle.dumps(refusal.refused)]
    yield from pieces


def _pieces(parsed: BaseModel) -> list[bytes]:
    """Raises _Refusal for what does not come apart."""
    pieces: list[bytes] = []
    for name, value in (parsed.__dict__ | (parsed.__pydantic_extra__ or {})).items():
        if isinstance(value, list):
            pieces += _slices(name, value, 0)
        else:
            pieces.append(_small_enough(pickle.dumps(_Piece(name, value, False)), f"/{name}"))
    return [*pieces, pickle.dumps(_Whole(frozenset(parsed.model_fields_set)))]


def _slices(name: str, value: list[Any], first: int) -> Iterator[bytes]:
    """A list in slices of about PIECE_BYTES; `first` is the place of its first element."""
    pickled = pickle.dumps(_Piece(name, value, True))
    if len(pickled) <= PIECE_BYTES or len(value) == 1:
        yield _small_enough(pickled, f"/{name}/{first}")
        return
    half = len(value) // 2
    yield from _slices(name, value[:half], first)
    yield from _slices(name, value[half:], first + half)


def _small_enough(pickled: bytes, pointer: str) -> bytes:
    if len(pickled) > MAX_PIECE_BYTES:
        detail = f"{pointer} alone is more than {MAX_PIECE_BYTES >> 20} MiB"
        raise _Refusal(_Refused(413, "item-too-large", detail))
    return pickled
