"""`hone serve reward` as people start it: a process of its own, on a free port, found by what it prints."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

REWARDS = """\
reward:
  workers: 2
  components:
    - {use: exact}
    - {use: "mine.py:words", weight: 0.25, args: {most: 8}}
    - {use: gsm8k, weight: 0}
    - {use: 'hone_poster:poster', weight: 0, args: {visual: heuristic_v1}}
    - {use: "mine.py:place", weight: 0}
"""
MINE = '''\
"""Rewards of a user, as the service's tests have them."""

import os
import time

from hone.reward import reward
from hone.types import Score


@reward(minimum=0.0, maximum=8.0)
def words(group, *, most):
    """Words of each response, and what an in-process reward may look at besides."""
    return [
        Score(float(min(most, len(sample.text.split()))), metrics={"tokens": len(sample.token_ids)})
        for sample in group.samples
    ]


def place(group):
    """How many of its siblings a response is longer than: a reward that needs its group."""
    return [float(sum(len(s.text) > len(other.text) for other in group.samples)) for s in group.samples]


def obey(group, *, witness):
    """Does what the response says, and leaves a line as the witness that it was asked."""
    for sample in group.samples:
        with open(witness, "a") as file:
            file.write(sample.text + "\\n")
    verb, _, seconds = group.samples[0].text.partition(" ")
    if verb == "sleep":
        time.sleep(float(seconds.split()[0]))
    if verb == "die":
        os._exit(3)
    return [None if verb == "none" else float(len(sample.text)) for sample in group.samples]
'''
MINE_PY = {"mine.py": MINE}
POSTER = {
    "canvas_size": [400, 300],
    "layers": [
        {"type": "title", "text": "Spring sale", "x": 20, "y": 20, "width": 360, "height": 60},
        {"type": "text", "text": "all week", "x": 20, "y": 120, "width": 200, "height": 40},
    ],
}


class Served:
    """A running service."""

    def __init__(self, process: subprocess.Popen, log: Path, url: str, token: str | None) -> None:
        self.process, self.log, self.url = process, log, url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(base_url=url, timeout=30, headers=headers, trust_env=False)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def score(self, *items: dict, **request: Any) -> list[dict]:
        """Results of `/v1/rewards`; items get ids and nothing else."""
        numbered = [{"id": f"i{number}", **item} for number, item in enumerate(items)]
        response = self.post("/v1/rewards", {"items": numbered, **request})
        assert response.status_code == 200, response.text
        return response.json()["results"]

    def metric(self, name: str) -> float:
        """Sum over all labels."""
        lines = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        return sum(map(float, lines))


@contextlib.contextmanager
def serving(
    folder: Path, *options: str, rewards: str = REWARDS, token: str | None = None, files: Mapping[str, str] = MINE_PY
) -> Iterator[Served]:
    """Started and ready; ended by SIGTERM, which must lead to exit code 0."""
    for name, text in {**files, "rewards.yaml": rewards}.items():
        (folder / name).write_text(text)
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "hone.cli.main", "serve", "reward", "rewards.yaml", "--port", "0", *options],
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        url = wait_for(lambda: re.search(r"listening on (\S+)", log.read_text()), process, log).group(1)
        wait_for(lambda: ": ready" in log.read_text(), process, log)
        served = Served(process, log, url, token)
        yield served
        served.client.close()
        if process.poll() is None:
            process.terminate()
            assert process.wait(10) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Any, process: subprocess.Popen, log: Path, seconds: float = 60.0) -> Any:
    """What `condition` gives once it is true; the log if the process ends before, or the time is over."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return found


def poster_text(**changes: Any) -> str:
    """A response with a poster that is nearly the ground truth."""
    layers = [dict(layer) for layer in POSTER["layers"]]
    layers[0] |= changes
    return json.dumps({"layers": layers})
