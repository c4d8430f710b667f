"""Faults planted in a small run, and whether `hone doctor` names them; alarms of healthy runs.

    python benchmarks/doctor.py --keep runs/doctor             # all: 48 faults x 3 seeds and healthy runs; two hours
    python benchmarks/doctor.py --seeds 1 --only clip_zero,kl_huge
    python benchmarks/doctor.py --growing                      # what grows from the first step, beside a healthy twin
    python benchmarks/doctor.py --keep runs/doctor --table     # the tables of the runs that are there
    python benchmarks/doctor.py --keep runs/doctor --table --write docs/doctor.md

A fault counts as found if the first alarm of the run names one of the causes that are right (`Fault.expected`), as late
if another alarm does. With `--keep` it can be ended and started again at any time: runs that are done are not repeated,
and their alarms are those of the rules as they are now. `_doctor_faults.py` and `_doctor_healthy.py` have the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _doctor_faults import FAULTS, GROWING, HEALTHY_TWIN, Fault
from _doctor_healthy import HEALTHY, Healthy, start_name
from _doctor_task import ARITHMETIC, EXAMPLES, QUIET, Task, write_rows

import hone
from hone.doctor.watch import Alarm, by_importance
from hone.errors import ConfigError, HoneError, Stopped
from hone.run.status import diagnose

DONE = "done"
"""File in the folder of a run that is done."""


def nested(flat: Mapping[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys put into a nested mapping."""
    for name, value in flat.items():
        *sections, last = name.split(".")
        place = into
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return into


# ---- runs


def is_done(folder: Path) -> bool:
    return (folder / DONE).exists()


@contextlib.contextmanager
def begun(folder: Path) -> Iterator[None]:
    """In the run's folder, empty; it is done afterwards. An error of the run itself is a way to end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started, used = time.perf_counter(), time.process_time()
    with contextlib.chdir(folder):
        try:
            yield
        except (ConfigError, Stopped):
            raise
        except HoneError as error:
            print(f"{folder.name}: {type(error).__name__}: {error}", flush=True)
    shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
    (folder / DONE).touch()
    seconds = f"{time.perf_counter() - started:.0f} s, {time.process_time() - used:.0f} s of CPU"
    print(f"{time.strftime('%H:%M:%S')} {folder.name}: {seconds}", flush=True)


def supervised_start(folder: Path, task: Task, seed: int) -> Path:
    """Weights of the task's supervised stage, which are right in part."""
    if not is_done(folder):
        settings = task.settings(folder, seed) | {"stages": ["sft"]}
        with begun(folder):
            write_rows(folder / "train.jsonl", task.supervised())
            write_rows(folder / "eval.jsonl", task.eval())
            hone.train(settings)
    return folder / "run" / "hf"


def train_faulty(work: Path, fault: Fault, seed: int) -> None:
    folder = work / f"{fault.name}-{seed}"
    if is_done(folder):
        return
    start = supervised_start(work / f"start-{seed}", ARITHMETIC, seed)
    settings = ARITHMETIC.base(folder, start, seed)
    settings["run"]["steps"] = fault.steps
    settings["extends"] += fault.extends
    nested(fault.settings, settings)
    rewards = fault.rewards() if fault.rewards else None
    with begun(folder):
        write_rows(folder / "train.jsonl", fault.train())
        write_rows(folder / "eval.jsonl", fault.eval())
        with fault.planted(folder) as more:
            hone.train(nested(more if isinstance(more, Mapping) else {}, settings), rewards=rewards)
    shutil.rmtree(folder / "run" / "hf", ignore_errors=True)


def folder_of(work: Path, name: str) -> Path:
    return work / re.sub(r"\W+", "-", name)


def train_healthy(work: Path, one: Healthy, seed: int = 7) -> None:
    folder = folder_of(work, one.name)
    if is_done(folder):
        return
    if isinstance(one.of, Task):
        start = supervised_start(folder_of(work, start_name(one.name.partition(":")[0])), one.of, seed)
        if one.is_start:
            return
        settings = one.of.base(folder, start, seed)
    else:
        run = {"dir": "run", "threads": 1, "device": "cpu"}
        settings = {"extends": [str(EXAMPLES / one.of)], "seed": seed, "run": run, "observe": QUIET}
    if one.steps is not None:
        settings["run"]["steps"] = one.steps
    settings["extends"] += one.extends
    with begun(folder):
        if isinstance(one.of, Task):
            write_rows(folder / "train.jsonl", one.of.train())
            write_rows(folder / "eval.jsonl", one.of.eval())
        hone.train(nested(one.settings, settings))


# ---- tables


