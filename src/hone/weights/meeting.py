"""Where the sender of weights and the engines that take them agree on what comes next, who took it, and who failed.

A key-value store that the sender opens; it holds what is small. The bytes go another way, which is what the two
transports that are built on this differ in: `publish_group` broadcasts them, `publish_ipc` shares a GPU's memory.

Engines meet the sender in groups, one at a time: a group is of those that live, and when one of them fails, it is over
for all. The others lost nothing: they join the next group, and their transfer continues there (`receiving.py`).

What the keys say, of one group, for messages counted from 0 over all versions:

    message/7        the sender: a bucket's header, a manifest, or that all is over and why
    over             the sender: that all is over and why, for those that wait for bytes
    trouble          somebody failed, or lost the others
    <engine>/there   it has come
    <engine>/ready   messages may be sent to it
    <engine>/at      the last message that it took
    <engine>/held/7  the fingerprint of what it holds after manifest 7
    <engine>/failed  it takes nothing any more, and why
    <engine>/lost    bytes did not reach it any more; it takes them from the next group
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hone.errors import EngineError
from hone.weights.buckets import Bucket, Manifest

GRACE_S = 2.0
"""How long engines may take, after something went wrong, to say that it was not they."""
_OVER = "the sender gave up: one of its engines {}"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


@dataclass(frozen=True, slots=True)
class Link:
    """How an engine joins a group. It goes there as it is."""

    address: str
    """Of the sender's `Meeting`."""
    group: str
    """Its part of the store."""
    engines: tuple[str, ...]
    """All of the group."""

    def section(self, store: Store) -> Store:
        """What those of the group say."""
        return PrefixStore(f"{self.group}/", store)


class Interrupted(EngineError):
    """Nothing more comes through this group, because of another engine or of the network between them."""


