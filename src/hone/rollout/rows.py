"""Live rows of an engine as arrays: what each has sampled so far, how it samples, and when it must end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hone.rollout.engine import OnSample, OnToken, Request, Token, stop_window
from hone.rollout.sampling import Controls, request_key, row_keys, uniforms
from hone.types import Sample, TokenIds, VersionSpan, version_spans


@dataclass(eq=False)
class RowJob:
    """One request on its way through the engine."""

    request: Request
    limit_tokens: int
    """Tokens per sample, at most."""
    stop_ids: tuple[int, ...]
    number: int = 0
    """The engine's count of jobs: those of a lower one came earlier."""
    waiting: deque[int] = field(init=False)
    """Which of the request's samples have no row, counted from 0."""
    begun: dict[int, Begun] = field(default_factory=dict)
    """Those among them that had one, and left it for lack of room."""
    prompt_id: int | None = None
    """The stepper's id of the prompt, once computed."""
    samples: list[Sample] = field(default_factory=list)
    """Finished ones, in order of finishing."""
    on_sample: OnSample | None = None
    """Called with each of them immediately, on the compute thread."""
    on_token: OnToken | None = None
    """Called with each of their tokens, likewise."""

    def __post_init__(self) -> None:
        self.begin_again()

    def begin_again(self) -> None:
        """Every sample that is not finished waits for a row again."""
        finished = {sample.index - self.request.first_sample for sample in self.samples}
        self.waiting = deque(i for i in range(self.request.num_samples) if i not in finished)
        self.prompt_id = None


