# pyright: reportMissingImports=false
"""What Hone adds to vLLM's workers, one for each tensor-parallel rank: the way in for new weights.

vLLM loads this class by its name into every worker, beside the methods of its own. A plain `load_weights` after the
start fails half-way, for the start has packed the weights for its kernels; the layer-wise reload unpacks each layer,
waits until all of it came, and packs it again into the same memory, so that CUDA graphs stay valid.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class WeightsExtension:
    """Three calls for one version: begin, one or more parts, finish. After a failure the worker holds half of it."""

    vllm_config: Any
    model_config: Any
    model_runner: Any

    def hone_begin_weights(self) -> None:
        begin_reload(self.model_runner.get_model(), self.vllm_config)

    def hone_take_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Whole tensors under Hugging Face names; of each, this rank takes its own part."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(weights)

    def hone_finish_weights(self) -> None:
        finish_reload(self.model_runner.get_model(), self.model_config, self.vllm_config)


def begin_reload(model: Any, vllm_config: Any) -> None:
    """Let a worker's model take weights, layer by layer."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    # It warns of every layer that has no weights; that all of them come is checked by the engine.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(model)


def finish_reload(model: Any, model_config: Any, vllm_config: Any) -> None:
    """All weights came: the model can compute with them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(vllm_config):
        finalize_layerwise_reload(model, model_config)
        for layer in model.modules():
            # One that is tied to the embedding got no weights of its own, so the reload did not pack it again.
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
