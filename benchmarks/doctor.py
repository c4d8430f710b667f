"""Faults planted in a small run, and whether `hone doctor` names them; alarms of healthy runs.

    python benchmarks/doctor.py                        # every fault x 3 seeds, healthy runs; half an hour on 2 cores
    python benchmarks/doctor.py --seeds 1 --only clip_zero,kl_huge
    python benchmarks/doctor.py --healthy              # healthy runs alone

The task is adding two numbers, by a model of about 30 thousand parameters that a supervised stage has taught a part of
it. Each fault is the base run with one thing wrong: a setting, the data, the reward, or the code (a patch). `expected`
has the causes that count as right: where two of them cannot be told apart from metrics, both are listed. Found means
that the first alarm of the run names one of them, late that another alarm does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import hone
from hone.doctor.watch import Alarm, by_importance
from hone.errors import ConfigError, HoneError
from hone.run.status import diagnose
from hone.types import Batch, Group

STEPS = 80
MODEL = {
    "model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 96, "max_position_embeddings": 48,
    "tie_word_embeddings": True,
}  # fmt: skip
CHARACTERS = "0123456789+="
Rows = list[dict[str, Any]]


def row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


EASY = [row(a, b) for a in range(6) for b in range(6)]
SUMS = [row(a, b) for a in range(5, 25) for b in range(10)]
HARD = [row(a, b) for a in range(100, 120) for b in range(100, 110)]
LEAKED = [{"prompt": f"{a + b}={a}+{b}=", "answer": str(a + b)} for a in range(5, 25) for b in range(10)]


def base(folder: Path, start: Path, seed: int) -> dict[str, Any]:
    """A run that learns: from the supervised weights in `start`."""
    return {
        "seed": seed,
        "run": {"dir": str(folder / "run"), "steps": STEPS, "threads": 1, "device": "cpu"},
        "model": {"path": str(start)},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl", "answer_column": "answer", "max_prompt_tokens": 16},
        "reward": {"components": [{"use": "exact"}]},
        "rollout": {"group_size": 8, "max_response_tokens": 8},
        "train": {"prompts_per_step": 16, "optimizer": {"lr": 1e-3}},
        "eval": {"every": 20},
        "gate": {"enabled": False},
        "checkpoint": {"every": 0},
        "observe": {"console": "quiet", "tensorboard": False, "trace": False, "samples_max_mib": 0},
    }


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    name: str
    expected: tuple[str, ...]
    """Causes that are right."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys over the base run's."""
    train: Rows | None = None
    eval: Rows | None = None
    rewards: Callable[[], list[Callable[..., Any]]] | None = None
    planted: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


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


def failing_reward() -> list[Callable[..., Any]]:
    chance = random.Random(0)

    def reward(group: Group) -> list[float]:
        if chance.random() < 0.3:
            raise RuntimeError("the service is away")
        return [right(sample, group) for sample in group.samples]

    return [reward]


def slow_reward() -> list[Callable[..., Any]]:
    def reward(group: Group) -> list[float]:
        time.sleep(0.05)
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
        return [min(len(s.token_ids) / 8, 1.0) + 0.1 * chance.random() for s in group.samples]

    return [*of_samples(right, "exactly")(), judge]


def with_constant() -> list[Callable[..., Any]]:
    return of_samples(right, "exactly")() + of_samples(lambda sample, group: 0.5, "formatted")()


def other_temperature() -> Any:
    from hone.assemble.sampling import sampling_of

    return patch("hone.assemble.stages.sampling_of", lambda config: replace(sampling_of(config), temperature=0.6))


def without_end_token() -> Any:
    from hone.rollout.local import LocalEngine

    def engine(*args: Any, **options: Any) -> LocalEngine:
        return LocalEngine(*args, **(options | {"eos_ids": frozenset()}))

    return patch("hone.assemble.sampling.LocalEngine", engine)


def with_batch(change: Callable[[Batch], Batch]) -> Any:
    from hone.data.pack import collate

    return patch("hone.loop.policy.collate", lambda groups: change(collate(groups)))


def shifted(batch: Batch) -> Batch:
    return replace(batch, sampler_logprobs_T=batch.sampler_logprobs_T.roll(1))


