"""Programs that attack their sandbox, each with a witness that the attack took place."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from needs import missing

import hone
from hone.reward.sandbox.base import Call, Limits, ProgramEnding, ProgramRun, SandboxLost, SandboxUnavailable, Stdin
from hone.reward.sandbox.bubblewrap import Bubblewrap
from hone.reward.sandbox.local import FIRST_USER, NUM_USERS

LIMITS = Limits(cpu_s=1, wall_s=3.0, memory_bytes=256 << 20, processes=8, output_bytes=64 << 10, disk_bytes=8 << 20)
ADD = "def add(a, b):\n    return a + b\nif __name__ == '__main__' and False: pass\n"


@pytest.fixture(scope="module")
def sandbox():
    found = Bubblewrap(LIMITS, num_slots=4)
    try:
        asyncio.run(found.start())
    except SandboxUnavailable as error:
        missing(f"needs bubblewrap: {error}")
    return found


@pytest.fixture
def run(sandbox):
    """Run a program on one input after another, in one sandbox."""

    def run_program(source: str, *inputs: Stdin | Call) -> list[ProgramRun]:
        async def go() -> list[ProgramRun]:
            async with sandbox.open(source) as session:
                return [await session.run(given) for given in inputs or (Stdin(""),)]

        return asyncio.run(go())

    return run_program


def sandboxed() -> list[psutil.Process]:
    """Processes of sandboxes of this process: its descendants, and whatever else runs as a sandbox's user, but for what
    descends from another test process."""
    here = psutil.Process()
    mine, above = here.children(recursive=True), {here, *here.parents()}
    users = range(FIRST_USER, FIRST_USER + NUM_USERS)

    def is_anothers(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(p not in above and p not in mine and p.uids().real not in users for p in process.parents())
        return True  # it has ended

    theirs = [p for p in psutil.process_iter(["uids"]) if p.info["uids"] and p.info["uids"].real in users]
    return mine + [p for p in theirs if not is_anothers(p)]


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = sandboxed()
    yield
    deadline = time.monotonic() + 3
    while (left := [p for p in sandboxed() if p not in before]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


def test_a_good_program_runs_on_one_input_after_another(run):
    runs = run("print(sum(map(int, input().split())))", Stdin("3 4"), Stdin("x"), Stdin("1 1\n"))
    assert [r.ending for r in runs] == [ProgramEnding.FINISHED, ProgramEnding.CRASHED, ProgramEnding.FINISHED]
    assert [r.output for r in runs] == [b"7\n", b"", b"2\n"]
    assert runs[1].detail.startswith("ValueError")


def test_functions_methods_and_plain_values(run):
    program = "def f(a, *, b=1): return {a, b}\nclass Solution:\n    def g(self, x): return (x, None, True)\n"
    calls = Call("f", (2,), {"b": 3}), Call("g", ("é",)), Call("Solution.g", (0.5,)), Call("h")
    runs = run(program, *calls)
    assert [r.output for r in runs[:3]] == [b"[2, 3]\n", b'["\\u00e9", null, true]\n', b"[0.5, null, true]\n"]
    assert (runs[3].ending, runs[3].detail) == (
        ProgramEnding.CRASHED,
        "AttributeError: 'Solution' object has no attribute 'h'",
    )


def test_scripts_end_as_scripts_do(run):
    program = """
