"""Pages of `hone ui` and their data, without a browser."""

import asyncio
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from written_runs import write_run

from hone.doctor.watch import watch_lines
from hone.observe.recorder import samples_file
from hone.observe.report import MAX_LINES, alarms_of_events
from hone.serve.http import HttpSettings, Lifecycle
from hone.services.state import TOKEN_FILE, ServiceState, own_supervision, write_state, write_token
from hone.ui.server import Runs, _changes, ui_app


@pytest.fixture
def runs(tmp_path):
    """A folder of two: `a` has ended, `sub/b` has not."""
    folder = tmp_path / "runs"
    write_run(folder / "a").close("finished")
    going = write_run(folder / "sub" / "b", lr=1e-2)
    yield folder
    going.close("finished")


@pytest.fixture
def client(runs, tmp_path):
    """Somebody who does not know the token."""
    return client_of(runs, tmp_path)


def client_of(runs, tmp_path):
    write_token(tmp_path, "secret")
    settings = HttpSettings(token_file=tmp_path / TOKEN_FILE)
    app = ui_app(Runs(runs), Lifecycle(), settings, "secret")
    return TestClient(app, base_url="http://127.0.0.1:8900", follow_redirects=False)


@pytest.fixture
def reader(client):
    """Somebody who has opened the address with the token."""
    answer = client.get("/run?name=a&token=secret")
    assert answer.status_code == 303 and answer.headers["location"] == "/run?name=a"
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=strict" in answer.headers["set-cookie"]
    return client


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.text, re.S)[1])


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/run?name=a",
        "/data/runs",
        "/data/run?name=a",
        "/data/search?name=a&query=1",
        "/changes?seen=0",
        "/?token=wrong",
    ],
)
def test_without_the_token_nothing_is_shown(client, path):
    assert client.get(path).status_code == 401


def test_a_page_of_another_site_and_another_name_are_refused(reader):
    assert reader.get("/data/runs", headers={"Origin": "http://evil.example"}).status_code == 403
    assert reader.get("/data/runs", headers={"Host": "evil.example"}).status_code == 403


def test_the_list_has_every_run_with_its_state(reader):
    found = {run["name"]: run for run in data_of(reader.get("/"))["runs"]}
    assert set(found) == {"a", "sub/b"}
    assert (found["a"]["outcome"], found["sub/b"]["outcome"]) == ("finished", None)
    run = found["sub/b"]
    assert (run["stage"], run["step"], run["steps"]) == ("rl", 12, 20)
    assert (run["title"], run["group"], run["tags"]) == ("b", "seeds", ["math"])
    assert run["metrics"] == {"eval/accuracy": 0.25, "rollout/reward_mean": 0.6}


def test_a_run_has_its_report_and_what_happens_now(reader):
    data = data_of(reader.get("/run?name=a"))
    assert data["summary"]["origin"]["git_commit"] == "1234abc"
    assert data["stages"][0]["steps"]["step"] == list(range(1, 13))
    assert data["now"]["step"] == 12 and not data["now"]["running"]
    assert data["live"]["changes"].startswith("/changes?name=a&seen=") and "12" in data["logs"]["training.log"]
    assert reader.get("/data/run?name=a").json()["recorded"] == {"rl": list(range(1, 13))}


def test_a_run_has_its_services_and_their_logs(reader, runs):
    service = ServiceState("judge", "http://127.0.0.1:9000", "ready", 1, 2, "f", "judge.log")
    write_state(runs / "a", own_supervision(Path("run.yaml"), (service,), 1.0))
    (runs / "a" / "logs" / "judge.log").write_text("\n".join(f"line {n}" for n in range(300)))
    data = reader.get("/data/run?name=a").json()
    expected = {"name": "judge", "state": "ready", "url": "http://127.0.0.1:9000", "restarts": 2}
    assert data["services"] == [expected]
    assert list(data["logs"]) == ["training.log", "judge.log"]
    assert data["logs"]["judge.log"].splitlines() == [f"line {n}" for n in range(200, 300)]


def test_samples_of_any_step_come_in_groups_those_with_signal_first(reader):
    rows = reader.get("/data/samples?name=a&stage=rl&step=7").json()
    assert [(row["group"], row["reward"]) for row in rows] == [
        ("row-1", 0.0),
        ("row-1", 1.0),
        ("row-0", 1.0),
        ("row-0", 1.0),
    ]
    assert {row["step"] for row in rows} == {7}
    assert reader.get("/data/samples?name=a&stage=rl&step=99").status_code == 404


