"""Reward service: what HTTP costs an item, and what happens to a load of twice its capacity.

    OMP_NUM_THREADS=1 python benchmarks/reward_service.py [--seconds 3]

Overhead: `gsm8k` (microseconds of work, so that the rest is seen) for 1, 8 and 64 clients at one time, each sending one
item or a batch of 64 per request over a kept connection, against the same groups scored in process. Clients and service
share the machine, so the time of an item is that of both sides together.

Overload: a scorer of 20 ms in one process is offered twice what it can do, by clients that come back after a 503 as it
asks them to. Every item must come to its true score: none is lost and none is made up. Baseline: half of the capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from hone.config.load import load_config
from hone.reward.rewards import Rewards
from hone.types import Group, Prompt, Sample

WORK_S = 0.02
REWARDS = """\
reward:
  components:
    - {use: gsm8k}
    - {use: "slow.py:slow", weight: 0}
"""
SLOW = f"""\
import time

def slow(group):
    time.sleep({WORK_S})
    return [float(sample.text) for sample in group.samples]
"""


class Service:
    """`hone serve reward` as a process of its own, with nothing remembered between requests."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        command = [sys.executable, "-m", "hone.cli.main", "serve", "reward", "rewards.yaml", "--port", "0"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--cache-items", "0", "--queue-items", "8192"],
                cwd=folder,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def url(self) -> str:
        deadline = time.monotonic() + 60
        while ": ready" not in self._log.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(self._log.read_text())
            time.sleep(0.05)
        found = re.search(r"listening on (\S+)", self._log.read_text())
        assert found is not None
        return found[1]

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        finally:
            self._process.kill()


def connections(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits)


def body(number: int, num_items: int) -> dict[str, Any]:
    items = [
        {"id": str(i), "solution_str": f"it is {number} and so #### {i}", "ground_truth": f"#### {i}"}
        for i in range(num_items)
    ]
    return {"reward": "gsm8k", "items": items}


async def in_process(folder: Path, num_items: int, seconds: float) -> float:
    """Seconds per item of groups scored by `Rewards`, groups of one as the service makes of pointwise items."""
    section = load_config(folder / "rewards.yaml", ["reward.components=[{use: gsm8k}]"], needed="reward").config.reward
    count = 0
    async with Rewards.from_config(section, folder, window_samples=1000) as rewards:
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            for i in range(num_items):
                sample = Sample("p", 0, (), (), (), "stop", f"it is {count} and so #### {i}")
                await rewards.score(Group(Prompt("p", 0, "", (), answer=f"#### {i}"), (sample,)))
            count += num_items
    return (time.perf_counter() - began) / count


async def served(url: str, num_clients: int, num_items: int, seconds: float) -> tuple[float, list[float]]:
    """Seconds per item over all clients, and seconds of each request."""
    durations: list[float] = []
    began = time.perf_counter()

    async def client(http: httpx.AsyncClient, number: int) -> None:
        while time.perf_counter() - began < seconds:
            started = time.perf_counter()
            response = await http.post("/v1/rewards", json=body(number, num_items))
            durations.append(time.perf_counter() - started)
            assert response.status_code == 200 and response.json()["summary"]["ok"] == num_items, response.text

    async with connections(url) as http:
        await asyncio.gather(*(client(http, number) for number in range(num_clients)))
    return (time.perf_counter() - began) / (len(durations) * num_items), durations


async def offered(url: str, load: float, seconds: float) -> tuple[list[float], list[float], int]:
    """Requests of one item at `load` times the capacity. Returns seconds of each answered try, seconds until each item
    was scored, and how many were refused."""
    tries: list[float] = []
    until_scored: list[float] = []
    refused = 0

    async def one(http: httpx.AsyncClient, number: int) -> None:
        nonlocal refused
        asked = {"reward": "slow", "timeout_ms": 500, "items": [{"id": "a", "solution_str": f"{number}"}]}
        began = time.perf_counter()
        while True:
            started = time.perf_counter()
            response = await http.post("/v1/rewards", json=asked)
            if response.status_code == 200:
                result = response.json()["results"][0]
                assert result["score"] == number, response.text  # its own score or none
                tries.append(time.perf_counter() - started)
                until_scored.append(time.perf_counter() - began)
                return
            assert response.status_code in (503, 504), response.text
            refused += 1
            await asyncio.sleep(float(response.headers.get("retry-after", 1)))

    async with connections(url) as http:
        num_items = round(load * seconds / WORK_S)
        pending = []
        began = time.perf_counter()
        for number in range(num_items):
            await asyncio.sleep(max(0.0, began + number * WORK_S / load - time.perf_counter()))
            pending.append(asyncio.ensure_future(one(http, number)))
        await asyncio.gather(*pending)
    assert len(until_scored) == num_items  # nothing lost
    return tries, until_scored, refused


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def row(*cells: object) -> None:
    print("".join(f"{cell!s:>14}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rewards.yaml").write_text(REWARDS)
        (folder / "slow.py").write_text(SLOW)
        service = Service(folder)
        try:
            url = service.url()
            row("clients", "items/request", "us/item", "x in process", "p50 ms", "p99 ms")
            for num_items in (1, 64):
                base = asyncio.run(in_process(folder, num_items, seconds / 3))
                row("in process", num_items, f"{base * 1e6:.1f}", "1.0", "", "")
                for num_clients in (1, 8, 64):
                    per_item, durations = asyncio.run(served(url, num_clients, num_items, seconds))
                    waits = (f"{1e3 * statistics.median(durations):.1f}", f"{1e3 * percentile(durations, 0.99):.1f}")
                    row(num_clients, num_items, f"{per_item * 1e6:.1f}", f"{per_item / base:.1f}", *waits)
            print(f"\na scorer of {WORK_S * 1e3:g} ms; the deadline of a request is 500 ms")
            row("load", "items", "scored", "503 or 504", "p99 try ms", "p99 total s")
            for load in (0.5, 2.0):
                tries, until_scored, refused = asyncio.run(offered(url, load, seconds))
                waits = (f"{1e3 * percentile(tries, 0.99):.0f}", f"{percentile(until_scored, 0.99):.2f}")
                row(f"{load:g} x", len(until_scored), len(tries), refused, *waits)
        finally:
            service.close()


if __name__ == "__main__":
    main()
