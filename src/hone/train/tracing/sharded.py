"""One optimizer step of a model sharded with FSDP2, on fake tensors, in a process group whose other members are not.

What `plan/cluster.py` describes: float32 weights, moments and gradients sharded, each layer gathered in bfloat16 while
it computes, embedding and output layer together as the root, which stays gathered through the loss.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hone.model.decoder import Decoder
from hone.model.hf import as_computed
from hone.model.layout import Layout
from hone.model.load import init_config
from hone.model.logprobs import token_logprobs
from hone.model.parallel import divide_class, divide_layers
from hone.plan.cluster import Trained
from hone.train.fsdp import placement_over
from hone.train.mesh import SHARD, TENSOR
from hone.train.tracing.local import marked
from hone.train.tracing.memory import LiveMemory, Moments, fake_tensors, kernels_of
from hone.types import Batch


def trace_sharded(trained: Trained, architecture: Mapping[str, Any], batch: Batch, *, forward: bool) -> Moments:
    """Most bytes of tensors on one device at each moment of an optimizer step, once the states are there.

    Args:
        trained: the model and its microbatch as the plan has them: whole root, no adapter, not offloaded, with layers
            divided the loss chunked, and in Transformers' classes no selective checkpointing.
        architecture: keys of its config.json.
        batch: that microbatch, of real tensors; Transformers' classes get its counts of tokens as one packed row.
        forward: whether there is a pass without gradients, too.
    """
    memory = LiveMemory()
    with _group_of(trained) as mesh:
        model = _TracedPolicy(trained, architecture)
        _divide(model, mesh)
        if trained.work.implementation == "hone":
            microbatch = Layout.from_flat(batch.prompts, batch.prompt_S, batch.length_S, batch.token_ids_T)
        else:
            wanted = torch.arange(trained.work.response_tokens)
            rows = max(1, trained.work.tokens // trained.work.longest) if trained.work.architecture.caps_scores else 1
            position_RX = torch.arange(trained.work.tokens // rows).expand(rows, -1)
            microbatch = _Packed(torch.zeros_like(position_RX), position_RX, wanted, wanted)
        with fake_tensors(memory), kernels_of(memory, trained.work):
            model.to_empty(device="cpu")
            if not model.is_ours:
                model.body.tie_weights()  # they have moved
            optimizer = _with_states(model)
            if trained.accumulates:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            gc.collect()  # what sharding left behind
            memory.peaks.clear()
            with marked(memory, model, last="root backward"):
                if forward:
                    with torch.no_grad():
                        model(microbatch)
                model(microbatch).sum().backward()
            memory.at("optimizer", "step")
            optimizer.step()
    return memory.peaks


@contextmanager
def _group_of(trained: Trained) -> Iterator[DeviceMesh]:
    """A process group of (shard, tensor) members that answers everything at once, with nothing."""
    tensor = trained.work.tensor_parallel
    dist.init_process_group("fake", rank=0, world_size=trained.shard, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (trained.shard // tensor, tensor), mesh_dim_names=(SHARD, TENSOR))
    finally:
        dist.destroy_process_group()


def _divide(model: _TracedPolicy, mesh: DeviceMesh) -> None:
    """Like `train/fsdp.py` does it."""
    if mesh[TENSOR].size() > 1:
        (divide_layers if model.is_ours else divide_class)(model.body, mesh[TENSOR])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    placed = placement_over(mesh[SHARD].size())
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh[SHARD], mp_policy=policy, shard_placement_fn=placed)


def _with_states(model: nn.Module) -> torch.optim.AdamW:
    """AdamW as it is after a step: its moments are there."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


class _TracedPolicy(nn.Module):
    """A model with its loss inside, for only there are sharded weights whole. Made on the meta device."""

    def __init__(self, trained: Trained, architecture: Mapping[str, Any]) -> None:
        super().__init__()
        work, config = trained.work, init_config(architecture, vocab_size=None)
        self.work = work
        self.is_ours = work.implementation == "hone"
        self.body: Any
        if self.is_ours:
            self.body = Decoder(config, device="meta")
            self.body.checkpointing = work.checkpointing
            self.layers = list(self.body.layers)
        else:
            attention = "eager" if work.architecture.caps_scores else fused_attention()
            with torch.device("meta"):
                self.body = AutoModelForCausalLM.from_config(
                    as_computed(config), dtype=torch.float32, attn_implementation=attention
                )
            self.body.train(work.checkpointing == "full")  # as `model/hf.py` does
            if work.checkpointing == "full":
                self.body.gradient_checkpointing_enable({"use_reentrant": False})
            self.layers = list(self.body.base_model.layers)

    def forward(self, microbatch: Layout | _Packed) -> Tensor:
        """(U,) logprobs."""
        if isinstance(microbatch, Layout):
            hidden, weight = self.body.hidden(microbatch), self.body.output_weight
        else:
            out = self.body.base_model(
                input_ids=microbatch.token_ids_RX, position_ids=microbatch.position_RX, use_cache=False
            )
            hidden = out.last_hidden_state.flatten(0, 1).index_select(0, microbatch.predict_U)
            weight = self.body.get_output_embeddings().weight
        target_U, work = microbatch.target_U, self.work
        if work.loss == "naive":
            logprobs_UV = (hidden @ weight.T).float().log_softmax(-1)
            return logprobs_UV.gather(1, target_U[:, None]).sum(1)
        logprobs_U, entropy_U = token_logprobs(
            hidden,
            weight,
            target_U,
            temperature=1.0,
            chunk_tokens=work.chunk_tokens,
            entropy_grad=work.entropy_gradient,
        )
        return logprobs_U + entropy_U if work.entropy_gradient else logprobs_U


@dataclass(frozen=True)
class _Packed:
    """Tokens of all samples: in one row, or a row each where attention holds the scores of a row."""

    token_ids_RX: Tensor
    position_RX: Tensor
    predict_U: Tensor
    target_U: Tensor


FUSED_ATTENTION = "hone_traced"


def fused_attention() -> str:
    """What Transformers calls, as `attn_implementation`, attention that keeps what flash attention keeps."""
    ALL_ATTENTION_FUNCTIONS.register(
        FUSED_ATTENTION, lambda _, query, key, value, *__, **___: (_Fused.apply(query, key, value), None)
    )
    ALL_MASK_ATTENTION_FUNCTIONS.register(FUSED_ATTENTION, lambda *_, **__: None)
    return FUSED_ATTENTION


class _Fused(torch.autograd.Function):
    """q (b, heads, s, d), k and v (b, kv heads, s, d) -> (b, s, heads, value width)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, _ = q.shape
        out = q.new_empty(batch, length, heads, v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, _, normaliser = ctx.saved_tensors
        summed = torch.empty(q.shape, dtype=torch.float32), torch.empty_like(normaliser)
        results = tuple(torch.empty_like(x) for x in (q, k, v))
        del summed
        return results
