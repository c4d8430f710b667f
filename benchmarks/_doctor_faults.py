"""The faults of benchmarks/doctor.py: each is the base run with one thing wrong.

What is wrong is a setting, the data, the reward, or the code (a patch). `_doctor_task.py` has the base run.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _doctor_task import (
    PROMPTS,
    RESPONSE_TOKENS,
    SAMPLES,
    STEPS,
    Rows,
    easy_rows,
    eval_rows,
    hard_rows,
    leaked,
    train_rows,
)

from hone.data.chat import character_tokenizer
from hone.types import Batch, Group

CHARACTERS = "0123456789+-*/="
"""Of examples/quickstart/run.yaml."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    name: str
    expected: tuple[str, ...]
    """Causes that are right: several where metrics cannot tell them apart."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys over the base run's."""
    train: Callable[[], Rows] = train_rows
    eval: Callable[[], Rows] = eval_rows
    rewards: Callable[[], list[Callable[..., Any]]] | None = None
    planted: Callable[[Path], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Takes the run's folder; within it the run is made. What it gives, if it is a mapping, are more settings."""
    extends: tuple[str, ...] = ()
    """Presets over the base run."""
    steps: int = STEPS
    """Fewer where the fault shows early."""


# ---- rewards and patches ------------------------------------------------------------------------------------------


def right(sample: Any, group: Group) -> float:
    return float(sample.text.strip() == group.prompt.answer)


def of_samples(score: Callable[[Any, Group], float], name: str = "score") -> Callable[[], list[Callable[..., Any]]]:
    def reward(group: Group) -> list[float]:
        return [score(sample, group) for sample in group.samples]

    reward.__name__ = name
    return lambda: [reward]


def noisy_reward() -> list[Callable[..., Any]]:
    chance = random.Random(0)
    return of_samples(lambda sample, group: float(chance.random() < 0.5))()


def idle_reward() -> list[Callable[..., Any]]:
    """Higher for every second prompt, and otherwise chance: nothing that a response can earn."""
    chance = random.Random(0)
    return of_samples(lambda sample, group: float(chance.random() < (0.3 if group.prompt.index % 2 else 0.7)))()


def failing_reward() -> list[Callable[..., Any]]:
    chance = random.Random(0)

    def reward(group: Group) -> list[float]:
        if chance.random() < 0.3:
            raise RuntimeError("the service is away")
        return [right(sample, group) for sample in group.samples]

    return [reward]


def slow_reward() -> list[Callable[..., Any]]:
    def reward(group: Group) -> list[float]:
        time.sleep(0.3)
        return [right(sample, group) for sample in group.samples]

    return [reward]


def leaking_reward() -> list[Callable[..., Any]]:
    kept: list[bytes] = []

    def reward(group: Group) -> list[float]:
        kept.append(random.randbytes(400_000))
        return [right(sample, group) for sample in group.samples]

    return [reward]


def outlier_reward(value: float, groups: int) -> list[Callable[..., Any]]:
    """After so many groups, one sample in a hundred groups earns `value`."""
    seen = 0

    def reward(group: Group) -> list[float]:
        nonlocal seen
        seen += 1
        scores = [right(sample, group) for sample in group.samples]
        if seen > groups and seen % 100 == 0:
            scores[0] = value
        return scores

    return [reward]


def wordy_judge() -> list[Callable[..., Any]]:
    chance = random.Random(0)

    def judge(group: Group) -> list[float]:
        return [min(len(s.token_ids) / RESPONSE_TOKENS, 1.0) + 0.1 * chance.random() for s in group.samples]

    return [*of_samples(right, "exactly")(), judge]


def string_pays(sample: Any, group: Group) -> float:
    """A judge that a string convinces, whatever was asked."""
    return max(right(sample, group), float(sample.text == "00000"))


def with_constant() -> list[Callable[..., Any]]:
    return of_samples(right, "exactly")() + of_samples(lambda sample, group: 0.5, "formatted")()


def other_temperature(_: Path) -> Any:
    from hone.assemble.sampling import sampling_of

    return patch("hone.assemble.stages.sampling_of", lambda config: replace(sampling_of(config), temperature=0.6))


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
def dying_service(_: Path) -> Iterator[Mapping[str, Any]]:
    """A reward service on a port of this machine that is gone in step 11: nothing listens there any more."""
    served = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            nonlocal served
            items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
            served += len(items)
            if served > 10 * PROMPTS * SAMPLES:
                self.close_connection = True
                threading.Thread(target=end).start()
            else:
                self.answer(reply_to(items))

        def answer(self, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def end() -> None:
        server.shutdown()
        server.server_close()

    threading.Thread(target=server.serve_forever, daemon=True).start()
    args = {"url": f"http://127.0.0.1:{server.server_port}", "deadline_s": 2.0}
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
    from hone.assemble.models import needed_roles, rl_roles
    from hone.assemble.sampling import embedded_engine
    from hone.assemble.workers import Workers
    from hone.model.lora import merged_copy
    from hone.rollout.local import LocalEngine
    from hone.rollout.router import Router

    class Stale(LocalEngine):
        async def load(self, weights: Any, version: int) -> None:
            await super().load(weights if version <= 3 else None, version)

    trainer = await job.computed(lambda: rl_roles(job, held=needed_roles(needs)), phase="start")
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


LR, LR_CRITIC = "train.optimizer.lr", "critic.optimizer.lr"
PPO = {LR_CRITIC: 1e-3, "critic.warmup_updates": 0}
NO_RATIO = {"algorithm.ratio": "none", "algorithm.clip": "none"}
SMALL = {"train.prompts_per_step": 8, "rollout.group_size": 8}
"""For faults that need many steps and no particular batch."""
TOO_HIGH = ("learning_rate_too_high",)
LENGTH = ("reward_pays_length",)

FAULTS = (
    Fault("lr_x100", TOO_HIGH, {LR: 3e-2}, steps=25),
    Fault("lr_x30", TOO_HIGH, {LR: 1e-2}),
    Fault("lr_by_100", ("learning_rate_too_low",), {LR: 3e-6}, steps=60),
    Fault("lr_by_1000", ("learning_rate_too_low",), {LR: 3e-7}, steps=30),
    Fault("lr_of_a_large_model", ("learning_rate_too_low",), {LR: 1e-7}, steps=30),
    Fault("sft_lr_x100", TOO_HIGH, {"stages": ["sft"], "sft.rows": "0:1600", "sft.optimizer.lr": 0.2}),
    Fault("kl_huge", ("kl_coefficient_too_large",), {"algorithm.kl_loss_coef": 10.0}, steps=50),
    Fault("kl_off", ("kl_coefficient_vanished", "drift_without_gain"), rewards=idle_reward, steps=60,
          settings={"algorithm.kl_loss_coef": 0.05, "algorithm.kl_target": 50.0, "algorithm.kl_horizon_samples": 500,
                    LR: 2e-3}),
    Fault("temperature_unknown", ("sampler_settings_differ",), planted=other_temperature, steps=15),
    Fault("top_p", ("truncated_sampling",), NO_RATIO | {"rollout.top_p": 0.8}, steps=15),
    Fault("top_k", ("truncated_sampling",), NO_RATIO | {"rollout.top_k": 2}, steps=15),
    Fault("logprobs_shifted", ("tokens_misaligned",), planted=lambda _: with_batch(shifted), steps=15),
    Fault("dtype", ("dtype_differs",), planted=lambda _: with_batch(rounded), steps=15),
    Fault("weights_stuck", ("weights_stale",), {"rollout.max_staleness": 1}, planted=stuck_weights),
    Fault(
        "staleness_4", ("off_policy",), {"rollout.max_staleness": 4, "algorithm.correction": "none", LR: 1e-3}
    ),
    Fault("sign", ("weight_negative",), {"reward.components": [{"use": "exact", "weight": -1.0}]}, steps=30),
    Fault("parser_broken", ("reward_broken",), rewards=of_samples(lambda sample, group: 0.0), steps=15),
    Fault("length_pays", LENGTH, steps=60,
          rewards=of_samples(lambda s, g: min(len(s.token_ids) / RESPONSE_TOKENS, 1) + 0.2 * right(s, g))),
    Fault("judge_likes_length", LENGTH, rewards=wordy_judge, steps=60),
    Fault("string_convinces", ("reward_exploited",), rewards=of_samples(string_pays), steps=60),
    Fault("reward_is_noise", ("reward_is_noise",), rewards=noisy_reward, steps=60),
    Fault("component_constant", ("component_constant",), rewards=with_constant, steps=20),
    Fault("reward_fails", ("reward_code_fails",), {"reward.max_unscored_frac": 1.0}, rewards=failing_reward, steps=15),
    Fault("reward_slow", ("reward_slow",), rewards=slow_reward, steps=15),
    Fault("reward_leaks", ("memory_leak",), SMALL, rewards=leaking_reward, steps=80),
    Fault("reward_outlier", ("reward_outlier",), {"algorithm.credit": "group_mean"},
          rewards=lambda: outlier_reward(1000.0, 350), steps=30),
    Fault("reward_overflows", ("batch_not_finite",), {"algorithm.credit": "group_mean"},
          rewards=lambda: outlier_reward(3e38, 350), steps=30),
    Fault("data_easy", ("prompts_too_easy",), train=easy_rows, eval=lambda: easy_rows()[::20], steps=15),
    Fault("data_hard", ("prompts_too_hard",), train=hard_rows, steps=15),
    Fault("data_duplicated", ("data_duplicated",), train=lambda: train_rows()[:4] * 100, steps=15),
    Fault("answers_leak", ("answers_leak",), train=lambda: leaked(train_rows())),
    Fault("no_end_token", ("no_end_token",), planted=without_end_token, steps=15),
    Fault("prompt_has_answer", ("prompt_ends_the_response",), {"data.template": "{prompt}{answer}"}, steps=15),
    Fault("limit_too_low", ("limit_too_low",), {"rollout.max_response_tokens": 3}, steps=15),
    Fault("clip_zero", ("clip_range_too_narrow",), steps=25,
          settings={"algorithm.clip_low": 0.0, "algorithm.clip_high": 0.0, "train.samples_per_optimizer_step": 64}),
    Fault("many_passes", ("too_many_steps_per_batch",), steps=25,
          settings={"train.passes_per_batch": 8, "train.samples_per_optimizer_step": 16, **SMALL}),
    Fault("entropy_bonus", ("entropy_bonus_too_large",), {"algorithm.entropy_coef": 0.5}, steps=50),
    Fault("weight_decay", ("weight_decay_too_large",), {"train.optimizer.weight_decay": 100.0}, steps=50),
    Fault("temperature_low", ("temperature_too_low",), {"rollout.temperature": 0.2}, steps=20),
    Fault("groups_of_two", ("group_too_small",), {"rollout.group_size": 2}),
    Fault("critic_lr_x100", ("critic_learning_rate_too_high",), PPO | {LR_CRITIC: 0.1},
          extends=("algorithm/ppo",), steps=20),
    Fault("reward_x1000", ("reward_scale",), PPO, rewards=of_samples(lambda s, g: 1000 * right(s, g)),
          extends=("algorithm/ppo",), steps=15),
    Fault("template_wrong", ("prompts_unlike_training",), {"data.template": "=={prompt}"}, steps=15),
    Fault("tokenizer_other", ("prompts_unlike_training",), planted=other_tokenizer, steps=15),
    Fault("service_dies", ("reward_service_fails",), planted=dying_service, steps=15),
    Fault("one_replica_stale", ("one_engine_differs",),
          planted=lambda _: patch("hone.assemble.workers.local_workers", two_engines), steps=30),
    Fault("disk_full", ("disk_full",), {"checkpoint.every": 2, "checkpoint.keep": 100}, planted=small_disk, steps=15),
    Fault("disk_fills", ("disk_full",), SMALL, planted=disk_that_fills, steps=50),
)  # fmt: skip
