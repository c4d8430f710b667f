"""The `code` reward: the program in a response is run against the unit tests of its row, in a sandbox.

    reward:
      components:
        - use: code
          args: {score: fraction, test_cpu_s: 5}

Attribution of failures: a program that is missing, broken, too slow, over its limits or hostile gets the minimum score
and the reason. A row without usable tests is a data fault. A sandbox that is unavailable, or fails for another reason,
is an infrastructure fault: the sample has no score. No test is left out silently.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from hone.config.run import Section, key
from hone.reward.args import settings_of
from hone.reward.http import token_from
from hone.reward.sandbox.base import (
    Limits,
    ProgramEnding,
    ProgramRun,
    Sandbox,
    SandboxFault,
    SandboxLost,
    SandboxUnavailable,
)
from hone.reward.sandbox.bubblewrap import Bubblewrap
from hone.reward.sandbox.local import BareProcess
from hone.reward.sandbox.remote import Remote
from hone.reward.sandbox.unit_tests import BadTests, UnitTest, read_tests
from hone.reward.signature import Range, ScoreSample
from hone.runtime.user_code import DETAIL_CHARACTERS
from hone.types import Fault, Group, Prompt, Sample, Score

START_AGAIN_S = 30.0
"""A service may come back."""
TRIES = 2
"""A sandbox that fails while running a program is replaced once; after a second failure the program is blamed."""
_REMOTE_SLOTS = 32
_WHY = {
    ProgramEnding.TIME: "time limit exceeded",
    ProgramEnding.MEMORY: "memory limit exceeded",
    ProgramEnding.OUTPUT: "output limit exceeded",
    ProgramEnding.FINISHED: "wrong output",
}


class CodeSettings(Section):
    """`args` of the `code` reward."""

    column: str | None = key(None)
    """Column with the row's tests; null: the answer column has them."""
    score: Literal["all", "fraction"] = key("all")
    """1 when every test passes, else 0 (stops at the first that fails); or the fraction of tests that pass."""
    tolerance: float = key(1e-6, unit="absolute or relative", ge=0)
    """Tolerance for numbers that the row writes with a decimal point."""
    remote_url: str | None = key(None)
    """A SandboxFusion-compatible service (`/run_code` is added); null: a sandbox on this machine."""
    remote_token_env: str | None = key(None)
    """Environment variable with the service's bearer token."""
    allow_unsafe_local_exec: bool = key(False)
    """Where bubblewrap does not work, run programs as plain processes with your own rights."""
    python: str | None = key(None)
    """Interpreter (3.11 or newer) with its packages; null: Hone's own, standard library alone."""
    parallel: int = key(0, unit="programs", ge=0)
    """Programs at one time; 0: one per usable core, or 32 at a service."""
    test_cpu_s: int = key(5, unit="CPU seconds", ge=1)
    """CPU time of each process of a test; bounds slow programs, independently of the machine's load."""
    test_wall_s: float = key(25.0, unit="seconds", gt=0)
    """Elapsed time of a test; bounds programs that wait. Leave room for a busy machine."""
    program_wall_s: float = key(120.0, unit="seconds", gt=0)
    """Elapsed time of all tests of a program; tests not reached by then count as failed."""
    memory_mib: int = key(512, unit="MiB", ge=32)
    """Address space of each process, and memory of all processes of a test."""
    processes: int = key(16, unit="processes and threads", ge=1)
    """Processes and threads of a program at one time."""
    output_kib: int = key(1024, unit="KiB", ge=1)
    """Standard output of a test, and a returned value."""
    disk_mib: int = key(32, unit="MiB", ge=1)
    """Scratch files of a program; they are kept in memory."""

    def limits(self) -> Limits:
        return Limits(
            cpu_s=self.test_cpu_s,
            wall_s=self.test_wall_s,
            memory_bytes=self.memory_mib << 20,
            processes=self.processes,
            output_bytes=self.output_kib << 10,
            disk_bytes=self.disk_mib << 20,
        )


