"""Sandbox interface: run an untrusted program on one input after another and report how each run ended.

A sandbox never receives expected outputs: inputs go in, outputs come out, and the comparison is made outside
(`unit_tests.py`). So nothing that a program prints, forges or breaks inside can earn it a point. Three kinds:
`bubblewrap.py` (the default on Linux), `remote.py` (a service), `local.BareProcess` (no isolation, only if allowed
explicitly).

Lifecycle:

    async with sandbox.open(source) as session:        # waits for a free slot; a fresh sandbox for this program
        run = await session.run(Stdin("3 4\\n"))        # Run(Ending.FINISHED, b"7\\n", "", elapsed_s=0.02)
        run = await session.run(Call("add", (3, 4)))   # Run(Ending.FINISHED, b"7", ...): the value as JSON
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class SandboxFault(Exception):
    """A program could not be run, for a reason outside of it. An infrastructure fault."""


class SandboxUnavailable(SandboxFault):
    """This kind of sandbox does not work on this machine, or not now."""


class SandboxLost(Exception):
    """The sandbox ended or stopped responding while a program ran; the program or the machine may be the cause."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one program, enforced unless a kind of sandbox documents an exception."""

    cpu_s: int
    """CPU seconds of each process of a run."""
    wall_s: float
    """Elapsed seconds of a run."""
    memory_bytes: int
    """Address space of each process, and memory of all processes together."""
    processes: int
    """Processes and threads at one time."""
    output_bytes: int
    """Standard output of a run; as much again for a returned value."""
    disk_bytes: int
    """Each file, and all files together."""
    grace_s: float = 5.0
    """Seconds beyond a run's own time after which a local sandbox that does not answer counts as lost."""


@dataclass(frozen=True, slots=True)
class Stdin:
    """Run the program as a script, with this standard input."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """Load the program, then call one of its functions. Arguments are plain data, as JSON has it."""

    function: str
    """A name in the program, `Class.method` (an instance is made), or a method of its class `Solution`."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


Input = Stdin | Call


class ProgramEnding(StrEnum):
    """How a run ended."""

    FINISHED = "finished"  # exit code 0, and a value if one was asked for, right or wrong
    CRASHED = "crashed"  # syntax error, exception, exit code, signal, or no value where one was asked for
    TIME = "time"
    MEMORY = "memory"
    OUTPUT = "output"  # wrote more than the limit
    LOST = "lost"  # killed by a signal from neither the sandbox nor the kernel's limits


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """Result of one run."""

    ending: ProgramEnding
    output: bytes
    """Standard output, or the returned value as JSON; at most `Limits.output_bytes`."""
    detail: str = ""
    """The last line of standard error, or which limit was hit; for messages."""
    elapsed_s: float = 0.0


class Session(Protocol):
    """One program in its sandbox."""

    async def run(self, given: Input) -> ProgramRun:
        """Run it once. Bounded by the limits and a grace time; processes that it leaves behind are killed afterwards.

        Raises:
            SandboxFault: the machine or the service failed.
            SandboxLost: the sandbox is gone; open another.
        """
        ...


class Sandbox(Protocol):
    """A kind of sandbox, with a bounded number of slots."""

    name: str

    async def start(self) -> None:
        """Prove that it works and that its limits hold. Raises SandboxUnavailable."""
        ...

    def open(self, source: str) -> AbstractAsyncContextManager[Session]:
        """A fresh sandbox with this program; waits for a free slot. Leaving the context kills all of its processes.

        Raises:
            SandboxFault: no sandbox could be made.
        """
        ...

    async def close(self) -> None:
        """End everything, within seconds."""
        ...