class Meeting:
    """The store of one sender; listens on `host` only, for as long as this object lives.

    What is said there is not authenticated: keep it on loopback, or on a network whose machines are all trusted.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            self.store: Store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
            )
        self.host = host
        self.address = f"{host}:{port}"
        """For the engines to come to."""
        self._numbers = itertools.count()

    def link(self, engines: Sequence[str]) -> Link:
        """For a new group."""
        return Link(self.address, f"group-{next(self._numbers)}", tuple(engines))


class MeetingOutlet(ABC):
    """The sending end towards a group; see `publish.Outlet`. For many versions, until one of the group fails.

    Args:
        engines: names; each of them makes the inlet under its own, from `link`.
        device: where buckets are packed and sent from.
        timeout_s: an engine that does not join, take a bucket or load what it took for so long is stuck.
    """

    def __init__(self, meeting: Meeting, engines: Sequence[str], *, device: torch.device, timeout_s: float) -> None:
        self.engines, self.device, self.timeout_s = list(engines), device, timeout_s
        self.link = meeting.link(engines)
        self.failed: dict[str, str] = {}
        self.bystanders: list[str] = []
        self.gone: Callable[[], Mapping[str, str]] = dict
        """Engines that others know to have failed, and why: the watchers of their processes."""
        self.store = self.link.section(meeting.store)
        self._number, self._first = -1, 0  # the last message, and the first whose key is still there

    def connect(self) -> None:
        """Wait until every engine has joined. If one does not, it is over, and `failed` says who."""
        deadline = time.monotonic() + self.timeout_s
        self._wait_until(lambda: self._all_said("there"), deadline, self._has_said("there"), "did not join")
        if not self.failed:
            joined = begun(self._join)
            what_not = "did not join the others"
            self._wait_until(lambda: joined() and self._all_said("ready"), deadline, self._has_said("ready"), what_not)

    def send(self, bucket: Bucket) -> Callable[[], object]:
        if self.failed:
            return _nothing
        arrived = self._send_data(self._number + 1, bucket)
        number = self._say("bucket", bucket.header())
        deadline = time.monotonic() + self.timeout_s
        what_not = f"did not take bucket {bucket.index}"
        return lambda: self._wait_until(arrived, deadline, lambda engine: self.last_taken(engine) >= number, what_not)

    def finish(self, manifest: Manifest) -> dict[str, str]:
        """See `publish.Outlet`. No call waits here: each engine answers for itself."""
        if self.failed:
            return {}
        number = self._say("manifest", manifest.as_json())
        held: dict[str, str] = {}
        waiting = list(self.engines)

        def all_settled() -> bool:
            gone = self.gone()
            for engine in list(waiting):
                if self.store.check([key := f"{engine}/held/{number}"]):
                    held[engine] = self.store.get(key).decode()
                elif why := self._complaint(engine) or gone.get(engine):
                    self.failed[engine] = why
                else:
                    continue
                waiting.remove(engine)
            return not waiting

        wait_until(all_settled, time.monotonic() + self.timeout_s)
        what_not = f"did not finish loading version {manifest.version} within {self.timeout_s:g} s"
        self.failed |= {engine: _stuck(engine, what_not) for engine in waiting}
        if self.failed:
            self._end()
        for key in [f"{engine}/held/{number}" for engine in held] + self._messages_so_far():
            self.store.delete_key(key)
        self._first = number + 1
        return held

    def close(self) -> None:
        """Leave the group."""
        if not self.failed:
            self._end()
        for key in self._messages_so_far():
            self.store.delete_key(key)

    @abstractmethod
    def _join(self) -> None:
        """Once all have come. May block for as long as one of them does not do so too."""

    @abstractmethod
    def _send_data(self, number: int, bucket: Bucket) -> Callable[[], bool]:
        """Begin to send a bucket's data. What is returned tells whether its memory may be written to again; it raises
        RuntimeError when that will never be."""

    @abstractmethod
    def _end(self) -> None:
        """Nothing is sent any more."""

    def _say(self, kind: str, text: str) -> int:
        self._number += 1
        self.store.set(f"message/{self._number}", json.dumps({kind: text}))
        return self._number

    def _messages_so_far(self) -> list[str]:
        return [f"message/{number}" for number in range(self._first, self._number + 1)]

    def last_taken(self, engine: str) -> int:
        """Number of the last message that an engine took; -1 before the first."""
        return int(self.store.get(f"{engine}/at"))

    def _has_said(self, key: str) -> Callable[[str], bool]:
        return lambda engine: self.store.check([f"{engine}/{key}"])

    def _all_said(self, key: str) -> bool:
        return self.store.check([f"{engine}/{key}" for engine in self.engines])

    def _wait_until(
        self, done: Callable[[], bool], deadline: float, done_by: Callable[[str], bool], what_not: str
    ) -> None:
        """Until it is done; else, with an engine that failed or at the deadline, it is over for all of them.

        Args:
            done_by: whether an engine did its part.
            what_not: of one that did not.
        """
        if self.failed:
            return

        def done_or_trouble() -> bool:
            return done() or self.store.check(["trouble"]) or bool(self.gone())

        what_happened = f"{what_not} within {self.timeout_s:g} s"
        try:
            if wait_until(done_or_trouble, deadline) and done():
                return
        except RuntimeError as error:  # what torch.distributed raises for a connection that was lost
            what_happened = f"{what_not}: {first_line(error)}"
        self._give_up(done_by, what_happened)

    def _give_up(self, done_by: Callable[[str], bool], what_happened: str) -> None:
        """Find out whose fault it was: an engine that neither did its part nor says why not."""
        self.store.set("over", what_happened)
        self._say("over", what_happened)
        culprits: dict[str, str] = {}
        silent = list(self.engines)

        def all_told() -> bool:
            gone = self.gone()
            for engine in list(silent):
                if why := self._complaint(engine) or gone.get(engine):
                    culprits[engine] = why
                elif not (self.store.check([f"{engine}/lost"]) or done_by(engine)):
                    continue
                silent.remove(engine)
            return not silent

        wait_until(all_told, time.monotonic() + GRACE_S)
        culprits |= {engine: _stuck(engine, what_happened) for engine in silent}
        for engine in self.engines:
            self.failed[engine] = culprits.get(engine) or f"{engine} lost the others of its group"
        self.bystanders = [engine for engine in self.engines if engine not in culprits]
        self._end()

    def _complaint(self, engine: str) -> str | None:
        """Why an engine says that it failed."""
        key = f"{engine}/failed"
        return f"{engine}: {self.store.get(key).decode()}" if self.store.check([key]) else None


class MeetingInlet(ABC):
    """The receiving end; see `publish.Inlet`.

    Args:
        link: of the sender's outlet.
        engine: this one's name.
        device: where the weights arrive.
        timeout_s: longest wait for the next bucket, once a version is awaited.
    """

    def __init__(self, link: Link, engine: str, *, device: torch.device, timeout_s: float) -> None:
        self.engine, self.device, self.timeout_s = engine, device, timeout_s
        host, _, port = link.address.rpartition(":")
        self.store = link.section(TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s)))
        self._number = -1
        self.store.set(f"{engine}/at", "-1")
        self.store.set(f"{engine}/there", "")

    def messages(self) -> Iterator[Bucket | Manifest]:
        """See `publish.Inlet`. Raises Interrupted when no more comes through this group."""
        while True:
            self._number += 1
            key = f"message/{self._number}"
            try:
                self.store.wait([key], timedelta(seconds=self.timeout_s))
                ((kind, text),) = json.loads(self.store.get(key)).items()
            except RuntimeError as error:  # what torch.distributed raises
                raise EngineError(
                    f"no more weights came within {self.timeout_s:g} s, or the connection was lost: {first_line(error)}"
                ) from error
            try:
                if kind == "over":
                    raise RuntimeError(_OVER.format(text))
                data = self._receive(self._number, text) if kind == "bucket" else None
                self.store.set(f"{self.engine}/at", str(self._number))
            except RuntimeError as error:
                self._tell("lost", "")
                raise Interrupted(f"weights stopped coming: {first_line(error)}") from error
            yield Manifest.of(text) if data is None else Bucket.of(text, data)

    def held(self, fingerprint: str) -> None:
        self.store.set(f"{self.engine}/held/{self._number}", fingerprint)

    def failed(self, reason: str) -> None:
        self._tell("failed", reason)

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    def _tell(self, key: str, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the sender may be what failed
            self.store.set(f"{self.engine}/{key}", text)
            self.store.set("trouble", "")

    def _wait_until(self, done: Callable[[], bool], what_not: str) -> None:
        """Raises RuntimeError when the sender gave up, or at the deadline."""

        def done_or_over() -> bool:
            return done() or self.store.check(["over"])

        if not wait_until(done_or_over, time.monotonic() + self.timeout_s):
            raise RuntimeError(what_not)
        if not done():
            raise RuntimeError(_OVER.format(self.store.get("over").decode()))

    @abstractmethod
    def _receive(self, number: int, header: str) -> Tensor:
        """A bucket's data, in memory of its own. Raises RuntimeError when it does not come."""


def begun(work: Callable[[], object]) -> Callable[[], bool]:
    """Begin what may block indefinitely, on a thread of its own. The returned call says whether it is done, and
    raises what it raised."""
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # the boundary of the thread: raised to the caller
            done.set_exception(error)

    def is_done() -> bool:
        if done.done():
            done.result()
        return done.done()

    threading.Thread(target=run, name="joining a group", daemon=True).start()
    return is_done


def wait_until(done: Callable[[], bool], deadline: float) -> bool:
    """Asks again and again. Returns whether it was done before the deadline, which is of the monotonic clock."""
    pause_s = _SHORTEST_PAUSE_S
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _stuck(engine: str, what_happened: str) -> str:
    return f"{engine} is stuck or dead: it {what_happened}"


def _nothing() -> None:
    return None
