# pyright: reportMissingImports=false
"""Requests to vLLM: prompts and settings as it takes them, and what its outputs are made into: samples, the experts of
their tokens, and the use of its cache.

vLLM's own processor is passed over: pictures are decoded, sized, cut into patches and normalised by the code that the
trainer uses, and their places are those in the prompt's tokens, so that engine and trainer see the same numbers.

vLLM keeps what its tower made of a picture, and keys and values of prompts, by a hash of each picture. The hash is that
of the picture's content with the number of the load, so neither outlives the weights that made it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BatchFeature

from hone.config.engine import VLLM_VISION_MODELS
from hone.errors import DataError, EngineError
from hone.experts import ExpertIds, unrecorded
from hone.model.load import read_config
from hone.model.routing import record_dtype
from hone.model.towers import TOWERS
from hone.rollout.engine import CacheUse, Decode, OnSample, OnToken, Request, Token, stop_window, text_up_to_stop
from hone.rollout.sampling import request_key, sample_seed
from hone.types import Prompt, Sample, version_spans


class VllmPictures:
    """Makes the inputs of prompts for a model in vLLM.

    Args:
        folder: of the model.
        dtype: that its vision tower computes in.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._kind = str(json.loads((folder / "config.json").read_text()).get("model_type"))
        self._dtype, self._tower = dtype, None
        if self._kind in VLLM_VISION_MODELS:
            self._tower = TOWERS[self._kind](nn.Module(), read_config(folder))

    def read(self, prompt: Prompt) -> Any:
        """A prompt's pictures as vLLM's `MultiModalKwargsItems`; None if it has none. Decodes them.

        Raises DataError where a picture cannot be read any more, or the model in vLLM reads none.
        """
        if not prompt.pictures:
            return None
        if self._tower is None:
            raise DataError(f"prompt {prompt.id} has pictures, but {self._kind} in vLLM reads none. Leave them out.")
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        named = self._tower.inputs(prompt.pictures)
        pixels = named["pixel_values"].to(self._dtype)  # as vLLM's tower would convert them, in half the memory
        grid = named["image_grid_thw"]
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        content = BatchFeature({"pixel_values": pixels, "image_grid_thw": grid})
        return MultiModalKwargsItems.from_hf_inputs(content, fields)


def vllm_prompt(prompt: Prompt, pictures: Any, load: int) -> Any:
    """What `LLMEngine.add_request` takes for a prompt.

    Args:
        pictures: from `VllmPictures.read`.
        load: number of the weights that are in the engine: caches are kept apart by it.
    """
    from vllm.inputs.engine import mm_input, tokens_input

    ids, salt = prompt.token_ids.tolist(), f"load {load}"
    if pictures is None:
        return tokens_input(ids, cache_salt=salt)
    from vllm.multimodal.inputs import PlaceholderRange

    hashes = [f"{picture.digest} {salt}" for picture in prompt.pictures]
    places = [PlaceholderRange(picture.start, picture.num_tokens) for picture in prompt.pictures]
    return mm_input(ids, pictures, {"image": hashes}, {"image": places}, cache_salt=salt)


@dataclass(eq=False)
class VllmGroup:
    """One request of ours on its way."""

    request: Request
    limit_tokens: int
    stop_ids: list[int]
    promise: Future[tuple[Sample, ...]]
    pictures: Any
    """See `VllmPictures.read`."""
    on_sample: OnSample | None
    on_token: OnToken | None
    samples: list[Sample] = field(default_factory=list)

    @property
    def is_followed(self) -> bool:
        """Whether each token is read as it comes. vLLM reports other samples only at their end, which costs less."""
        return self.on_token is not None or bool(self.request.sampling.stop)


