"""Faults that benchmarks/doctor.py plants outside of settings, data and rewards: patches, services, a disk.

Each is a context manager, or gives one; what it yields, if it is a mapping, are settings over the base run's.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _doctor_task import PROMPTS, SAMPLES

from hone.data.chat import character_tokenizer
from hone.types import Batch

CHARACTERS = "0123456789+-*/="
"""Of examples/quickstart/run.yaml."""


def sampled_with(**settings: float) -> Any:
    """The engine has sampling settings that the run file does not."""
    from hone.assemble.sampling import sampling_of

    return patch("hone.assemble.stage_runs.sampling_of", lambda config: replace(sampling_of(config), **settings))


def without_end_token(_: Path) -> Any:
    from hone.rollout.local import LocalEngine

    def engine(*args: Any, **options: Any) -> LocalEngine:
        return LocalEngine(*args, **(options | {"eos_ids": frozenset()}))

    return patch("hone.assemble.sampling.LocalEngine", engine)


def with_batch(change: Callable[[Batch], Batch]) -> Any:
    from hone.data.pack import collate

    return patch("hone.loop.policy.collate", lambda groups: change(collate(groups)))


def shifted(batch: Batch) -> Batch:
    return replace(batch, sampler_logprobs_T=batch.sampler_logprobs_T.roll(1))


@contextlib.contextmanager
def other_tokenizer(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The same characters, with other ids."""
    character_tokenizer(CHARACTERS[::-1]).save_pretrained(folder / "tokenizer")
    yield {"model.tokenizer": str(folder / "tokenizer")}


def without_last_tokens(batch: Batch) -> Batch:
    """The loss mask is one token early: the last token of each response, its end, is taken for the next prompt's."""
    ends_S = batch.length_S.cumsum(0)[batch.length_S > 0] - 1
    return replace(batch, loss_mask_T=batch.loss_mask_T.index_fill(0, ends_S, 0.0))


def nan_in_step(step: int) -> Any:
    """In this step one token has an advantage that is not a number. Rewards and logprobs that are none do no harm."""
    from hone.algo.algorithm import Algorithm

    assign, seen = Algorithm.assign, 0

    def planted(self: Algorithm, batch: Batch) -> tuple[Batch, dict[str, float]]:
        nonlocal seen
        batch, metrics = assign(self, batch)
        seen += 1
        if seen == step:
            batch.columns["advantages_T"][0] = math.nan
        return batch, metrics

    return patch.object(Algorithm, "assign", planted)


def slower_updates(slower_s: float, *, after: int) -> Any:
    """After `after` updates each takes `slower_s` longer than the one before."""
    from hone.algo.algorithm import Algorithm

    assign, seen = Algorithm.assign, 0

    def planted(self: Algorithm, batch: Batch) -> tuple[Batch, dict[str, float]]:
        nonlocal seen
        seen += 1
        time.sleep(slower_s * max(0, seen - after))
        return assign(self, batch)

    return patch.object(Algorithm, "assign", planted)


