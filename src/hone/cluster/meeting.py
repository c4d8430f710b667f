"""Where the sender of weights and the engines that take them agree on what comes next, who took it, and who failed.

A key-value store that the sender opens; it holds what is small. The bytes go another way, which is what the two
transports that are built on this differ in: `publish_group` broadcasts them, `publish_ipc` shares a GPU's memory.

What the keys say, for messages counted from 0 over all versions:

    message/7        the sender: a bucket's header, a manifest, or that all is over and why
    over             the sender: that all is over and why, for those that wait for bytes
    <engine>/there   it has come
    <engine>/ready   messages may be sent to it
    <engine>/at      the last message that it took
    <engine>/held/7  the fingerprint of what it holds after manifest 7
    <engine>/failed  it takes nothing any more, and why
"""

from __future__ import annotations

import json
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hone.cluster.weights import Bucket, Manifest
from hone.errors import ClusterError, EngineError

GRACE_S = 2.0
"""How long engines may take, after something went wrong, to say that it was not they."""
_OVER = "the sender gave up: one of its engines {}"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


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


class MeetingOutlet(ABC):
    """The sending end towards engines that share one fate; see `publish.Outlet`. For many versions, until one fails.

    Args:
        engines: names; each of them makes the inlet under its own.
        device: where buckets are packed and sent from.
        timeout_s: an engine that does not join, take a bucket or load what it took for so long is stuck.
    """

    def __init__(self, meeting: Meeting, engines: Sequence[str], *, device: torch.device, timeout_s: float) -> None:
        self.engines, self.device, self.timeout_s = list(engines), device, timeout_s
        self.failed: dict[str, str] = {}
        self.store = section(meeting.store, engines)
        self._number, self._first = -1, 0  # the last message, and the first whose key is still there

    def await_all(self, key: str) -> None:
        """Wait until every engine has said so. Raises ClusterError naming those that have not."""
        missing = list(self.engines)

        def all_said() -> bool:
            missing[:] = [engine for engine in missing if not self.store.check([f"{engine}/{key}"])]
            return not missing

        if not wait_until(all_said, time.monotonic() + self.timeout_s):
            raise ClusterError(
                f"publishing weights: {', '.join(missing)}: not {key} within {self.timeout_s:g} s. "
                "Did its process end, or can it not reach the trainer's machine?"
            )

    def send(self, bucket: Bucket) -> Callable[[], object]:
        if self.failed:
            return _nothing
        arrived = self._send_data(self._number + 1, bucket)
        number = self._say("bucket", bucket.header())
        deadline = time.monotonic() + self.timeout_s
        what_not = f"did not take bucket {bucket.index}"
        return lambda: self._wait_until(arrived, deadline, lambda engine: self.last_taken(engine) >= number, what_not)

    def finish(self, manifest: Manifest) -> dict[str, str]:
        if self.failed:
            return {}
        number = self._say("manifest", manifest.as_json())
        keys = [f"{engine}/held/{number}" for engine in self.engines]
        deadline = time.monotonic() + self.timeout_s
        what_not = f"did not finish loading version {manifest.version}"
        self._wait_until(
            lambda: self.store.check(keys),
            deadline,
            lambda engine: self.store.check([f"{engine}/held/{number}"]),
            what_not,
        )
        if self.failed:
            return {}
        held = {engine: self.store.get(key).decode() for engine, key in zip(self.engines, keys, strict=True)}
        for key in keys + [f"message/{old}" for old in range(self._first, number + 1)]:
            self.store.delete_key(key)
        self._first = number + 1
        return held

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

    def last_taken(self, engine: str) -> int:
        """Number of the last message that an engine took; -1 before the first."""
        return int(self.store.get(f"{engine}/at"))

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

        def done_or_failed() -> bool:
            return done() or any(self.store.check([f"{engine}/failed"]) for engine in self.engines)

        what_happened = f"{what_not} within {self.timeout_s:g} s"
        try:
            if wait_until(done_or_failed, deadline) and done():
                return
        except RuntimeError as error:  # what torch.distributed raises for a connection that was lost
            what_happened = f"{what_not}: {first_line(error)}"
        self._give_up(done_by, what_happened)

    def _give_up(self, done_by: Callable[[str], bool], what_happened: str) -> None:
        """Find out whose fault it was: an engine that neither did its part nor says why not."""
        self.store.set("over", what_happened)
        self._say("over", what_happened)
        silent = list(self.engines)

        def all_told() -> bool:
            silent[:] = [engine for engine in silent if not (self._complaint(engine) or done_by(engine))]
            return not silent

        wait_until(all_told, time.monotonic() + GRACE_S)
        for engine in self.engines:
            self.failed[engine] = (
                f"{engine} is stuck or dead: it {what_happened}"
                if engine in silent
                else self._complaint(engine) or f"{engine} lost the others of its group"
            )
        self._end()

    def _complaint(self, engine: str) -> str | None:
        """Why an engine says that it failed."""
        key = f"{engine}/failed"
        return f"{engine}: {self.store.get(key).decode()}" if self.store.check([key]) else None


class MeetingInlet(ABC):
    """The receiving end; see `publish.Inlet`.

    Args:
        address: of the sender's `Meeting`.
        engine: this one's name.
        engines: all of its group, as the sender has them.
        device: where the weights arrive.
        timeout_s: longest wait for the next bucket, once a version is awaited.
    """

    def __init__(
        self, address: str, engine: str, engines: Sequence[str], *, device: torch.device, timeout_s: float
    ) -> None:
        self.engine, self.device, self.timeout_s = engine, device, timeout_s
        host, _, port = address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
        self.store = section(store, engines)
        self._number = -1
        self.store.set(f"{engine}/at", "-1")
        self.store.set(f"{engine}/there", "")

    def messages(self) -> Iterator[Bucket | Manifest]:
        while True:
            self._number += 1
            key = f"message/{self._number}"
            try:
                self.store.wait([key], timedelta(seconds=self.timeout_s))
                ((kind, text),) = json.loads(self.store.get(key)).items()
                data = self._receive(self._number, text) if kind == "bucket" else None
                self.store.set(f"{self.engine}/at", str(self._number))
            except RuntimeError as error:  # what torch.distributed raises
                raise EngineError(
                    f"no more weights came within {self.timeout_s:g} s, or the connection was lost: {first_line(error)}"
                ) from error
            if kind == "over":
                raise EngineError(_OVER.format(text))
            yield Manifest.of(text) if data is None else Bucket.of(text, data)

    def held(self, fingerprint: str) -> None:
        self.store.set(f"{self.engine}/held/{self._number}", fingerprint)

    def failed(self, reason: str) -> None:
        self.store.set(f"{self.engine}/failed", reason)

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


def section(store: Store, engines: Iterable[str]) -> Store:
    """A part of a store for those of one group."""
    return PrefixStore(f"{'+'.join(engines)}/", store)


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
    return str(error).strip().splitlines()[0]


def _nothing() -> None:
    return None
