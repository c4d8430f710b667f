"""Finished samples go to a quick service together and to a slow one each by itself; none costs another its score."""

import asyncio

import pytest
from faulty_server import Answer, FaultyServer, good_reply, score_of

from hone.reward.client import MAX_REQUEST_ITEMS, Gathering
from hone.reward.wire import Item
from hone.types import Score

NUM_SAMPLES = 256


def reward_of(text):
    return 0.75 * score_of(text) + 0.25 * score_of(text[::-1])


@pytest.fixture
def score_early(make_rewards, make_group):
    """Give finished samples to a `service` reward, all at one moment, after a first group that it learns from."""

    def score(url, texts, **args):
        async def one(rewards, group):
            async with rewards.begin(group.prompt) as scoring:
                for sample in group.samples:
                    scoring.on_sample(sample)
                return await scoring.finish(group.samples)

        async def go():
            async with make_rewards({"use": "service", "args": {"url": url, "max_in_flight": 2, **args}}) as rewards:
                await one(rewards, make_group(*(f"first {n}" for n in range(16)), prompt_id="first"))
                return await one(rewards, make_group(*texts))

        return asyncio.run(go())

    return score


TEXTS = [f"sample {n}" for n in range(NUM_SAMPLES)]


def test_a_quick_service_is_sent_many_at_a_time(score_early):
    with FaultyServer() as server:  # which says that an item took it half a millisecond
        group = score_early(server.url, TEXTS)
    assert list(group.rewards) == [reward_of(text) for text in TEXTS]
    sizes = [len(request.ids) for request in server.requests]
    assert sizes[:2] == [1, 1]
    assert sum(sizes) == NUM_SAMPLES + 16
    assert max(sizes) == MAX_REQUEST_ITEMS and len(sizes) < 30


def test_a_slow_one_each_by_itself(score_early):
    def slow(request):
        reply = good_reply(request.body)
        for result in reply["results"]:
            result["elapsed_ms"] = 80.0
        return Answer.of(reply)

    with FaultyServer(slow) as server:
        group = score_early(server.url, TEXTS[:20])
    assert list(group.rewards) == [reward_of(text) for text in TEXTS[:20]]
    assert {len(request.ids) for request in server.requests} == {1}


@pytest.mark.parametrize("status", [400, 413, 422])
def test_an_item_that_the_service_refuses_costs_those_with_it_nothing(score_early, status):
    def refuse(request):
        culprits = [item for item in request.body["items"] if item["solution_str"] == "sample 40"]
        return Answer.of({"detail": "no"}, status) if culprits else None

    with FaultyServer(refuse) as server:
        group = score_early(server.url, TEXTS)
    assert max(len(request.ids) for request in server.requests) > 1  # it was among others
    assert server.faults == 2  # with them, and alone
    expected = [reward_of(text) for text in TEXTS]
    expected[40] = None
    assert list(group.rewards) == expected


def item(number):
    return Item(id=f"i{number}", solution_str="")


def test_who_stops_waiting_leaves_the_line_and_the_last_one_ends_the_request():
    asked, ended = [], []

    async def ask(items):
        asked.append([item.id for item in items])
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(len(items))
        return {}

    async def go():
        before = asyncio.all_tasks()
        gathering = Gathering(ask, max_requests=1, max_items=lambda: 2)
        waiting = [asyncio.create_task(gathering.score(item(number))) for number in range(4)]
        while not asked:
            await asyncio.sleep(0.001)
        waiting[0].cancel()
        waiting[2].cancel()
        await asyncio.sleep(0.01)
        assert not ended
        waiting[1].cancel()
        while len(asked) < 2:
            await asyncio.sleep(0.001)
        waiting[3].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert asyncio.all_tasks() == before

    asyncio.run(go())
    assert (asked, ended) == ([["i0", "i1"], ["i3"]], [2, 1])


def test_one_id_goes_once_in_a_request_and_an_exception_reaches_every_caller():
    asked = []

    async def ask(items):
        asked.append([item.id for item in items])
        if asked[-1] == ["bad"]:
            raise RuntimeError("no more")
        return {item.id: Score(1.0) for item in items}

    async def go():
        gathering = Gathering(ask, max_requests=4, max_items=lambda: 8)
        ids = ["a", "b", "a", "c"]
        scores = await asyncio.gather(*(gathering.score(Item(id=name, solution_str="")) for name in ids))
        assert scores == [Score(1.0)] * 4
        bad = [gathering.score(Item(id="bad", solution_str="")) for _ in range(2)]
        assert [type(error) for error in await asyncio.gather(*bad, return_exceptions=True)] == [RuntimeError] * 2

    asyncio.run(go())
    assert asked == [["a", "b"], ["a", "c"], ["bad"], ["bad"]]