def test_a_search_goes_through_every_recorded_step(reader, runs):
    found = reader.get("/data/search", params={"name": "a", "query": "<B> reward>0 step<4"}).json()
    assert [(row["step"], row["reward"], "<b>22</b>" in row["response"]) for row in found["samples"]] == [
        (3, 1.0, True),
        (2, 1.0, True),
        (1, 1.0, True),
    ]
    assert (found["matches"], found["searched"], found["steps"], found["after"]) == (3, 12, 12, "")
    left = reader.get("/data/search", params={"name": "a", "query": "<B> reward>0", "after": "rl/3"}).json()
    assert [row["step"] for row in left["samples"]] == [2, 1] and left["searched"] == 12
    samples_file(runs / "a" / "samples", "rl", 2).write_bytes(b"torn")
    assert reader.get("/data/search", params={"name": "a", "query": "22"}).json()["damaged"] == 1
    torn = reader.get("/data/samples?name=a&stage=rl&step=2")
    assert torn.status_code == 404 and "step-000002.jsonl.gz: is not whole" in torn.json()["detail"]
    assert reader.get("/data/search?name=b&query=22").status_code == 404
    assert reader.get("/data/search", params={"name": "a", "query": "x" * 1001}).status_code == 422


def test_runs_side_by_side(reader):
    data = data_of(reader.get("/compare?name=a&name=sub/b"))
    assert data["settings"] == {"train.optimizer.lr": [1e-3, 1e-2]}
    assert [run["evaluations"]["eval/accuracy"]["error"] for run in data["runs"]] == pytest.approx([0.0196, 0.0196])


@pytest.mark.parametrize("text", ['{"title": "a", "beg', '{"title": "a", "began_unix_s": 1.0, "mood": "good"}', "[]"])
def test_a_run_that_cannot_be_read_is_listed_with_the_reason(reader, runs, text):
    (runs / "a" / "logs" / "summary.json").write_text(text)
    found = {run["name"]: run for run in reader.get("/data/runs").json()["runs"]}
    assert "summary.json: is torn, or of another version of Hone" in found["a"]["unreadable"]
    assert found["sub/b"]["step"] == 12
    answer = reader.get("/data/run?name=a")
    assert answer.status_code == 404 and "summary.json: is torn" in answer.json()["detail"]


def test_a_torn_identity_is_named_by_the_page_of_its_run(reader, runs):
    (runs / "a" / ".identity.json").write_text('{"run_file": "ru')
    answer = reader.get("/data/run?name=a")
    assert answer.status_code == 404 and ".identity.json cannot be read" in answer.json()["detail"]
    assert len(reader.get("/data/runs").json()["runs"]) == 2


@pytest.mark.parametrize(
    "content", [b"", b'{"1": "a', b"\xff\xfe\0\xe9\n", b"[]\n", b"{}\n", b"null\n", b'{"kind": 5}\n']
)
@pytest.mark.parametrize(
    "file", ["events.jsonl", "run.yaml", "memory.svg", "memory.json", "samples/tokens.json", "samples/pictures.json"]
)
def test_a_damaged_file_takes_no_page_down(reader, runs, file, content):
    (runs / "a" / file).write_bytes(content)
    assert [run.get("unreadable") for run in reader.get("/data/runs").json()["runs"]] == [None, None]
    assert data_of(reader.get("/run?name=a"))["stages"][0]["last_step"] == 12
    assert reader.get("/data/compare?name=a&name=sub/b").status_code == 200


@pytest.mark.parametrize("content", ["[]", "{}", '{"run_file": "run.yaml"}'])
def test_an_identity_without_settings_is_named(reader, runs, content):
    (runs / "a" / ".identity.json").write_text(content)
    for path in ("/data/run?name=a", "/data/compare?name=a&name=sub/b"):
        answer = reader.get(path)
        assert answer.status_code == 404 and ".identity.json cannot be read" in answer.json()["detail"]


def test_a_damaged_line_of_metrics_is_left_out_and_said(reader, runs):
    with (runs / "a" / "metrics.jsonl").open("a") as lines:
        lines.write("[]\n")
    data = reader.get("/data/run?name=a").json()
    assert data["stages"][0]["steps"]["step"] == list(range(1, 13)) and "1 damaged line" in data["broken"]
    assert reader.get("/data/runs").json()["runs"][0]["step"] == 12


@pytest.mark.parametrize("name", ["../runs/a", "/etc", "sub", "a/logs", "", "nobody"])
def test_nothing_but_runs_of_the_folder_is_read(reader, name):
    for path in ("/run", "/data/run", "/compare", "/changes"):
        answer = reader.get(path, params={"name": name, "seen": "0"})
        assert answer.status_code == 404 and "no such run" in answer.json()["detail"]


