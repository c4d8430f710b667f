"""Share of time spent training while processes are killed, and how long each kind takes to recover; against no faults.

    python benchmarks/faults.py                        # about 20 minutes
    python benchmarks/faults.py --quick                # three short runs: does it work?

One run file on Ray, asynchronous, two trainer ranks and two engines on a machine's cores. After each update, with the
chance that is named, one process is killed (SIGKILL) in turn: an engine, a rank of the trainer, the controller, which
is started again with --resume as a scheduler would. Nothing else is done; what recovers does so by itself. Each fault
must have its witness in events.jsonl, and the checker (`hone status RUN --audit`) must find no violation.

The share is the time that the updates which survive take where nothing fails, over the time they took: stalls, restarts
and updates that were made twice all count against it. A recovery costs about the same whatever an update takes, so the
last table says what the same faults cost where updates are long.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from _runs import DIGITS

from hone.observe.events import read_events
from hone.run.audit import Audit, audit

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("engine", "trainer rank", "controller")
ACTORS = {"engine": "ray::EngineActor", "trainer rank": "ray::TrainerRank"}
DEADLINE_S = 1800.0
"""Of one run; a benchmark that hangs says so."""

RUN = """
stages: [rl]
run: {{dir: run, steps: {steps}, threads: 1, device: cpu}}
model:
  characters: "0123456789+="
  init: {{model_type: qwen3, hidden_size: {hidden}, num_hidden_layers: 4, num_attention_heads: 4,
         num_key_value_heads: 2, head_dim: 32, intermediate_size: {hidden}, max_position_embeddings: 128,
         tie_word_embeddings: true}}
data: {{train: sums.jsonl, answer_column: answer, max_prompt_tokens: 8}}
reward: {{components: [{{use: "reward.py:digits"}}]}}
rollout: {{group_size: 8, max_response_tokens: {tokens}, max_staleness: 1}}
train: {{prompts_per_step: 32, optimizer: {{lr: 1e-4}}}}
algorithm: {{}}
checkpoint: {{every: {save_every}}}
observe: {{console: plain, tensorboard: false, samples_max_mib: 0}}
cluster:
  backend: ray
  restarts: 1000
  pools: {{trainer: {{devices: 2, roles: [policy]}}, engines: {{devices: 2, roles: [rollout]}}}}
