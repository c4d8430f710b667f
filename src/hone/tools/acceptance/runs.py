"""Parts that are whole runs, killed and resumed: in one process, and on Ray."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from hone.memory.record import comparison
from hone.observe.events import events_of
from hone.runtime.files import whole_lines
from hone.services.log import last_lines
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import NO_ACCELERATOR, RUN_TIMEOUT_S, PartSetting

STEPS, LAYERS = 6, 14
"""Updates; layers of the model, half of Qwen3-0.6B's: each checkpoint is written and hashed while the run waits."""
TRAIN = (sys.executable, "-m", "hone.cli.main", "train", "run.yaml")
SCATTERED = {"components": [{"use": "rewards.py:scattered"}]}
REWARDS = '''def scattered(group):
    """Another score for nearly every text, so that nearly every sample has a gradient."""
    return [sum(map(ord, sample.text)) % 97 / 96 for sample in group.samples]
'''


def run(setting: PartSetting) -> Iterator[Figure]:
    """`hone train` in one process: the gate, memory against the plan, a kill and a resumption, the export; and whether
    the same run without the kill ends in the same weights."""
    yield from whole_run("run", setting, {"backend": "local"})


def cluster_part(use: Literal["hone", "vllm"]) -> Callable[[PartSetting], Iterator[Figure]]:
    """The part that does the same on Ray, with a trainer and engines of one kind in turn on one device."""

    def part(setting: PartSetting) -> Iterator[Figure]:
        name = f"cluster-{use}"
        if importlib.util.find_spec("ray") is None:
            yield Figure(name, "left_out", 1.0, note="Ray is not installed")
            return
        if use == "vllm" and not (importlib.util.find_spec("vllm") and setting.is_gpu):
            yield Figure(name, "left_out", 1.0, note=f"vLLM is not installed, or {NO_ACCELERATOR}")
            return
        pools = {} if setting.is_gpu else {"pools": {"all": {"devices": 1, "roles": ["policy", "rollout"]}}}
        yield from whole_run(name, setting, {"backend": "ray", "engines": {"use": use}, **pools})

    return part