def test_a_long_run_is_read_in_part_with_every_evaluation(tmp_path):
    observer = write_run(tmp_path / "runs" / "long", steps=1)
    found = watch_lines({}, [{"stage": "rl", "step": s, "rollout/truncated_frac": 0.4} for s in range(1, 9)]).alarms
    (alarm,) = [asdict(alarm) for alarm in found]
    advice = alarm | {"name": "rewards_slow", "level": "tuning", "metric": "time/reward_s", "since": 1, "step": 2}
    for one in (advice, alarm):
        observer.event("alarm", **{name: value for name, value in one.items() if name != "ended"})
    observer.event("alarm_ended", name=advice["name"], stage="rl", step=90_000)
    observer.close("finished")
    with (tmp_path / "runs" / "long" / "metrics.jsonl").open("w") as lines:
        for step in range(1, 100_001):
            lines.write(f'{{"stage": "rl", "step": {step}, "time_s": {step}.0, "rollout/reward_mean": {step / 1e5}}}\n')
            if step % 10_000 == 0:
                lines.write(f'{{"stage": "rl", "step": {step}, "time_s": {step}.0, "eval/accuracy": {step / 1e5}}}\n')
    data = json.loads(json.dumps(Runs(tmp_path / "runs").run("long")))
    assert data["alarms"] == json.loads(json.dumps([alarm, advice | {"ended": 90_000}]))
    (entry,) = Runs(tmp_path / "runs").list()["runs"]
    assert (entry["alarms"], entry["advice"]) == (["truncation"], [])
    (stage,) = data["stages"]
    steps = stage["steps"]["step"]
    assert stage["steps"]["count"] <= 2 * MAX_LINES and len(steps) <= 1000
    assert steps[0] < 100 and steps[-1] > 99_900
    assert stage["steps"]["values"]["rollout/reward_mean"] == pytest.approx([step / 1e5 for step in steps], rel=1e-3)
    assert stage["evals"]["step"] == list(range(10_000, 100_001, 10_000))
    (run,) = Runs(tmp_path / "runs").comparison(["long"])["runs"]
    assert [text.partition(":")[0] for text in (*run["alarms"], *run["advice"])] == ["truncation", "rewards_slow"]
    assert run["steps"] == {"rl": 100_000} and run["ends"]["rollout/reward_mean"] == pytest.approx(0.99995, abs=1e-4)
    assert run["stages"][0]["steps"]["values"]["x/samples"][-1] == pytest.approx(4 * steps[-1], rel=1e-3)


def test_an_alarm_that_a_resumed_run_reports_again(tmp_path):
    """Reported at step 9 and ended, then again from the checkpoint of step 5; a new one begins at step 30."""
    words = dict.fromkeys(("level", "metric", "pattern", "change", "confirm", "source"), "")
    words |= {"cause": "no_end_token", "what": "no_end_token", "evidence": []}
    alarm = {"kind": "alarm", "name": "truncation", "stage": "rl", **words}
    ended = {"kind": "alarm_ended", "name": "truncation", "stage": "rl"}
    events = [alarm | {"step": 9, "since": 7}, ended | {"step": 12}, alarm | {"step": 9, "since": 7}]
    events += [ended | {"step": 13}, alarm | {"step": 32, "since": 30}]
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps({"at": 1.0, **event}, separators=(",", ":")) + "\n" for event in events)
    )
    assert [(a.since, a.ended, a.what) for a in alarms_of_events(tmp_path)] == [
        (7, 13, "no_end_token"),
        (30, None, "no_end_token"),
    ]


def test_a_folder_without_runs_and_one_that_is_a_run(tmp_path, runs):
    assert Runs(tmp_path / "nothing").list()["runs"] == []
    assert [run["name"] for run in Runs(runs / "a").list()["runs"]] == ["."]


def test_what_is_written_between_a_page_and_its_first_question_is_not_missed(runs):
    seen = Runs(runs).state(["a"])
    with (runs / "a" / "metrics.jsonl").open("a") as lines:
        lines.write("{}\n")

    async def first() -> tuple[bytes, bytes]:
        return tuple([await anext(_changes(Runs(runs), ["a"], at, Lifecycle())) for at in (seen, now)])

    now = Runs(runs).state(["a"])
    assert asyncio.run(first()) == (f"id: {now}\ndata: new\n\n".encode(), b": \n\n")