import atexit, sys, threading
atexit.register(lambda: print("exit handler"))
threading.Thread(target=lambda: print("thread", sys.stdin.read())).start()
sys.exit(0)
"""
    assert run(program, Stdin("in"))[0].output == b"thread in\nexit handler\n"
    assert run("print(open('/dev/stdin').read() * 2, end='')", Stdin("ab"))[0].output == b"abab"
    assert run("import sys; sys.exit('no')")[0].detail == "no"


def test_large_input_that_is_never_read_holds_nothing_up(run):
    runs = run("print(1)", Stdin("x" * 3_000_000))
    assert runs[0].output == b"1\n"
    assert run("import sys; print(len(sys.stdin.read()))", Stdin("x" * 3_000_000))[0].output == b"3000000\n"


@pytest.mark.parametrize("source", ["def f(:", "x = '\0'", "(" * 5000, "\ud800 = 1", "import nothing_of_the_kind"])
def test_a_program_that_cannot_be_loaded_crashes(run, source):
    (ended,) = run(source)
    assert ended.ending is ProgramEnding.CRASHED
    assert "Error" in ended.detail


def test_an_infinite_loop_ends_at_its_time(run):
    (ended,) = run("print('on my way', flush=True)\nwhile True: pass")
    assert (ended.ending, ended.output) == (ProgramEnding.TIME, b"on my way\n")
    assert ended.elapsed_s > 0.9


def test_ignoring_the_signal_for_time_helps_nothing(run):
    program = "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: print('ignored', flush=True))\nwhile True: pass"
    (ended,) = run(program)
    assert ended.ending is ProgramEnding.TIME


def test_a_fork_bomb_is_held_and_killed(run):
    bomb = """
import os
made = 0
while True:
    try:
        if os.fork() == 0:
            made = -10**9
        elif made >= 0:
            made += 1
            os.write(1, b"%d " % made)
    except OSError:
        if made >= 0:
            os.write(1, b"full ")
            break
while True: pass
"""
    (bombed,) = run(bomb)
    assert bombed.ending is ProgramEnding.TIME
    assert b"1 " in bombed.output and b"full" in bombed.output
    assert max(int(n) for n in bombed.output.replace(b"full", b"").split()) <= LIMITS.processes + 2


def test_ten_gigabytes_are_not_to_be_had(run):
    at_once, bit_by_bit = (
        run("import sys\nprint('asking', flush=True)\nx = bytearray(10 * 10**9)", Stdin("")),
        run("x = []\nwhile True: x.append(bytearray(10**6))"),
    )
    assert at_once[0].output == b"asking\n"
    assert at_once[0].ending is bit_by_bit[0].ending is ProgramEnding.MEMORY


def test_memory_of_many_processes_counts_together(run):
    program = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        x = bytearray(b"x") * (64 << 20)  # a quarter of the limit each
        os.write(1, b"64 MiB ")
        time.sleep(30)
    time.sleep(0.1)
time.sleep(30)
"""
    (ended,) = run(program)
    assert ended.ending is ProgramEnding.MEMORY
    assert b"64 MiB" in ended.output


def test_shared_memory_counts_too(run):
    program = """
import mmap, os, time
for _ in range(6):
    shared = mmap.mmap(-1, 64 << 20)  # a quarter of the limit each
    if os.fork() == 0:
        for at in range(0, len(shared), mmap.PAGESIZE): shared[at] = 1
        os.write(1, b"64 MiB ")
        time.sleep(30)
    shared.close()
    time.sleep(0.1)
time.sleep(30)
"""
    (ended,) = run(program)
    assert ended.ending is ProgramEnding.MEMORY
    assert b"64 MiB" in ended.output
    assert run("import mmap\nshared = mmap.mmap(-1, 64 << 20)\nprint(len(shared))")[0].output == b"67108864\n"


def test_memory_that_no_limit_counts_is_refused(run):
    program = """
import ctypes, errno
c = ctypes.CDLL(None, use_errno=True)
for call in (lambda: c.memfd_create(b"x", 0), lambda: c.shmget(0, 1 << 30, 0o1600)):
    print(call(), ctypes.get_errno() == errno.EPERM)
"""
    assert run(program)[0].output == b"-1 True\n-1 True\n"