class CodeReward:
    """Scores programs in [0, 1]. Equal programs of a group are run once."""

    hone_range = Range(0.0, 1.0)

    def __init__(
        self,
        settings: CodeSettings,
        *,
        sandboxes: Sequence[Sandbox] | None = None,
        start_again_s: float = START_AGAIN_S,
    ) -> None:
        """
        Args:
            sandboxes: to try, best first; None: those that the settings allow.
            start_again_s: until another try when no sandbox could be had.
        """
        self._settings, self._sandboxes, self._start_again_s = settings, sandboxes, start_again_s
        self.sandbox: Sandbox | None = None
        """The one in use, once started and available."""
        self._unavailable = "it was not started"
        self._next_start = 0.0
        self._starting = asyncio.Lock()

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """Of a component's args. Raises Unusable with every problem of them."""
        return cls(settings_of(CodeSettings, args))

    async def start(self) -> list[str]:
        """Start the first allowed sandbox that passes its self-test. Without one every score is an infrastructure
        fault; the run file is still valid."""
        await self._start()
        return []

    async def close(self) -> None:
        sandbox, self.sandbox = self.sandbox, None
        if sandbox is not None:
            await sandbox.close()

    def begin(self, prompt: Prompt) -> ScoreSample:
        """See `StreamingScorer`. Equal programs of one prompt are run once."""
        column, tests = self._settings.column, ()
        bad_row: Score | None = None
        try:
            tests = read_tests(prompt.answer if column is None else prompt.columns.get(column))
        except BadTests as error:
            bad_row = Score(None, Fault.DATA, str(error)[:DETAIL_CHARACTERS])
        verdicts: dict[str, asyncio.Task[Score]] = {}

        async def score_sample(sample: Sample) -> Score:
            if bad_row is not None:
                return bad_row
            try:
                program = last_program(sample.text)
            except NoProgram as error:
                return Score(0.0, Fault.MODEL, str(error))
            if program not in verdicts:
                verdicts[program] = asyncio.create_task(self._judge(program, tests))
            return await verdicts[program]

        return score_sample

    async def score(self, group: Group) -> tuple[Score, ...]:
        """One score per sample. Waits for free slots."""
        return tuple(await asyncio.gather(*map(self.begin(group.prompt), group.samples)))

    async def _start(self) -> None:
        async with self._starting:
            if self.sandbox is not None or time.monotonic() < self._next_start:
                return
            reasons: list[str] = []
            allowed = _allowed_sandboxes(self._settings, reasons) if self._sandboxes is None else self._sandboxes
            for sandbox in allowed:
                try:
                    await sandbox.start()
                except SandboxUnavailable as error:
                    reasons.append(f"{sandbox.name}: {error}")
                    continue
                if isinstance(sandbox, BareProcess):
                    logging.getLogger(__name__).warning("programs run WITHOUT a sandbox (%s)", "; ".join(reasons))
                self.sandbox = sandbox
                return
            if self._settings.remote_url is None and not self._settings.allow_unsafe_local_exec:
                reasons.append("no remote_url is set and allow_unsafe_local_exec is off")
            self._unavailable = "; ".join(reasons)
            self._next_start = time.monotonic() + self._start_again_s

    async def _judge(self, source: str, tests: Sequence[UnitTest]) -> Score:
        """The score of one program. Breaking the sandbox never scores better than a wrong output."""
        if self.sandbox is None:
            await self._start()
        sandbox = self.sandbox
        if sandbox is None:
            return Score(None, Fault.INFRA, f"sandbox_unavailable: {self._unavailable}"[:DETAIL_CHARACTERS])
        failed = lost = 0
        while True:
            try:
                return await self._run_tests(sandbox, source, tests)
            except SandboxLost as error:
                lost += 1
                if lost == TRIES:
                    return Score(0.0, Fault.MODEL, f"its sandbox was lost {TRIES} times: {error}"[:DETAIL_CHARACTERS])
            except SandboxFault as error:
                failed += 1
                if failed == TRIES:
                    return Score(None, Fault.INFRA, str(error)[:DETAIL_CHARACTERS])

    async def _run_tests(self, sandbox: Sandbox, source: str, tests: Sequence[UnitTest]) -> Score:
        """The score; a fault of the model if no test passed and the first did not fail by a wrong output."""
        passed, only_all = 0, self._settings.score == "all"
        first_failed: tuple[int, ProgramRun] | None = None
        async with sandbox.open(source) as session:
            deadline = time.monotonic() + self._settings.program_wall_s
            for number, test in enumerate(tests, 1):
                is_late = time.monotonic() >= deadline
                run = ProgramRun(ProgramEnding.TIME, b"") if is_late else await session.run(test.given)
                if run.ending is ProgramEnding.LOST:
                    raise SandboxLost(run.detail)
                if test.passed_by(run, self._settings.tolerance):
                    passed += 1
                    continue
                first_failed = first_failed or (number, run)
                if is_late or only_all:
                    break
        value = float(passed == len(tests)) if only_all else passed / len(tests)
        if first_failed is None:
            return Score(value)
        number, run = first_failed
        detail = f"test {number} of {len(tests)}: {_WHY.get(run.ending, run.detail)}"[:DETAIL_CHARACTERS]
        broken = value == 0.0 and run.ending is not ProgramEnding.FINISHED
        return Score(value, Fault.MODEL if broken else None, detail)


