"""Supervisor process (warden) inside a local sandbox: runs a program on one input after another, each in a fork.

`local.py` sends this file as source to an interpreter with the standard library alone, so it imports nothing of Hone.
It receives inputs, never expected outputs, over a socket that programs in the sandbox cannot open; when the socket is
closed, it exits. Each run is a fork with the resource limits set and pipes for its streams; when it ends or exceeds a
limit, all processes that it started are killed before the next run.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import time

FRAME = struct.Struct("!II")
"""Lengths of a JSON header and of raw bytes behind it, the bytes being a run's output."""
CHUNK_BYTES = 1 << 16
TAIL_BYTES = 2048
"""Bytes of standard error that are kept: the end, where a traceback has its message."""
WATCH_S = 0.05
"""Interval between measurements of the memory of all processes together."""
GONE_TIMEOUT_S = 2.0
"""Timeout for killed processes to be gone."""
VALUE_FD = 3
"""File descriptor for the returned value."""
OPEN_FILES = 64
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def main():
    channel = os.dup(0)  # programs do not inherit this descriptor
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python handles this signal by default, and a program could send it
    setup, _ = _receive(channel)
    try:
        _enter(setup)
    except OSError as error:
        sys.exit(f"the warden could not set up the sandbox: {error}")
    os.dup2(null, 2)
    gc.collect()
    gc.freeze()  # existing objects are shared by all forks; a collection in a fork would copy them
    _send(channel, {"ready": True}, b"")
    while True:
        given, _ = _receive(channel)
        header, output = _run(setup, given, channel)
        _send(channel, header, output)


