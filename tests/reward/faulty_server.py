"""A reward service over real sockets that fails as it is told, and remembers that it did. Runs in a thread, or as a
process to be killed: `python faulty_server.py PORT SECONDS_PER_REQUEST`."""

import asyncio
import contextlib
import hashlib
import json
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Request:
    """One that came: what it asked for, and when."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict
    number: int
    """From 1, over all requests of the server."""
    time: float = field(default_factory=time.monotonic)

    @property
    def ids(self) -> list[str]:
        return [item["id"] for item in self.body.get("items", [])]


@dataclass
class Answer:
    """An HTTP answer, `pause_s` after each of its parts; `headers` may lie."""

    status: int = 200
    body: bytes | list[bytes] = b""
    headers: dict[str, str] = field(default_factory=dict)
    pause_s: float = 0.0
    close: bool = False
    """End the connection after it."""
    reset: bool = False
    """Reset the connection instead."""

    @classmethod
    def of(cls, value: object, status: int = 200, **headers: str) -> "Answer":
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return cls(status, json.dumps(value).encode(), named)


SILENCE = Answer(status=0)
"""Takes the request and never answers."""


def score_of(text: str) -> float:
    """A score that no accident gives: sixteen digits that depend on every character."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:6]) / 2**48


def good_reply(body: dict) -> dict:
    """What a service in good health answers: two components, summed with weights."""
    results = []
    for item in body["items"]:
        first, second = score_of(item["solution_str"]), score_of(item["solution_str"][::-1])
        results.append(
            {
                "id": item["id"],
                "status": "ok",
                "score": 0.75 * first + 0.25 * second,
                "min": 0.0,
                "max": 1.0,
                "components": {
                    "first": {"score": first, "weight": 0.75, "fault": None, "detail": "", "metrics": {}},
                    "second": {"score": second, "weight": 0.25, "fault": None, "detail": "", "metrics": {}},
                },
                "metrics": {"first_characters": len(item["solution_str"])},
                "flags": [],
                "cached": False,
                "elapsed_ms": 0.5,
                "error": None,
            }
        )
    return {
        "schema_version": "1",
        "server": {"name": "faulty", "version": "0", "boot_id": "b", "fingerprint": "sha256:right"},
        "results": results,
        "summary": {"n": len(results), "ok": len(results), "error": 0},
        "elapsed_ms": 1.0,
    }


Fault = Callable[[Request], Answer | None]


class FaultyServer:
    """`with FaultyServer(fault) as server`: `fault` answers instead, or gives None for the right answer."""

    def __init__(
        self, fault: Fault = lambda request: None, *, ready: Callable[[], bool] = lambda: True, tls=None
    ) -> None:
        self.fault, self.ready, self.tls = fault, ready, tls
        self.requests: list[Request] = []
        """Of POST, in order."""
        self.ready_asked: list[float] = []
        self.faults = 0
        """How often `fault` answered: the witness."""
        self.open_now = self.most_open = 0
        """Requests being answered, now and at most."""
        self.bytes_sent = 0
        self.cut_off = 0
        """Answers that the client did not read to their end."""
        self.host, self.port = "127.0.0.1", 0

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    def __enter__(self) -> "FaultyServer":
        self._loop, started = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)  # a busy machine needs more than 10
        assert not self._thread.is_alive()

    def _run(self, started: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self.serve(self.port, started.set))

    async def serve(self, port: int, started: Callable[[], object] = lambda: None) -> None:
        self._stop = asyncio.Event()
        connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await self._answer_one(reader, writer):
                    pass
            except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                self.cut_off += 1
            writer.close()
            with contextlib.suppress(ConnectionError, TimeoutError, ssl.SSLError):
                await asyncio.wait_for(writer.wait_closed(), 1)
            del connections[asyncio.current_task()]

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._stop.is_set():
                writer.transport.abort()
            else:
                connections[asyncio.create_task(converse(reader, writer))] = writer

        # A handshake that its client gave up would hold up the end for a minute.
        limits = {} if self.tls is None else {"ssl": self.tls, "ssl_handshake_timeout": 5}
        async with await asyncio.start_server(connected, self.host, port, **limits) as server:
            self.port = server.sockets[0].getsockname()[1]
            started()
            await self._stop.wait()
            for listening in server.sockets:  # not closed yet: asyncio drops the sockets that a closed server accepts
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for task, writer in connections.items():
                task.cancel()
                writer.transport.abort()
            while others := asyncio.all_tasks() - {asyncio.current_task()}:  # who was being accepted is let in, and out
                await asyncio.wait(others, timeout=1)
            await asyncio.sleep(0.01)

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""
        if not head:
            return False
        first, *lines = head.decode().strip().split("\r\n")
        method, path, _ = first.split()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            self.ready_asked.append(time.monotonic())
            return await self._send(writer, Answer(200 if self.ready() else 503))
        request = Request(method, path, headers, json.loads(content), len(self.requests) + 1)
        self.requests.append(request)
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            answer = self.fault(request)
            if asyncio.iscoroutine(answer):
                answer = await answer
            self.faults += answer is not None
            return await self._send(writer, answer or Answer.of(good_reply(request.body)))
        finally:
            self.open_now -= 1

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer) -> bool:
        if answer is SILENCE:
            await self._stop.wait()
        if answer.reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return False
        parts = [answer.body] if isinstance(answer.body, bytes) else answer.body
        headers = {"Content-Length": str(sum(map(len, parts))), "Content-Type": "application/json", **answer.headers}
        head = f"HTTP/1.1 {answer.status} X\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
        for part in (head.encode(), *parts):
            writer.write(part)
            await writer.drain()
            self.bytes_sent += len(part)
            await asyncio.sleep(answer.pause_s)
        return not answer.close


async def slowly(request: Request) -> None:
    await asyncio.sleep(float(sys.argv[2]))


if __name__ == "__main__":
    asyncio.run(FaultyServer(slowly).serve(int(sys.argv[1]), lambda: print("ready", flush=True)))
