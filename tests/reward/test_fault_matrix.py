"""The claim of the reward side, over real sockets: whatever fault is injected, the trained batch holds exactly the
rewards of the run without it, or the sample is masked and counted. Never a made-up number.

Each fault is injected twice: so that it passes (the rewards must be bit-equal) and so that it stays (every sample must
be masked). The server's own memory is the witness that the fault happened.
"""

import asyncio
import copy
import errno
import gzip
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import faulty_server
import pytest
import torch
from faulty_server import SILENCE, Answer, FaultyServer, good_reply, score_of

from hone.data.pack import collate
from hone.errors import RewardError
from hone.reward.aggregate import component_metrics
from hone.types import Fault, Group

TEXTS = [[f"group {g} sample {s}: " + "word " * (g + s) for s in range(4)] for g in range(5)]


@pytest.fixture
def train(make_rewards, make_group):
    """Score some groups with the services at these URLs, all at once; early: each sample as it finishes."""

    def score(*urls, early=False, texts=TEXTS, deadline_s=10.0, **args) -> list[Group]:
        component = {
            "use": "service",
            "args": {"url": list(urls), "deadline_s": deadline_s, "first_backoff_s": 0.01, **args},
        }

        async def go():
            async with make_rewards(component) as rewards:
                groups = [make_group(*group, prompt_id=f"p{n}") for n, group in enumerate(texts)]
                return await asyncio.gather(*(one(rewards, group) for group in groups))

        async def one(rewards, group):
            async with rewards.begin(group.prompt) as scoring:
                for sample in group.samples if early else ():
                    scoring.on_sample(sample)
                return await scoring.finish(group.samples)

        return asyncio.run(go())

    return score


@pytest.fixture(scope="module")
def fault_free():
    """The rewards without a fault, computed here: what a service adds to them is nothing."""
    return [[0.75 * score_of(text) + 0.25 * score_of(text[::-1]) for text in group] for group in TEXTS]


def assert_bit_equal(groups, expected):
    """The rewards, and the tensor that is trained on."""
    assert [list(group.rewards) for group in groups] == expected
    batch = collate(groups)
    trained = torch.tensor([reward for group in expected for reward in group])
    assert batch.reward_S.numpy().tobytes() == trained.numpy().tobytes()
    assert batch.loss_mask_T.eq(1).all()


def assert_masked(groups, cause):
    """No number anywhere: not in the rewards, not in the tensors, and counted in the metrics."""
    scores = [score for group in groups for score in group.scores["service"]]
    assert {score.fault for score in scores} == {Fault.INFRA}
    assert any(cause in score.detail or "no answer in" in score.detail for score in scores)  # on a busy machine
    assert all(reward is None for group in groups for reward in group.rewards)
    batch = collate(groups)
    assert batch.reward_S.isnan().all() and not batch.loss_mask_T.any()
    metrics = component_metrics(groups)
    assert metrics["reward/service_fault_frac"] == 1.0 and "reward/service_mean" not in metrics


# ---- answers that are wrong


def changed(change):
    """The right answer with one thing wrong."""

    def answer(request):
        reply = good_reply(request.body)
        return Answer.of(change(reply, reply["results"]) or reply)

    return answer


def text_of(old, new):
    """The right answer with a piece of its text replaced."""
    return lambda request: Answer(body=json.dumps(good_reply(request.body)).replace(old, new, 1).encode())


def set_of(**fields):
    """The right answer with the last result changed."""
    return changed(lambda reply, results: results[-1].update(fields))


def score_as(text):
    """The right answer, its first score written so."""

    def answer(request):
        reply = good_reply(request.body)
        right = json.dumps(reply["results"][0]["score"])
        return Answer(body=json.dumps(reply).replace(f'"score": {right}', f'"score": {text}', 1).encode())

    return answer


def compressed(request):
    return Answer(body=gzip.compress(b" " * 10_000_000), headers={"Content-Encoding": "gzip"})


