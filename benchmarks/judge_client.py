"""What the judge reward costs for each response beyond asking: against a bare httpx loop that asks the same.

    python benchmarks/judge_client.py --rounds 5 --items 512

A judge that answers at once, in a process of its own. `httpx` sends such bodies, made beforehand, through one pooled
client, as many at a time, and reads the answer's text; `judge` scores groups of 16: prompt and fence, flags, HTTP with
deadline and retries, parsing, verdicts. All responses are different. Rounds are interleaved; the median counts, and
what is left after the bare loop is the judge reward's own time for each response.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from hone.reward.judge.prompt import GRM, JudgeTemplate, neutraliser
from hone.reward.judge.scorer import JudgeReward
from hone.types import Group, Prompt, Sample, VersionSpan

GROUP = 16
QUESTION, RESPONSE = "What is 48/2? " * 8, "Half of 48 is 24. " * 40
SERVER = """
import json, uvicorn
REPLY = json.dumps({"choices": [{"finish_reason": "stop", "message": {"content": "Scores: \\\\boxed{8}"}}],
                    "usage": {"prompt_tokens": 400, "completion_tokens": 8}}).encode()
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(REPLY)).encode())]
async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": REPLY})
class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)
Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off")).run()
"""


async def bare(url: str, texts: list[str], in_flight: int) -> float:
    """Seconds for all texts."""
    template, turn = JudgeTemplate(GRM, 1, 10, "grm_boxed", neutraliser()), asyncio.Semaphore(in_flight)
    bodies = [
        json.dumps({"messages": template.messages(QUESTION, [text], None), "temperature": 1.0, "seed": 1}).encode()
        for text in texts
    ]
    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    async with httpx.AsyncClient(limits=limits, trust_env=False) as client:

        async def ask(body: bytes) -> str:
            async with turn:
                headers = {"Content-Type": "application/json"}
                reply = await client.post(f"{url}/v1/chat/completions", content=body, headers=headers)
                return reply.json()["choices"][0]["message"]["content"]

        began = time.perf_counter()
        await asyncio.gather(*map(ask, bodies))
        return time.perf_counter() - began


async def judged(url: str, texts: list[str], in_flight: int) -> float:
    """Seconds for all texts."""
    args = {"url": url, "max_in_flight": in_flight, "log_every_s": 1e9}
    reward = JudgeReward.from_args(args, folder=Path(), timeout_s=10)
    prompt = Prompt("p", 0, QUESTION, (1,))
    groups = [
        Group(
            prompt,
            tuple(
                Sample("p", i, (1,), (0.0,), (VersionSpan(0, 1),), "stop", text)
                for i, text in enumerate(texts[n : n + GROUP])
            ),
        )
        for n in range(0, len(texts), GROUP)
    ]
    try:
        began = time.perf_counter()
        scores = await asyncio.gather(*map(reward.score, groups))
        elapsed = time.perf_counter() - began
    finally:
        await reward.close()
    assert all(score.value == 7 / 9 for group in scores for score in group)
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=512, help="responses in a round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            print(f"{'in flight':>10}{'httpx':>14}{'judge':>14}{'ratio':>8}{'own time':>16}")
            for in_flight in (1, 8, 64):
                compare(url, in_flight, arguments.items, arguments.rounds)
        finally:
            server.kill()


def compare(url: str, in_flight: int, items: int, rounds: int) -> None:
    """One line of the table."""
    plain, full = [], []
    for number in range(rounds):
        texts = [f"{RESPONSE}{number} {item}" for item in range(items)]
        plain.append(asyncio.run(bare(url, texts, in_flight)) / items)
        full.append(asyncio.run(judged(url, texts, in_flight)) / items)
    a, b = statistics.median(plain) * 1e3, statistics.median(full) * 1e3
    print(f"{in_flight:>10}{a:>11.2f} ms{b:>11.2f} ms{b / a:>8.2f}{b - a:>10.2f} ms/item")


if __name__ == "__main__":
    main()