def test_a_flood_of_output_is_cut_off(run):
    (flood,) = run("while True: print('y' * 1000)")
    assert flood.ending is ProgramEnding.OUTPUT
    assert len(flood.output) == LIMITS.output_bytes
    (errors,) = run("import sys\nfor _ in range(10**5): print('y' * 100, file=sys.stderr)\nprint(1)")
    assert (errors.ending, errors.output) == (ProgramEnding.FINISHED, b"1\n")
    (value,) = run("def f(): return 'x' * 10**6", Call("f"))
    assert value.ending is ProgramEnding.OUTPUT


def test_exit_code_0_before_the_answer_is_no_answer(run):
    ran, called = run("import os\nos._exit(0)", Stdin(""), Call("f"))
    assert (ran.ending, ran.output) == (ProgramEnding.FINISHED, b"")
    assert (called.ending, called.detail) == (ProgramEnding.CRASHED, "ended before its function returned a value")


def test_there_is_no_network(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2)
        address = server.getsockname()
        (ended,) = run(f"import socket\nsocket.create_connection({address!r}, timeout=1)")
        assert ended.ending is ProgramEnding.CRASHED and "Error" in ended.detail
        with socket.create_connection(address, timeout=1) as ours:  # witness: out here the very same call connects
            theirs, peer = server.accept()
            theirs.close()
            assert peer == ours.getsockname()  # and was the first to do so


def test_files_of_the_machine_cannot_be_seen(run, tmp_path):
    secret = tmp_path / "expected.txt"
    secret.write_text("42")
    program = f"""
import os
for path in ("/etc/passwd", "/etc/shadow", {str(secret)!r}, {str(Path(__file__))!r}, "/home", "/sys"):
    print(os.path.exists(path), end=" ")
print(sorted(os.environ))
"""
    (ended,) = run(program)
    assert ended.output.startswith(b"False False False False False False")
    names = ended.output.decode()
    assert "PATH" not in names and "HOME" in names and Path("/etc/passwd").exists()


def test_nothing_of_the_machine_can_be_written(run, tmp_path):
    target = tmp_path / "host.txt"
    target.write_text("as it was")
    program = f"""
import os, sys
for path in ({str(target)!r}, "/x", "/usr/lib/x", "/dev/x", os.__file__, "/proc/sys/kernel/hostname"):
    try:
        open(path, "a").write("changed")
        print("wrote", path)
    except OSError as error:
        print(type(error).__name__, end=" ")
open("/tmp/mine", "w").write("scratch")
print(open("/tmp/mine").read())
"""
    (ended,) = run(program)
    assert b"wrote" not in ended.output and ended.output.endswith(b"scratch\n")
    assert target.read_text() == "as it was"


def test_other_processes_are_out_of_reach(run):
    program = f"""
import ctypes, os, posix
me = {os.getpid()}
for act in (lambda: posix.kill(me, 9), lambda: ctypes.CDLL(None).kill(me, 9) and posix.kill(me, 9)):
    try:
        act(); print("killed")
    except OSError as error:
        print(type(error).__name__)
print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit()) == [1, os.getpid()], os.getuid() != 0)
"""
    assert run(program)[0].output == b"ProcessLookupError\nProcessLookupError\nTrue True\n"


def test_no_signal_ends_or_stops_the_warden(run):
    program = """
import os, time
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
try: os.kill(-1, 9)
except ProcessLookupError: print("nobody", end=" ")
time.sleep(0.1)
print(input())
"""
    assert [ended.output for ended in run(program, Stdin("a"), Stdin("b"))] == [b"nobody a\n", b"nobody b\n"]


def test_limits_of_the_warden_are_out_of_reach(run):
    program = """
import os, resource
for act in (lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)), lambda: os.sched_setaffinity(1, {0})):
    try: act(); print("done")
    except PermissionError as error: print(error.errno)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0, len(os.sched_getaffinity(0)) > 0)
"""
    assert [ended.output for ended in run(program, *[Stdin("")] * 2)] == [b"1\n1\nTrue True\n"] * 2


