# pyright: reportMissingImports=false
"""vLLM as an engine: one replica, in this process, over one device or divided over several (tensor parallel).

One thread steps vLLM's `LLMEngine`, as with the embedded engine: weights are loaded between
two steps, so it is known of every token which version sampled it. Each sample is a request of its own with a seed of
its own; the prompt's blocks are shared through vLLM's prefix cache, whose keys carry the number of the load, so that no
request ever reads keys that older weights made.

What differs from Hone's own engine, see docs/vllm.md: a sample's draws are a function of its key and the software, but
its logits, and so with a tiny chance its tokens, depend on what else is in the batch; nothing is computed from the
trainer's own memory, weights are always copied in. vllm is imported when an engine starts, and only then.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from hone.config.engine import EngineSection
from hone.devices import device_of
from hone.errors import DataError, EngineError
from hone.model.fingerprint import weights_fingerprint
from hone.model.load import read_weights
from hone.rollout.engine import Buckets, CacheUse, Decode, OnSample, OnToken, Request
from hone.rollout.vllm_args import (
    CPU_ENVIRONMENT,
    ENVIRONMENT,
    ROUTING_ENVIRONMENT,
    VllmPlace,
    check_sampling,
    check_version,
    engine_arguments,
)
from hone.rollout.vllm_requests import VllmCache, VllmGroup, VllmPictures, VllmRouting, VllmRow, vllm_prompt
from hone.rollout.vllm_weights import VllmAdapter
from hone.rollout.worker import EngineWorker, in_loop
from hone.types import Sample

SHUTDOWN_S = 30.0


class VllmEngine:
    """`engine.TokenwiseEngine` over vLLM. Made by `start`."""

    def __init__(
        self,
        llm: Any,
        executor: ThreadPoolExecutor,
        *,
        place: VllmPlace,
        settings: EngineSection,
        on_gpu: bool,
        decode: Decode,
        eos_ids: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        self.version = 0
        llm.set_weight_version("0")
        self._llm, self._executor, self._cache = llm, executor, VllmCache(llm)
        self._place, self._settings = place, settings
        self._adapter = None if place.adapter is None else VllmAdapter(llm, place.adapter, place.folder)
        self._pictures = VllmPictures(place.folder, llm.model_config.dtype)
        self._routing = VllmRouting(llm) if place.records_routing else None
        self._frees_memory = on_gpu and place.takes_turns
        self._decode, self._eos_ids = decode, eos_ids
        self._max_positions: int = llm.model_config.max_model_len
        self._vocab_size: int = llm.model_config.get_vocab_size()
        self._fingerprint: str | None = None  # of the folder's weights: computed when it is asked for
        self._rows: dict[str, VllmRow] = {}  # the worker's, as the two below
        self._numbers = itertools.count()
        self._loads = 0
        self._awake, self._weights_awake = True, True
        self._has_weights = True  # all of one version
        self._worker = EngineWorker(
            lambda: self._has_weights and bool(self._rows),
            self._step,
            executor=executor,
            name="hone-vllm",
            timeout_s=timeout_s,
        )

    @classmethod
    async def start(
        cls,
        place: VllmPlace,
        settings: EngineSection,
        *,
        decode: Decode,
        eos_ids: tuple[int, ...],
        timeout_s: float,
        start_timeout_s: float,
    ) -> VllmEngine:
        """Start vLLM with the weights of a Hugging Face directory, as version 0.

        Args:
            decode, eos_ids, timeout_s: as for `LocalEngine`.
            start_timeout_s: longest wait for vLLM to be ready.
        Raises:
            EngineError: vLLM is not installed, in a version that is not supported, or could not start in time.
        """
        device = device_of("auto", "cluster.engines.use")
        if device.type not in ("cuda", "cpu"):
            raise EngineError(
                f"cluster.engines.use = vllm: Hone runs vLLM on GPUs of NVIDIA and AMD and on CPUs; this machine has "
                f"an accelerator of type `{device.type}`. Set cluster.engines.use = hone."
            )
        on_gpu = device.type == "cuda"
        executor = ThreadPoolExecutor(1, thread_name_prefix="hone-vllm")  # a GPU is chosen thread by thread
        arguments = engine_arguments(settings, place, on_gpu=on_gpu)
        environment = ENVIRONMENT | ({} if on_gpu else CPU_ENVIRONMENT)
        environment |= ROUTING_ENVIRONMENT if place.records_routing else {}
        try:
            async with asyncio.timeout(start_timeout_s):
                llm = await asyncio.get_running_loop().run_in_executor(executor, _start, arguments, environment)
        except BaseException as error:
            executor.shutdown(wait=False)
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"vLLM was not ready with {place.folder} within {start_timeout_s:g} s. Raise "
                    "cluster.start_timeout_s, or look into its log (VLLM_LOGGING_LEVEL=INFO)."
                ) from None
            raise
        return cls(
            llm,
            executor,
            place=place,
            settings=settings,
            on_gpu=on_gpu,
            decode=decode,
            eos_ids=eos_ids,
            timeout_s=timeout_s,
        )

    async def generate(
        self, request: Request, on_sample: OnSample | None = None, on_token: OnToken | None = None
    ) -> tuple[Sample, ...]:
        """See `TokenwiseEngine.generate`.

        Raises:
            DataError: the prompt leaves no position for a response, has tokens that the model does not know, or
                pictures that cannot be read any more.
            EngineError: also where vLLM would sample from another distribution than is asked for.
        """
        prompt = request.prompt
        if not self._awake:
            raise EngineError(f"prompt {prompt.id}: the engine is asleep; wake it before generating.")
        check_sampling(request.sampling)
        room = self._max_positions - len(prompt.token_ids)
        if room < 1:
            raise DataError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens, which leaves no room for a response in the "
                f"engine's {self._max_positions} positions. Lower data.max_prompt_tokens."
            )
        if prompt.token_ids.max() >= self._vocab_size:  # vLLM would fail in the middle of a step
            raise DataError(
                f"prompt {prompt.id} has token {prompt.token_ids.max()}, and the model knows {self._vocab_size}. Do "
                "tokenizer and model belong together?"
            )
        # In another thread, as decoding takes long, and once for all samples of the prompt.
        pictures = await asyncio.to_thread(self._pictures.read, prompt) if prompt.pictures else None
        group = VllmGroup(
            request,
            limit_tokens=min(request.sampling.max_tokens, room),
            stop_ids=[*self._eos_ids, *request.sampling.stop_token_ids],
            promise=self._worker.promise(),
            pictures=pictures,
            on_sample=in_loop(on_sample),
            on_token=in_loop(on_token),
        )
        self._worker.post([lambda: self._begin(group)])
        try:
            return await self._worker.wait_for(group.promise, f"prompt {prompt.id}")
        except BaseException:
            self._worker.forget(group.promise)
            self._worker.post([lambda: self._drop(group)])
            raise

    async def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """See `Engine.load`. While asleep it wakes the memory of the weights first, and no other.

        After a failure it holds a part of them, and requests wait until it was given all of a version.

        Args:
            weights: a `Buckets`, which vLLM's workers open.
        Raises:
            EngineError: they do not fit, or stopped coming.
        """
        if self._adapter is not None and weights is not None:
            await self._worker.attempt(lambda: self._load_adapter(weights, version), f"loading version {version}")
            return
        if not isinstance(weights, Buckets):
            raise EngineError(
                "vLLM shares no memory with the trainer: its workers take new weights in buckets, as "
                "hone.weights.receive.Receiver brings them."
            )
        await self._worker.attempt(lambda: self._load(weights, version), f"loading the weights of version {version}")

    @property
    def opens_buckets(self) -> bool:
        """See `weights.receive.LoadsBuckets`: not where an adapter comes alone, which vLLM reads from a directory."""
        return self._adapter is None

    @property
    def num_workers(self) -> int:
        """See `weights.receive.LoadsBuckets`."""
        return self._settings.tensor_parallel_size

    async def connect_workers(self, address: Any) -> None:
        """See `weights.receive.LoadsBuckets`."""

        def join() -> None:
            self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"address": address}})
            self._check_workers()

        await self._worker.attempt(join, "joining a group")

    async def sleep(self) -> None:
        """See `Engine.sleep`. Where it takes turns, with `sleep_level` 2, the weights are gone: `load` before `wake`.

        A CPU's memory is not freed; the order is asked for all the same, so that it is seen to hold there too.
        """
        if not await self._worker.run(self._sleep_if_idle, "sleep"):
            raise EngineError("the engine cannot sleep while samples are in flight; await or cancel them first.")

    async def wake(self) -> None:
        """See `Engine.wake`. Weights first, then new ones by `load`, then this for the cache."""
        if not self._has_weights:
            raise EngineError(
                "the engine has no weights: its weights were discarded on sleep (sleep_level 2), or new ones did "
                "not arrive whole. Load new ones before waking it, or set sleep_level to 1."
            )
        await self._worker.run(self._wake, "wake")

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._worker.close()
        if self._adapter is not None:
            self._adapter.close()
        stopping = self._executor.submit(_stop, self._llm)
        self._executor.shutdown(wait=False)
        await asyncio.wait({asyncio.wrap_future(stopping)}, timeout=SHUTDOWN_S)

    def fingerprint(self) -> str:
        """See `Engine.fingerprint`. Of the weights as they came, before vLLM converted, divided and packed them: it
        proves what arrived, and that every name of the model was among it. That vLLM computes with it is what a
        comparison of logprobs proves."""
        if self._fingerprint is None:
            self._fingerprint = weights_fingerprint(read_weights(self._place.folder))
        return self._fingerprint

    def cache_use(self) -> CacheUse:
        """See `Caching.cache_use`."""
        return self._cache.fullest()

    @property
    def num_rows(self) -> int:
        """Samples that are being drawn, or wait for it inside vLLM."""
        return len(self._rows)

    # ---- on the worker

    def _begin(self, group: VllmGroup) -> None:
        request = group.request
        for index in range(request.first_sample, request.first_sample + request.num_samples):
            name = str(next(self._numbers))
            prompt = vllm_prompt(request.prompt, group.pictures, self._loads)
            adapter = None if self._adapter is None else self._adapter.request
            row = VllmRow(group, index)
            self._llm.add_request(name, prompt, row.settings(), lora_request=adapter)
            self._rows[name] = row

    def _drop(self, group: VllmGroup) -> None:
        names = [name for name, row in self._rows.items() if row.group is group]
        for name in names:
            del self._rows[name]
        self._llm.abort_request(names)

    def _take_in_flight(self) -> None:
        """Where vLLM schedules ahead of what it returns (asynchronous scheduling, on GPUs), take the tokens of the
        steps that it has launched: they are of the weights that are there now."""
        launched = self._llm.vllm_config.max_concurrent_batches - 1
        if not launched or not self._awake:
            return
        self._llm.sleep(level=0, mode="keep")  # schedules nothing more, and frees nothing
        for _ in range(launched):
            self._step()
        self._llm.wake_up(["scheduling"])

    def _step(self) -> None:
        version = self.version
        outputs = self._llm.step()
        self._cache.look(outputs)
        for output in outputs:
            row = self._rows.get(output.request_id)
            if row is not None:
                self._take(output.request_id, row, output.outputs[0], version)

    def _take(self, name: str, row: VllmRow, news: Any, version: int) -> None:
        """The next tokens of a sample, or all of them, and its end."""
        cut = row.take(news, version, self._decode)
        if cut is None and news.finish_reason is None:
            return
        sample = row.sample(name, news, cut, decode=self._decode, routing=self._routing)
        if news.finish_reason is None:
            self._llm.abort_request([name])
        del self._rows[name]
        group = row.group
        group.samples.append(sample)
        if group.on_sample is not None:
            group.on_sample(sample)
        if len(group.samples) == group.request.num_samples:
            self._worker.keep(group.promise, tuple(sorted(group.samples, key=lambda s: s.index)))

    def _load_adapter(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert self._adapter is not None
        self._take_in_flight()
        self._wake_weights()
        self._now_has(version, self._adapter.load(weights, version))

    def _load(self, weights: Buckets, version: int) -> None:
        self._take_in_flight()
        self._wake_weights()
        self._has_weights = False
        self._llm.collective_rpc("start_weight_update")
        try:
            for header, parts in weights.buckets():
                bucket = {"header": header, "parts": parts}
                self._llm.collective_rpc("update_weights", kwargs={"update_info": bucket})
        finally:  # an update that was started must be finished before another can start
            self._llm.collective_rpc("finish_weight_update")
        fingerprints = self._check_workers()
        if fingerprints != {weights.manifest.fingerprint}:
            raise EngineError(
                f"weights of version {version}: what arrived at vLLM's workers hashes to {', '.join(fingerprints)}, "
                f"what was sent to {weights.manifest.fingerprint}. Bytes were damaged on the way."
            )
        self._now_has(version, weights.manifest.fingerprint)

    def _wake_weights(self) -> None:
        if not self._weights_awake and self._frees_memory:
            self._llm.wake_up(["weights"])
        self._weights_awake = True

    def _now_has(self, version: int, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._loads += 1
        self._llm.set_weight_version(str(version))
        self._has_weights, self.version = True, version

    def _check_workers(self) -> set[str]:
        """Fingerprints of what arrived last. Raises EngineError with what a worker says went wrong."""
        outcomes = self._llm.collective_rpc("hone_weights_outcome")
        for number, outcome in enumerate(outcomes):
            if outcome.failure is not None:
                of = f"vLLM's worker {number}: " if len(outcomes) > 1 else ""
                raise EngineError(f"{of}{outcome.failure}")
        return {outcome.fingerprint for outcome in outcomes}

    def _sleep_if_idle(self) -> bool:
        if self._rows:
            return False
        if self._awake:
            self._take_in_flight()
        if self._awake or self._weights_awake:  # weights alone: they were loaded, and nothing was sampled
            if self._frees_memory:
                self._llm.sleep(self._settings.sleep_level)
            else:
                self._llm.reset_prefix_cache()
            self._awake, self._weights_awake = False, False
            if self._place.takes_turns and self._settings.sleep_level == 2:
                self._has_weights = False
        return True

    def _wake(self) -> None:
        if self._frees_memory and not self._awake:
            self._llm.wake_up(["kv_cache"] if self._weights_awake else None)
        self._awake, self._weights_awake = True, True


def _start(arguments: dict[str, Any], environment: dict[str, str]) -> Any:
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise EngineError(f"vLLM cannot be imported ({error}). Install hone-rl[vllm]; see docs/vllm.md.") from error
    check_version(vllm.__version__)
    try:
        return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
    except Exception as error:  # the boundary of vLLM: it may fail in any way, and its reason is what helps
        raise EngineError(f"vLLM could not start with {arguments['model']}: {type(error).__name__}: {error}") from error


def _stop(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.engine_core.shutdown()
    cleanup_dist_env_and_memory()
