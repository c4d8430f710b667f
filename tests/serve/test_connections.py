"""Clients that connect and then send too little, against a server of ours on a real port."""

import asyncio
import os
import signal

import httpx
import pytest

from hone.serve.http import BearerTokens, HttpSettings, Lifecycle, guarded_app
from hone.serve.running import serve

HALF = b"POST /asked HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BEGUN = {
    "nothing": b"",
    "half of the headers": HALF,
    "no body": HALF + b"Content-Length: 100\r\n\r\n",
    "half of a second request's headers": b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" + HALF,
    "a body that was not asked for": HALF.replace(b"POST /asked", b"GET /livez") + b"Content-Length: 100\r\n\r\n",
}


class Nothing:
    async def start(self):
        pass

    async def close(self):
        pass


def beside_server(scenario, capfd, **settings):
    """What a scenario returns, of the port of a server that runs in the same event loop."""

    async def main():
        http, lifecycle = HttpSettings(port=0, **settings), Lifecycle()
        app = guarded_app("test", lifecycle, http, BearerTokens(http))
        app.get("/livez")(lambda: {})
        app.post("/asked")(lambda: {})
        running = asyncio.create_task(serve(app, Nothing(), lifecycle, http, name="test"))
        said = ""
        while "ready" not in said:
            await asyncio.sleep(0.01)
            said += capfd.readouterr().out
        port = int(said.split("\n")[0].rpartition(":")[2])
        try:
            return await scenario(port)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await running

    return asyncio.run(asyncio.wait_for(main(), 60))


async def begun(port, sent):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await writer.drain()
    if sent.startswith(b"GET"):  # it waits once the first request is answered
        assert b"200" in await reader.readline()
    return reader, writer


async def closed(reader, writer):
    """Wait until the server has closed it; what it said before."""
    said = b""
    try:
        while part := await reader.read(4096):
            said += part
    except ConnectionError:
        pass
    writer.close()
    return said


async def is_alive(port):
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"http://127.0.0.1:{port}/livez")).status_code == 200


@pytest.mark.parametrize("kind", BEGUN)
def test_what_is_not_sent_in_time_ends_the_connection(kind, capfd):
    async def scenario(port):
        return await closed(*await begun(port, BEGUN[kind]))

    said = beside_server(scenario, capfd, body_timeout_s=0.2, keep_alive_s=0.2)
    assert (b"body-too-slow" in said) == (kind == "no body")


def test_headers_byte_by_byte_are_no_way_around(capfd):
    async def scenario(port):
        reader, writer = await begun(port, HALF)
        ended = asyncio.create_task(closed(reader, writer))
        while not ended.done():
            writer.write(b"x")
            await asyncio.sleep(0.02)

    beside_server(scenario, capfd, keep_alive_s=0.2)


@pytest.mark.parametrize("kind", BEGUN)
def test_many_that_wait_keep_no_other_out(kind, capfd):
    """Those that wait longest are closed; who sends whole requests is answered."""

    async def scenario(port):
        half_open = [await begun(port, BEGUN[kind]) for _ in range(24)]
        assert await is_alive(port)
        await asyncio.gather(*(closed(*one) for one in half_open[:14]))
        rest = [asyncio.create_task(closed(*one)) for one in half_open[-4:]]
        await asyncio.sleep(0.05)
        assert not any(one.done() for one in rest)
        for _, writer in half_open:
            writer.close()
        await asyncio.gather(*rest)

    beside_server(scenario, capfd, max_waiting_connections=8)


def test_a_client_that_pauses_keeps_its_connection(monkeypatch, capfd):
    async def scenario(port):
        reader, writer = await begun(port, b"")
        for _ in range(3):
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" in await reader.readuntil(b"{}")
            await asyncio.sleep(0.02)
        writer.close()

    beside_server(scenario, capfd)
