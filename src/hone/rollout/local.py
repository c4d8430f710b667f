"""The embedded engine: samples in this process, from a model that it may share with the trainer.

The event loop's thread takes requests and hands results over; a worker thread owns the scheduler and does all
arithmetic, so that rewards are scored while other groups are still being sampled. Requests made in one pass of the
event loop reach the worker together and in order: a synchronous run repeats bit for bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from functools import partial

import torch
from torch import Tensor

from hone.errors import DataError, EngineError
from hone.memory.gauges import capacity_of
from hone.memory.guard import UNGUARDED, Guard
from hone.model.base import CausalModel
from hone.model.decoder import Decoder
from hone.model.hf import TransformersModel
from hone.model.load import weights_fingerprint
from hone.model.routing import no_experts
from hone.plan.architecture import Architecture
from hone.plan.families import architecture_from
from hone.plan.kv_cache import CacheRoom, most_within
from hone.rollout.decoding import PREFILL_TOKENS, DecoderStepper
from hone.rollout.engine import CacheUse, OnSample, OnToken, Request
from hone.rollout.graphs import CudaCapture, StepGraphs
from hone.rollout.rows import RowJob
from hone.rollout.scheduler import Decode, Scheduler
from hone.rollout.stepper import Stepper
from hone.rollout.worker import Action, EngineWorker, in_loop
from hone.types import Sample


class LocalEngine:
    """`engine.TokenwiseEngine` for one process and one device.

    Args:
        model: sampled from as it is: shared with the trainer, or the engine's own copy that `load` writes to.
        decode: token ids to text without special tokens.
        eos_ids: tokens that end every response.
        max_concurrent: rows decoded together, at most.
        room: of the cache; None: for `max_concurrent` rows of all positions, within a share of the device's memory.
        prefill_tokens: prompt tokens computed together, one prompt at least; both are memory, never the result.
        timeout_s: an engine that makes no step for so long is given up (EngineError).
        executor: one thread to compute on, shared with the trainer in a synchronous run; None: a thread of its own.
        guard: watches over memory. What runs out begins again, with the same randomness.
        records_routing: samples have the experts that their tokens were sent to; of a model with Transformers' class.
        enforce_eager: no CUDA graphs.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        decode: Decode,
        eos_ids: tuple[int, ...],
        max_concurrent: int,
        timeout_s: float,
        room: CacheRoom | None = None,
        executor: Executor | None = None,
        version: int = 0,
        prefill_tokens: int = PREFILL_TOKENS,
        guard: Guard = UNGUARDED,
        records_routing: bool = False,
        enforce_eager: bool = False,
    ) -> None:
        self.version = version
        self._model = model
        self._eos_ids = eos_ids
        self._guard = guard
        self._max_concurrent, self._prefill_tokens = max_concurrent, prefill_tokens
        self._is_whole = True  # the worker's: whether the weights are all of one version
        self._is_busy = False  # the worker's; the phase "rollout" is open while it is
        self._room = room or whole_room(model, max_concurrent)
        graphs = None if enforce_eager else graphs_on(model.output_weight.device)
        stepper = make_stepper(
            model, max_concurrent, prefill_tokens, self._room, records_routing=records_routing, graphs=graphs
        )
        self._scheduler = Scheduler(stepper, decode, max_concurrent)
        self._promises: dict[RowJob, Future[tuple[Sample, ...]]] = {}  # the worker's; a job is in it while it runs
        self._worker = EngineWorker(
            lambda: self._is_whole and not self._scheduler.idle,
            self._step,
            executor=executor,
            name="hone-engine",
            timeout_s=timeout_s,
        )
        self._unsent: list[Action] = []
        self._awake = True
        self._fullest = CacheUse()

    async def generate(
        self, request: Request, on_sample: OnSample | None = None, on_token: OnToken | None = None
    ) -> tuple[Sample, ...]:
        """See `TokenwiseEngine.generate`. Raises DataError when the prompt leaves no position for a response."""
        if not self._awake:
            raise EngineError(f"prompt {request.prompt.id}: the engine is asleep; wake it before generating.")
        job, promise = self._job(request), self._worker.promise()
        job.on_sample, job.on_token = in_loop(on_sample), in_loop(on_token)
        self._unsent.append(lambda: self._start(job, promise))
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._send_when_quiet, 1)
        try:
            return await self._worker.wait_for(promise, f"prompt {request.prompt.id}")
        except asyncio.CancelledError:
            self._worker.forget(promise)
            self._send(lambda: self._cancel(job))
            raise

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """See `Engine.load`. After a failure it holds a part of them, and requests wait until it was given all of a
        version.

        Raises EngineError and DataError: they do not fit, or stopped coming.
        """

        def load() -> None:
            if weights is not None:
                self._is_whole = False
                with self._guard.phase("publish"):
                    self._model.load_weights(weights)
            self._is_whole, self.version = True, version

        self._send()
        await self._worker.attempt(lambda: self._guard.attempt(load), f"loading the weights of version {version}")

    async def sleep(self) -> None:
        """See `Engine.sleep`."""

        def clear_if_idle() -> bool:
            if idle := self._scheduler.idle:
                self._scheduler.clear()
            return idle

        self._send()
        if not await self._worker.run(clear_if_idle, "sleep"):
            raise EngineError("the engine cannot sleep while samples are in flight; await or cancel them first.")
        self._awake = False

    async def wake(self) -> None:
        """See `Engine.wake`. The first request allocates the cache again."""
        self._awake = True

    def limit(self, *, max_concurrent: int | None = None, prefill_tokens: int | None = None) -> None:
        """Change bounds while the engine runs; may be called from any thread. What does not fit any more begins again,
        and a cache that was made for more is freed: at once where the worker's own thread asks, else before its next
        step."""
        self._max_concurrent = max_concurrent or self._max_concurrent
        self._prefill_tokens = prefill_tokens or self._prefill_tokens
        rows, tokens = self._max_concurrent, self._prefill_tokens
        self._worker.do(lambda: self._scheduler.limit(max_rows=rows, prefill_tokens=tokens))

    @property
    def num_rows(self) -> int:
        """Sequences being decoded."""
        return self._scheduler.num_rows

    def cache_use(self) -> CacheUse:
        """See `Caching.cache_use`."""
        fullest, self._fullest = self._fullest, CacheUse()
        return fullest

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._worker.close()

    def fingerprint(self) -> str:
        """See `Engine.fingerprint`."""
        return weights_fingerprint(self._model.named_weights())

    def _job(self, request: Request) -> RowJob:
        prompt, sampling = request.prompt, request.sampling
        room = self._model.max_positions - len(prompt.token_ids)
        if room < 1:
            raise DataError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens, which leaves no room for a response in the "
                f"model's {self._model.max_positions} positions. Lower data.max_prompt_tokens."
            )
        limit, cached = min(sampling.max_tokens, room), self._room.tokens(self._max_concurrent)
        if (needed := self._room.of_one(len(prompt.token_ids), limit)) > cached:
            raise DataError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens and its response up to {limit}, which needs a "
                f"cache of {needed} tokens; the engine's has room for {cached}. Raise rollout.kv_cache_tokens, or "
                "lower the limits of prompts and responses."
            )
        return RowJob(request, limit, (*self._eos_ids, *sampling.stop_token_ids))

    def _send_when_quiet(self, seen: int) -> None:
        """Send new requests all at once, after a pass of the event loop that brought no more of them."""
        if len(self._unsent) in (0, seen):
            self._send()
        else:
            asyncio.get_running_loop().call_soon(self._send_when_quiet, len(self._unsent))

    def _send(self, *more: Action) -> None:
        actions, self._unsent = [*self._unsent, *more], []
        if actions:
            self._worker.post(actions)

    # ---- on the worker

    def _step(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._guard.open("rollout")
        for job in self._guard.attempt(self._guarded_step, self._scheduler.begin_again):
            self._worker.keep(self._promises.pop(job), tuple(job.samples))
        if self._scheduler.idle:
            self._is_busy = False
            self._guard.close("rollout")

    def _guarded_step(self) -> list[RowJob]:
        with self._guard.phase("rollout", moment=lambda: self._scheduler.doing, measured=False):
            self._guard.check()  # first: what a step completes must not be lost
            complete = self._scheduler.step(self.version)
        if (use := self._scheduler.cache_use()).tokens >= self._fullest.tokens:
            self._fullest = use
        return complete

    def _start(self, job: RowJob, promise: Future[tuple[Sample, ...]]) -> None:
        self._promises[job] = promise
        self._scheduler.add(job)

    def _cancel(self, job: RowJob) -> None:
        if self._promises.pop(job, None) is not None:
            self._scheduler.cancel(job)


def whole_room(model: CausalModel, max_rows: int) -> CacheRoom:
    """Of an engine whose lengths are the model's alone."""
    positions, most = model.max_positions, most_tokens(model, max_rows)
    return CacheRoom(positions, positions, max_rows, max_rows, most, shares_prompts=isinstance(model, Decoder))


def most_tokens(model: CausalModel, max_rows: int) -> int | None:
    """Like `most_within`, on the model's device; None for a model that no plan knows."""
    architecture, weight = counted(model), model.output_weight
    if architecture is None:
        return None
    return most_within(capacity_of(weight.device), architecture, weight.element_size(), max_rows)


def counted(model: CausalModel) -> Architecture | None:
    """A model's shape; None for one that no plan knows."""
    try:
        return architecture_from(model.hf_config.to_dict(), source="the engine's model")
    except DataError:
        return None


def graphs_on(device: torch.device) -> StepGraphs | None:
    """Graphs of decoding steps, on a device that has them."""
    return StepGraphs(partial(CudaCapture, device)) if device.type == "cuda" else None


def make_stepper(
    model: CausalModel,
    max_rows: int,
    prefill_tokens: int,
    room: CacheRoom,
    *,
    records_routing: bool = False,
    graphs: StepGraphs | None = None,
) -> Stepper:
    """The fastest way to decode with this model. Raises DataError if its routing is to be recorded and cannot be.

    Args:
        graphs: for Hone's own decoder; the caches of Transformers' classes move with every token.
    """
    if isinstance(model, Decoder):
        if records_routing:
            raise DataError(no_experts(model.hf_config.model_type))
        return DecoderStepper(model, max_rows, room=room, prefill_tokens=prefill_tokens, graphs=graphs)
    if isinstance(model, TransformersModel):
        from hone.rollout.transformers_decoding import TransformersStepper  # brings modelling code and SciPy: 0.7 s

        return TransformersStepper(model, max_rows, room=room, records_routing=records_routing)
    raise TypeError(f"no way to decode with a {type(model).__name__}")


def refuse_to_compile(model: CausalModel) -> None:
    """Raises DataError for a model that has no decoder of Hone's own, which is what `rollout.compile` compiles."""
    if not isinstance(model, Decoder):
        raise DataError(
            f"rollout.compile = true: {type(model.hf_config).__name__} goes through Transformers' own class, which "
            "is not compiled. Set rollout.compile=false."
        )