def whole_run(part: str, setting: PartSetting, section: Mapping[str, Any]) -> Iterator[Figure]:
    """A run that is killed and resumed, in a folder of its own."""
    shape = setting.shape(layers=LAYERS)
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        folder = Path(name)
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (folder / "rewards.py").write_text(REWARDS)
        (folder / "run.yaml").write_text(json.dumps(run_file(setting, shape, section, is_compared=part == "run")))
        code, log = train(folder, kill_after=STEPS // 2)
        lines = metrics_of(folder)
        yield Figure(part, "steps", max((line["step"] for line in lines), default=0) if code == 0 else 0, note=log)
        if code:
            return
        yield Figure(part, "resumed_steps", lines[-1]["step"])
        if part == "run":  # against the same run without a kill
            with (folder / "straight.log").open("w") as log:
                words = [*TRAIN, "run.dir=straight"]
                done = subprocess.run(words, cwd=folder, stdout=log, stderr=log, timeout=RUN_TIMEOUT_S, check=False)
            is_same = done.returncode == 0 and digest(folder / "out") == digest(folder / "straight")
            yield Figure(part, "resumed_same", float(is_same))
        else:
            yield Figure(part, "engines_first", float(is_in_order(folder / "out" / "events.jsonl")))
        yield Figure(part, "exported", float((folder / "out/hf/config.json").is_file()))
        yield from figures_of_steps(part, lines, 8 * (4 if setting.tiny else 32))
        if setting.is_gpu and section["backend"] == "local":
            yield from memory_over_plan(part, folder, "")


def figures_of_steps(part: str, lines: Sequence[Mapping[str, Any]], samples: int) -> Iterator[Figure]:
    """Of a run's metrics: the gate, whether there was something to learn, and the time of its steps."""

    def all_of(name: str) -> list[float]:
        return [line[name] for line in lines if name in line]

    gaps, steps, publish = map(all_of, ("gate/logprob_gap", "time/step_s", "time/publish_s"))
    yield Figure(part, "gate_gap", gaps[0] if gaps else float("inf"))
    yield Figure(part, "trained_frac", min(all_of("train/samples_trained_frac"), default=0.0))
    if publish:
        yield Figure(part, "publish_s", sorted(publish)[len(publish) // 2])
    if steps and (means := all_of("rollout/response_tokens_mean")):
        median_s = sorted(steps)[len(steps) // 2]
        yield Figure(part, "step_s", median_s)
        yield Figure(part, "step_tokens_per_s", samples * sum(means) / len(means) / median_s)


def memory_over_plan(part: str, folder: Path, case: str) -> Iterator[Figure]:
    """Of a run in one process: its worst phase."""
    _, found = comparison(folder / "out")
    ratios = {row.phase: row.measured_bytes / row.expected.bytes for row in found if row.expected}
    if not ratios:
        yield Figure(part, "left_out", 1.0, f"memory_over_plan {case}".strip(), "the run has no plan of this device")
        return
    worst = max(ratios, key=lambda phase: ratios[phase])
    yield Figure(part, "memory_over_plan", ratios[worst], case, worst)


def digest(run_dir: Path) -> str:
    """Hash of the weights that a run exported."""
    found = hashlib.blake2b()
    for file in sorted((run_dir / "hf").glob("*.safetensors")):
        with file.open("rb") as read:
            found.update(hashlib.file_digest(read, "blake2b").digest())
    return found.hexdigest()


def is_in_order(events: Path) -> bool:
    """Whether, before each trainer started, engines were up, and asleep where they share its devices."""
    up, states, starts = set[str](), dict[str, str](), 0
    for event in events_of(events, ("replica_up", "replica_state", "trainer_up")):
        kind, name = event["kind"], event.get("replica", "")
        if kind == "replica_up":
            up.add(name)
        elif kind == "replica_state":
            states[name] = event["state"]
        elif kind == "trainer_up":
            starts += 1
            if not up or any(states.get(engine) != "offloaded" for engine in up):
                return False
            up, states = set(), {}  # a resumed run starts its own
    return starts > 0


def run_file(
    setting: PartSetting, shape: Mapping[str, Any], section: Mapping[str, Any], *, is_compared: bool
) -> dict[str, Any]:
    """A run of a random model on sums, with sums in a fixed order where it is compared with another."""
    return {
        "extends": "algorithm/dr_grpo",
        "run": {
            "dir": "out",
            "steps": STEPS,
            "deterministic": is_compared,
            **({} if setting.is_gpu else {"device": "cpu"}),
        },
        "model": {"init": dict(shape), "characters": "0123456789+= "},
        "data": {"train": "rows.jsonl", "answer_column": "answer", "max_prompt_tokens": 16},
        "reward": SCATTERED,
        "rollout": {"group_size": 8, "max_response_tokens": 8 if setting.tiny else 128},
        "train": {"prompts_per_step": 4 if setting.tiny else 32, "optimizer": {"lr": 1e-6}},
        "checkpoint": {"every": 2},
        "observe": {"console": "quiet", "tensorboard": False, "trace": False},
        "cluster": dict(section),
    }


def train(folder: Path, *, kill_after: int) -> tuple[int, str]:
    """`hone train`, killed after `kill_after` updates and then resumed. Returns exit code and last line of the log."""
    with (folder / "log").open("w") as log:
        first = subprocess.Popen(TRAIN, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while first.poll() is None and time.monotonic() < deadline:
            if len([line for line in metrics_of(folder) if "time/step_s" in line]) >= kill_after:
                break
            time.sleep(0.05)
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
        code = first.wait()
        if code == -signal.SIGKILL:
            left = max(deadline - time.monotonic(), 1)
            code = subprocess.run([*TRAIN, "--resume"], cwd=folder, stdout=log, stderr=log, timeout=left).returncode
    return code, last_line(folder / "log") if code else ""


def last_line(log: Path) -> str:
    """The last one that says something; empty where none does."""
    said = [line.strip() for line in last_lines(log) if line.strip()]
    return said[-1][:200] if said else ""


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of a run's metrics."""
    return [json.loads(line) for line in whole_lines(folder / "out" / "metrics.jsonl")]
