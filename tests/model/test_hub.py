"""Upload to the hub, against a server on this machine that speaks the part of its HTTP API that a commit needs."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hone.assemble.verbs import HubRepository
from hone.errors import DataError


class Hub(ThreadingHTTPServer):
    """Repositories in memory: name -> whether it is private, its files, the messages of its commits."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Requests)
        self.repositories: dict[str, dict] = {}
        self.tokens: set[str | None] = set()
        self.refuses = False

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Requests(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args): ...

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        refused = {"error": "Invalid username or password."}
        self.answer(
            *((refused, 401) if self.server.refuses else ({"sha": "0" * 40, "id": "me/model", "siblings": []},))
        )

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub = self.server
        hub.tokens.add(self.headers.get("authorization"))
        if hub.refuses:
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(part for part in (asked.get("organization") or "me", asked["name"]) if part)
            hub.repositories.setdefault(
                name, {"private": asked.get("visibility") == "private", "files": {}, "commits": []}
            )
            self.answer({"url": f"{hub.address}/{name}", "name": name})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            self.answer({"files": modes})
        elif "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "header":
                    hub.repositories[name]["commits"].append(line["value"]["summary"])
                elif line["key"] == "file":
                    hub.repositories[name]["files"][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{hub.address}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40})
        else:
            self.answer({"error": f"not here: {self.path}"}, 404)


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # of the tests; this server is here
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture
def exported(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)))
    return tmp_path


def test_a_directory_becomes_a_private_repository_in_one_commit(hub, exported):
    repository = HubRepository("me/model", endpoint=hub.address)
    assert repository.upload(exported, "step 8") == f"{hub.address}/me/model"
    found = hub.repositories["me/model"]
    assert (found["private"], found["commits"]) == (True, ["step 8"])
    assert found["files"] == {path.name: path.read_bytes() for path in exported.iterdir()}
    assert hub.tokens == {"Bearer hf_secret"}
    HubRepository("me/model", is_private=False, endpoint=hub.address).upload(exported, "step 9")
    assert (found["private"], found["commits"]) == (True, ["step 8", "step 9"]), "one that is there stays private"


def test_a_hub_that_refuses_is_named_with_what_to_do(hub, exported):
    hub.refuses = True
    with pytest.raises(DataError, match=r"me/model: no such repository could be made .* HF_TOKEN"):
        HubRepository("me/model", endpoint=hub.address)
    hub.refuses = False
    repository = HubRepository("me/model", endpoint=hub.address)
    hub.refuses = True
    with pytest.raises(DataError, match="not uploaded to me/model"):
        repository.upload(exported, "step 8")