"""


@dataclass
class Fault:
    """A kill, and what the events say came of it."""

    role: str
    at: float
    """Unix seconds."""
    seen: bool = False
    recovered_s: float | None = None
    """Until the engine may sample again, or until the next update of a new trainer or controller."""


@dataclass
class Outcome:
    """One run, however many lives it took."""

    chance: float
    seconds: float
    """From the first update to the last."""
    found: Audit
    faults: list[Fault] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chances", nargs="+", type=float, default=[0.0, 0.05, 0.1], help="per update; the first is 0")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5, help="updates")
    parser.add_argument("--tokens", type=int, default=64, help="most of a response: how long a step takes")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed when")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "faults")
    parser.add_argument("--quick", action="store_true", help="short runs of a tiny model")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.tokens, options.hidden, options.chances = 40, 8, 32, [0.0, 0.1]
    outcomes = []
    for chance in options.chances:
        outcomes.append(run(chance, options))
        print(f"{chance:.0%} faults per update: {outcomes[-1].seconds:.0f} s", flush=True)
    print_tables(outcomes)
    if not all(fault.seen for outcome in outcomes for fault in outcome.faults):
        sys.exit("a fault has no witness in events.jsonl")
    if any(outcome.found.violations for outcome in outcomes):
        sys.exit("the checker found violations")


def run(chance: float, options: argparse.Namespace) -> Outcome:
    """Train to the end while processes are killed."""
    folder = options.folder / f"chance-{chance:g}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(100) for b in range(100)]
    (folder / "sums.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text(DIGITS)
    names = {"steps": options.steps, "hidden": options.hidden, "tokens": options.tokens}
    (folder / "run.yaml").write_text(RUN.format(save_every=options.save_every, **names))
    faults = list(killed_run(folder, chance, random.Random(options.seed), last=options.steps - 3))
    events = list(read_events(folder / "run" / "events.jsonl"))
    for fault in faults:
        find_witness(fault, events)
    updates = [event["at"] for event in events if event["kind"] == "trained"]
    return Outcome(chance, updates[-1] - updates[0], audit(events), faults)


def killed_run(folder: Path, chance: float, rng: random.Random, *, last: int) -> Iterator[Fault]:
    """Drive one run to its end; gives each fault as it is made, none after update `last`: it would do nothing."""
    deadline, turn, highest = time.monotonic() + DEADLINE_S, 0, 1
    process = start(folder)
    while (code := process.poll()) is None or code == -signal.SIGKILL:
        if time.monotonic() > deadline:
            process.kill()
            sys.exit(f"the run did not end within {DEADLINE_S:g} s; its log is {folder / 'run.log'}")
        if code is not None:
            process = start(folder, "--resume")
        step = last_update(folder)
        while highest < min(step, last):  # each update once, also where it is made again
            highest += 1
            if rng.random() < chance and (fault := kill(ROLES[turn % len(ROLES)], process)) is not None:
                turn += 1
                yield fault
        time.sleep(0.05)
    if code != 0:
        sys.exit(f"the run failed ({code}); its log is {folder / 'run.log'}")


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hone", "train", "run.yaml", *arguments]
    with (folder / "run.log").open("a") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=environment)


def last_update(folder: Path) -> int:
    events = read_events(folder / "run" / "events.jsonl", last_bytes=1 << 16)
    return max((event["step"] for event in events if event["kind"] == "trained"), default=0)


def kill(role: str, controller: subprocess.Popen[bytes]) -> Fault | None:
    """Kill a process of a role; None when there is none at the moment."""
    if role == "controller":
        controller.kill()
        controller.wait()
        return Fault(role, time.time())
    found = [p for p in psutil.Process(controller.pid).children(recursive=True) if ACTORS[role] in words(p)]
    if not found:
        return None
    found[-1].kill()
    return Fault(role, time.time())


def words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def find_witness(fault: Fault, events: list[dict]) -> None:
    """What the events after a fault say of it."""
    after = [event for event in events if event["at"] >= fault.at - 0.01]
    witness = {"engine": "replica_down", "trainer rank": "trainer_down", "controller": "started"}[fault.role]
    index = next((i for i, event in enumerate(after) if event["kind"] == witness), None)
    fault.seen = index is not None
    if index is None:
        return
    if fault.role == "engine":
        name = after[index]["replica"]
        back = (e for e in after[index:] if e["kind"] == "published" and e.get("replica") == name)
    else:
        begun = next((i for i, event in enumerate(after) if event["kind"] == "started"), len(after))
        back = (e for e in after[begun:] if e["kind"] == "trained")
    event = next(back, None)
    fault.recovered_s = None if event is None else event["at"] - fault.at


def print_tables(outcomes: list[Outcome]) -> None:
    calm = outcomes[0]
    step_s = calm.seconds / (calm.found.updates - 1)
    print(f"\nseconds an update without faults: {step_s:.2f}\n")
    print(
        "| faults per update | killed | seen | seconds | updates undone | requeued | share of time training | audit |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for o in outcomes:
        share = step_s * (o.found.updates - 1) / o.seconds
        seen = sum(fault.seen for fault in o.faults)
        verdict = f"{len(o.found.violations)} violations" if o.found.violations else "holds"
        counts = f"{len(o.faults)} | {seen} | {o.seconds:.0f} | {o.found.undone} | {o.found.counts.get('requeued', 0)}"
        print(f"| {o.chance:.0%} | {counts} | {share:.2f} | {verdict} |")
    print("\n| killed | times | seconds to recover, median | most |\n|---|---|---|---|")
    medians = {}
    for role in ROLES:
        times = [f.recovered_s for o in outcomes for f in o.faults if f.role == role and f.recovered_s is not None]
        if times:
            medians[role] = statistics.median(times)
            print(f"| {role} | {len(times)} | {medians[role]:.1f} | {max(times):.1f} |")
    if not medians:
        return
    # An engine's death stalls nothing while another one samples; the other two stop all.
    stall_s = sum(seconds for role, seconds in medians.items() if role != "engine") / len(ROLES)
    print("\n| share of time training, computed | " + " | ".join(f"{o.chance:.0%}" for o in outcomes) + " |")
    print("|---|" + "---|" * len(outcomes))
    for long_s in (60, 600):
        shares = " | ".join(f"{long_s / (long_s + o.chance * stall_s):.3f}" for o in outcomes)
        print(f"| where an update takes {long_s} s, checkpoints after each | {shares} |")


if __name__ == "__main__":
    main()
