"""A stand-in for VisualQuality-R1 where there is no GPU: the same HTTP, a rating by the spread of a picture's greys.

python stand_in_judge.py PORT
"""

import base64
import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image, ImageStat

FULL_SPREAD = 80
"""Standard deviation of the greys, of 255, from which a picture is rated 5."""


def rating(data_url: str) -> float:
    """From 1, a picture of one grey, to 5."""
    picture = Image.open(io.BytesIO(base64.b64decode(data_url.partition("base64,")[2])))
    return 1 + 4 * min(1.0, ImageStat.Stat(picture.convert("L")).stddev[0] / FULL_SPREAD)


class Handler(BaseHTTPRequestHandler):
    """`GET /health` and `POST /v1/chat/completions`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer({}, 200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = asked["messages"][0]["content"]
        (picture,) = (part["image_url"]["url"] for part in parts if part["type"] == "image_url")
        message = {"role": "assistant", "content": f"<answer>{rating(picture):.2f}</answer>"}
        self.answer({"model": asked["model"], "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def answer(self, body: dict, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