@contextlib.contextmanager
def other_chat_template(folder: Path) -> Iterator[Mapping[str, Any]]:
    """A chat template that the model was not trained with."""
    (folder / "chat.jinja").write_text(
        "{% for message in messages %}=-{{ message.content }}-={% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    yield {"model.chat_template": str(folder / "chat.jinja"), "data.chat": True}


@contextlib.contextmanager
def inverted_reward(folder: Path) -> Iterator[Mapping[str, Any]]:
    """A user's function that pays for everything but the answer."""
    (folder / "inverted.py").write_text(
        "def score(group):\n    return [float(s.text.strip() != group.prompt.answer) for s in group.samples]\n"
    )
    yield {"reward.components": [{"use": f"{folder / 'inverted.py'}:score"}]}


@contextlib.contextmanager
def growing_reward(folder: Path, *, kept_bytes: int = 0, slower_s: float = 0.0) -> Iterator[Mapping[str, Any]]:
    """A user's function, in a process of its own. Each call keeps `kept_bytes` and takes `slower_s` longer than the one
    before; with neither it is healthy."""
    (folder / "growing.py").write_text(
        "import os, time\nkept = []\n\n\ndef score(group):\n"
        f"    kept.append(os.urandom({kept_bytes}))\n    time.sleep({slower_s} * len(kept))\n"
        "    return [float(s.text.strip() == group.prompt.answer) for s in group.samples]\n"
    )
    yield {"reward.components": [{"use": f"{folder / 'growing.py'}:score"}]}


def rounded(batch: Batch) -> Batch:
    return replace(batch, sampler_logprobs_T=batch.sampler_logprobs_T.to(torch.bfloat16).float())


def stuck_weights(_: Path) -> Any:
    """The engine has weights of its own and stops taking new ones after the third version."""
    from hone.rollout.local import LocalEngine

    load = LocalEngine.load

    async def stuck(self: LocalEngine, weights: Any, version: int) -> None:
        await load(self, weights if version <= 3 else None, version)

    return patch.object(LocalEngine, "load", stuck)


@contextlib.contextmanager
def own_service(*, dies_after: float = math.inf, delay_s: float = 0.0) -> Iterator[Mapping[str, Any]]:
    """A reward service on a port of this machine. After `dies_after` steps nothing listens there any
    more. Each answer takes `delay_s`."""
    served = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            nonlocal served
            items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
            served += len(items)
            if served > dies_after * PROMPTS * SAMPLES:
                self.close_connection = True
                threading.Thread(target=end).start()
            else:
                time.sleep(delay_s)
                self.answer(reply_to(items))

        def answer(self, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def end() -> None:
        server.shutdown()
        server.server_close()

    threading.Thread(target=server.serve_forever, daemon=True).start()
    args = {"url": f"http://127.0.0.1:{server.server_port}", "deadline_s": 2.0 + 10 * delay_s}
    try:
        yield {"reward.components": [{"use": "service", "args": args}]}
    finally:
        end()


def reply_to(items: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdicts of a reward service (hone.reward.wire): 1 for the right sum."""
    results = [
        {"id": item["id"], "status": "ok", "score": float(item["solution_str"].strip() == str(item["ground_truth"]))}
        for item in items
    ]
    return {
        "schema_version": "1",
        "server": {"name": "sums", "version": "1", "boot_id": "1", "fingerprint": "sha256:sums"},
        "results": results,
        "summary": {"n": len(results), "ok": len(results), "error": 0},
        "elapsed_ms": 1.0,
    }


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """The run's folder is a file system of 40 MiB (Linux, as root). What the run leaves is copied out of it."""
    (folder / "run").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder / "run")], check=True)
    try:
        yield
    finally:
        left = shutil.copytree(folder / "run", folder / "left", ignore=shutil.ignore_patterns("checkpoints", "hf"))
        subprocess.run(["umount", str(folder / "run")], check=True)
        (folder / "run").rmdir()
        left.rename(folder / "run")


@contextlib.contextmanager
def disk_that_fills(_: Path) -> Iterator[None]:
    """What the system says of the disk: each time it is asked 1 GiB less of 60 is free."""
    asked, usage = 0, shutil.disk_usage("/")

    def disk_usage(_: Any) -> Any:
        nonlocal asked
        asked += 1
        return usage._replace(total=500 << 30, free=max(60 - asked, 1) << 30)

    with patch("shutil.disk_usage", disk_usage):
        yield


@contextlib.asynccontextmanager
async def two_engines(job: Any, needs: frozenset[str], saved: Any) -> AsyncIterator[Any]:
    """Two engines in place of one. The second says that it took every version, and samples from the third."""
    from hone.assemble.models import rl_roles, roles_of_needs
    from hone.assemble.sampling import embedded_engine
    from hone.assemble.workers import Workers
    from hone.model.lora import merged_copy
    from hone.rollout.local import LocalEngine
    from hone.rollout.router import Router

    class Stale(LocalEngine):
        async def load(self, weights: Any, version: int) -> None:
            await super().load(weights if version <= 3 else None, version)

    trainer = await job.computed(lambda: rl_roles(job, held=roles_of_needs(needs)), phase="start")
    engines = [embedded_engine(job.config, job.tokenizer, merged_copy(trainer.policy.model)) for _ in range(2)]
    engines[1].__class__ = Stale
    for engine in engines:
        engine.fingerprint = trainer.fingerprint
    router = Router(
        {"engine-0": engines[0], "engine-1": engines[1]}, job.observer, silence_s=60, call_s=60, patience_s=60
    )
    try:
        yield Workers(trainer, router, weights_are_shared=False)
    finally:
        await router.close()
