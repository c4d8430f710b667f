"""Continuous batching scheduler: one token per live row and step, finished rows replaced at once.

Synchronous and without threads. Jobs start in the order of their arrival, sample by sample, whenever a row is free and
the cache has room for it; where the cache runs out, the newest samples wait, and continue later from their tokens so
far. What happens is a function of the jobs and of the steps at which they came, never of time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hone.data.pack import pictures_of
from hone.experts import ExpertIds, unrecorded
from hone.rollout.engine import CacheUse, Decode, text_up_to_stop
from hone.rollout.rows import NOTHING, RowJob, Rows
from hone.rollout.sampling import on_host, sample, upload
from hone.rollout.stepper import Stepper, closing_moves, old_rows
from hone.types import Sample


class Scheduler:
    """Drives a stepper. `step()` until `idle`; finished jobs are what it returns."""

    def __init__(self, stepper: Stepper, decode: Decode, max_rows: int) -> None:
        self._stepper = stepper
        self._decode = decode
        self._max_rows = max_rows
        self._rows = Rows(max_rows)
        self._jobs: dict[RowJob, None] = {}  # all that are not complete, in the order of their arrival
        self._waiting: deque[RowJob] = deque()
        self._complete: list[RowJob] = []  # a step that fails must not lose them
        self._logits_BV: Tensor | None = None  # of the live rows' next token
        self._num_jobs = 0
        self.num_tokens = 0
        """Tokens sampled since the start."""
        self.preempted = 0
        """Samples that left their row for lack of room since the start."""
        self.doing = ""
        """What the step in progress, or the one that failed, was at; names of the plan's moments."""

    @property
    def num_rows(self) -> int:
        """Live rows."""
        return self._rows.count

    def cache_use(self) -> CacheUse:
        """How full the cache is now."""
        return self._stepper.cache_use()

    @property
    def idle(self) -> bool:
        return not self._waiting and self._rows.count == 0

    def add(self, job: RowJob) -> None:
        job.number, self._num_jobs = self._num_jobs, self._num_jobs + 1
        self._jobs[job] = None
        self._waiting.append(job)

    def cancel(self, job: RowJob) -> None:
        """Drop the job and free its rows. Unknown and finished jobs are ignored."""
        self._jobs.pop(job, None)
        if job in self._waiting:
            self._waiting.remove(job)
            if job.prompt_id is not None:
                self._stepper.release_prompt(job.prompt_id)
        dead_B = np.fromiter((other is job for other in self._rows.jobs), bool, self._rows.count)
        if dead_B.any():
            logits_BV = self._logits_BV
            assert logits_BV is not None  # a step that leaves rows also leaves their next logits
            remaining = self._remove(dead_B)
            self._logits_BV = logits_BV[upload(remaining, logits_BV.device)] if len(remaining) else None

    def step(self, version: int) -> list[RowJob]:
        """Admit what fits, sample one token per live row; returns the jobs whose last sample this finished."""
        self.doing = "prompts computed"
        self._admit()
        self.doing = "sampling"
        if self._logits_BV is None:
            return self._take_complete()
        rows = self._rows
        token_B, logprob_B = on_host(*sample(self._logits_BV, rows.controls(), rows.uniforms()))
        self._logits_BV = None
        stopped_B, full_B = rows.append(token_B, logprob_B, version)
        rows.report_newest()
        self.num_tokens += rows.count
        cut_texts = self._completed_stop_strings()
        stopped_B[list(cut_texts)] = True
        done_B = stopped_B | full_B
        if done_B.any():
            self._collect(np.flatnonzero(done_B), stopped_B, cut_texts)
            token_B = token_B[self._remove(done_B)]
        if rows.count:
            token_B = self._preempt(token_B)
            self._logits_BV = self._stepper.advance(token_B)
        return self._take_complete()

    def begin_again(self) -> None:
        """After a step that failed in the middle: free the cache, and restart all unfinished samples.

        Each is drawn with the randomness that it was drawn with before.
        """
        jobs = [job for job in self._jobs if len(job.samples) < job.request.num_samples]
        self.clear()
        for job in jobs:
            job.begin_again()
            self.add(job)

    def limit(self, *, max_rows: int, prefill_tokens: int) -> None:
        """Bounds from now on. Fewer rows than are live begin again; a cache that was made for more is freed."""
        are_fewer, self._max_rows = max_rows < self._max_rows, max_rows
        self._stepper.limit(max_rows=max_rows, prefill_tokens=prefill_tokens)
        if are_fewer:
            self.begin_again()
        else:
            self._rows.make_room(max_rows)

    def clear(self) -> None:
        """Forget all jobs and free the cache."""
        self._jobs.clear()
        self._waiting.clear()
        self._rows = Rows(self._max_rows)
        self._logits_BV = None
        self._stepper.clear()

    def _admit(self) -> None:
        if not self._waiting or self._rows.count == self._max_rows:
            return
        starting = self._that_fit()
        if not starting and self._rows.count == 0:
            self._let_go_of_prompts(self._waiting)
            starting = self._that_fit()
        if not starting:
            return
        new = [job for job, _ in starting if job.prompt_id is None]
        if new:
            prompts = [job.request.prompt for job in new]
            pictures = pictures_of([prompt.pictures for prompt in prompts])
            ids = self._stepper.add_prompts([prompt.token_ids for prompt in prompts], pictures)
            for job, prompt_id in zip(new, ids, strict=True):
                job.prompt_id = prompt_id
        row_prompts: list[int] = []
        begun: list[np.ndarray] = []
        for job, count in starting:
            assert job.prompt_id is not None
            row_prompts += [job.prompt_id] * count
            begun += [one.tokens for one in self._rows.add(job, count)]
        logits_BV = self._stepper.add_rows(row_prompts, begun)
        self._logits_BV = logits_BV if self._logits_BV is None else torch.cat([self._logits_BV, logits_BV])
        while self._waiting and not self._waiting[0].waiting:
            job = self._waiting.popleft()
            assert job.prompt_id is not None
            self._stepper.release_prompt(job.prompt_id)

    def _that_fit(self) -> list[tuple[RowJob, int]]:
        """Waiting jobs, in their order, and how many samples of each the rows and the cache have room for."""
        rows, free = self._rows, self._max_rows - self._rows.count
        admission = self._stepper.admission(int(rows.limits.max(initial=0)))
        starting: list[tuple[RowJob, int]] = []
        for job in self._waiting:
            prompt_tokens, count = len(job.request.prompt.token_ids) if job.prompt_id is None else 0, 0
            for number in job.waiting:
                begun = len(job.begun.get(number, NOTHING).tokens)
                if free == 0 or not admission.take(begun, job.limit_tokens, 0 if count else prompt_tokens):
                    break
                count, free = count + 1, free - 1
            if count:
                starting.append((job, count))
            if count < len(job.waiting):
                break
        return starting

    def _preempt(self, token_B: np.ndarray) -> np.ndarray:
        """Let the newest rows wait that the cache has no room for; returns the tokens of those that stay."""
        rows = self._rows
        by_age = np.lexsort((rows.sample_index[: rows.count], rows.job_number[: rows.count]))
        if self._stepper.rows_that_fit(by_age) == rows.count:
            return token_B
        live = set(rows.jobs)
        self._let_go_of_prompts(job for job in self._waiting if job not in live)
        if (stay := self._stepper.rows_that_fit(by_age)) == rows.count:
            return token_B
        dead_B = np.zeros(rows.count, bool)
        dead_B[by_age[stay:]] = True
        for row in by_age[stay:][::-1].tolist():
            rows.leave(row)
        leaving = {rows.jobs[row]: None for row in by_age[stay:].tolist()}
        self._let_go_of_prompts([job for job in self._waiting if job in leaving])
        for job in leaving:
            job.prompt_id = None
        others = [job for job in self._waiting if job not in leaving]
        self._waiting = deque(sorted([*leaving, *others], key=lambda job: job.number))
        self.preempted += len(by_age) - stay
        return token_B[self._remove(dead_B)]

    def _let_go_of_prompts(self, jobs: Iterable[RowJob]) -> None:
        """Drop the prompts of waiting jobs with their last rows; they are computed again when needed."""
        for job in jobs:
            if job.prompt_id is not None:
                self._stepper.release_prompt(job.prompt_id)
                job.prompt_id = None

    def _remove(self, dead_B: np.ndarray) -> np.ndarray:
        """Close over dead rows; returns the old row of each remaining one."""
        target, source, count = closing_moves(dead_B)
        self._rows.move(target, source, count)
        self._stepper.move_rows(target, source, count)
        return old_rows(target, source, count)

    def _completed_stop_strings(self) -> dict[int, str]:
        """Rows whose text now contains one of their stop strings, and the text up to the end of the first one."""
        rows, hits = self._rows, {}
        for row in np.flatnonzero(rows.stop_window[: rows.count]).tolist():
            stop, token_ids = rows.jobs[row].request.sampling.stop, rows.tokens[row, : rows.length[row]]
            text = text_up_to_stop(token_ids, stop, int(rows.stop_window[row]), self._decode)
            if text is not None:
                hits[row] = text
        return hits

    def _take_complete(self) -> list[RowJob]:
        complete, self._complete = self._complete, []
        return complete

    def _collect(self, done: np.ndarray, stopped_B: np.ndarray, cut_texts: dict[int, str]) -> None:
        """Make samples of finished rows, and set the jobs aside that are complete."""
        rows = self._rows
        for row, (token_ids, logprobs, versions) in zip(done.tolist(), rows.drawn(done), strict=True):
            job = rows.jobs[row]
            routing, prompt_routing = self._routing(row, job, len(token_ids))
            finished = Sample(
                prompt_id=job.request.prompt.id,
                index=int(rows.sample_index[row]),
                token_ids=token_ids,
                sampler_logprobs=logprobs,
                versions=versions,
                finish_reason="stop" if stopped_B[row] else "length",
                text=cut_texts[row] if row in cut_texts else self._decode(token_ids.tolist()),
                routing=routing,
                prompt_routing=prompt_routing,
            )
            job.samples.append(finished)
            if job.on_sample is not None:
                job.on_sample(finished)
            if len(job.samples) == job.request.num_samples:
                job.samples.sort(key=lambda s: s.index)
                del self._jobs[job]
                self._complete.append(job)

    def _routing(self, row: int, job: RowJob, length: int) -> tuple[ExpertIds | None, ExpertIds | None]:
        """See `Sample`; of a row that has sampled `length` tokens, the last one just now."""
        found = self._stepper.routing(row)
        if found is None:
            return None, None
        of_prompt, own = found
        is_first = self._rows.sample_index[row] == job.request.first_sample
        return np.concatenate([own, unrecorded(length - len(own), own)]), of_prompt if is_first else None
