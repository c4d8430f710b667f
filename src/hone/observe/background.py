"""Background writer thread for samples, TensorBoard, Weights & Biases and trace; not for metrics.jsonl.

`submit` waits while `capacity` jobs are queued, `drain` and `close` until all are done, each for at most `patience_s`.
A disk or network that stalls longer causes a warning; until it recovers no call waits, and jobs beyond the capacity
are dropped and counted.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

PATIENCE_S = 10.0

Task = Callable[[], None]


class Background:
    """Runs jobs one at a time, in order, on its own daemon thread."""

    def __init__(self, warn: Callable[[str], None], *, capacity: int = 16, patience_s: float = PATIENCE_S) -> None:
        """
        Args:
            warn: called when jobs are not done in time, and when they are done again.
            patience_s: how long a call waits for the disk or network.
        """
        self._jobs: queue.Queue[Task | None] = queue.Queue(capacity)
        self._warn = warn
        self.patience_s = patience_s
        self._is_stalled = False
        self._dropped = 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="hone-observe", daemon=True)
        self._thread.start()

    def submit(self, job: Task, *, bulk: bool = False) -> None:
        """Queue a job, or drop it where the one that is being done stalls. Raises what an earlier job raised.

        Args:
            bulk: from a thread that may wait: half of the places are left to others, such as the event loop's.
        """
        self._raise_failure()
        deadline_s = time.monotonic() + self._wait_s()
        while bulk and self._jobs.qsize() > self._jobs.maxsize // 2 and time.monotonic() < deadline_s:
            time.sleep(0.002)
        try:
            self._jobs.put(job, timeout=max(deadline_s - time.monotonic(), 0))
        except queue.Full:
            self._dropped += 1
            self._stall()

    def drain(self) -> None:
        """Return once every job queued so far is done, or stalls. Raises as `submit` does."""
        with self._jobs.all_tasks_done:
            is_done = self._jobs.all_tasks_done.wait_for(lambda: not self._jobs.unfinished_tasks, self._wait_s())
        if not is_done:
            self._stall()
        self._raise_failure()

    def close(self) -> None:
        """Do what is queued and end the thread. Raises as `submit` does."""
        try:
            self.drain()
        finally:
            with contextlib.suppress(queue.Full):  # then the thread hangs in a job; as a daemon it dies with us
                self._jobs.put_nowait(None)
        self._thread.join(self._wait_s())

    def _wait_s(self) -> float:
        return 0.001 if self._is_stalled else self.patience_s

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as failure:  # boundary of the thread: raised again in the thread that submits next
                self._failure = self._failure or failure
            finally:
                if self._is_stalled:
                    self._is_stalled = False
                    dropped, self._dropped = self._dropped, 0
                    self._warn(f"the run's folder and metrics services take data again; {dropped} writes were dropped")
                self._jobs.task_done()

    def _stall(self) -> None:
        if not self._is_stalled:
            self._is_stalled = True
            self._warn(
                f"the run's folder or a metrics service has taken nothing for {self.patience_s:g} s: the run "
                "continues, and samples, charts and traces that find no place are dropped until it does. Check disk "
                "and network"
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
