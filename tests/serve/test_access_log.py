"""The access log: errors and named requests one by one, a trainer's stream of good answers as sums."""

import asyncio
import logging

import pytest

from hone.serve.access import AccessLog, Answered, sum_line


def answered(number, what="POST /v1/rewards 200", *, is_remarkable=False):
    return Answered(what, float(number), f"id{number}", "", is_remarkable)


def test_the_first_has_a_line_and_those_after_it_are_reported_together(caplog):
    caplog.set_level(logging.INFO, "hone.serve")

    async def go():
        log = AccessLog(sum_s=0.1)
        for number in range(1, 1002):
            log.write(answered(number))
        log.write(answered(1, "POST /v1/rewards 503", is_remarkable=True))
        log.write(answered(2, "POST /v1/rewards 503", is_remarkable=True))
        log.write(answered(3, "GET /metrics 200"))
        await asyncio.sleep(0.3)  # two periods: nothing came in the second
        log.write(answered(4))

    asyncio.run(go())
    assert [record.getMessage() for record in caplog.records] == [
        "POST /v1/rewards 200 1.0 ms request=id1",
        "POST /v1/rewards 503 1.0 ms request=id1",
        "POST /v1/rewards 503 2.0 ms request=id2",
        "GET /metrics 200 3.0 ms request=id3",
        "POST /v1/rewards 200 1,000 more in 0.1 s: p50 502.0 ms, p95 951.0 ms, longest 1001.0 ms",
        "POST /v1/rewards 200 4.0 ms request=id4",
    ]


@pytest.mark.parametrize("number", [1, 2, 20])
def test_a_sum_of_few(number):
    line = sum_line("GET / 200", [float(n + 1) for n in range(number)], 30.0)
    assert line.startswith(f"GET / 200 {number} more in 30 s: p50 ") and line.endswith(f"longest {number}.0 ms")