def rounded(batch: Batch) -> Batch:
    return replace(batch, sampler_logprobs_T=batch.sampler_logprobs_T.to(torch.bfloat16).float())


def stuck_weights() -> Any:
    """The engine has weights of its own and stops taking new ones after the third version."""
    from hone.rollout.local import LocalEngine

    load = LocalEngine.load

    async def stuck(self: LocalEngine, weights: Any, version: int) -> None:
        await load(self, weights if version <= 3 else None, version)

    return patch.object(LocalEngine, "load", stuck)


LR, LR_CRITIC = "train.optimizer.lr", "critic.optimizer.lr"
PPO = {"extends": ["algorithm/ppo"], LR_CRITIC: 3e-3, "critic.warmup_updates": 0}
NO_RATIO = {"algorithm.ratio": "none", "algorithm.clip": "none"}
TOO_HIGH = ("learning_rate_too_high",)
LENGTH = ("reward_pays_length",)

FAULTS = (
    Fault("lr_x100", TOO_HIGH, {LR: 0.1}),
    Fault("lr_x30", TOO_HIGH, {LR: 0.03}),
    Fault("lr_by_100", ("learning_rate_too_low",), {LR: 1e-5}),
    Fault("lr_by_1000", ("learning_rate_too_low",), {LR: 1e-6}),
    Fault("lr_of_a_large_model", ("learning_rate_too_low",), {LR: 1e-7}),
    Fault("sft_lr_x100", TOO_HIGH, {"stages": ["sft"], "sft.epochs": 40, "sft.optimizer.lr": 0.3}),
    Fault("kl_huge", ("kl_coefficient_too_large",), {"algorithm.kl_loss_coef": 10.0}),
    Fault("temperature_unknown", ("sampler_settings_differ",), planted=other_temperature),
    Fault("top_p", ("truncated_sampling",), NO_RATIO | {"rollout.top_p": 0.8}),
    Fault("top_k", ("truncated_sampling",), NO_RATIO | {"rollout.top_k": 2}),
    Fault("logprobs_shifted", ("tokens_misaligned",), planted=lambda: with_batch(shifted)),
    Fault("dtype", ("dtype_differs",), planted=lambda: with_batch(rounded)),
    Fault("weights_stuck", ("weights_stale",), {"rollout.max_staleness": 1}, planted=stuck_weights),
    Fault(
        "staleness_4", ("off_policy",), {"rollout.max_staleness": 4, "algorithm.correction": "none", LR: 2e-3}
    ),
    Fault("sign", ("weight_negative",), {"reward.components": [{"use": "exact", "weight": -1.0}]}),
    Fault("parser_broken", ("reward_broken",), rewards=of_samples(lambda sample, group: 0.0)),
    Fault("length_pays", LENGTH, rewards=of_samples(lambda s, g: min(len(s.token_ids) / 8, 1) + 0.2 * right(s, g))),
    Fault("judge_likes_length", LENGTH, rewards=wordy_judge),
    Fault("reward_is_noise", ("reward_is_noise",), {"run.steps": 150}, rewards=noisy_reward),
    Fault("component_constant", ("component_constant",), rewards=with_constant),
    Fault("reward_fails", ("reward_code_fails",), {"reward.max_unscored_frac": 1.0}, rewards=failing_reward),
    Fault("reward_slow", ("reward_slow",), {"run.steps": 20}, rewards=slow_reward),
    Fault("reward_leaks", ("memory_leak",), {"run.steps": 110}, rewards=leaking_reward),
    Fault("reward_outlier", ("reward_outlier",), {"algorithm.credit": "group_mean"},
          rewards=lambda: outlier_reward(1000.0, 500)),
    Fault("reward_overflows", ("batch_not_finite",), {"algorithm.credit": "group_mean"},
          rewards=lambda: outlier_reward(3e38, 500)),
    Fault("data_easy", ("prompts_too_easy",), train=LEAKED, eval=LEAKED[::5]),
    Fault("data_hard", ("prompts_too_hard",), train=HARD),
    Fault("data_duplicated", ("data_duplicated",), train=SUMS[:4] * 20),
    Fault("answers_leak", ("answers_leak",), train=LEAKED),
    Fault("no_end_token", ("no_end_token",), planted=without_end_token),
    Fault("limit_too_low", ("limit_too_low",), {"rollout.max_response_tokens": 2}),
    Fault("clip_zero", ("clip_range_too_narrow",),
          {"algorithm.clip_low": 0.0, "algorithm.clip_high": 0.0, "train.samples_per_optimizer_step": 32}),
    Fault("many_passes", ("too_many_steps_per_batch",),
          {"train.passes_per_batch": 8, "train.samples_per_optimizer_step": 32, LR: 4e-3}),
    Fault("entropy_bonus", ("entropy_bonus_too_large",), {"algorithm.entropy_coef": 0.5}),
    Fault("weight_decay", ("weight_decay_too_large",), {"train.optimizer.weight_decay": 30.0}),
    Fault("temperature_low", ("temperature_too_low",), {"rollout.temperature": 0.2}),
    Fault("groups_of_two", ("group_too_small",), {"rollout.group_size": 2}),
    Fault("critic_lr_x100", ("critic_learning_rate_too_high",), PPO | {LR_CRITIC: 0.3}),
    Fault("reward_x1000", ("reward_scale",), PPO, rewards=of_samples(lambda s, g: 1000 * right(s, g))),
    Fault("template_wrong", ("prompts_unlike_training",), {"data.template": "=={prompt}"}),
)  # fmt: skip