def lines_of_faults(work: Path, faults: Sequence[Fault], seeds: Sequence[int]) -> Iterator[str]:
    """The table of those that are done, and what they come to."""
    yield "| Fault | Expected | First alarm names, by seed | Right | Since step / found at |"
    yield "|---|---|---|---|---|"
    right, late, total, waits = 0, 0, 0, []
    for fault in faults:
        runs = [list(diagnose(path / "run").alarms) for seed in seeds if is_done(path := work / f"{fault.name}-{seed}")]
        if not runs:
            continue
        firsts = [alarms[0] if alarms else None for alarms in runs]
        found = [first is not None and first.cause in fault.expected for first in firsts]
        later = sum(any(a.cause in fault.expected for a in runs[i]) for i, hit in enumerate(found) if not hit)
        named = Counter(f"{a.name}: {a.cause}" if a else "no alarm" for a in firsts)
        shown = ", ".join(f"{cause}{f' ({count})' if count > 1 else ''}" for cause, count in named.most_common())
        steps = ", ".join(f"{a.since} / {a.step}" for a in firsts if a)
        mark = "" if all(found) else "**"
        score = f"{mark}{sum(found)}/{len(runs)}{mark}{f'; {later} later' if later else ''}"
        yield f"| {fault.name} | {' or '.join(fault.expected)} | {shown} | {score} | {steps} |"
        right, late, total = right + sum(found), late + later, total + len(runs)
        waits += [a.step - a.since for a, hit in zip(firsts, found, strict=True) if a and hit]
    if not total:
        return
    quick = sum(wait <= 20 for wait in waits)
    yield ""
    yield (
        f"Right: {right} of {total} ({right / total:.0%}); {late} more are named by a later alarm. Of those right, "
        f"{quick} of {len(waits)} are found within 20 steps of the first abnormal one."
    )


def lines_of_growing(work: Path, faults: Sequence[Fault], seeds: Sequence[int]) -> Iterator[str]:
    """A metric is visible from the step on at which it stays above all that it is in the healthy twin."""
    yield "| Fault | Expected | First alarm names, by seed | Visible from / since / found at | Alarms of the twin |"
    yield "|---|---|---|---|---|"
    for fault in faults:
        named, places, of_twin = [], [], 0
        for seed in seeds:
            run, twin = (work / f"{name}-{seed}" / "run" for name in (fault.name, HEALTHY_TWIN.name))
            alarms, of_twin = diagnose(run).alarms, of_twin + len(diagnose(twin).alarms)
            named.append(f"{alarms[0].name}: {alarms[0].cause}" if alarms else "no alarm")
            if alarms:
                healthy, found = (steps_of(path, alarms[0].metric) for path in (twin, run))
                hidden = [step for step, value in found.items() if value <= max(healthy.values())]
                visible = min((step for step in found if step > max(hidden, default=-1)), default="never")
                places.append(f"{visible} / {alarms[0].since} / {alarms[0].step}")
        shown = ", ".join(f"{name} ({count})" for name, count in Counter(named).most_common())
        yield f"| {fault.name} | {' or '.join(fault.expected)} | {shown} | {', '.join(places)} | {of_twin} |"


def steps_of(run: Path, metric: str) -> dict[int, float]:
    """Values of a metric by step, those of evaluations left out."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        line["step"]: line[metric]
        for line in lines
        if metric in line and not any(name.startswith("eval/") for name in line)
    }


def lines_of_healthy(work: Path, runs: Sequence[Healthy]) -> Iterator[str]:
    yield "| Run | Steps | Alarms | Advice |"
    yield "|---|---|---|---|"
    total, false = 0, 0
    for one in runs:
        if not is_done(folder := folder_of(work, one.name)):
            continue
        found = diagnose(folder / "run")
        wrong = [a for a in by_importance(found.alarms) if a.level != "tuning"]
        advice = [a for a in found.alarms if a.level == "tuning"]
        steps = sum(found.last_steps.values())
        total, false = total + steps, false + len(wrong)
        yield f"| {one.name} | {steps:,} | {shown_alarms(wrong)} | {shown_alarms(advice)} |"
    yield ""
    yield f"False alarms: {false} in {total:,} steps, {1000 * false / max(total, 1):.2f} per 1,000."


def shown_alarms(alarms: Sequence[Alarm]) -> str:
    return ", ".join(f"{a.name}: {a.cause} ({a.stage} step {a.since})" for a in alarms)


def write_table(page: Path, name: str, table: str) -> None:
    """Put a table between its marks in a page."""
    text = page.read_text("utf-8")
    begin, end = f"<!-- {name}: made by benchmarks/doctor.py -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    assert found, f"{page} has no line {begin!r}"
    page.write_text(f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="faults, by name")
    parser.add_argument("--healthy", action="store_true", help="healthy runs alone")
    parser.add_argument("--growing", action="store_true", help="faults that grow, and their healthy twin, alone")
    parser.add_argument("--keep", type=Path, help="folder of the runs; those that it has are read and not repeated")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--write", type=Path, help="page to put the tables in")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [fault.name for fault in FAULTS]
    is_all = not (options.only or options.healthy or options.growing)
    faults = [fault for fault in FAULTS if fault.name in names and (is_all or options.only)]
    growing = GROWING if options.growing or is_all else ()
    runs = HEALTHY if options.healthy or is_all else ()
    with tempfile.TemporaryDirectory(prefix="doctor-") as temporary:
        work = (options.keep or Path(temporary)).absolute()
        if not options.table:
            for seed in options.seeds:
                for fault in (*faults, *growing, *[HEALTHY_TWIN] * bool(growing)):
                    train_faulty(work, fault, seed)
            for one in runs:
                train_healthy(work / "healthy", one)
        tables = {"faults": lines_of_faults(work, faults, options.seeds)} if faults else {}
        tables |= {"growing faults": lines_of_growing(work, growing, options.seeds)} if growing else {}
        tables |= {"healthy runs": lines_of_healthy(work / "healthy", runs)} if runs else {}
        for name, lines in tables.items():
            table = "\n".join(lines)
            print(table, end="\n\n")
            if options.write:
                write_table(options.write, name, table)


if __name__ == "__main__":
    main()