def half(request):
    body = json.dumps(good_reply(request.body)).encode()
    return Answer(body=body[: len(body) // 2])


def half_and_gone(request):
    body = json.dumps(good_reply(request.body)).encode()
    return Answer(body=body[: len(body) // 2], headers={"Content-Length": str(len(body))}, close=True)


WRONG = {
    "truncated JSON": half,
    "truncated body": half_and_gone,
    "HTML with status 200": lambda request: Answer(body=b"<html><body>502 Bad Gateway</body></html>"),
    "an empty body": lambda request: Answer(),
    "NaN score": score_as("NaN"),
    "infinite score": score_as("-Infinity"),
    "overflowing score": score_as("1e999"),
    "null score": set_of(score=None),
    "string score": score_as('"0.5"'),
    "boolean score": score_as("true"),
    "score out of range": set_of(score=1.5, components={}),
    "score that is not the sum": score_as("0.123"),
    "NaN component": text_of('"weight": 0.75', '"weight": NaN'),
    "fewer results": changed(lambda reply, results: results.pop() and None),
    "more results": changed(lambda reply, results: results.append(copy.deepcopy(results[0]))),
    "no results": changed(lambda reply, results: results.clear()),
    "duplicate id": changed(lambda reply, results: results[0].update(id=results[-1]["id"])),
    "another's id": set_of(id="p77:0"),
    "missing id": changed(lambda reply, results: results[-1].pop("id") and None),
    "permuted order": changed(lambda reply, results: results.reverse()),
    "an error that says nothing": set_of(status="error", score=None, components={}),
    "a score and an error": set_of(error={"fault": "infra", "retryable": True, "component": None, "detail": "x"}),
    "another schema": text_of('"schema_version": "1"', '"schema_version": "2"'),
    "a list": changed(lambda reply, results: results),
    "deep JSON": lambda request: Answer(body=b"[" * 200_000),
    "100 MB": lambda request: Answer(body=[b" " * (1 << 20)] * 100),
    "gzip bomb": compressed,
}
FAILING = {
    "500": lambda request: Answer(500, b"Internal Server Error"),
    "502": lambda request: Answer(502, b"<html>Bad Gateway</html>"),
    "503 with Retry-After": lambda request: Answer(503, headers={"Retry-After": "0"}),
    "504": lambda request: Answer(504),
    "429": lambda request: Answer(429, headers={"Retry-After": "0"}),
    "reset": lambda request: Answer(reset=True),
    "closed without an answer": lambda request: Answer(status=100, close=True, headers={"Content-Length": "0"}),
}
CAUSE = {
    **dict.fromkeys(WRONG, "answer"),
    "truncated body": "RemoteProtocolError",
    "500": "HTTP 500",
    "502": "HTTP 502",
    "503 with Retry-After": "HTTP 503",
    "504": "HTTP 504",
    "429": "HTTP 429",
    "reset": "Error",
    "closed without an answer": "RemoteProtocolError",
}
"""What the masked samples must say."""
FAULTS = WRONG | FAILING


def at_first(fault):
    """Once for each set of samples: an answer to the same question is right the second time."""
    seen = set()

    def answer(request):
        if tuple(request.ids) in seen:
            return None
        seen.add(tuple(request.ids))
        return fault(request)

    return answer


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_passes_changes_no_bit(train, fault_free, name):
    with FaultyServer(at_first(FAULTS[name])) as server:
        groups = train(server.url)
    assert server.faults == 5  # the witness: every question was answered wrongly once
    assert_bit_equal(groups, fault_free)


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "100 MB"])  # longer to send than the deadline
def test_a_fault_that_stays_masks_and_counts(train, name):
    for deadline_s in (0.2, 3.0):  # on a busy machine the first may be over before the server is heard
        with FaultyServer(FAULTS[name]) as server:
            groups = train(server.url, deadline_s=deadline_s, texts=TEXTS[:2])
        if len(server.requests) >= 2:
            break
    assert server.faults == len(server.requests) >= 2
    assert_masked(groups, CAUSE[name])


@pytest.mark.slow("reads 100 MB")
def test_an_answer_of_100_mb_that_stays_is_cut_off_and_masked(train):
    """Of each answer no more is read than may be: the others of its bytes are never sent."""
    for deadline_s in (2.0, 8.0):  # on a busy machine the first may be over before a second try
        with FaultyServer(FAULTS["100 MB"]) as server:
            groups = train(server.url, deadline_s=deadline_s, texts=TEXTS[:1])
        if len(server.requests) >= 2 and server.cut_off:
            break
    assert server.faults == len(server.requests) >= 2
    assert server.cut_off >= 1 and server.bytes_sent < 60e6 * server.faults
    assert_masked(groups, "answer")


@pytest.mark.parametrize(
    "hanging",
    [SILENCE, Answer(body=[b" "] * 1000, pause_s=0.05), Answer(body=b"{", headers={"Content-Length": "9"}, pause_s=60)],
    ids=["never answers", "trickles", "stops in the middle"],
)
def test_a_server_that_hangs_changes_no_bit_and_blocks_no_caller(train, fault_free, hanging):
    """Each second question is asked and answered before the deadline, or its score would be masked."""
    for deadline_s in (2.0, 30.0):  # on a busy machine the first may be too short for any answer
        with FaultyServer(at_first(lambda request: hanging)) as server:
            groups = train(server.url, deadline_s=deadline_s)
        if all(reward is not None for group in groups for reward in group.rewards):
            break
    assert len(server.requests) == 10
    assert_bit_equal(groups, fault_free)


def test_a_server_that_hangs_for_good_masks_within_the_deadline(train):
    for deadline_s in (0.6, 10.0):  # on a busy machine the first may be over before the server is heard
        with FaultyServer(lambda request: SILENCE) as server:
            groups = train(server.url, deadline_s=deadline_s)
        if len(server.requests) >= 5:
            break
    assert server.open_now == 0 and len(server.requests) >= 5
    assert_masked(groups, "no answer in")


def test_a_head_that_trickles_in_is_no_answer_either(train, fault_free):
    """The slow-loris of a server: one byte of the status line at a time."""
    connections = []

    async def drip(reader, writer):
        connections.append(writer)
        try:
            for byte in b"HTTP/1.1 200 OK\r\nX-Pad: " + b"a" * 1000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)
        except ConnectionError:
            pass
        finally:
            writer.close()

    class Loris(FaultyServer):
        async def serve(self, port, started=lambda: None):
            self._stop = asyncio.Event()
            async with await asyncio.start_server(drip, self.host, port) as server:
                self.port = server.sockets[0].getsockname()[1]
                started()
                await self._stop.wait()

    for deadline_s in (2.0, 30.0):  # on a busy machine the first may be too short for any answer
        with Loris() as loris, FaultyServer() as good:
            groups = train(loris.url, good.url, deadline_s=deadline_s)
        if all(reward is not None for group in groups for reward in group.rewards):
            break
    assert connections
    assert_bit_equal(groups, fault_free)


def test_every_kind_of_failure_in_turn(train, fault_free):
    kinds = list(FAILING.values())

    def in_turn(request):
        return kinds[request.number // 2 % len(kinds)](request) if request.number % 2 else None

    with FaultyServer(in_turn) as server:
        groups = train(server.url, early=True, deadline_s=30.0)
    assert server.faults >= 19
    assert_bit_equal(groups, fault_free)


# ---- servers that come and go


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_process(port, seconds_per_request):
    command = [sys.executable, str(Path(faulty_server.__file__)), str(port), str(seconds_per_request)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_refused_at_the_start_and_there_a_second_later(train, fault_free):
    port = free_port()
    with socket.socket() as probe:
        refused = probe.connect_ex(("127.0.0.1", port))
    server = FaultyServer()
    server.port = port
    later = threading.Timer(0.5, server.__enter__)
    later.start()
    try:
        groups = train(f"http://127.0.0.1:{port}")
    finally:
        later.join()
        server.__exit__()
    assert refused == errno.ECONNREFUSED
    assert_bit_equal(groups, fault_free)


def test_killed_in_the_middle_of_a_batch_and_started_again(train, fault_free):
    port = free_port()
    process, restarted = start_process(port, 0.3), []

    def kill_and_restart():
        time.sleep(0.15)  # every request is in the server now
        process.send_signal(signal.SIGKILL)
        process.wait()
        restarted.append(start_process(port, 0))

    async def go():
        return await asyncio.gather(asyncio.to_thread(kill_and_restart), asyncio.to_thread(score))

    def score():
        return train(f"http://127.0.0.1:{port}", early=True, deadline_s=20.0)

    try:
        _, groups = asyncio.run(go())
    finally:
        process.kill()
        for other in restarted:
            other.kill()
            other.wait()
            other.stdout.close()
        process.stdout.close()
    assert process.returncode == -signal.SIGKILL and restarted
    assert_bit_equal(groups, fault_free)


def test_one_of_two_killed_for_good(train, fault_free):
    process = start_process(port := free_port(), 0.2)
    killing = subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -9 {process.pid}"])
    try:
        with FaultyServer() as good:
            groups = train(f"http://127.0.0.1:{port}", good.url, early=True)
    finally:
        process.kill()
        process.wait()
        killing.wait()
        process.stdout.close()
    assert len(good.requests) >= 10
    assert_bit_equal(groups, fault_free)


# ---- faults of single items, and of nobody


def error(fault, retryable, detail="why"):
    return {"fault": fault, "retryable": retryable, "component": None, "detail": detail}


def failing_item(which, fault, retryable, times=10**9):
    """The right answer, but for the item of this id the service has an error, a number of times."""
    seen = []

    def change(reply, results):
        for result in results:
            if result["id"] == which and len(seen) < times:
                seen.append(which)
                result.update(status="error", score=None, components={}, error=error(fault, retryable))

    return changed(change), seen


@pytest.mark.parametrize("early", [False, True], ids=["groups", "samples"])
def test_only_the_items_that_failed_are_sent_again(train, fault_free, early):
    answer, seen = failing_item("p1:2", "infra", retryable=True, times=2)
    with FaultyServer(answer) as server:
        groups = train(server.url, early=early)
    assert len(seen) == 2
    assert [request.ids for request in server.requests].count(["p1:2"]) == (3 if early else 2)
    assert sum(len(request.ids) for request in server.requests) == 22  # 20 and two more
    assert_bit_equal(groups, fault_free)


def test_an_item_that_stays_unscored_costs_no_other_item(train, fault_free):
    answer, seen = failing_item("p1:2", "infra", retryable=True)
    with FaultyServer(answer) as server:
        groups = train(server.url, deadline_s=0.5)
    assert len(seen) > 1
    assert groups[1].rewards[2] is None and groups[1].scores["service"][2].detail == "why"
    rewards = [list(group.rewards) for group in groups]
    rewards[1][2] = fault_free[1][2]
    assert rewards == fault_free
    batch = collate(groups)
    assert batch.reward_S.isnan().nonzero().tolist() == [[6]]
    assert component_metrics(groups)["reward/service_fault_frac"] == pytest.approx(1 / 20)


def test_a_fault_of_the_row_is_not_sent_again(train):
    answer, seen = failing_item("p0:0", "data", retryable=False)
    with FaultyServer(answer) as server:
        groups = train(server.url, texts=TEXTS[:1])
    assert seen == ["p0:0"] and len(server.requests) == 1
    assert groups[0].scores["service"][0].fault is Fault.DATA and groups[0].rewards[0] is None


def test_a_fault_of_the_model_earns_the_minimum_that_the_service_gave(train):
    def broke(reply, results):
        for part in results[0]["components"].values():
            part.update(score=0.0, fault="model", detail="no JSON")
        results[0]["score"] = 0.0

    with FaultyServer(changed(broke)) as server:
        (group,) = train(server.url, texts=TEXTS[:1])
    assert group.rewards[0] == 0.0
    assert group.scores["service"][0].fault is Fault.MODEL and "no JSON" in group.scores["service"][0].detail


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 415, 422])
def test_a_refusal_is_masked_and_not_repeated(train, status):
    with FaultyServer(lambda request: Answer.of({"detail": "not like this"}, status)) as server:
        groups = train(server.url, texts=TEXTS[:1])
    assert len(server.requests) == 1
    assert_masked(groups, f"HTTP {status}: not like this")


def test_a_group_goes_whole_or_not_at_all_when_it_is_scored_as_one(train, fault_free):
    answer, seen = failing_item("p1:2", "infra", retryable=True, times=1)
    with FaultyServer(answer) as server:
        groups = train(server.url, mode="groupwise")
    assert seen and all(len(request.ids) == 4 for request in server.requests)
    assert len(server.requests) == 6
    assert_bit_equal(groups, fault_free)


def test_another_service_than_the_run_began_with_ends_it(train):
    def other(reply, results):
        reply["server"]["fingerprint"] = "sha256:other"

    def later(request):
        return changed(other)(request) if request.number > 2 else None

    # Requests are under way at the same time: the third may be answered before the first, which is then the other one.
    either = "sha256:other, not sha256:right|sha256:right, not sha256:other"
    with FaultyServer(later) as server, pytest.raises(RewardError, match=either):
        train(server.url)
    with FaultyServer(later) as server:
        groups = train(server.url, allow_other_fingerprint=True)
    assert server.faults == 3 and all(None not in group.rewards for group in groups)


def test_text_that_is_none_of_utf_8_spoils_nothing(train):
    with FaultyServer() as server:
        (group,) = train(server.url, texts=[["a\ud800b", "fine", "\x00\x1b"]])
    assert None not in group.rewards and group.rewards[1] == 0.75 * score_of("fine") + 0.25 * score_of("enif")


def test_the_rules_of_a_service_are_remembered_and_its_failures_reported_once(make_rewards, make_group):
    with FaultyServer(lambda request: Answer(502) if request.number == 1 else None) as server:
        component = {"use": "service", "args": {"url": server.url}}

        async def go(expected):
            async with make_rewards(component) as rewards:
                rewards.expect(expected)
                await rewards.score(make_group("a", "b"))
                return rewards.fingerprints(), rewards.http_metrics(), rewards.http_metrics()

        fingerprints, told, told_again = asyncio.run(go({}))
        assert fingerprints == {"service": "sha256:right"}
        assert told == {"reward/service_http_failed": 1.0, "reward/service_http_given_up": 0.0}
        assert set(told_again.values()) == {0.0}
        assert asyncio.run(go(fingerprints))[0] == fingerprints
        with pytest.raises(RewardError, match="sha256:right, not sha256:former"):
            asyncio.run(go({"service": "sha256:former"}))
