"""Inside the reward service: memory, pace, micro-batches, fingerprint; and what crosses the wire."""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
from pictures import save_picture
from PIL import Image

from hone.config.load import load_config
from hone.data.picture_processors import QwenProcessor
from hone.data.pictures import BrokenPicture
from hone.reward.client import ServiceReward, ServiceSettings
from hone.reward.fingerprint import fingerprint
from hone.reward.picture_urls import ShownPictures, picture_of
from hone.reward.rewards import Component
from hone.reward.strict_json import decode_json, encode_json, plain
from hone.reward.wire import (
    Disagreement,
    Item,
    ItemResult,
    RewardReply,
    RewardRequest,
    RewardSummary,
    ServerInfo,
    component_result,
    groups_of,
    items_of,
    request_parts,
)
from hone.serve.problem import HttpProblem
from hone.serve.queue import MicroBatcher, RateEstimate, ScoreCache, ScoredGroup, ScoreQueue, batched
from hone.serve.scoring import ScoringService, ScoringSettings
from hone.types import Fault, Group, Prompt, Sample, Score, Turn, VersionSpan


def group_of(*texts):
    samples = tuple(
        Sample("p", i, (7, 8), (-0.25, -1e-3), (VersionSpan(3, 2),), "stop", text) for i, text in enumerate(texts)
    )
    return Group(Prompt("p", 0, "2+2=", (1,), answer="4"), samples)


# ---- the wire


def test_a_group_crosses_the_wire_unchanged():
    chat = ({"role": "user", "content": "2+2?", "name": "x"},)
    group = group_of("4", "five")
    samples = (
        replace(group.samples[0], loss_mask=(True, False), turns=(Turn(0, 1, 0.5, {"m": 1.0}),)),
        replace(group.samples[1], finish_reason="length"),
    )
    prompt = replace(group.prompt, columns={"level": 3, "tags": ["a"], "none": None}, messages=chat)
    group = Group(prompt, samples)
    request = RewardRequest(mode="groupwise", items=items_of(group, trace=True))
    received = RewardRequest.model_validate(decode_json(encode_json(request.model_dump(mode="json"))))
    (work,) = groups_of(received.items, received.mode)
    assert work.group == group and work.places == (0, 1)


def test_pictures_cross_the_wire_once(tmp_path):
    """Whole, in their own shape, at most this number of pixels a side; what is none is named."""
    save_picture(tmp_path / "wide.png", 1, width=300, height=150)
    Image.new("RGB", (20, 30), colour := (10, 200, 60)).save(tmp_path / "small.png")
    processor = QwenProcessor(28, (0.5,) * 3, (0.25,) * 3, "bicubic", least_pixels=784, most_pixels=784 * 4)
    wide, small = (processor.picture(tmp_path / name) for name in ("wide.png", "small.png"))
    urls = asyncio.run(ShownPictures(100).urls([wide, small, wide]))
    items = items_of(group_of("4", "five"), pictures=urls)
    request = RewardRequest(mode="groupwise", **request_parts(items))
    assert len(request.pictures) == 2
    received = RewardRequest.model_validate(decode_json(encode_json(request.model_dump(mode="json"))))
    pictures = {name: picture_of(url) for name, url in received.pictures.items()}
    (work,) = groups_of(received.items, received.mode, pictures)
    first, second, third = work.group.prompt.pictures
    assert first.read().shape == (50, 100, 3) and second.read().shape == (30, 20, 3) and third is first
    assert max(first.read(within=10).shape) == 10
    assert np.abs(second.read() - np.array(colour, np.float32)).max() < 5
    assert pickle.loads(pickle.dumps(second)).read().shape == (30, 20, 3)
    with pytest.raises(ValueError, match=r"has picture 'x', which is not in .pictures."):
        RewardRequest(items=[Item(id="a", solution_str="", pictures=["x"])])
    for url in ("a.png", "https://example.org/a.png", "data:image/png;base64,!", "data:image/png;base64,aaaa"):
        with pytest.raises(BrokenPicture):
            picture_of(url)


