"""Services that give their devices to others for a while, as real processes; and the commands of replicas in pools."""

import asyncio
import json
import os
import signal
import sys

import psutil
from test_services import QUICK, Watched, until

from hone.config.run import ServiceSection
from hone.services.launch import ReplicaPlace, plan_replica
from hone.services.supervisor import begin_here

SLEEPY = """
import http.server, pathlib, sys
port, log, refuses = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_GET(self):
        self.answer(200)
    def do_POST(self):
        with log.open("a") as out:
            out.write(self.path + "\\n")
        self.answer(500 if self.path.partition("?")[0] in refuses else 200)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Sleepy(Watched):
    """A run's one service, which is told to sleep."""

    def __init__(self, folder, *refuses):
        (folder / "sleepy.py").write_text(SLEEPY)
        self.told = folder / "told"
        super().__init__(
            folder,
            QUICK,
            judge={"command": [sys.executable, "sleepy.py", "{port}", str(self.told), *refuses], "restarts": 3},
        )

    async def begun(self):
        service = self.services.add(self.launches[0], begin_here)
        await service.ready.wait()
        return service


def running(tmp_path, scenario, *refuses):
    sleepy = Sleepy(tmp_path, *refuses)

    async def main():
        try:
            return await scenario(sleepy, await sleepy.begun())
        finally:
            await sleepy.services.stop()

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_service_sleeps_and_wakes(tmp_path):
    async def scenario(sleepy, service):
        await service.sleep()
        asleep = sleepy.state()
        await service.wake()
        assert (asleep.state, sleepy.state().state) == ("offloaded", "ready")
        assert sleepy.told.read_text().split() == ["/sleep?level=1", "/wake_up"]
        assert asleep.pid == sleepy.state().pid

    running(tmp_path, scenario)


def test_one_that_dies_asleep_is_not_started_before_it_is_woken(tmp_path):
    async def scenario(sleepy, service):
        await service.sleep()
        pid = sleepy.state().pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda: sleepy.state().state == "restarting")
        await asyncio.sleep(0.3)
        assert sleepy.state().pid == pid and not psutil.pid_exists(pid), "the fault really happened"
        await service.wake()
        await until(lambda: sleepy.state().state == "ready")
        assert sleepy.state().pid != pid and sleepy.state().restarts == 1
        assert "/wake_up" not in sleepy.told.read_text(), "what is started anew is awake"

    running(tmp_path, scenario)


def test_one_that_does_not_obey_is_ended_and_comes_back_when_it_is_woken(tmp_path):
    async def scenario(sleepy, service):
        pid = sleepy.state().pid
        await service.sleep()
        assert not psutil.pid_exists(pid), "its memory is the trainer's"
        assert any("POST /sleep?level=1 failed (HTTP 500: ); the service is stopped" in said for said in sleepy.said)
        await service.wake()
        await until(lambda: sleepy.state().state == "ready")
        assert sleepy.state().pid != pid

    running(tmp_path, scenario, "/sleep")


def test_one_that_is_being_started_is_awaited_and_then_put_to_sleep(tmp_path):
    async def scenario(sleepy, service):
        pid = sleepy.state().pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda: sleepy.state().state == "restarting")
        await until(lambda: sleepy.state().pid != pid)
        await service.sleep()
        assert sleepy.state().state == "offloaded"
        assert sleepy.told.read_text().split() == ["/sleep?level=1"]

    running(tmp_path, scenario)


def place(**changes):
    settings = {"name": "judge-0", "section": "grm", "sleeps": False, "processes": 1, "token": "secret"}
    return ReplicaPlace(**settings | changes)


def test_a_replica_of_hones_own_server_listens_where_it_is_asked(tmp_path):
    (tmp_path / "tiny").mkdir()
    service = ServiceSection(policy="tiny")
    alone = plan_replica(service, place(), tmp_path, tmp_path / "logs", "127.0.0.1")
    assert alone.command[-4:-1] == ("--host", "127.0.0.1", "--threads")
    assert (alone.url, alone.log) == (f"http://127.0.0.1:{alone.port}", tmp_path / "logs" / "judge-0.log")
    shared = plan_replica(service, place(sleeps=True), tmp_path, tmp_path, "127.0.0.1")
    assert "--enable-sleep-mode" in shared.command and "secret" not in json.dumps(shared.command)
    assert " --token-env HONE_SERVICE_TOKEN " in " ".join(shared.command)
    assert shared.environment == {"HONE_SERVICE_TOKEN": "secret"}


def test_a_replica_of_vllm_is_divided_over_its_devices_alone(tmp_path, monkeypatch):
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    service = ServiceSection(policy="org/judge", engine={"tensor_parallel_size": 2})
    found = plan_replica(service, place(sleeps=True), tmp_path, tmp_path, "127.0.0.2")
    words = " ".join(found.command)
    assert words.startswith(f"{tmp_path}/vllm serve org/judge --host 127.0.0.2 --port {found.port} ")
    assert "--tensor-parallel-size 2" in words and "--data-parallel-size" not in words
    assert words.endswith("--enable-sleep-mode")
    assert found.environment == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "secret", "HONE_SERVICE_TOKEN": "secret"}
