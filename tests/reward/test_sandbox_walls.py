"""What a sandbox is built of: the filter of system calls, the folders that it shows, the trial of its walls."""

import asyncio
import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from needs import PYTHON_OF_ALL, missing

from hone.reward.code import CodeSettings
from hone.reward.sandbox import local
from hone.reward.sandbox.base import Limits, ProgramEnding, SandboxFault, SandboxUnavailable, Stdin
from hone.reward.sandbox.bubblewrap import Bubblewrap, seccomp_filter
from hone.reward.sandbox.local import BareProcess, Interpreter

LIMITS = Limits(cpu_s=20, wall_s=60.0, memory_bytes=512 << 20, processes=8, output_bytes=1 << 16, disk_bytes=8 << 20)
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003


def verdict(program: bytes, architecture: int, number: int, first_argument: int = 0) -> int:
    """Run a filter as the kernel would (the five instructions that it is made of)."""
    data = struct.pack("=IIQQ", number, architecture, 0, first_argument)
    instructions = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        code, if_true, if_false, value = instructions[at]
        if code == 0x06:
            return value
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
            at += 1
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
        at += 1 + (if_true if holds else if_false)


CALLS = ("read", "clone", "ptrace", "unshare", "memfd_create", "openat")


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [("x86_64", X86_64, (0, 56, 101, 272, 319, 257)), ("aarch64", AARCH64, (63, 220, 117, 97, 279, 56))],
)
def test_the_filter_refuses_what_it_says(machine, architecture, calls):
    program, numbers = seccomp_filter(machine), dict(zip(CALLS, calls, strict=True))
    assert program is not None and len(program) < 4096  # what a pipe takes at once
    call = {name: verdict(program, architecture, number) for name, number in numbers.items()}
    assert call == {
        "read": ALLOW,
        "clone": ALLOW,
        "ptrace": EPERM,
        "unshare": EPERM,
        "memfd_create": EPERM,
        "openat": ALLOW,
    }
    new_user, plain_fork, thread = 0x10000000, 17, 0x3D0F00
    assert verdict(program, architecture, numbers["clone"], new_user | 17) == EPERM
    assert verdict(program, architecture, numbers["clone"], plain_fork) == ALLOW
    assert verdict(program, architecture, numbers["clone"], thread) == ALLOW
    prlimit = {"x86_64": 302, "aarch64": 261}[machine]
    assert (verdict(program, architecture, prlimit, 0), verdict(program, architecture, prlimit, 1)) == (ALLOW, EPERM)
    assert verdict(program, architecture, 435) == ENOSYS  # clone3
    assert verdict(program, architecture, 425) == EPERM  # io_uring_setup
    assert verdict(program, architecture, 0x40000000) == ENOSYS  # x32
    assert verdict(program, I386, numbers["read"]) == KILL


def test_machines_whose_calls_are_not_known_have_no_filter():
    assert seccomp_filter("riscv64") is None


def test_only_what_the_interpreter_needs_is_shown():
    interpreter = Interpreter.find(None)
    arguments = Bubblewrap(LIMITS, num_slots=1)._isolation(interpreter)
    shown = {arguments[i + 1] for i, word in enumerate(arguments) if word == "--ro-bind"}
    allowed = {interpreter.executable, f"{interpreter.prefix}/lib", f"{interpreter.prefix}/lib64"}
    assert shown <= allowed | {"/usr/lib", "/usr/lib64", "/lib", "/lib64"}
    assert not any(word.startswith(("--bind", "--dev-bind")) for word in arguments)
    assert {"--die-with-parent", "--as-pid-1", "--clearenv"} <= set(arguments)
    assert arguments[arguments.index("--cap-drop") + 1] == "ALL"