def test_items_of_several_groups_find_back_to_their_places():
    items = [Item(id=str(n), group_id=group, solution_str="x") for n, group in enumerate("abacb")]
    assert [work.places for work in groups_of(items, "groupwise")] == [(0, 2), (1, 4), (3,)]
    assert [work.places for work in groups_of(items, "pointwise")] == [(0,), (1,), (2,), (3,), (4,)]
    with pytest.raises(Disagreement, match="needs a group_id") as raised:
        groups_of([*items, Item(id="5", solution_str="x")], "groupwise")
    assert raised.value.place == 5


class NumpyLike:
    def __init__(self, value):
        self.value = value

    def tolist(self):
        return self.value


def test_plain_data_of_a_row():
    row = {"a": NumpyLike([1, 2.5]), "b": (True, None), 3: {"nan": float("nan")}, "c": NumpyLike(4)}
    assert plain(row) == {"a": [1, 2.5], "b": [True, None], "3": {"nan": None}, "c": 4}
    with pytest.raises(ValueError, match=r"row.x\[1\] is bytes"):
        plain({"x": [1, b"2"]}, "row")


@pytest.mark.parametrize(
    "text", [b"NaN", b"[Infinity]", b"-1e400", b'{"a":}', b"\xff", b"[" * 65 + b"]" * 65, b"1" * 5000]
)
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError):
        decode_json(text)


def test_depth_is_of_brackets_and_not_of_text():
    assert decode_json(b'["[[[[[[[[[[{{{{", "\\"[["]', max_depth=1) == ["[[[[[[[[[[{{{{", '"[[']
    with pytest.raises(ValueError, match="nested 3 deep"):
        decode_json(b'[{"a": []}]', max_depth=2)


OK = {"id": "a", "status": "ok", "score": 0.5, "components": {"x": {"score": 1.0, "weight": 0.5}}}


@pytest.mark.parametrize(
    "changed",
    [
        {"score": float("nan")},
        {"score": None},
        {"score": "0.5"},
        {"score": 0.6},
        {"max": 0.4},
        {"min": 0.6},
        {"status": "error"},
        {"error": {"fault": "infra", "retryable": True, "detail": ""}},
        {"components": {"x": {"score": 1.0, "weight": 1e308}, "y": {"score": 10.0, "weight": 1e308}}},
        {"components": {"x": {"score": None, "weight": 0.5}}},
        {"surprise": 1},
    ],
)
def test_a_result_that_contradicts_itself_is_no_result(changed):
    ItemResult.model_validate(OK)
    with pytest.raises(ValueError):
        ItemResult.model_validate(OK | changed)


def test_a_measurement_that_is_not_finite_is_left_out():
    score = Score(1.0, metrics={"good": 2.0, "bad": float("nan")})
    assert component_result(score, 1.0).metrics == {"good": 2.0}


# ---- memory and pace