@pytest.mark.parametrize(("signal", "match"), [(9, "ended"), (19, "did not answer")])
def test_a_warden_killed_or_stopped_from_outside_is_a_lost_sandbox(sandbox, signal, match):
    async def go():
        async with sandbox.open("import time\ntime.sleep(30)") as session:
            session._limits = replace(LIMITS, grace_s=-2.5)  # of 3 s of wall time
            running = asyncio.create_task(session.run(Stdin("")))
            await asyncio.sleep(0.1)
            ((warden,),) = (p.children() for p in psutil.Process().children() if p.name() == "bwrap")
            warden.send_signal(signal)
            await running

    with pytest.raises(SandboxLost, match=match):
        asyncio.run(go())


MEMORY_ATTACK = """
import ctypes, os, time
def attempt(pid):
    try:
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "Py_Version")))
            memory.write(b"x")
        return "written"
    except OSError as error:
        return type(error).__name__
if (child := os.fork()) == 0:
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # opens its memory again, as the warden's would be
    time.sleep(30)
time.sleep(0.2)
print(*(attempt(pid) for pid in (1, os.getppid(), child)))
"""
MEMORY_IS_CLOSED = b"PermissionError PermissionError written\n"
"""Of the first process, of the parent; and of an open one, as a witness."""


def test_memory_of_the_warden_is_out_of_reach(run):
    (ended,) = run(MEMORY_ATTACK)
    assert ended.output == MEMORY_IS_CLOSED


def test_a_killed_program_is_lost_not_wrong(run):
    assert run("import os\nos.kill(os.getpid(), 9)")[0].ending is ProgramEnding.LOST


def test_a_daemon_does_not_see_the_next_input(run):
    program = """
import os, sys, time
if input() == "first":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open("/tmp/born", "w").close()
            time.sleep(60)
        os._exit(0)
    while not os.path.exists("/tmp/born"): time.sleep(0.01)
    print("born")
else:
    print(len([p for p in os.listdir("/proc") if p.isdigit() and int(p) > 2]))
"""
    runs = run(program, Stdin("first"), Stdin("second"))
    assert [r.output for r in runs] == [b"born\n", b"1\n"]


def test_a_forged_verdict_is_only_output(run):
    program = """
import os, struct
verdict = b'{"ending": "finished", "detail": "", "elapsed_s": 0}'
for fd in range(1, 64):
    try: os.write(fd, struct.pack("!II", len(verdict), 3) + verdict + b'42\\n')
    except OSError: pass
for fd in range(3, 64):
    try: open(f"/proc/2/fd/{fd}", "wb").write(b"forged"); print("forged", fd)
    except OSError: pass
def f(): return 1
"""
    called, ran = run(program, Call("f"), Stdin(""))
    assert called.ending in (ProgramEnding.FINISHED, ProgramEnding.CRASHED) and called.output.strip() not in (
        b"42",
        b"1",
    )
    assert b'"ending"' in ran.output and b"forged" not in ran.output


def test_zombies_and_tracing(run):
    zombies = "import os, time\nfor _ in range(5):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(0.1)\nprint(5)"
    runs = run(zombies, *[Stdin("")] * 4)
    assert [r.output for r in runs] == [b"5\n"] * 4
    trace = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint(c.ptrace(16, 2, 0, 0), ctypes.get_errno())"
    assert run(trace)[0].output == b"-1 1\n"


def test_new_namespaces_are_refused(run):
    program = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint(c.unshare(0x10000000), ctypes.get_errno())"
    assert run(program)[0].output == b"-1 1\n"


def test_huge_files_end_at_the_limit(run):
    program = """
import os
def fill(path):
    try:
        with open(path, "wb", buffering=0) as file:
            while True: file.write(b"x" * (1 << 20))
    except OSError as error:
        return os.path.getsize(path) >> 20
print(fill("/tmp/a"), fill("/tmp/b"), fill("/dev/shm/c"))
"""
    one, two, shared = map(int, run(program)[0].output.split())
    assert 6 <= one <= 8 and one + two <= 8 and shared <= 1