def _enter(setup):
    """Drop privileges, and make sure that killing everything kills only processes of the sandbox.

    A program is a process of the same user, so the warden's memory is closed to it (`/proc/1/mem`): the kernel opens it
    again at an exec, so this is done here and not before.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if setup["uid"] is not None:
        os.setgroups([])
        os.setresgid(setup["uid"], setup["uid"], setup["uid"])
        os.setresuid(setup["uid"], setup["uid"], setup["uid"])
    options = [(PR_SET_DUMPABLE, 0)]
    if setup["isolated"]:
        if os.getpid() != 1:  # the first process, which no signal from inside can end
            raise OSError("it has no process numbers of its own")
        most = setup["processes"] + 1  # the warden counts too
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    else:  # what a program leaves behind becomes a child of the warden, where it can be found
        options.append((PR_SET_CHILD_SUBREAPER, 1))
    for option, value in options:
        if prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option} failed")
    sys.path += setup["packages"]


def _receive(channel):
    """The next frame; exits when the parent has closed the socket."""
    header_bytes, output_bytes = FRAME.unpack(_read(channel, FRAME.size))
    return json.loads(_read(channel, header_bytes)), _read(channel, output_bytes)


def _read(channel, num_bytes):
    data = bytearray()
    while len(data) < num_bytes:
        part = os.read(channel, num_bytes - len(data))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def _send(channel, header, output):
    body = json.dumps(header).encode()
    data = memoryview(FRAME.pack(len(body), len(output)) + body + output)
    while data:
        data = data[os.write(channel, data) :]


def _run(setup, given, channel):
    """Run the program once. Returns how it ended and its output."""
    ends = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "value")}
    started = time.monotonic()
    try:
        pid = os.fork()
    except OSError:  # the limit on processes is reached
        for pair in ends.values():
            os.close(pair[0])
            os.close(pair[1])
        return {"ending": "crashed", "detail": "no further process could be started", "elapsed_s": 0.0}, b""
    if pid == 0:
        _become_program(setup, given, {"stdin": ends["stdin"][0], **{n: ends[n][1] for n in ends if n != "stdin"}})
    os.close(ends["stdin"][0])
    for name in ("stdout", "stderr", "value"):
        os.close(ends[name][1])
    streams = _Streams(
        stdin=ends["stdin"][1],
        text=given.get("stdin", "").encode("utf-8", "replace"),
        outputs={name: ends[name][0] for name in ("stdout", "stderr", "value")},
        most=setup["output_bytes"],
    )
    ending = _watch(setup, pid, streams, channel, started + setup["wall_s"])
    _kill_all(setup, pid)
    _, status, usage = os.wait4(pid, 0)
    _until_gone() if setup["isolated"] else _kill_orphans()
    elapsed_s = time.monotonic() - started
    if not streams.drain() and ending is None:
        ending = "output"
    streams.close()
    cpu_s = usage.ru_utime + usage.ru_stime
    ending, detail = _verdict(setup, ending, status, cpu_s, streams, wants_value="call" in given)
    output = streams.data["value" if "call" in given else "stdout"]
    return {"ending": ending, "detail": detail, "elapsed_s": elapsed_s}, bytes(output)


class _Streams:
    """The warden's ends of the program's streams: non-blocking, and bounded by the limit."""

    def __init__(self, *, stdin, text, outputs, most):
        self.text, self.outputs, self.most = memoryview(text), outputs, most
        self.stdin = stdin
        self.open = True
        self.data = {name: bytearray() for name in outputs}
        for fd in (stdin, *outputs.values()):
            os.set_blocking(fd, False)

    def feed(self):
        """Write as much standard input as the pipe accepts; close it at the end. False when nothing is left."""
        try:
            self.text = self.text[os.write(self.stdin, self.text[:CHUNK_BYTES]) :] if self.text else self.text
        except BlockingIOError:
            return True
        except OSError:  # the program closed it
            self.text = memoryview(b"")
        if not self.text:
            os.close(self.stdin)
            self.open = False
        return self.open

    def take(self, name):
        """Read what is available. Returns None at the end, False beyond the limit, else True."""
        try:
            part = os.read(self.outputs[name], CHUNK_BYTES)
        except BlockingIOError:
            return True
        if not part:
            return None
        data = self.data[name]
        data += part
        if name == "stderr":
            del data[:-TAIL_BYTES]
        elif len(data) > self.most:
            del data[self.most :]
            return False
        return True

    def drain(self):
        """Read the rest of the pipes after all writers have been killed. False beyond the limit."""
        within = True
        for name in self.outputs:
            poll = select.poll()
            poll.register(self.outputs[name], select.POLLIN)
            while poll.poll(0):
                more = self.take(name)
                if not more:
                    within = within and more is None
                    break
        return within

    def close(self):
        for fd in (self.stdin, *self.outputs.values()) if self.open else self.outputs.values():
            os.close(fd)


def _watch(setup, pid, streams, channel, deadline):
    """Serve the program's streams until it ends or hits a limit. Returns the limit's name, or None."""
    poll = select.poll()
    process = os.pidfd_open(pid)
    poll.register(process, select.POLLIN)
    poll.register(channel, select.POLLIN)
    if streams.feed():
        poll.register(streams.stdin, select.POLLOUT)
    readable = {fd: name for name, fd in streams.outputs.items()}
    for fd in readable:
        poll.register(fd, select.POLLIN)
    base, look_at = _memory_bytes(os.getpid()), time.monotonic() + WATCH_S
    try:
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "time"
            if now >= look_at:
                if setup["isolated"] and _total_memory_bytes(base) > setup["memory_bytes"]:
                    return "memory"
                # Ended processes whose parent has gone count against the process limit until they are reaped.
                while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != pid:
                    os.waitpid(ended.si_pid, 0)
                look_at = now + WATCH_S
            events = poll.poll(1000 * min(deadline - now, WATCH_S))
            for fd, _ in events:
                if fd == channel:  # nothing is sent while a program runs, so the parent has closed it
                    _kill_all(setup, pid)
                    if not setup["isolated"]:
                        _kill_orphans()
                    os._exit(0)
                elif fd == process:
                    return None
                elif fd == streams.stdin:
                    if not streams.feed():
                        poll.unregister(fd)
                else:
                    more = streams.take(readable[fd])
                    if more is None:
                        poll.unregister(fd)
                    elif not more:
                        return "output"
    finally:
        os.close(process)


def _total_memory_bytes(base):
    """Memory of all processes of the sandbox, less what forks share with the warden."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return sum(max(0, _memory_bytes(pid) - base) for pid in pids if pid > 1)