def test_an_ordinary_user_unshares_everything(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    arguments = Bubblewrap(LIMITS, num_slots=1)._isolation(Interpreter.find(None))
    assert "--unshare-all" in arguments and "--cap-add" not in arguments
    monkeypatch.setattr("os.geteuid", lambda: 0)
    arguments = Bubblewrap(LIMITS, num_slots=1)._isolation(Interpreter.find(None))
    unshared = {word for word in arguments if word.startswith("--unshare")}
    assert unshared >= {"--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"}
    assert [arguments[i + 1] for i, word in enumerate(arguments) if word == "--cap-add"] == ["CAP_SETUID", "CAP_SETGID"]


def run(sandbox, source):
    async def go():
        try:
            await sandbox.start()
        except SandboxUnavailable as error:
            missing(f"needs {sandbox.name}: {error}")
        async with sandbox.open(source) as session:
            return await session.run(Stdin(""))

    return asyncio.run(go())


def test_installed_packages_are_there_when_an_interpreter_is_named():
    source = "import psutil, sys\nprint(psutil.__name__, sys.flags.no_user_site)"
    without = run(Bubblewrap(LIMITS, num_slots=1), source)
    assert (without.ending, without.detail) == (ProgramEnding.CRASHED, "ModuleNotFoundError: No module named 'psutil'")
    with_packages = run(Bubblewrap(LIMITS, num_slots=1, python=sys.executable), source)
    assert with_packages.output == b"psutil 1\n"


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_an_interpreter_that_does_not_run_makes_no_sandbox(python):
    with pytest.raises(SandboxUnavailable, match="does not run"):
        Interpreter.find(python)


def warden_that(enters):
    """The warden with a faulty `_enter`, which may call the real one, `enter`. Not __main__, it starts afterwards."""
    return f"__name__ = 'warden'\n{local.WARDEN}\nenter = _enter\ndef _enter(setup):\n    {enters}\nmain()\n"


def test_walls_that_do_not_stand_are_found():
    """A bubblewrap that shares the network, shows /etc and lets processes multiply is refused, each named."""

    class Leaky(Bubblewrap):
        def _isolation(self, interpreter):
            walls = [word for word in super()._isolation(interpreter) if word not in ("--unshare-net", "--unshare-all")]
            if "--unshare-pid" not in walls:
                walls += ["--unshare-user", "--unshare-pid", "--unshare-ipc"]
            return ["--ro-bind", "/etc", "/etc", *walls]

    run(Bubblewrap(LIMITS, num_slots=1), "pass")  # or missing
    sandbox = Leaky(LIMITS, num_slots=1, warden=warden_that('enter({**setup, "processes": 39})'))
    with pytest.raises(SandboxUnavailable) as refused:
        asyncio.run(sandbox.start())
    for breach in (
        "/etc/passwd can be seen",
        "16 processes can be started, 8 are allowed",
        "the network can be reached",
    ):
        assert breach in str(refused.value)


def test_a_bwrap_that_cannot_work_is_unavailable_and_says_what_it_said(tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxUnavailable, match="No permissions to create new namespace"):
        asyncio.run(Bubblewrap(LIMITS, num_slots=1).start())


def test_a_sandbox_that_was_not_started_runs_nothing():
    async def go(sandbox):
        async with sandbox.open("pass"):
            pass

    for sandbox in (Bubblewrap(LIMITS, num_slots=1), BareProcess(LIMITS, num_slots=1)):
        with pytest.raises(SandboxFault, match="not started"):
            asyncio.run(go(sandbox))


def test_the_bare_process_ends_what_a_program_left_behind(tmp_path):
    mark = tmp_path / "alive"
    source = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.3)
        open({str(mark)!r}, "w").close()
    os._exit(0)
print("born")
"""
    tmp_path.chmod(0o777)
    for folder in (tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    assert run(BareProcess(LIMITS, num_slots=1, python=PYTHON_OF_ALL), source).output == b"born\n"
    asyncio.run(asyncio.sleep(0.5))
    assert not mark.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="without a sandbox an ordinary user's programs are that user's")
def test_the_bare_process_of_root_has_no_rights_of_root():
    victim = subprocess.Popen(["sleep", "60"])
    program = f"""
import os
print(0 in os.getresuid() + os.getresgid() or os.getgroups())
try: os.kill({victim.pid}, 9)
except PermissionError: print("refused")
open("mine", "w").close()
"""
    try:
        ended = run(BareProcess(LIMITS, num_slots=1, python=PYTHON_OF_ALL), program)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert (ended.ending, ended.output) == (ProgramEnding.FINISHED, b"[]\nrefused\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs change their user")
def test_root_without_an_interpreter_that_others_can_read_is_refused():
    forgets = 'enter(setup); sys.path[:] = setup["packages"]; sys.path_importer_cache.clear()'
    with pytest.raises(SandboxUnavailable, match=r"No module named 'decimal' \(as root, programs run as user \d+, who"):
        asyncio.run(BareProcess(LIMITS, num_slots=1, warden=warden_that(forgets)).start())


def test_every_setting_is_documented():
    page = (Path(__file__).parents[2] / "docs/rewards-code.md").read_text()
    assert [name for name in CodeSettings.model_fields if f"`{name}`" not in page] == []


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_what_a_ci_machine_lacks_is_a_failure(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="needs x"):
        missing("needs x")
