"""One thread that writes what nobody waits for: samples, TensorBoard, Weights & Biases, trace. Not for metrics.jsonl.

Who waits: `submit` waits while `capacity` jobs are queued, `drain` and `close` until all are done; each with a
deadline, so a disk or a network that hangs ends in a message. Who wakes them: the thread, after each job.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from hone.errors import HoneError

Job = Callable[[], None]


class Background:
    """Runs jobs one at a time, in order, on its own daemon thread."""

    def __init__(self, *, capacity: int = 16, deadline_s: float = 60.0) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(capacity)
        self._deadline_s = deadline_s
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="hone-observe", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises what an earlier job raised, or HoneError when the queue stays full."""
        self._raise_failure()
        try:
            self._jobs.put(job, timeout=self._deadline_s)
        except queue.Full:
            raise HoneError(self._stuck()) from None

    def drain(self) -> None:
        """Return once every job queued so far is done. Raises as `submit` does."""
        with self._jobs.all_tasks_done:
            done = self._jobs.all_tasks_done.wait_for(lambda: self._jobs.unfinished_tasks == 0, self._deadline_s)
        if not done:
            raise HoneError(self._stuck())
        self._raise_failure()

    def close(self) -> None:
        """Do what is queued and end the thread. Raises as `submit` does."""
        try:
            self.drain()
        finally:
            with contextlib.suppress(queue.Full):  # then the thread hangs in a job; as a daemon it dies with us
                self._jobs.put_nowait(None)
        self._thread.join(self._deadline_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as failure:  # boundary of the thread: raised again in the thread that submits next
                self._failure = self._failure or failure
            finally:
                self._jobs.task_done()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _stuck(self) -> str:
        return (
            f"the run's folder or a metrics service has taken nothing for {self._deadline_s:g} s "
            f"({self._jobs.qsize()} writes wait): check the disk and the network, or switch observe.wandb off"
        )
