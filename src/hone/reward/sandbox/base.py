"""What a sandbox is: it runs an untrusted program on one input after another and says how each run ended.

It never learns what output is right: inputs go in, outputs come out, and the comparison happens out here
(`cases.py`). So nothing that a program prints, forges or breaks in there can earn it a point. Three kinds of sandbox:
`bubblewrap.py` (the default on Linux), `remote.py` (a service) and `bare.py` (no isolation, by explicit leave only).

Lifecycle:

    async with sandbox.open(source) as session:        # waits for a free place; a fresh sandbox for this program
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
    """We failed to run a program, through no fault of its own; says why. An infra fault."""


class SandboxUnavailable(SandboxFault):
    """This kind of sandbox cannot work on this machine, or not now; says why."""


class SandboxLost(Exception):
    """The sandbox ended or fell silent while a program ran in it. The program may have done it, or the machine."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. Each holds whatever the program does, except where a kind of sandbox says otherwise."""

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
    """Seconds beyond a run's own time, until a local sandbox that says nothing counts as lost."""


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

    FINISHED = "finished"  # exit code 0, and a value if one was asked for; whether it is right is another question
    CRASHED = "crashed"  # syntax error, exception, exit code, signal, or no value where one was asked for
    TIME = "time"
    MEMORY = "memory"
    OUTPUT = "output"  # wrote more than the limit
    LOST = "lost"  # killed by a signal that neither we nor the kernel's limits sent


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """What came out of one run."""

    ending: ProgramEnding
    output: bytes
    """Standard output, or the returned value as JSON; at most `Limits.output_bytes`."""
    detail: str = ""
    """The last line of standard error, or what limit was hit; for people."""
    elapsed_s: float = 0.0


class Session(Protocol):
    """One program in its sandbox."""

    async def run(self, given: Input) -> ProgramRun:
        """Run it once. Bounded by the limits and a grace; what a run leaves behind is ended before the next.

        Raises:
            SandboxFault: the world failed.
            SandboxLost: the sandbox is gone; open another.
        """
        ...


class Sandbox(Protocol):
    """A kind of sandbox, with a bounded number of places."""

    name: str

    async def start(self) -> None:
        """Prove that it works and that its limits hold. Raises SandboxUnavailable."""
        ...

    def open(self, source: str) -> AbstractAsyncContextManager[Session]:
        """A fresh sandbox with this program in it; waits for a free place. Leaving it ends every process of it.

        Raises:
            SandboxFault: no sandbox could be made.
        """
        ...

    async def close(self) -> None:
        """End everything, within seconds."""
        ...
