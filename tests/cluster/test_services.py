"""Services that start, fall, fall silent, start again and end, as real processes."""

import asyncio
import time
from pathlib import Path

import psutil
import pytest
from watching import gone, listens, processes_of, toy

from hone.config.run import RunConfig
from hone.errors import ServiceError
from hone.reward.http import Address
from hone.services.gpus import Split
from hone.services.launch import plan_launches
from hone.services.service import DEFAULT_INTERVALS, ServiceIntervals
from hone.services.state import read_state
from hone.services.supervisor import Services

TOKEN = "token-of-the-run"
QUICK = ServiceIntervals(health_s=0.05, health_timeout_s=0.3, first_restart_s=0.01, port_timeout_s=0.2)


class Watched:
    """Services of a run file with these sections, and everything they said."""

    def __init__(self, folder: Path, intervals=DEFAULT_INTERVALS, **services):
        config = RunConfig.model_validate({"model": {"path": "a/b"}, "data": {"train": "a/b"}, "services": services})
        self.said: list[str] = []
        self.relayed: list[tuple[str, str]] = []
        self.stop = asyncio.Event()
        self.launches = plan_launches(
            config,
            folder,
            folder / "logs",
            Split(None, {name: ",".join(map(str, one.get("devices", ()))) for name, one in services.items()}),
            token=TOKEN,
        )
        self.services = Services(
            self.launches,
            folder=folder,
            run_file=folder / "run.yaml",
            say=self.said.append,
            relay=lambda name, line: self.relayed.append((name, line)),
            stop=self.stop,
            intervals=intervals,
        )

    @property
    def port(self) -> int:
        return self.launches[0].port

    def state(self):
        return read_state(self.launches[0].log.parents[1]).services[0]


async def until(holds, within_s=15.0):
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.02)


def test_a_service_is_waited_for_and_ended_with_all_it_started(tmp_path):
    async def run():
        watched = Watched(tmp_path, judge={"command": toy("--children", "--ready-after", "0.3")})
        async with watched.services as services:
            await services.ready()
            assert services.addresses == {"judge": Address((f"http://127.0.0.1:{watched.port}",), TOKEN)}
            assert listens(watched.port)
            (server,) = processes_of(watched.port)
            reaper = server.parent()
            below = reaper.children(recursive=True)
            assert len(below) == 4, "the server, two of its children, and one whose parent has gone"
            await asyncio.sleep(0.3)
        assert gone([reaper, *below], within_s=0.5) and not listens(watched.port)
        assert watched.relayed == [("judge", "listening")]
        assert watched.state().state == "stopped"
        assert any("ready after" in line for line in watched.said)
        assert services.summary() == "judge 0 restarts"

    asyncio.run(run())


def test_a_crash_at_the_start_is_reported_at_once_with_fifty_lines(tmp_path):
    async def run():
        watched = Watched(tmp_path, judge={"command": toy("--crash-before-ready", "80")})
        async with watched.services as services:
            with pytest.raises(
                ServiceError, match="service judge ended with exit code 7 before it was ready"
            ) as caught:
                await services.ready()
        lines = [line.strip() for line in str(caught.value).splitlines()]
        assert lines[-50:] == [f"line {number}" for number in range(30, 80)] and "line 29" not in lines
        assert caught.value.exit_code == 3
        assert watched.stop.is_set() and watched.state().state == "failed" and watched.state().restarts == 0

    asyncio.run(run())


def test_a_program_that_is_not_there(tmp_path):
    async def run():
        watched = Watched(tmp_path, judge={"command": ["/nowhere/server", "{port}"]})
        async with watched.services as services:
            with pytest.raises(ServiceError, match="could not be started before it was ready") as caught:
                await services.ready()
        assert "/nowhere/server cannot be started: No such file or directory" in str(caught.value)

    asyncio.run(run())


def test_a_service_that_does_not_become_ready_in_time(tmp_path):
    async def run():
        watched = Watched(tmp_path, judge={"command": toy("--never-ready"), "start_timeout_s": 1.0})
        async with watched.services as services:
            with pytest.raises(ServiceError, match=r"was not ready within start_timeout_s = 1 s; .*/health says 503"):
                await services.ready()
        assert not listens(watched.port)

    asyncio.run(run())


