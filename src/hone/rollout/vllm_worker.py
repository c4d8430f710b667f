# pyright: reportMissingImports=false
"""What Hone adds to vLLM's workers, one for each tensor-parallel rank: the way in for new weights.

vLLM loads this class by its name into every worker, beside the methods of its own. A plain `load_weights` after the
start fails half-way, for the start has packed the weights for its kernels; the layer-wise reload unpacks each layer,
waits until all of it came, and packs it again into the same memory, so that CUDA graphs stay valid.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from hone.errors import EngineError


class WeightsExtension:
    """Three calls for one version: begin, one or more parts, finish. After a failure the worker holds half of it."""

    vllm_config: Any
    model_config: Any
    model_runner: Any

    def hone_begin_weights(self) -> None:
        begin_reload(self.model_runner.get_model(), self.vllm_config)

    def hone_take_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Whole tensors under Hugging Face names; of each, this rank takes its own part."""
        load_weights(self.model_runner.get_model(), self.vllm_config, weights)

    def hone_finish_weights(self) -> None:
        finish_reload(self.model_runner.get_model(), self.model_config, self.vllm_config)


def begin_reload(model: Any, vllm_config: Any) -> None:
    """Let a worker's model take weights, layer by layer."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, meta

    # It warns of every layer that got no weights, a tied output layer too; `finish_reload` raises of the others.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    # gpt-oss writes attention sinks into the parameter itself, so they stay where they are.
    meta.SKIP_LOAD_TENSORS.add("sinks")
    meta.SKIP_TENSORS.add("sinks")
    with set_current_vllm_config(vllm_config):
        _repack_experts_on_cpu(model)
        initialize_layerwise_reload(model)


def _repack_experts_on_cpu(model: Any) -> None:
    """vLLM's CPU kernel reads experts in a layout of its own. vLLM 0.32 converts them only while a layer has no kernel
    yet, so without this a reload would copy rows where the kernel expects blocks."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.platforms import current_platform

    if current_platform.is_cpu():  # a GPU's kernel is kept: CUDA graphs refer to it, and no GPU layout is lost
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if isinstance(method, FusedMoEMethodBase):
                method.moe_kernel = None


def load_weights(model: Any, vllm_config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Some weights of a version, each whole, between `begin_reload` and `finish_reload`."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    with set_current_vllm_config(vllm_config):
        model.load_weights(_each_expert(weights) if isinstance(model, GptOssForCausalLM) else weights)


def _each_expert(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """gpt-oss's weights with those of experts one by one: vLLM 0.32 gives them to a layer's loader, and would write
    those of all experts together past it, into memory that the reload drops."""
    for name, weight in weights:
        layer, experts, kind = name.partition(".mlp.experts.")
        if experts:
            yield from ((f"{layer}{experts}{index}.{kind}", one) for index, one in enumerate(weight))
        else:
            yield name, weight


def finish_reload(model: Any, model_config: Any, vllm_config: Any) -> None:
    """All weights came: the model can compute with them.

    Raises EngineError where a layer took none of them, for it would compute with its old ones.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for name, layer in model.named_modules():
        waits = any(parameter.is_meta for parameter in layer.parameters(recurse=False))
        # A tied output layer has the embedding's weight, and gets none of its own.
        if waits and not get_layerwise_info(layer).load_numel and not isinstance(layer, ParallelLMHead):
            raise EngineError(
                f"weights: {name} took none of the new weights, so vLLM's {type(model).__name__} would keep computing "
                "with its old ones. Set cluster.engines.use = hone."
            )
    with set_current_vllm_config(vllm_config):
        finalize_layerwise_reload(model, model_config)
        for layer in model.modules():
            # One that is tied to the embedding got no weights of its own, so the reload did not pack it again.
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
