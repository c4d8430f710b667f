"""Self-test of a sandbox at the start: a program attempts what must not be possible.

A limit that is set is not a limit that holds: RLIMIT_NPROC says nothing to root, and old kernels count the user's
other processes. So the limits are tried, on this machine, with this user.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

from hone.reward.sandbox.base import Call, ProgramEnding, SandboxFault, SandboxLost, SandboxUnavailable, Stdin

if TYPE_CHECKING:
    from hone.reward.sandbox.base import Sandbox

_PROGRAM = """
import decimal, os, sys  # decimal is read from a file, which an unprivileged user may not be able to read

def breaches(processes, port):
    found = []
    if os.getuid() == 0:
        found.append("programs run as root")
    for path in ("/etc/passwd", "/root/.ssh", "/home"):
        if os.path.exists(path):
            found.append(f"{path} can be seen")
    for path in ("/", "/usr/lib", "/dev"):
        if os.access(path, os.W_OK):
            found.append(f"{path} can be written")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(pid) != os.getpid():
                os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
                found.append(f"the memory of process {pid} can be written")
        except OSError:
            pass
    import socket
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
        found.append("the network can be reached")
    except OSError:
        pass
    children = 0
    try:
        for _ in range(processes + 8):
            if os.fork() == 0:
                import time
                time.sleep(60)
                os._exit(0)
            children += 1
        found.append(f"{children} processes can be started, {processes} are allowed")
    except OSError:
        if children < 1:
            found.append("not one process can be started: the limit counts processes outside (Linux before 5.14)")
    return found

if len(sys.argv) == 1 and "breaches" in globals():
    text = sys.stdin.read()
    if text:
        print(text[::-1], end="")
"""


async def prove(sandbox: Sandbox, *, isolated: bool, processes: int = 0) -> None:
    """Run the self-test. Raises SandboxUnavailable with every breach that it found."""
    try:
        async with sandbox.open(_PROGRAM) as session:
            echo = await session.run(Stdin("olleh"))
            if echo.ending is not ProgramEnding.FINISHED or echo.output != b"hello":
                raise SandboxUnavailable(f"a program that reverses a line {echo.ending}: {echo.detail}")
            if not isolated:
                return
            with socket.create_server(("127.0.0.1", 0)) as server:  # a server that must be out of reach
                tried = await session.run(Call("breaches", (processes, server.getsockname()[1])))
    except SandboxUnavailable:
        raise
    except (SandboxFault, SandboxLost) as error:
        raise SandboxUnavailable(str(error)) from error
    found = (
        json.loads(tried.output)
        if tried.ending is ProgramEnding.FINISHED
        else [f"the self-test {tried.ending}: {tried.detail}"]
    )
    if found:
        raise SandboxUnavailable(f"it does not isolate: {'; '.join(found)}")