def test_a_taken_port_is_reported_with_its_process_and_nothing_is_started(tmp_path):
    async def run():
        first = Watched(tmp_path / "first", QUICK, judge={"command": toy()})
        async with first.services:
            await first.services.ready()
            second = Watched(
                tmp_path / "second", QUICK, other={"command": toy()}, judge={"command": toy(), "port": first.port}
            )
            with pytest.raises(ServiceError, match=rf"services.judge.port = {first.port} is taken by process \d+ \("):
                await second.services.start()
            assert not processes_of(second.port)

    asyncio.run(run())


def test_a_killed_service_starts_again_on_its_port(tmp_path):
    async def run():
        watched = Watched(tmp_path, QUICK, judge={"command": toy("--children")})
        async with watched.services as services:
            await services.ready()
            address, first = services.addresses["judge"], watched.state().pid
            below = psutil.Process(first).children(recursive=True)
            psutil.Process(first).kill()
            await until(lambda: watched.state().state == "ready" and watched.state().pid != first)
            assert services.addresses["judge"] == address and listens(watched.port)
            assert gone(below), "what the first life left was ended with it"
            assert watched.state().restarts == 1 and services.summary() == "judge 1 restart"
            assert any("was ended by signal 9, Killed; started again in" in line for line in watched.said)
            services.check()

    asyncio.run(run())


def test_a_service_that_falls_silent_starts_again(tmp_path):
    async def run():
        command = toy("--silent-after", "1")
        watched = Watched(tmp_path, QUICK, judge={"command": command, "silence_timeout_s": 0.5})
        async with watched.services as services:
            await services.ready()
            await until(lambda: watched.state().restarts == 1)
            assert any("did not answer /health for 0.5 s" in line for line in watched.said)

    asyncio.run(run())


def test_restarts_are_bounded(tmp_path):
    async def run():
        watched = Watched(tmp_path, QUICK, judge={"command": toy("--crash-after", "0.6"), "restarts": 2})
        async with watched.services as services:
            await services.ready()
            async with asyncio.timeout(20):
                await watched.stop.wait()
            with pytest.raises(ServiceError, match=r"already \(services.judge.restarts = 2\)"):
                services.check()
            assert watched.state().restarts == 2 and watched.state().state == "failed"

    asyncio.run(run())


def test_waiting_ends_when_a_stop_is_asked_for(tmp_path):
    async def run():
        watched = Watched(tmp_path, judge={"command": toy("--never-ready")})
        async with watched.services as services:
            asyncio.get_running_loop().call_later(0.3, watched.stop.set)
            async with asyncio.timeout(5):
                await services.ready()
        assert not processes_of(watched.port)

    asyncio.run(run())


def test_a_deaf_service_is_killed_after_its_time(tmp_path):
    async def run():
        watched = Watched(tmp_path, judge={"command": toy("--deaf"), "stop_timeout_s": 0.5})
        async with watched.services as services:
            await services.ready()
            began = time.monotonic()
        assert time.monotonic() - began >= 0.5, "it was asked to end first"
        assert not listens(watched.port) and not processes_of(watched.port)

    asyncio.run(run())


def test_a_killed_reaper_takes_its_service_with_it(tmp_path):
    async def run():
        watched = Watched(tmp_path, QUICK, judge={"command": toy()})
        async with watched.services as services:
            await services.ready()
            server = psutil.Process(watched.state().pid)
            server.parent().kill()
            assert gone([server])
            await until(lambda: watched.state().state == "ready" and watched.state().pid != server.pid)
            assert any("was killed together with its reaper" in line for line in watched.said)

    asyncio.run(run())


def test_many_lines_are_counted_and_left_to_the_log(tmp_path):
    async def run():
        program = "import time\nfor n in range(1000): print('n', n)\ntime.sleep(600)"
        watched = Watched(tmp_path, judge={"command": ["python", "-c", program, "{port}"]})
        async with watched.services:
            await until(lambda: (tmp_path / "logs" / "judge.log").stat().st_size > 5000 if watched.relayed else False)
            await asyncio.sleep(0.4)
        assert len(watched.relayed) < 50 and "more lines in its log" in watched.relayed[-1][1]
        assert len((tmp_path / "logs" / "judge.log").read_text().splitlines()) == 1000

    asyncio.run(run())


def test_a_service_has_variables_of_its_own_and_no_other_has_them(tmp_path):
    toy = {"command": ["python", str(tmp_path), "{port}"]}
    first, second = Watched(tmp_path, first={**toy, "env": {"NCCL_DEBUG": "INFO"}}, second=toy).launches
    assert first.environment["NCCL_DEBUG"] == "INFO" and "NCCL_DEBUG" not in second.environment
    assert first.fingerprint != second.fingerprint, "another environment is another service"
