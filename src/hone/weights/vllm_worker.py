# pyright: reportMissingImports=false
"""How vLLM's workers load new weights, one worker for each tensor-parallel rank.

vLLM has a protocol for it (`vllm.distributed.weight_transfer`, of version 0.32): start, update, finish, on every
worker, with backends that others may register. Ours opens buckets (`parts.PartOpener`); it has the fingerprint and the
deadlines that vLLM's own backends do not have. A plain `load_weights` after the start fails half-way, for the start has
packed the weights for its kernels; the layer-wise reload unpacks each layer, waits until all of it came, and packs it
again into the same memory, so that CUDA graphs stay valid.

A failure is kept until the update is finished, for a reload that was begun cannot begin again: a version that failed is
finished, never sampled from, and sent once more. An exception in one worker would also leave the answers of the others
in vLLM's queue. Only vLLM loads this module, by the name of `Extension`, into its workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from hone.errors import EngineError
from hone.rollout.vllm_weights import Missing, in_parts, published_shapes
from hone.weights.buckets import Bucket, Header, Unpacker
from hone.weights.groups import GroupAddress
from hone.weights.parts import BucketPart, PartOpener


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """For joining a group; vLLM calls that the start of a transfer engine."""

    address: GroupAddress


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """A bucket; vLLM calls that an update."""

    header: Header
    parts: Sequence[BucketPart]
    """See `PartOpener.open`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a worker's last update, or of joining a group."""

    fingerprint: str
    """Of what arrived."""
    failure: str | None
    """Why it does not hold the version."""


class Transfer(WeightTransferEngine[JoinInfo, BucketInfo]):
    """One worker's side of publishing."""

    init_info_cls = JoinInfo
    update_info_cls = BucketInfo

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # A model with a vision tower may say it of the whole alone.
        configs = (self.model_config.hf_config, self.model_config.hf_text_config)
        tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
        self._shapes = published_shapes(Path(self.model_config.model), is_tied=tied)
        self._opener = PartOpener(self.device)
        self._failure: str | None = None
        self._is_open = True  # nothing failed to arrive
        self._unpacker, self._missing = Unpacker(), Missing(self._shapes)

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        self._failure = None
        with self._keeping_failure():
            self._opener.join(init_info.address, 1 + self.parallel_config.rank)

    def start_weight_update(self) -> None:
        self._failure, self._is_open = None, True
        self._unpacker, self._missing = Unpacker(), Missing(self._shapes)
        begin_reload(self.model, self.vllm_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's, without a wait for a GPU that may not be there."""
        with self._keeping_failure():
            self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: BucketInfo) -> None:
        if not self._is_open:
            return
        self._is_open = False
        data = self._opener.open(update_info.header, update_info.parts)  # also after a failure: others broadcast
        self._is_open = True
        if self._failure is None:
            weights = self._missing.without(self._unpacker.unpack(Bucket(update_info.header, data)))
            for part in in_parts(weights):
                load_weights(self.model, self.vllm_config, part)

    def finish_weight_update(self) -> None:
        with self._keeping_failure():
            self._missing.check()
        with self._keeping_failure():
            finish_reload(self.model, self.model_config, self.vllm_config)

    def shutdown(self) -> None:
        self._opener.leave()

    def outcome(self) -> Outcome:
        if self._failure is not None:
            self._opener.leave()  # the sender leaves its group too
        return Outcome(self._unpacker.fingerprint(), self._failure)

    @contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the boundary of the worker: `outcome` has the first failure
            said = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            self._failure = self._failure or said


class Extension:
    """Beside the methods of vLLM's workers."""

    weight_transfer_engine: Transfer

    def hone_weights_outcome(self) -> Outcome:
        return self.weight_transfer_engine.outcome()

    def hone_expert_layers(self) -> list[int]:
        """Numbers of the model's layers that have experts, in order."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        layers = self.weight_transfer_engine.model.modules()
        return sorted({layer.layer_id for layer in layers if isinstance(layer, MoERunner)})


WeightTransferEngineFactory.register_engine("hone", Transfer)


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
    """End the reload, also one that failed. If all weights came, the model can compute with them.

    Raises EngineError where a layer took none of them, for it would compute with its old ones.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    old = [name for name, layer in model.named_modules() if _waits(layer) and not isinstance(layer, ParallelLMHead)]
    with set_current_vllm_config(vllm_config):
        finalize_layerwise_reload(model, model_config)
        for layer in model.modules():
            # One that is tied to the embedding got no weights of its own, so the reload did not pack it again.
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
    if old:
        raise EngineError(
            f"weights: {old[0]} took none of the new weights, so vLLM's {type(model).__name__} would keep computing "
            "with its old ones. Set cluster.engines.use = hone."
        )


def _waits(layer: Any) -> bool:
    """Whether a layer took none of a version's weights."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    waits = any(parameter.is_meta for parameter in layer.parameters(recurse=False))
    return waits and not get_layerwise_info(layer).load_numel
