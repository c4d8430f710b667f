"""Work that a stop interrupts: at the loops, at the start of Ray's processes, at the start of services."""

import asyncio

import pytest

from hone.runtime.processes import unless_stopped


def raced(work, *, stops):
    async def go():
        stop = asyncio.Event()
        if stops:
            asyncio.get_running_loop().call_soon(stop.set)
        return await unless_stopped(stop, work())

    return asyncio.run(asyncio.wait_for(go(), 60))


async def fails():
    raise ValueError("of its own")


def test_what_is_done_gives_its_result_or_its_error():
    done = raced(lambda: asyncio.sleep(0, "found"), stops=False)
    assert done is not None and done.result() == "found"
    failed = raced(fails, stops=False)
    with pytest.raises(ValueError, match="of its own"):
        failed.result()


def test_a_stop_cancels_what_is_not_done():
    ended = []

    async def hangs():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    assert raced(hangs, stops=True) is None
    assert ended == [True]
