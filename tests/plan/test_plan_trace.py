"""The trace: against torch's own CPU allocator, and the closed form against it."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hone.algo.algorithm import Algorithm
from hone.config.derived import needs_critic, needs_reference, trains_adapter
from hone.model.heads import ScalarModel
from hone.model.load import init_model
from hone.model.lora import AdapterOff, add_adapter
from hone.train.critic import Critic
from hone.train.local import LocalTrainer
from hone.train.tracing.compare import full_microbatch
from hone.train.tracing.local import trace_local

TINY = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "vocab_size": 2000,
    "tie_word_embeddings": True,
}
LLAMA = {**TINY, "model_type": "llama", "hidden_size": 192, "num_attention_heads": 6, "tie_word_embeddings": False}
QWEN2 = {**TINY, "model_type": "qwen2", "vocab_size": 8000, "hidden_size": 64, "intermediate_size": 192}
MISTRAL = {**TINY, "model_type": "mistral", "num_hidden_layers": 6, "vocab_size": 500}
HALF, AGAIN, OTHERS = (
    "run.precision=bfloat16",
    "train.activation_checkpointing=true",
    "model.implementation=transformers",
)
SMALL_CHUNK = "train.logprob_chunk_tokens=64"
REAL = {
    "qwen3": (TINY, ["run.precision=float32"]),
    "qwen3 in bfloat16": (TINY, [HALF]),
    "qwen3 checkpointed": (TINY, [HALF, AGAIN]),
    "qwen3 chunked": (TINY, ["run.precision=float32", SMALL_CHUNK]),
    "llama": (LLAMA, ["run.precision=float32"]),
    "llama checkpointed": (LLAMA, ["run.precision=float32", AGAIN, SMALL_CHUNK]),
    "qwen2": (QWEN2, [HALF, SMALL_CHUNK]),
    "mistral": (MISTRAL, [HALF, AGAIN]),
    "entropy bonus": (TINY, ["run.precision=float32", "algorithm.entropy_coef=0.01"]),
    "critic": (TINY, ["run.precision=float32", "algorithm.credit=gae"]),
    "adapter": (TINY, ["run.precision=float32", "lora.rank=8"]),
    "transformers": (TINY, ["run.precision=float32", OTHERS]),
    "transformers checkpointed": (LLAMA, [HALF, OTHERS, AGAIN, SMALL_CHUNK]),
}


def real_trainer(config, architecture):
    model = init_model(
        architecture,
        vocab_size=None,
        seed=0,
        dtype=torch.float32,
        device="cpu",
        implementation=config.model.implementation,
    )
    train = config.train
    common = {"total_optimizer_steps": 9, "precision": config.run.precision}
    critic = None
    if needs_critic(config):
        body = init_model(architecture, vocab_size=None, seed=1, dtype=torch.float32, device="cpu")
        critic = Critic(
            ScalarModel(body),
            optimizer=config.critic.optimizer,
            tokens_per_microbatch=train.tokens_per_microbatch,
            value_clip=None,
            **common,
        )
    if trains_adapter(config, "rl"):
        add_adapter(model, config.lora, seed=0, dtype=getattr(torch, config.run.precision))
    model.checkpoint_layers = train.activation_checkpointing
    return LocalTrainer(
        model,
        optimizer=train.optimizer,
        temperature=1.0,
        tokens_per_microbatch=train.tokens_per_microbatch,
        logprob_chunk_tokens=train.logprob_chunk_tokens,
        critic=critic,
        reference=AdapterOff(model) if needs_reference(config) else None,
        **common,
    )


def resident(trainer):
    """Bytes of every tensor that lives between updates."""
    gc.collect()
    learners = [trainer, *([trainer.critic] if trainer.critic else [])]
    tensors = []
    for one in learners:
        flat = one.flat
        tensors += [flat.master, flat.grad, flat.compute, *one.optimizer.moments.values()]
        tensors += [*one.model.parameters(), *one.model.buffers()]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def allocated(work):
    """Most bytes that torch's allocator had handed out at once during `work`, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    now = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("name", REAL)
def test_a_trace_is_what_the_allocator_hands_out(name, configured):
    """Never more than 1 % below it, at most 8 % above."""
    architecture, words = REAL[name]
    config = configured(*words)
    batch = full_microbatch(900, max_prompt=64, max_response=65, group=4)
    traced = trace_local(config, architecture, None, batch)
    trainer = real_trainer(config, architecture)
    algorithm = Algorithm(config.algorithm, correction="none", max_response_tokens=65)
    trainer.update(batch, algorithm)
    real = resident(trainer) + allocated(lambda: trainer.update(batch, algorithm))
    peak = max(size for (phase, _), size in traced.items() if phase in ("update", "optimizer"))
    print(f"{name}: traced {peak / 2**20:.2f} MiB, allocated {real / 2**20:.2f} MiB, {100 * (peak / real - 1):+.2f} %")
    assert -0.01 < peak / real - 1 < 0.08
