"""A chat completions endpoint over real HTTP that follows a script."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = tuple[int, dict[str, str], bytes]
Script = Callable[[int, dict], Reply]
"""Number of the request, counted from 0, and its body."""


def completion(text: object, finish: str = "stop") -> bytes:
    return json.dumps({"choices": [{"finish_reason": finish, "message": {"content": text}}]}).encode()


def says(text: object, finish: str = "stop") -> Reply:
    return 200, {}, completion(text, finish)


@contextmanager
def endpoint(script: Script) -> Iterator[tuple[str, list[dict]]]:
    """A server and what it was asked."""
    asked: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body | {"path": self.path, "auth": self.headers.get("Authorization")})
            status, headers, reply = script(len(asked) - 1, body)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # a client may have hung up by now
                self.wfile.write(reply)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