@dataclass(eq=False)
class VllmRow:
    """One sample that is being drawn: a request of vLLM's."""

    group: VllmGroup
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def settings(self) -> Any:
        """vLLM's own for this sample."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        group, request, sampling = self.group, self.group.request, self.group.request.sampling
        key = request_key(request.seed, request.stream, request.prompt.index)
        greedy = sampling.temperature == 0
        return SamplingParams(
            temperature=sampling.temperature,
            top_k=0 if greedy else sampling.top_k,
            top_p=1.0 if greedy else sampling.top_p,
            min_p=0.0 if greedy else sampling.min_p,
            seed=sample_seed(key, self.index, request.first_position),
            max_tokens=group.limit_tokens,
            stop_token_ids=group.stop_ids,
            ignore_eos=True,  # those that end a response are all in stop_token_ids
            logprobs=0,  # of the sampled token alone
            routed_experts_prompt_start=self._first_recorded,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if group.is_followed else RequestOutputKind.FINAL_ONLY,
        )

    def take(self, news: Any, version: int, decode: Decode) -> str | None:
        """The next tokens, or all of them. Returns the text where they complete a stop string, up to its end.

        Args:
            version: of the weights that the newest tokens are from, where each token is followed.
        """
        self.token_ids += news.token_ids
        self.logprobs += news.logprobs.logprobs
        if self.group.is_followed:
            self.versions += [version] * len(news.token_ids)
        else:
            for span in news.weight_versions:
                self.versions += [int(span.version)] * (span.end - span.start)
        if (on_token := self.group.on_token) is not None:
            for position in range(len(self.token_ids) - len(news.token_ids), len(self.token_ids)):
                on_token(Token(self.index, position, self.token_ids[position], self.logprobs[position], version))
        stop = self.group.request.sampling.stop
        return text_up_to_stop(self.token_ids, stop, stop_window(stop), decode) if stop else None

    def sample(self, name: str, news: Any, cut: str | None, *, decode: Decode, routing: VllmRouting | None) -> Sample:
        """The sample that ends with `news`, or with the stop string that `cut` ends with.

        Raises EngineError where vLLM ended it for another reason than a stop token or the limit of tokens.
        """
        prompt = self.group.request.prompt
        if cut is None and news.finish_reason not in ("stop", "length"):
            raise EngineError(f"prompt {prompt.id}: vLLM ended a sample with {news.finish_reason!r}.")
        own, of_prompt, first = None, None, self._first_recorded
        if routing is not None:
            size = len(prompt.token_ids)
            of_prompt, own = routing.of(name, news, first=first, prompt_tokens=size, tokens=len(self.token_ids))
        return Sample(
            prompt_id=prompt.id,
            index=self.index,
            token_ids=np.array(self.token_ids, np.int32),
            sampler_logprobs=np.array(self.logprobs, np.float32),
            versions=version_spans(self.versions),
            finish_reason="stop" if cut is not None or news.finish_reason == "stop" else "length",
            text=decode(self.token_ids) if cut is None else cut,
            routing=own,
            prompt_routing=None if first else of_prompt,
        )

    @property
    def _first_recorded(self) -> int:
        """The prompt's token with which the record of experts begins: the first sample stands for the others."""
        request = self.group.request
        return 0 if self.index == request.first_sample else len(request.prompt.token_ids)


class VllmRouting:
    """The experts that vLLM sent each token of an engine's samples to (`algorithm.replay_routing`).

    vLLM 0.32 keeps them for every layer of the model, with experts or without, and gives them with the end of a
    request. Only its second model runner has that. Not here: what the trainer does with them (`model/routing.py`).

    Args:
        llm: vLLM's `LLMEngine`, started with `enable_return_routed_experts`.
    """

    def __init__(self, llm: Any) -> None:
        self._processor = llm.output_processor
        self._layers: list[int] = llm.collective_rpc("hone_expert_layers")[0]
        self._dtype = record_dtype(llm.model_config.get_num_experts())

    def of(self, name: str, news: Any, *, first: int, prompt_tokens: int, tokens: int) -> tuple[ExpertIds, ExpertIds]:
        """Experts of the prompt's tokens from `first` on, and of a sample's tokens; the last one was no input.

        Args:
            name: of the request, which ends now, or is given up after this because Hone found its end.
            news: vLLM's newest output for it.
            first: token of the prompt with which the record begins.
            tokens: of the sample, so far.
        """
        found = news.routed_experts
        if found is None:  # vLLM itself has not ended it
            (internal,) = self._processor.external_req_ids[name]
            found = np.concatenate(self._processor.request_states[internal].routed_experts_chunks)
        expected = prompt_tokens - first + tokens - 1
        if len(found) != expected:
            raise EngineError(
                f"vLLM gave the experts of {len(found)} tokens of a sample, not of {expected}. Set "
                "algorithm.replay_routing=false, or cluster.engines.use=hone."
            )
        experts = found[:, self._layers].astype(self._dtype)
        own = experts[prompt_tokens - first :]
        return experts[: prompt_tokens - first], np.concatenate([own, unrecorded(1, own)])


class VllmCache:
    """Usage of vLLM's KV cache and prefix cache hits, looked at after each step, in the thread that makes them.

    vLLM reports these only to its own loggers, which cost more than a look at its scheduler. That is in this process,
    see `vllm_args.ENVIRONMENT`.
    """

    def __init__(self, llm: Any) -> None:
        config = llm.vllm_config.cache_config
        self._manager = llm.engine_core.engine_core.scheduler.kv_cache_manager
        self._room_tokens: int = config.num_gpu_blocks * config.block_size
        self._fullest = CacheUse()

    def look(self, outputs: Iterable[Any]) -> None:
        """After a step; `outputs` are what it returned."""
        finished = [output for output in outputs if output.finished]
        before = self._fullest
        self._fullest = CacheUse(
            tokens=max(before.tokens, round(self._manager.usage * self._room_tokens)),
            room_tokens=self._room_tokens,
            asked_tokens=before.asked_tokens + sum(len(output.prompt_token_ids) for output in finished),
            found_tokens=before.found_tokens + sum(output.num_cached_tokens or 0 for output in finished),
        )

    def fullest(self) -> CacheUse:
        """When it was fullest since the last call; prompts are those of samples that ended since then."""
        fullest, self._fullest = self._fullest, CacheUse()
        return fullest