def test_memory_forgets_the_oldest_and_never_learns_our_failures():
    memory = ScoreCache(max_items=3, ttl_s=60)
    done = ScoredGroup((Score(1.0),), 0.1)
    for key in (b"a", b"b", b"c"):
        memory.put(key, done)
    assert memory.get(b"a") is done  # used again, so b is now the oldest
    memory.put(b"d", done)
    assert [memory.get(key) is done for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    memory.put(b"e", ScoredGroup((Score(None, Fault.INFRA, "down"),), 0.1))
    memory.put(b"f", ScoredGroup((Score(None, Fault.DATA, "no answer"),), 0.1))
    assert memory.get(b"e") is None and memory.get(b"f") is not None


def test_memory_ends_with_its_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hone.serve.queue.time.monotonic", lambda: now[0])
    memory = ScoreCache(max_items=3, ttl_s=60)
    memory.put(b"a", ScoredGroup((Score(1.0),), 0.1))
    now[0] += 59
    assert memory.get(b"a") is not None
    now[0] += 2
    assert memory.get(b"a") is None


def test_pace_is_learnt_from_what_finishes_and_from_what_does_not(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("hone.serve.queue.time.monotonic", lambda: now[0])
    pace = RateEstimate()
    pace.begin()
    assert pace.wait_s(100, 10) == 0.0  # nothing is known yet
    now[0] = 4.0
    for _ in range(4):  # a batch of them at one moment
        pace.finished(2)
    assert pace.wait_s(10, 0) == 5.0
    now[0] = 24.0  # and then nothing for 20 s, with 10 items running: 2 s each at best
    assert pace.wait_s(10, 10) == 20.0


def test_a_queue_scores_equal_work_once_and_drops_what_no_request_waits_for():
    seen = []

    class Slow:
        async def score(self, group):
            seen.append(group.samples[0].text)
            await asyncio.sleep(0.01)
            return (Score(1.0),) * len(group.samples)

    async def main():
        queue = ScoreQueue(
            Component("slow", 1.0, Slow()), ScoreCache(10, 60), max_in_flight_groups=1, abandoned_after_s=0
        )
        first = queue.add(b"1", group_of("first"))
        left_alone = queue.add(b"2", group_of("left"))
        again = queue.find(b"1")
        left_alone.leave()
        third = queue.add(b"3", group_of("third"))
        await asyncio.wait([first.future, again.future, third.future])
        assert first.result() == again.result() and queue.find(b"1").done is not None
        assert queue.find(b"2") is None and (queue.items_waiting, queue.items_running) == (0, 0)
        begun = queue.add(b"4", group_of("begun"))
        await asyncio.sleep(0)
        begun.leave()  # cancelled while it runs
        at_once = queue.add(b"5", group_of("at once"))
        at_once.leave()
        await asyncio.sleep(0.03)
        assert (queue.items_waiting, queue.items_running) == (0, 0)
        assert (await asyncio.wait_for(queue.add(b"6", group_of("last")).future, 5)).scores == (Score(1.0),)

    asyncio.run(main())
    assert seen == ["first", "third", "begun", "last"]


def test_where_stopping_costs_more_than_finishing_work_continues_and_a_repeated_request_finds_it():
    async def main():
        release, calls = asyncio.Event(), []

        class InProcesses:
            async def score(self, group):
                calls.append(group)
                await release.wait()
                return (Score(1.0),) * len(group.samples)

        queue = ScoreQueue(
            Component("p", 1.0, InProcesses()), ScoreCache(10, 60), max_in_flight_groups=1, abandoned_after_s=0.2
        )
        running, queued = queue.add(b"1", group_of("a")), queue.add(b"2", group_of("b"))
        await asyncio.sleep(0)
        running.leave()
        queued.leave()
        again = queue.find(b"1")
        release.set()
        assert (await again.future).scores == (Score(1.0),) and queue.find(b"2") is None
        assert len(calls) == 1

    asyncio.run(main())


def test_abandoned_work_is_cancelled_after_a_while():
    async def main():
        cancelled = asyncio.Event()

        class Endless:
            async def score(self, group):
                try:
                    await asyncio.sleep(60)
                finally:
                    cancelled.set()

        queue = ScoreQueue(
            Component("p", 1.0, Endless()), ScoreCache(10, 60), max_in_flight_groups=1, abandoned_after_s=0.05
        )
        queue.add(b"1", group_of("a")).leave()  # before it could begin
        running = queue.add(b"2", group_of("b"))
        await asyncio.sleep(0)
        running.leave()
        assert not cancelled.is_set()
        await asyncio.wait_for(cancelled.wait(), 10)
        await asyncio.sleep(0)
        assert queue.find(b"2") is None and (queue.items_waiting, queue.items_running) == (0, 0)

    asyncio.run(main())


# ---- micro-batches


class Together:
    """Counts what it is given at one time; a response "fail" fails the batch it is in."""

    def __init__(self):
        self.batches = []

    async def score(self, group):
        raise AssertionError("one by one is not how it is asked")

    async def score_many(self, groups):
        self.batches.append([group.samples[0].text for group in groups])
        await asyncio.sleep(0.005)
        if any(group.samples[0].text == "fail" for group in groups):
            raise RuntimeError("no memory")
        return [tuple(Score(float(len(sample.text))) for sample in group.samples) for group in groups]


def test_what_waits_while_a_batch_runs_is_the_next_batch():
    scorer = Together()

    async def main():
        batcher = MicroBatcher(scorer, max_items=3, max_wait_s=0.001)
        texts = ["a", "bb", "ccc", "dddd", "e"]
        scores = await asyncio.gather(*(batcher.score(group_of(text)) for text in texts))
        assert [score.value for (score,) in scores] == [1, 2, 3, 4, 1]
        gone = asyncio.ensure_future(batcher.score(group_of("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        failed, fine = await asyncio.gather(
            batcher.score(group_of("fail")), batcher.score(group_of("too", "many", "here")), return_exceptions=True
        )
        assert isinstance(failed, RuntimeError) and fine == (Score(3.0), Score(4.0), Score(4.0))

    asyncio.run(main())
    assert scorer.batches == [["a", "bb", "ccc"], ["dddd", "e"], ["fail"], ["too"]]


def test_only_a_scorer_that_can_is_given_batches():
    class Plain:
        async def score(self, group):
            return ()

    plain_one, together = Component("plain", 1.0, Plain()), Component("together", 1.0, Together())
    assert batched(plain_one, 8, 0.0) is plain_one
    assert isinstance(batched(together, 8, 0.0).scorer, MicroBatcher)


# ---- fingerprint


def test_the_fingerprint_is_of_rules_and_their_files(tmp_path):
    def of(weight=1.0, workers=1, code="import helper\ndef f(group): return helper.x\n", helper="x = 1", template="t"):
        (tmp_path / "mine.py").write_text(code)
        (tmp_path / "helper.py").write_text(helper)
        (tmp_path / "unrelated.py").write_text(str(weight + workers))
        (tmp_path / "template.txt").write_text(template)
        (tmp_path / "r.yaml").write_text(
            f"reward:\n  workers: {workers}\n  components:\n"
            f"    - {{use: 'mine.py:f', weight: {weight}, args: {{template: template.txt}}}}\n"
        )
        return fingerprint(load_config(tmp_path / "r.yaml", needed="reward"))

    first = of()
    assert first.startswith("sha256:") and of() == of(workers=4) == first
    others = [of(weight=2.0), of(code="def f(group): return [1]\n"), of(helper="x = 2"), of(template="u")]
    assert len({first, *others}) == 5


# ---- pictures, from a run to a reward of a service


class Direct:
    """In place of `http.Endpoints`: bodies go to a service in this process."""

    def __init__(self, service):
        self.service, self.bodies = service, []

    def __len__(self):
        return 1

    def call(self, *, deadline_s):
        self.try_s = deadline_s
        return self

    async def post(self, path, body, check):
        self.bodies.append(body)
        results = await self.service.score(RewardRequest.model_validate(body), client="a")
        ok = sum(result.status == "ok" for result in results)
        server = ServerInfo(name="a", version="1", boot_id="a", fingerprint="a")
        summary = RewardSummary(n=len(results), ok=ok, error=len(results) - ok)
        reply = RewardReply(server=server, results=results, summary=summary, elapsed_ms=0)
        return check(reply.model_dump(mode="json"))


LOOKS = """
def brightness(group):
    return [float(sum(picture.read().mean() for picture in group.prompt.pictures)) for sample in group.samples]
"""


def test_a_reward_of_a_service_sees_the_prompts_pictures(tmp_path):
    (tmp_path / "mine.py").write_text(LOOKS)
    (tmp_path / "rewards.yaml").write_text("reward: {components: [{use: 'mine.py:brightness'}]}")
    processor = QwenProcessor(28, (0.5,) * 3, (0.25,) * 3, "bicubic", least_pixels=784, most_pixels=784 * 4)
    pictures = []
    for shade in (40, 100):
        Image.new("RGB", (60, 40), (shade,) * 3).save(file := tmp_path / f"{shade}.png")
        pictures.append(processor.picture(file))
    group = group_of("4", "five")
    both, one = (replace(group, prompt=replace(group.prompt, pictures=tuple(p))) for p in (pictures, pictures[:1]))

    async def use():
        service = ScoringService(load_config(tmp_path / "rewards.yaml", needed="reward"), ScoringSettings())
        await service.start()
        endpoints = Direct(service)
        shown, blind = (
            ServiceReward(ServiceSettings(url="http://a", mode="groupwise", pictures=shows), endpoints)
            for shows in (True, False)
        )
        try:
            found = [await client.score(asked) for client in (shown, blind) for asked in (both, one)]
            with pytest.raises(HttpProblem, match="picture 'a' must be a data URL"):
                await service.score(RewardRequest(items=[], pictures={"a": "a.png"}), client="a")
        finally:
            await service.close()
        return endpoints.bodies, [[score.value for score in scores] for scores in found]

    bodies, values = asyncio.run(use())
    assert values == [pytest.approx([140, 140], abs=2), pytest.approx([40, 40], abs=2), [0, 0], [0, 0]]
    assert [len(body["pictures"]) for body in bodies] == [2, 1, 0, 0]