@dataclass(frozen=True, slots=True)
class Begun:
    """What a sample had drawn when it left its row."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


NOTHING = Begun(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


class Rows:
    """Struct of arrays over at most `max_rows` rows; rows 0 .. count - 1 are live."""

    def __init__(self, max_rows: int) -> None:
        self.count = 0
        self.jobs: list[RowJob] = []
        self.sample_index = np.zeros(max_rows, np.int64)
        self.job_number = np.zeros(max_rows, np.int64)
        self.length = np.zeros(max_rows, np.int64)
        self._limit = np.zeros(max_rows, np.int64)
        self._key = np.zeros(max_rows, np.uint64)
        self._first_position = np.zeros(max_rows, np.int64)
        self._temperature = np.zeros(max_rows)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.zeros(max_rows)
        self._min_p = np.zeros(max_rows)
        self._stop_ids = np.full((max_rows, 1), -1, np.int64)
        self.stop_window = np.zeros(max_rows, np.int64)
        """Last tokens that may hold a stop string just completed; 0: the row has no stop strings."""
        self.tokens = np.zeros((max_rows, 0), np.int32)
        self.logprobs = np.zeros((max_rows, 0), np.float32)
        self.versions = np.zeros((max_rows, 0), np.int32)

    def add(self, job: RowJob, count: int) -> list[Begun]:
        """Give the job's next `count` samples a row each; returns what each has drawn already."""
        new = slice(self.count, self.count + count)
        sampling, request = job.request.sampling, job.request
        samples = [job.waiting.popleft() for _ in range(count)]
        self.sample_index[new] = [request.first_sample + sample for sample in samples]
        self.job_number[new] = job.number
        begun = [job.begun.pop(sample, NOTHING) for sample in samples]
        self.length[new] = [len(one.tokens) for one in begun]
        self._have_columns(int(self.length[new].max()))
        for row, one in enumerate(begun, self.count):
            if one is not NOTHING:
                self.tokens[row, : len(one.tokens)] = one.tokens
                self.logprobs[row, : len(one.tokens)] = one.logprobs
                self.versions[row, : len(one.tokens)] = one.versions
        self._limit[new] = job.limit_tokens
        self._key[new] = row_keys(
            request_key(request.seed, request.stream, request.prompt.index), self.sample_index[new]
        )
        self._first_position[new] = request.first_position
        self._temperature[new] = sampling.temperature
        self._top_k[new], self._top_p[new], self._min_p[new] = sampling.top_k, sampling.top_p, sampling.min_p
        if len(job.stop_ids) > self._stop_ids.shape[1]:
            self._stop_ids = _widened(self._stop_ids, len(job.stop_ids), fill=-1)
        self.stop_window[new] = stop_window(sampling.stop)
        self._stop_ids[new] = -1
        self._stop_ids[new, : len(job.stop_ids)] = job.stop_ids
        self.jobs += [job] * count
        self.count += count
        return begun

    def leave(self, row: int) -> None:
        """Let a row's sample wait for another row, with what it has drawn; the row is still to be moved over."""
        job, length = self.jobs[row], int(self.length[row])
        sample = int(self.sample_index[row]) - job.request.first_sample
        kept = (array[row, :length].copy() for array in (self.tokens, self.logprobs, self.versions))
        job.begun[sample] = Begun(*kept)
        job.waiting.appendleft(sample)

    @property
    def limits(self) -> np.ndarray:
        """(count,) most tokens of each live row."""
        return self._limit[: self.count]

    def controls(self) -> Controls:
        live = slice(self.count)
        return Controls(self._temperature[live], self._top_k[live], self._top_p[live], self._min_p[live])

    def uniforms(self) -> np.ndarray:
        """(count,) the randomness of each row's next token."""
        live = slice(self.count)
        return uniforms(self._key[live], self._first_position[live] + self.length[live])

    def append(self, token_B: np.ndarray, logprob_B: np.ndarray, version: int) -> tuple[np.ndarray, np.ndarray]:
        """Record one token per live row; returns (stopped_B, full_B): a stop token came, the limit is reached."""
        live = np.arange(self.count)
        length_B = self.length[: self.count]
        self._have_columns(int(length_B.max()) + 1)
        self.tokens[live, length_B] = token_B
        self.logprobs[live, length_B] = logprob_B
        self.versions[live, length_B] = version
        length_B += 1
        stopped_B = (token_B[:, None] == self._stop_ids[: self.count]).any(1)
        return stopped_B, length_B >= self._limit[: self.count]

    def drawn(self, row_D: np.ndarray) -> Iterator[tuple[TokenIds, NDArray[np.float32], tuple[VersionSpan, ...]]]:
        """Tokens, logprobs and versions of rows that have some: read-only pieces of one copy."""
        length_D = self.length[row_D]
        width = int(length_D.max(initial=0))
        is_drawn_DL = np.arange(width) < length_D[:, None]
        version_DL = self.versions[row_D, :width]
        is_one_span_D = ((version_DL == version_DL[:, :1]) | ~is_drawn_DL).all(1).tolist()
        tokens, logprobs = self.tokens[row_D, :width][is_drawn_DL], self.logprobs[row_D, :width][is_drawn_DL]
        for copy in (tokens, logprobs):
            copy.setflags(write=False)
        end = 0
        for versions, length, is_one_span in zip(version_DL, length_D.tolist(), is_one_span_D, strict=True):
            own, end = slice(end, end + length), end + length
            spans = (VersionSpan(int(versions[0]), length),) if is_one_span else version_spans(versions[:length])
            yield tokens[own], logprobs[own], spans

    def report_newest(self) -> None:
        """Call `on_token` with the newest token of each job that has one."""
        for row, job in enumerate(self.jobs):
            if job.on_token is not None:
                place = int(self.length[row]) - 1
                token, logprob, version = (array[row, place] for array in (self.tokens, self.logprobs, self.versions))
                job.on_token(Token(int(self.sample_index[row]), place, int(token), float(logprob), int(version)))

    def _have_columns(self, longest: int) -> None:
        if longest > self.tokens.shape[1]:
            self.tokens, self.logprobs, self.versions = (
                _widened(array, max(64, 2 * longest), fill=0) for array in (self.tokens, self.logprobs, self.versions)
            )

    def make_room(self, max_rows: int) -> None:
        """Have room for at least `max_rows` rows."""
        more = max_rows - len(self.length)
        if more <= 0:
            return
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(self, name, np.pad(value, [(0, more)] + [(0, 0)] * (value.ndim - 1)))

    def move(self, target: np.ndarray, source: np.ndarray, count: int) -> None:
        """Row `target[i]` becomes row `source[i]`; afterwards `count` rows are live."""
        for array in (
            self.sample_index,
            self.job_number,
            self.length,
            self._limit,
            self._key,
            self._temperature,
            self._top_k,
        ):
            array[target] = array[source]
        for array in (self._top_p, self._min_p, self._stop_ids, self.stop_window, self._first_position):
            array[target] = array[source]
        if len(source):
            used = int(self.length[target].max())
            for array in (self.tokens, self.logprobs, self.versions):
                array[target, :used] = array[source, :used]
        for to, origin in zip(target.tolist(), source.tolist(), strict=True):
            self.jobs[to] = self.jobs[origin]
        del self.jobs[count:]
        self.count = count


def _widened(array: np.ndarray, width: int, fill: int) -> np.ndarray:
    wider = np.full((array.shape[0], width), fill, array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