WARM = {"train.optimizer.warmup_steps": 10}
"""Healthy runs begin gently: Adam's first step at the full rate undoes a part of what a tiny model knows."""
HEALTHY: dict[str, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"extends": ["algorithm/dr_grpo"]},
    "rloo": {"extends": ["algorithm/rloo"]},
    "reinforce_pp": {"extends": ["algorithm/reinforce_pp"]},
    "gspo, 2 steps": {"extends": ["algorithm/gspo"], "train.samples_per_optimizer_step": 64},
    "dapo": {"extends": ["algorithm/dapo"], LR: 5e-4},
    "ppo": PPO,
    "grpo with KL": {"algorithm.kl_loss_coef": 0.02},
    "overlapped": {"rollout.max_staleness": 1},
    "two components": {
        "reward.components": [
            {"use": "exact"},
            {"use": "length", "weight": 0.1, "args": {"target_tokens": 3, "tolerance_tokens": 1}},
        ]
    },
}


# ---- running ------------------------------------------------------------------------------------------------------


def nested(flat: Mapping[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys put into a nested mapping."""
    for name, value in flat.items():
        *sections, last = name.split(".")
        place = into
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return into


def write_rows(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


def supervised_start(folder: Path, seed: int) -> Path:
    """Weights that add easy numbers well, the others in part, and can copy an answer that stands in the prompt."""
    if (folder / "run" / "hf").exists():
        return folder / "run" / "hf"
    folder.mkdir(parents=True)
    rows = EASY * 12 + SUMS * 4 + LEAKED * 6
    write_rows(folder / "train.jsonl", rows)
    settings = base(folder, folder, seed) | {
        "stages": ["sft"],
        "model": {"characters": CHARACTERS, "init": MODEL},
        "sft": {"epochs": 6, "rows_per_step": 64, "optimizer": {"lr": 5e-3, "schedule": "cosine", "warmup_steps": 10}},
    }
    del settings["data"]["eval"], settings["eval"]
    with contextlib.chdir(folder):
        hone.train(settings)
    return folder / "run" / "hf"


def run(folder: Path, start: Path, fault: Fault, seed: int, steps: int = STEPS) -> tuple[list[Alarm], int]:
    """Train with the fault, unless that was done; the run's alarms by importance, and its steps."""
    if not (folder / "run").exists():
        train(folder, start, fault, seed, steps)
    found = diagnose(folder / "run")
    return list(found.alarms), max(found.last_steps.values(), default=0)


def train(folder: Path, start: Path, fault: Fault, seed: int, steps: int) -> None:
    folder.mkdir(parents=True)
    write_rows(folder / "train.jsonl", fault.train or SUMS)
    write_rows(folder / "eval.jsonl", fault.eval or SUMS[::5])
    settings = base(folder, start, seed)
    settings["run"]["steps"] = steps
    nested(fault.settings, settings)
    rewards = fault.rewards() if fault.rewards else None
    if rewards:
        del settings["reward"]["components"]
    with contextlib.chdir(folder), fault.planted():
        try:
            hone.train(settings, rewards=rewards)
        except ConfigError:
            raise
        except HoneError as error:
            print(f"{fault.name}: {error}", flush=True)
    for large in ("checkpoints", "hf"):
        shutil.rmtree(folder / "run" / large, ignore_errors=True)


def lines_of_table(rows: Sequence[tuple[str, Sequence[list[Alarm]], Fault]]) -> Iterator[str]:
    yield "| Fault | Expected | First alarm names, by seed | Right | Since step / found at |"
    yield "|---|---|---|---|---|"
    for name, seeds, fault in rows:
        firsts = [alarms[0] if alarms else None for alarms in seeds]
        named = Counter(f"{a.name}: {a.cause}" if a else "no alarm" for a in firsts)
        good = sum(a is not None and a.cause in fault.expected for a in firsts)
        late = sum(
            bool(not (a and a.cause in fault.expected) and any(b.cause in fault.expected for b in alarms))
            for a, alarms in zip(firsts, seeds, strict=True)
        )
        shown = ", ".join(f"{cause}{f' ({count})' if count > 1 else ''}" for cause, count in named.most_common())
        steps = ", ".join(f"{a.since} / {a.step}" for a in firsts if a)
        then = f"; {late} later" if late else ""
        yield f"| {name} | {' or '.join(fault.expected)} | {shown} | {good}/{len(seeds)}{then} | {steps} |"


def faulty(work: Path, faults: Sequence[Fault], seeds: int) -> None:
    starts = [supervised_start(work / f"start-{seed}", seed) for seed in range(seeds)]
    rows, right_ones = [], 0
    for fault in faults:
        began, found = time.perf_counter(), []
        for seed in range(seeds):
            alarms, _ = run(
                work / f"{fault.name}-{seed}", starts[seed], fault, seed, fault.settings.get("run.steps", STEPS)
            )
            found.append(alarms)
        rows.append((fault.name, found, fault))
        right_ones += sum(bool(alarms) and alarms[0].cause in fault.expected for alarms in found)
        print(list(lines_of_table(rows[-1:]))[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
        for alarms in found:
            print("     ", [(a.name, a.cause, a.since, a.step, a.ended) for a in alarms], flush=True)
    print("\n".join(lines_of_table(rows)))
    print(f"\n{right_ones} of {len(faults) * seeds} right ({right_ones / (len(faults) * seeds):.0%})")


def healthy(work: Path, steps: int) -> None:
    start = supervised_start(work / "start", 7)
    print("| Run | Steps | Alarms | Advice |\n|---|---|---|---|")
    total, false = 0, 0
    for name, settings in HEALTHY.items():
        alarms, last = run(work / name, start, Fault(name, (), WARM | settings), 7, steps)
        wrong = [a for a in by_importance(alarms) if a.level != "tuning"]
        advice = [a for a in alarms if a.level == "tuning"]
        total, false = total + last, false + len(wrong)
        listed = [", ".join(f"{a.name}: {a.cause} (step {a.since})" for a in kind) for kind in (wrong, advice)]
        print(f"| {name} | {last} | {listed[0]} | {listed[1]} |", flush=True)
    print(f"\n{false} alarms in {total} steps: {1000 * false / max(total, 1):.2f} per 1,000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="faults, by name")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--steps", type=int, default=200, help="of each healthy run")
    parser.add_argument("--keep", type=Path, help="folder of the runs; those that it has are read and not repeated")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [fault.name for fault in FAULTS]
    with tempfile.TemporaryDirectory(prefix="doctor-") as temporary:
        work = options.keep or temporary
        if not options.healthy:
            faulty(Path(work), [fault for fault in FAULTS if fault.name in names], options.seeds)
        if options.healthy or not options.only:
            healthy(Path(work) / "healthy", options.steps)


if __name__ == "__main__":
    main()
