"""`hone up`, `hone status` and `hone stop`, and a run that takes what is up."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from service_run import write_run
from test_services import Watched
from watching import gone, listens, toy, wait_for

from hone.cli.main import main
from hone.services.state import ServiceState, Supervision, kept_up, read_state, read_token, runtime_folder, write_state


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    folder = tmp_path / "runtime"
    monkeypatch.setenv("HONE_RUNTIME_DIR", str(folder))
    yield folder
    assert main(["stop", "--all"]) == 0


def write_file(folder, *flags):
    file = folder / "shared.yaml"
    file.write_text(f"services: {{judge: {{command: {json.dumps(toy(*flags))}}}}}\n")
    return str(file)


def shown(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_up_status_and_stop(runtime, tmp_path, capsys):
    file = write_file(tmp_path, "--children")
    up = shown(capsys, "up", file)
    (service,) = up["services"]
    port = int(service["url"].rpartition(":")[2])
    assert up["name"] == "shared" and service["state"] == "ready" and listens(port)
    below = psutil.Process(up["pid"]).children(recursive=True)
    assert main(["up", file]) == 2, "once is enough"
    assert "shared is up already" in capsys.readouterr().err
    assert shown(capsys, "status")["shared"]["services"] == [service]
    assert shown(capsys, "status", "shared")["running"] is True
    assert main(["stop", "shared"]) == 0
    assert not listens(port) and gone(below, within_s=0.5)
    capsys.readouterr()
    assert shown(capsys, "status") == {}
    assert main(["stop", "shared"]) == 2
    assert "shared is not up, and no run's folder is there. Up: nothing." in capsys.readouterr().err


def test_what_does_not_start_is_reported_and_is_not_up(runtime, tmp_path, capsys):
    assert main(["up", write_file(tmp_path, "--crash-before-ready", "3")]) == 3
    said = capsys.readouterr().err
    assert "service judge ended with exit code 7 before it was ready" in said and "line 2" in said
    assert kept_up(runtime_folder()) == {}


def test_a_killed_supervisor_leaves_nothing(runtime, tmp_path, capsys):
    up = shown(capsys, "up", write_file(tmp_path, "--children"))
    below = psutil.Process(up["pid"]).children(recursive=True)
    assert len(below) == 5, "a reaper, the server, three of its processes"
    psutil.Process(up["pid"]).kill()
    assert gone(below) and not listens(int(up["services"][0]["url"].rpartition(":")[2]))
    wait_for(lambda: kept_up(runtime_folder()) == {})
    os.waitpid(up["pid"], 0)  # `hone up` would have ended by now, and left it to init


@pytest.mark.slow("a start of services more")
def test_in_the_foreground_ctrl_c_stops_it(runtime, tmp_path):
    command = [sys.executable, "-m", "hone.cli.main", "up", write_file(tmp_path), "--foreground", "--name", "mine"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    state = wait_for(lambda: (s := read_state(runtime / "mine")) and s.services[0].state == "ready" and s)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "[judge] listening" in said and "stopped: judge 0 restarts" in said
    assert not psutil.pid_exists(state.services[0].pid)


@pytest.mark.slow("starts services and a run")
def test_a_run_takes_the_same_service_that_is_up_and_leaves_it(runtime, tmp_path, capsys):
    url = shown(capsys, "up", write_file(tmp_path))["services"][0]["url"]

    async def run(**settings):
        watched = Watched(tmp_path, judge={"command": toy(), **settings})
        async with watched.services as services:
            await services.ready()
            return services.addresses["judge"].urls[0], watched.said

    taken, said = asyncio.run(run())
    assert taken == url and said == [f"service judge: the one that `hone up` keeps as shared, at {url}"]
    assert listens(int(url.rpartition(":")[2])), "it was not ours to stop"
    other = shown(capsys, "up", str(tmp_path / "shared.yaml"), "--name", "other")
    assert other["services"][0]["url"] != url, "what is told to be up is started"
    assert asyncio.run(run(command=toy("--deaf"), stop_timeout_s=0.1))[0] != url, "another service"


@pytest.mark.slow("services and runs, each an interpreter of its own")
def test_a_run_uses_a_reward_service_that_is_up_only_while_its_rewards_are_the_same(runtime, tmp_path, capsys):
    run_file = str(write_run(tmp_path, service="reward: rewards.yaml", steps=1))
    url = shown(capsys, "up", run_file)["services"][0]["url"]
    log = tmp_path / "run" / "logs" / "training.log"
    assert main(["train", run_file]) == 0
    assert f"service reward_server: the one that `hone up` keeps as tiny, at {url}" in log.read_text()
    assert not (tmp_path / "run" / "logs" / "reward_server.log").exists(), "no second copy"
    with (tmp_path / "digits.py").open("a") as code:
        code.write("# other rewards, as far as files can tell\n")
    assert main(["train", run_file, "--fresh"]) == 0
    assert f"tiny at {url} scores by other rewards; `hone stop tiny`" in log.read_text()
    assert "POST /v1/rewards 200" in (tmp_path / "run" / "logs" / "reward_server.log").read_text()


def test_what_is_up_asks_for_a_token_that_only_this_user_can_read(runtime, tmp_path, capsys):
    up = shown(capsys, "up", str(write_run(tmp_path, service="reward: rewards.yaml")))
    (service,), token = up["services"], read_token(runtime / "tiny")

    def status(**headers):
        item = {"id": "a", "solution_str": "4", "ground_truth": "4"}
        return httpx.post(f"{service['url']}/v1/rewards", json={"items": [item]}, headers=headers).status_code

    assert (status(), status(Authorization="Bearer x"), status(Authorization=f"Bearer {token}")) == (401, 401, 200)
    assert (runtime / "tiny" / "services.token").stat().st_mode & 0o777 == 0o600
    shown_to_others = [psutil.Process(up["pid"]), *psutil.Process(up["pid"]).children(recursive=True)]
    shown_to_others = [word for process in shown_to_others for word in process.cmdline()]
    shown_to_others += [file.read_text() for file in (runtime / "tiny").rglob("*.log")]
    shown_to_others += [json.dumps(up), (runtime / "tiny" / "services.json").read_text()]
    assert len(shown_to_others) > 10 and not any(token in text for text in shown_to_others)
    assert main(["stop", "tiny"]) == 0
    assert read_token(runtime / "tiny") is None


def test_a_number_that_is_used_again_is_not_killed(runtime, tmp_path, capsys):
    """services.json of a supervisor that is gone, whose process number somebody else has now."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    service = ServiceState("judge", "http://127.0.0.1:1", "ready", other.pid, 0, "x", "judge.log")
    (runtime_folder() / "old").mkdir()
    write_state(runtime / "old", Supervision(other.pid, time.time() - 1000, "run.yaml", 1.0, (service,)))
    assert main(["stop", "old"]) == 2 and main(["stop", "--all"]) == 0
    assert other.poll() is None
    assert shown(capsys, "status", "old")["running"] is False
    other.kill()
    other.wait()


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden"])
def test_names_stay_in_the_folder(runtime, tmp_path, name):
    assert main(["up", write_file(tmp_path), "--name", name]) == 2


def test_a_file_without_services(runtime, tmp_path, capsys):
    (tmp_path / "none.yaml").write_text("seed: 1\n")
    assert main(["up", str(tmp_path / "none.yaml")]) == 2
    assert "there are none in this file" in capsys.readouterr().err
