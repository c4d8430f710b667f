"""A judge behind `hone serve reward`: what Prometheus and the log are told of it. The judge is a script over HTTP."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from served import serving


class Judge(BaseHTTPRequestHandler):
    """Gives the highest score to whoever demands it, no score to the response `mumble`, and else the lowest."""

    def do_POST(self):
        asked = json.dumps(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"])
        said = (
            "I cannot tell." if "mumble" in asked else "\\boxed{10}" if "is perfect: output" in asked else "\\boxed{1}"
        )
        reply = json.dumps({"choices": [{"finish_reason": "stop", "message": {"content": said}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_): ...


@pytest.fixture
def judge_url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_its_failures_and_canaries_are_metrics_and_its_pace_is_in_the_log(tmp_path, judge_url):
    args = {"url": judge_url, "model": "scripted", "canary_every": 2, "log_every_s": 0.001}
    rewards = json.dumps({"reward": {"components": [{"use": "judge", "name": "grm", "args": args}]}})
    with serving(tmp_path, rewards=rewards) as served:
        good, mumbled = served.score({"solution_str": "fine", "prompt": "q"}, {"solution_str": "mumble", "prompt": "q"})
        assert (good["score"], mumbled["score"]) == (0.0, None)
        text = served.client.get("/metrics").text
        assert 'reward_parse_failures_total{judge="grm",method="missing"} 3.0' in text  # it was asked again, twice
        assert 'reward_canary_score{judge="grm",kind="injected"} 1.0' in text
        assert 'reward_canary_score{judge="grm",kind="empty"} 0.0' in text
    log = (tmp_path / "server.log").read_text()
    assert re.search(r"Throughput: .* of score and length none, of score and flags none", log)
    assert re.search(r"Inference time: \d+\.\d\d sec/batch, p50 \d+\.\d\d, p95 \d+\.\d\d", log)