def _allowed_sandboxes(settings: CodeSettings, reasons: list[str]) -> list[Sandbox]:
    """Sandboxes that the settings allow, best first; plain processes only if allowed explicitly."""
    limits = settings.limits()
    if settings.remote_url is not None:
        try:
            token = token_from(settings.remote_token_env, "remote_token_env")
        except ValueError as error:
            reasons.append(f"remote: {error}")
            return []
        return [Remote(settings.remote_url, limits, num_slots=settings.parallel or _REMOTE_SLOTS, token=token)]
    num_slots = settings.parallel or len(os.sched_getaffinity(0))
    candidates: list[Sandbox] = [Bubblewrap(limits, num_slots=num_slots, python=settings.python)]
    if settings.allow_unsafe_local_exec:
        candidates.append(BareProcess(limits, num_slots=num_slots, python=settings.python))
    return candidates


_FENCE = re.compile(r"( *)(`{3,}|~{3,})([^`]*)")
_LIST_ITEM = re.compile(r" *(?:[-*+]|\d{1,9}[.)]) +")
_MOST_INDENTED = 3
_PYTHON = re.compile(r"|\{?\s*\.?(?:python|py)(?:\d[\d.]*)?(?:[\s,:{}].*)?", re.IGNORECASE | re.DOTALL)
"""Info strings of Python: python, py, python3.11, {python}, {.python .numberLines}, python title=a.py, or none."""


class NoProgram(ValueError):
    """A response has no program; says why. A fault of the model."""


def last_program(text: str) -> str:
    """The last code block of what follows the reasoning, as CommonMark reads it: what its fence is indented by is taken
    off its lines. Blocks marked as another language than Python are passed over.

    Raises:
        NoProgram: the reasoning has no end, there is no block, or the last one is not closed.
    """
    _, ended, answer = text.rpartition("</think>")
    if not ended and "<think>" in text:
        raise NoProgram("its reasoning is not closed")
    found: str | None = None
    fence, info, lines = "", "", []
    indented = margin = 0
    for line in answer.split("\n"):
        if not fence:
            # Where the text of the list item begins that the line is in; 0 outside of lists.
            if item := _LIST_ITEM.match(line):
                margin = item.end()
            elif line.strip() and not line.startswith(" " * margin):
                margin = 0
            opening = _FENCE.fullmatch(" " * margin + line[margin:].rstrip("\r"))
            if opening is not None and len(opening[1]) <= margin + _MOST_INDENTED:
                indented, fence, info, lines = len(opening[1]), opening[2], opening[3].strip(), []
            continue
        closing = _FENCE.fullmatch(line.rstrip("\r"))
        if (
            closing is not None
            and len(closing[1]) <= margin + _MOST_INDENTED
            and closing[2].startswith(fence)
            and not closing[3].strip()
        ):
            if _PYTHON.fullmatch(info):
                found = "\n".join(lines)
            fence = ""
        else:
            spaces = len(line) - len(line.lstrip(" "))
            lines.append(line[min(indented, spaces) :])
    if fence and _PYTHON.fullmatch(info):
        raise NoProgram("its last code block is not closed")
    if found is None:
        raise NoProgram("no code block")
    return found
