"""The experts that vLLM sent each token to (`algorithm.replay_routing`).

vLLM 0.32 keeps them for every layer of the model, with experts or without, and gives them with the end of a request.
Only its second model runner has that. Not here: what the trainer does with them (`model/routing.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hone.data.pack import unrecorded
from hone.errors import EngineError
from hone.model.routing import record_dtype
from hone.types import Experts


class VllmRouting:
    """Experts of the samples of one engine.

    Args:
        llm: vLLM's `LLMEngine`, started with `enable_return_routed_experts`.
    """

    def __init__(self, llm: Any) -> None:
        self._processor = llm.output_processor
        self._layers: list[int] = llm.collective_rpc("hone_expert_layers")[0]
        self._dtype = record_dtype(llm.model_config.get_num_experts())

    def of(self, name: str, news: Any, *, first: int, prompt_tokens: int, tokens: int) -> tuple[Experts, Experts]:
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
