"""The reward service when things go wrong: scorers that hang or die, clients that leave, deadlines, limits, its end.

The scorer `obey` does what a response says and leaves a line in a file: the witness of what was really scored.
"""

import json
import resource
import signal
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from served import serving

from hone.cli.main import main
from hone.reward.wire import RewardRequest
from hone.serve.foreign import OpenRlhfRequest
from hone.serve.problem import HttpProblem
from hone.serve.routing import parse

TIMEOUT_S = 1.5
OBEY = """\
reward:
  workers: 2
  components:
    - {use: "mine.py:obey", args: {witness: witness.txt}, timeout_s: TIMEOUT_S}
    - {use: "mine.py:place", weight: 0}
"""


def obeying(folder, *options, timeout_s=TIMEOUT_S, **more):
    return serving(folder, *options, rewards=OBEY.replace("TIMEOUT_S", str(timeout_s)), **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("obey")


@pytest.fixture(scope="module")
def served(folder):
    with obeying(folder, "--timeout-s", "30") as running:
        yield running


@pytest.fixture
def witnessed(folder):
    """What was scored so far, a response a line."""
    path = folder / "witness.txt"
    path.write_text("")
    return lambda: path.read_text().splitlines()


def in_background(function, *args, **more):
    thread = threading.Thread(target=function, args=args, kwargs=more, daemon=True)
    thread.start()
    return thread


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def texts(*responses):
    return {"reward": "obey", "items": [{"id": f"i{n}", "solution_str": text} for n, text in enumerate(responses)]}


def posted(served, body):
    """The answer, once what was cancelled before is ended: until then a service foresees a wait and refuses."""
    while (response := served.post("/v1/rewards", body)).status_code == 503:
        time.sleep(0.05)
    return response


def test_health_answers_at_once_while_every_scorer_hangs(served, witnessed):
    """Four hang two workers, so that two of them wait for the others' time limit; health is asked all the time. Had
    the event loop waited for a scorer, there would be two or three answers of a time limit each."""
    hangs = [f"sleep 99 {n}" for n in range(4)]
    running = in_background(served.post, "/v1/rewards", texts(*hangs))
    until(lambda: len(witnessed()) == 2)
    answers = 0
    while running.is_alive():
        assert served.client.get("/health").status_code == 200
        answers += 1
        time.sleep(0.02)
    assert answers > 5
    assert len(witnessed()) == 4
    (after,) = served.score({"solution_str": "fine"}, reward="obey")
    assert after["score"] == 4.0


HOSTILE = {
    "unknown keys": lambda: b'{"items": [],' + b",".join(b'"k%d":0' % n for n in range(1_000_000)) + b"}",
    "an unknown key": lambda: b'{"items": [], "extra": [' + b",".join([b"[0]"] * 900_000) + b"]}",
    "arrays": lambda: b'{"items": [], "extra": [' + b",".join([b"[]"] * 4_000_000) + b"]}",
    "items that do not fit": lambda: b'{"items": [' + b",".join([b"{}"] * 1_000_000) + b"]}",
    "too many items": lambda: b'{"items": [' + b",".join([b'{"id": "same", "solution_str": ""}'] * 400_000) + b"]}",
    "no JSON": lambda: b"[" + b"[1]," * 900_000,
}
"""Makes bodies of 3 to 14 MiB. Python's own reader makes hundreds of MiB of objects of each, and takes seconds."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_body_that_does_not_fit_becomes_no_objects(kind):
    body = HOSTILE[kind]()
    parse(RewardRequest, b'{"items": []}', {})
    tracemalloc.start()
    try:
        with pytest.raises(HttpProblem) as raised:
            parse(RewardRequest, body, {"items": 1024})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert raised.value.status_code in (400, 413, 422)
    assert peak_bytes < 8 << 20  # the first 4,096 items are made


def test_keys_of_others_trainers_are_dropped_before_they_are_objects():
    body = HOSTILE["an unknown key"]().replace(b'"items": []', b'"query": ["a"]')
    parse(OpenRlhfRequest, b'{"query": []}', {})
    tracemalloc.start()
    try:
        assert parse(OpenRlhfRequest, body, {}).query == ["a"]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def watched(served, content):
    """The answer to a body, and how often `/health` answered meanwhile."""
    answers, times = [], 0
    running = in_background(lambda: answers.append(served.client.post("/v1/rewards", content=content, headers=JSON)))
    while running.is_alive():
        assert served.client.get("/health").status_code == 200
        times += 1
        time.sleep(0.005)
    return answers[0], times


def test_health_answers_while_the_items_of_a_large_body_are_scored(served):
    """8 MiB that are all right: their keys are made by the server, in turns with everything else."""
    columns = {"extra_info": {"numbers": [0.5] * 4_000, "text": "x" * 8_000}}
    items = [{"id": f"i{n}", "solution_str": f"fine {n}", **columns} for n in range(300)]
    answer, health = watched(served, json.dumps({"reward": "place", "items": items}).encode())
    assert answer.json()["summary"] == {"n": 300, "ok": 300, "error": 0}
    assert answer.json()["results"][299]["id"] == "i299"
    assert health > 5


def test_a_scorer_that_fails_is_an_error_of_its_items_alone(served):
    restarts = served.metric("reward_worker_restarts_total")
    results = served.score(
        *({"solution_str": text} for text in ("fine", "die", "none", "sleep 99 again")), reward="obey"
    )
    assert [result["score"] for result in results] == [4.0, None, None, None]
    details = [result["error"]["detail"] for result in results[1:]]
    assert "exit code 3" in details[0] and "returned None" in details[1] and "took longer" in details[2]
    assert all(result["error"]["fault"] == "infra" and result["error"]["retryable"] for result in results[1:])
    assert served.client.get("/health").json()["status"] == "degraded"
    assert [r["score"] for r in served.score({"solution_str": "well"}, reward="obey")] == [4.0]
    assert served.metric("reward_worker_restarts_total") > restarts  # a dead process is replaced when it is needed
    assert served.client.get("/health").json()["status"] == "healthy"


def test_our_own_failure_is_not_remembered(served, witnessed):
    for _ in range(2):
        (result,) = served.score({"solution_str": "none of it"}, reward="obey")
        assert result["error"]["retryable"] and not result["cached"]
    assert witnessed() == ["none of it"] * 2


def test_what_is_late_is_an_error_of_its_item_and_the_rest_is_answered(served, witnessed):
    for attempt in range(5):  # on a busy machine both may be late
        served.score(*({"solution_str": f"sleep 0.3 {n}.{attempt}"} for n in range(2)), reward="obey")  # both run
        response = posted(served, texts(f"sleep 1.4 late {attempt}", "fine too") | {"timeout_ms": 1000})
        if response.status_code == 200:
            break
    late, fine = response.json()["results"]
    assert (fine["score"], late["score"]) == (8.0, None)
    assert late["error"] == {
        "fault": "infra",
        "retryable": True,
        "component": "obey",
        "detail": "not scored within 1 s",
    }


def test_nothing_in_time_is_an_answer_of_its_own(served):
    response = posted(served, texts("sleep 1.4 nothing") | {"timeout_ms": 200})
    assert (response.status_code, response.json()["type"]) == (504, "urn:hone:problem:deadline")
    assert response.json()["retryable"]


def test_work_whose_deadline_passed_in_the_queue_is_not_scored(served, witnessed):
    busy_and_queued = texts("sleep 1 a", "sleep 1 b", "too late")
    assert posted(served, busy_and_queued | {"timeout_ms": 500}).status_code == 504
    served.score({"solution_str": "afterwards"}, reward="obey")
    assert "too late" not in witnessed() and "afterwards" in witnessed()


def test_a_wait_beyond_the_deadline_is_refused_at_once(served, witnessed):
    busy = in_background(served.post, "/v1/rewards", texts(*(f"sleep 0.4 {n}" for n in range(4))))
    until(lambda: len(witnessed()) == 4)
    response = served.post("/v1/rewards", texts("impatient") | {"timeout_ms": 50})
    assert (response.status_code, response.json()["type"]) == (503, "urn:hone:problem:too-long-a-wait")
    busy.join(20)


def test_work_whose_client_is_gone_is_not_scored(served, witnessed):
    busy = in_background(served.post, "/v1/rewards", texts("sleep 2 c", "sleep 2 d"))
    until(lambda: len(witnessed()) == 2)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/rewards", json=texts("nobody waits"), timeout=0.2)
    until(lambda: served.client.get("/health").json()["queue_depth"] == 2)
    busy.join(20)
    served.score({"solution_str": "later"}, reward="obey")
    assert sorted(witnessed()) == ["later", "sleep 2 c", "sleep 2 d"]
    assert served.client.get("/health").json()["queue_depth"] == 0
    assert " 499 " in served.log.read_text()


@pytest.mark.slow("a server of its own that ends")
def test_a_process_at_work_for_no_caller_is_killed_and_replaced(tmp_path):
    """Both workers are at work for a minute: one's client hangs up, the other's deadline passes."""
    with obeying(tmp_path, timeout_s=60) as served:
        workers = psutil.Process(served.process.pid).children()
        witness = tmp_path / "witness.txt"
        left = in_background(served.post, "/v1/rewards", texts("sleep 60 late") | {"timeout_ms": 2000})
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/v1/rewards", json=texts("sleep 60 gone"), timeout=2)
        left.join(20)
        assert sorted(witness.read_text().splitlines()) == ["sleep 60 gone", "sleep 60 late"]  # they were at work
        gone, alive = psutil.wait_procs(workers, timeout=60)
        assert len(gone) == 2 and not alive
        assert [r["score"] for r in served.score({"solution_str": "fine"}, reward="obey")] == [4.0]
        assert served.metric("reward_worker_restarts_total") == 1


def test_the_same_work_in_flight_is_done_once(served, witnessed):
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(served.post, "/v1/rewards", texts("sleep 0.5 once")) for _ in range(4)]
        scores = [future.result().json()["results"][0]["score"] for future in asked]
    assert scores == [float(len("sleep 0.5 once"))] * 4
    assert witnessed() == ["sleep 0.5 once"]


def test_work_that_one_client_still_waits_for_outlives_another(served, witnessed):
    waiting = ThreadPoolExecutor(1).submit(served.post, "/v1/rewards", texts("sleep 0.7 shared"))
    until(lambda: witnessed() == ["sleep 0.7 shared"])
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/rewards", json=texts("sleep 0.7 shared"), timeout=0.1)
    assert waiting.result(20).json()["summary"]["ok"] == 1
    assert witnessed() == ["sleep 0.7 shared"]


def test_workers_killed_under_load_cost_retries_and_no_score(served):
    responses = [f"sleep 0.02 {n}" for n in range(40)]
    restarts = served.metric("reward_worker_restarts_total")

    def kill_twice():
        for _ in range(2):
            time.sleep(0.15)
            for child in psutil.Process(served.process.pid).children():
                child.kill()

    killer = in_background(kill_twice)
    body, scores, failed = texts(*responses), {}, 0
    while len(scores) < len(responses):
        body["items"] = [item for item in body["items"] if item["id"] not in scores]
        results = served.post("/v1/rewards", body).json()["results"]
        assert all(result["error"] is None or result["error"]["retryable"] for result in results)
        failed += sum(result["score"] is None for result in results)
        scores |= {result["id"]: result["score"] for result in results if result["score"] is not None}
    killer.join()
    assert failed > 0 and served.metric("reward_worker_restarts_total") > restarts  # they did die at work
    assert [scores[f"i{n}"] for n in range(40)] == [float(len(text)) for text in responses]


# ---- limits and tokens


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """A service with a token and with every limit small."""
    folder = tmp_path_factory.mktemp("strict")
    (folder / "tokens.txt").write_text("old-token\n")
    limits = {"queue-items": 4, "client-items": 3, "max-items": 3, "max-solution-kib": 1, "max-body-mib": 0.01}
    options = [f"--{name}={value}" for name, value in limits.items()]
    options += ["--token-file", "tokens.txt", "--allowed-host", "judge.example"]
    with obeying(folder, *options, token="old-token") as running:
        running.folder = folder
        yield running


JSON = {"Content-Type": "application/json"}
ANY = b'{"items": [{"id": "a", "solution_str": "", "ground_truth": %b}]}'


@pytest.mark.parametrize(
    ("status", "kind", "request_"),
    [
        (400, "bad-json", {"content": b"{", "headers": JSON}),
        (422, "unprocessable-body", {"content": b'{"items": [], "timeout_ms": NaN}', "headers": JSON}),
        (422, "unprocessable-body", {"content": b'{"items": [], "seed": 1e999}', "headers": JSON}),
        (422, "unprocessable-body", {"content": ANY % b"NaN", "headers": JSON}),
        (422, "unprocessable-body", {"content": ANY % b'{"a": [-1e999]}', "headers": JSON}),
        (400, "bad-json", {"content": ANY % (b"1" * 5000), "headers": JSON}),
        (400, "bad-json", {"content": b'{"items": "\xff"}', "headers": JSON}),
        (400, "bad-json", {"content": b"[" * 500 + b"]" * 500, "headers": JSON}),
        (400, "bad-gzip", {"content": b"{}", "headers": {**JSON, "Content-Encoding": "gzip"}}),
        (403, "unknown-host", {"json": {"items": []}, "headers": {"Host": "rebound.example:8899"}}),
        (403, "unknown-host", {"method": "GET", "url": "/health", "headers": {"Host": "rebound.example"}}),
        (403, "unknown-origin", {"json": {"items": []}, "headers": {"Origin": "http://evil.example"}}),
        (403, "unknown-origin", {"json": {"items": []}, "headers": {"Origin": "http://127.0.0.1:3000"}}),
        (403, "unknown-origin", {"json": {"items": []}, "headers": {"Origin": "null"}}),
        (401, "unauthorized", {"json": {"items": []}, "headers": {"Authorization": "Bearer old-toke"}}),
        (401, "unauthorized", {"json": {"items": []}, "headers": {"Authorization": "old-token"}}),
        (404, "unknown-reward", {"json": {"items": [], "reward": "nope"}}),
        (404, "not-found", {"url": "/v2/rewards", "json": {}}),
        (405, "method-not-allowed", {"method": "PUT", "json": {}}),
        (413, "body-too-large", {"content": b" " * 20_000, "headers": JSON}),
        (413, "body-too-large", {"content": (b" " * 2_000 for _ in range(10)), "headers": JSON}),
        (413, "too-many-items", {"json": texts(*"abcd")}),
        (413, "too-many-items", {"url": "/get_reward", "json": {"query": list("abcd")}}),
        (415, "not-json", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}),
        (415, "unknown-encoding", {"content": b"{}", "headers": {**JSON, "Content-Encoding": "br"}}),
        (422, "unprocessable-body", {"json": {"items": [{"id": "a", "solution_str": 5}]}}),
        (422, "unprocessable-body", {"json": texts("a") | {"unknown": 1}}),
        (422, "unprocessable-body", {"json": {"items": [{"id": "a", "solution_str": "x"}] * 2}}),
        (422, "unprocessable-body", {"json": texts("a") | {"mode": "groupwise"}}),
    ],
)
def test_a_wrong_request_is_a_problem(strict, status, kind, request_):
    request = {"method": "POST", "url": "/v1/rewards"} | request_
    response = strict.client.request(**request)
    problem = response.json()
    assert (response.status_code, problem["status"], problem["type"]) == (status, status, f"urn:hone:problem:{kind}")
    assert response.headers["content-type"] == "application/problem+json"
    assert problem.keys() == {"type", "title", "status", "detail", "instance", "retryable", "errors"}
    assert problem["retryable"] is False
    assert problem["instance"] == f"urn:hone:request:{response.headers['x-request-id']}"


def test_a_problem_points_to_what_is_wrong(strict):
    items = [{"id": "a", "solution_str": "x"}, {"id": "b", "solution": "y"}]
    problem = strict.post("/v1/rewards", {"items": items}).json()
    assert problem["errors"] == [
        {"pointer": "#/items/1/solution_str", "detail": "Field required"},
        {"pointer": "#/items/1/solution", "detail": "unknown field"},
    ]
    same = {"solution_str": "x", "group_id": "g"}
    items = [{"id": "a", **same}, {"id": "b", **same, "prompt": "?"}]
    problem = strict.post("/v1/rewards", {"mode": "groupwise", "items": items}).json()
    (error,) = problem["errors"]
    assert error == {"pointer": "#/items/1", "detail": "differs from the first item of its group in prompt"}


def test_a_small_gzip_body_does_not_become_a_large_one(strict):
    import gzip

    bomb = gzip.compress(b" " * (64 << 20))
    before = psutil.Process(strict.process.pid).memory_info().rss
    response = strict.client.post("/v1/rewards", content=bomb[:9_000], headers={**JSON, "Content-Encoding": "gzip"})
    assert response.status_code == 413
    assert psutil.Process(strict.process.pid).memory_info().rss < before + (16 << 20)


def test_a_response_too_long_to_score_costs_its_item_alone(strict):
    results = strict.score({"solution_str": "x" * 2000}, {"solution_str": "short"}, reward="obey")
    assert [result["score"] for result in results] == [None, 5.0]
    assert results[0]["error"]["fault"] == "data" and "the limit is 1 KiB" in results[0]["error"]["detail"]


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(strict):
    (strict.folder / "tokens.txt").write_text("old-token another-token third-token")
    with ThreadPoolExecutor(2) as threads:
        busy = threads.submit(strict.post, "/v1/rewards", texts("sleep 1 a", "sleep 1 b", "sleep 1 c"))
        until(lambda: strict.client.get("/health").json()["queue_depth"] == 3)
        own = strict.post("/v1/rewards", texts("more"))
        others = strict.post("/v1/rewards", texts("x", "y"), headers={"Authorization": "Bearer another-token"})
        fits = threads.submit(strict.post, "/v1/rewards", texts("z"), headers={"Authorization": "Bearer third-token"})
        assert busy.result(20).json()["summary"]["ok"] == fits.result(20).json()["summary"]["ok"] + 2 == 3
    for response, status, kind in ((own, 429, "client-limit"), (others, 503, "queue-full")):
        assert (response.status_code, response.json()["type"]) == (status, f"urn:hone:problem:{kind}")
        assert response.json()["retryable"] and int(response.headers["retry-after"]) >= 1
    assert strict.post("/v1/rewards", texts("more")).status_code == 200


def test_tokens_are_rotated_in_their_file_and_never_logged(strict):
    def status(token):
        return strict.post("/v1/rewards", {"items": []}, headers={"Authorization": f"Bearer {token}"}).status_code

    (strict.folder / "tokens.txt").write_text("new-token\nold-token\n")
    assert (status("new-token"), status("old-token")) == (200, 200)
    (strict.folder / "tokens.txt").write_text("new-token\n")
    assert (status("new-token"), status("old-token")) == (200, 401)
    (strict.folder / "tokens.txt").write_text("")
    assert (status("new-token"), status("wrong")) == (401, 401)  # revoked, and nothing is open
    (strict.folder / "tokens.txt").unlink()
    assert status("new-token") == 401
    (strict.folder / "tokens.txt").write_text("new-token")
    assert status("new-token") == 200
    assert [strict.client.get(path).status_code for path in ("/livez", "/readyz", "/health")] == [200, 200, 200]
    assert [strict.client.get(path).status_code for path in ("/metrics", "/openapi.json")] == [401, 401]
    assert "-token" not in strict.log.read_text()
    (strict.folder / "tokens.txt").write_text("old-token\n")


@pytest.mark.parametrize(
    "host", ["localhost:8899", "LOCALHOST", "127.0.0.1", "[::1]:8899", "10.0.0.7", "judge.example:1"]
)
def test_a_server_is_asked_by_address_localhost_or_an_allowed_name(strict, host):
    allowed = {"Host": host, "Origin": "https://judge.example"}
    assert strict.post("/v1/rewards", {"items": []}, headers=allowed).status_code == 200


# ---- the end


@pytest.mark.slow("a server of its own that ends")
def test_sigterm_drains_and_a_second_signal_cancels(tmp_path):
    """That a drained service ends with 0 is seen by `serving`, at the end of every service of these tests."""
    with obeying(tmp_path, timeout_s=60) as served, ThreadPoolExecutor(2) as threads:
        workers = psutil.Process(served.process.pid).children()
        finishes = threads.submit(served.post, "/v1/rewards", texts("sleep 1 last"))
        never = threads.submit(served.post, "/v1/rewards", texts("sleep 50 never"))
        until(lambda: served.client.get("/health").json()["queue_depth"] == 2)
        served.process.send_signal(signal.SIGTERM)
        until(lambda: served.client.get("/readyz").status_code == 503)
        health, refused = served.client.get("/health"), served.post("/v1/rewards", texts("new"))
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:hone:problem:draining")
        assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
        assert finishes.result(20).json()["summary"]["ok"] == 1
        served.process.send_signal(signal.SIGINT)
        cancelled = never.result(20)
        assert (cancelled.status_code, cancelled.json()["type"]) == (503, "urn:hone:problem:cancelled")
        assert served.process.wait(60) == 130
        gone, alive = psutil.wait_procs(workers, timeout=60)
        assert len(gone) == 2 and not alive


@pytest.mark.slow("a server of its own that ends")
def test_a_full_disk_costs_the_log_and_no_score(tmp_path):
    """From some moment on no file of the service may grow: what a full disk does to its log. It still ends with 0."""
    with obeying(tmp_path, timeout_s=60) as served:
        size = served.log.stat().st_size
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (size + 100, size + 100))
        for number in range(20):  # each has a line of the log, for its name
            items = {"reward": "place", "items": [{"id": "a", "solution_str": f"fine {number}"}]}
            answer = served.post("/v1/rewards", items, headers={"X-Request-Id": f"named-{number}"})
            assert answer.json()["results"][0]["score"] == 0.0
        assert size < served.log.stat().st_size <= size + 100
        assert "named-19" not in served.log.read_text()


@pytest.mark.parametrize(
    ("rewards", "options", "code", "said"),
    [
        ("{use: exact}", ["--host", "0.0.0.0"], 2, "needs a token"),
        ("{use: exact}", ["--token-env", "HONE_NO_SUCH_VARIABLE"], 2, "the environment has no HONE_NO_SUCH_VARIABLE"),
        ("{use: exact}", ["--queue-items", "0"], 2, "--queue-items"),
        ("{use: exakt}", [], 2, "Did you mean exact?"),
        ("{use: 'broken.py:f'}", [], 2, "No module named 'not_there'"),
        ("{use: exact}", ["--warm-up", "item.json"], 3, "the row has no answer"),
    ],
)
def test_a_service_that_cannot_start_says_why(tmp_path, monkeypatch, capsys, rewards, options, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(f"reward: {{components: [{rewards}]}}")
    (tmp_path / "broken.py").write_text("import not_there\ndef f(group): return []\n")
    (tmp_path / "item.json").write_text(json.dumps({"solution_str": "4"}))
    assert main(["serve", "reward", "bad.yaml", "--port", "0", *options]) == code
    out, err = capsys.readouterr()
    assert said in err and "ready" not in out


def test_a_port_that_is_taken_is_named(served, tmp_path, capsys):
    (tmp_path / "fine.yaml").write_text("reward: {components: [{use: exact}]}")
    port = served.url.rpartition(":")[2]
    assert main(["serve", "reward", str(tmp_path / "fine.yaml"), "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