def _memory_bytes(pid):
    """Anonymous memory of a process, private and shared; shared memory counts for each process that uses it."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().split(b"\n")
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"RssAnon:", b"RssShmem:")))


def _kill_all(setup, pid):
    """Kill the program and everything that it started, in whatever session and under whatever parent."""
    if setup["isolated"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all but the caller, atomically, so no fork escapes
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _until_gone():
    """Wait for the killed processes, so that the next run starts in an empty sandbox."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.001)


def _kill_orphans():
    """Without a PID namespace: kill adopted processes until none is left; a fork bomb may outrun this."""
    for _ in range(1000):
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                children = [int(child) for child in file.read().split()]
        except OSError:
            return
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _verdict(setup, ending, status, cpu_s, streams, wants_value):
    """How a run ended, and one line of detail."""
    lines = streams.data["stderr"].decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")[-200:]
    if ending is not None:
        return ending, ""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= setup["cpu_s"]):
            return "time", ""
        if number == signal.SIGKILL:
            return "lost", "killed by SIGKILL"
        return "crashed", f"killed by {signal.Signals(number).name}" if number < 32 else f"killed by signal {number}"
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        ending = "memory" if last.startswith("MemoryError") else "crashed"
        return ending, last or f"exit code {code}"
    if wants_value and not streams.data["value"].endswith(b"\n"):
        return "crashed", "ended before its function returned a value"
    return "finished", ""


def _become_program(setup, given, fds):
    """The child's side of the fork: limits set, no descriptor of the warden open. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    moved = [os.dup2(fds[name], 100 + i) for i, name in enumerate(("stdin", "stdout", "stderr", "value"))]
    for target, fd in enumerate(moved):
        os.dup2(fd, target)
    os.closerange(VALUE_FD + 1, 1 << 16)
    _limit(setup)
    sys.stdin = sys.__stdin__ = _text_stream(0, "r", "surrogateescape")
    sys.stdout = sys.__stdout__ = _text_stream(1, "w", "surrogateescape")
    sys.stderr = sys.__stderr__ = _text_stream(2, "w", "backslashreplace")
    sys.argv = ["program.py"]
    if "call" not in given:
        os.close(VALUE_FD)
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    code = 0
    try:
        exec(compile(setup["source"], "program.py", "exec", dont_inherit=True), vars(module))
        if "call" in given:
            value = find_function(vars(module), given["call"])(*given["args"], **given["kwargs"])
            sys.set_int_max_str_digits(0)
            data = memoryview(json.dumps(value, default=plain).encode() + b"\n")
            while data:
                data = data[os.write(VALUE_FD, data) :]
    except SystemExit as error:  # as the interpreter does: an integer is the exit code, anything else is printed
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        code = (code or 0) & 0xFF
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    _end(code, module)


def _end(code, module):
    """End as a script does: join threads, run exit handlers, flush files. The rest of the interpreter's shutdown has no
    visible effect and costs ten times as much as all of a fork."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    vars(module).clear()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            code = code or 120
    os._exit(code)


def _text_stream(fd, mode, errors):
    return os.fdopen(fd, mode, encoding="utf-8", errors=errors, closefd=False)


def _limit(setup):
    for kind, most in (
        (resource.RLIMIT_CPU, setup["cpu_s"]),
        (resource.RLIMIT_AS, setup["memory_bytes"]),
        (resource.RLIMIT_FSIZE, setup["disk_bytes"]),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # One CPU second from the signal that names the limit to the one that cannot be ignored.
        resource.setrlimit(kind, (most, most + 1 if kind == resource.RLIMIT_CPU and hard < 0 else most))


def find_function(names, dotted):
    """The function that a call names: a function, `Class.method`, or a method of the program's `Solution`."""
    first, *rest = dotted.split(".")
    if not rest and first not in names and "Solution" in names:
        first, rest = "Solution", [first]
    if first not in names:
        raise NameError(f"the program defines no {first!r}")
    found = names[first]
    for name in rest:
        found = getattr(found() if isinstance(found, type) else found, name)
    return found


def plain(value):
    """Convert sets, tuples and the like, which JSON does not have, to lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "__iter__"):
        return list(value)
    raise TypeError(f"returned {type(value).__name__}, which is not plain data")


if __name__ == "__main__":
    main()