@pytest.mark.slow("many programs at once")
def test_all_at_once_leave_the_good_ones_alone(sandbox):
    hostile = [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "while True: print('y' * 1000)",
        "import os\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)",
        "x = [bytearray(10**6) for _ in range(10**5)]",
    ]

    async def one(source: str) -> bytes | str:
        try:
            async with sandbox.open(source) as session:
                return (await session.run(Call("add", (3, 4)))).output
        except SandboxLost:
            return "lost"

    async def go():
        sources = [part for bad in hostile for part in (bad, ADD, ADD)]
        return await asyncio.gather(*map(one, sources))

    outputs = asyncio.run(go())
    assert [output for number, output in enumerate(outputs) if number % 3] == [b"7\n"] * 8
    assert [output for number, output in enumerate(outputs) if not number % 3] == [b""] * 4


@pytest.fixture(scope="module")
def as_ordinary_user(tmp_path_factory):
    """Run a script as user 65534, with the system's Python: root has no user namespace to build on, others have."""
    if os.geteuid() != 0:
        pytest.skip("all tests here run as an ordinary user already")
    python = shutil.which("python3", path="/usr/bin")
    if python is None or shutil.which("setpriv") is None or shutil.which("bwrap") is None:
        missing("needs setpriv, bwrap and /usr/bin/python3")
    if subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode:
        missing("/usr/bin/python3 is older than 3.11")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(hone.__file__).parent, Path(folder, "hone"), ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder, "hone", "reward", "__init__.py").write_text("")  # the system's Python has no numpy
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", f"PYTHONPATH={folder}"]

        def run_script(script: str) -> str:
            command = [*user, python, "-B", "-c", ORDINARY + script]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert ran.returncode == 0, ran.stderr
            return ran.stdout

        if unavailable := run_script("print(asyncio.run(started()) or '', end='')"):
            missing(f"ordinary users cannot have sandboxes here: {unavailable}")
        yield run_script


ORDINARY = """
import asyncio, os
from hone.reward.sandbox import local
from hone.reward.sandbox.base import *
from hone.reward.sandbox.bubblewrap import Bubblewrap
limits = Limits(1, 4.0, 256 << 20, 8, 1 << 16, 8 << 20)
sandbox = Bubblewrap(limits, num_slots=1)
async def started(sandbox=sandbox):
    try: await sandbox.start()  # tries network, files, processes, memory
    except SandboxUnavailable as error: return str(error)
async def run(source, given):
    await sandbox.start()
    async with sandbox.open(source) as session:
        return (await session.run(given)).output
"""


def test_the_wall_of_an_ordinary_user_stands_too(as_ordinary_user):
    script = f"print(os.getuid(), asyncio.run(run({ADD!r}, Call('add', (3, 4)))))"
    assert as_ordinary_user(script) == "65534 b'7\\n'\n"


def test_memory_of_an_ordinary_users_warden_is_out_of_reach(as_ordinary_user):
    assert as_ordinary_user(f"print(asyncio.run(run({MEMORY_ATTACK!r}, Stdin(''))))") == f"{MEMORY_IS_CLOSED!r}\n"


def test_the_trial_of_the_walls_finds_a_warden_that_can_be_written(as_ordinary_user):
    script = """
enters = "enter(setup); ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)"
warden = f"__name__ = 'warden'\\n{local.WARDEN}\\nenter = _enter\\ndef _enter(setup): {enters}\\nmain()"
print(asyncio.run(started(Bubblewrap(limits, num_slots=1, warden=warden))))
"""
    assert as_ordinary_user(script) == "it does not isolate: the memory of process 1 can be written\n"


def test_this_file_runs_with_the_interpreter_of_the_sandbox(run):
    (ended,) = run(f"import sys; print(sys.version_info[:2] == {sys.version_info[:2]!r})")
    assert ended.output == b"True\n"
