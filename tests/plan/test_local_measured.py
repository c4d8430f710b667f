"""The ledger of one process against this process: bytes that torch's CPU allocator really hands out.

Tiny models and few tokens; the forms must not come out below what is measured, nor far above it. Sizes that
both read are in `hone.sizes`.
"""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from measuring import allocated
from needs import needs

from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.run import OptimizerSection
from hone.data.chat import character_tokenizer
from hone.model.kernels import use_fused_kernels
from hone.model.load import init_model
from hone.plan import activations, local
from hone.plan.activations import Pass
from hone.plan.families import architecture_from
from hone.sizes import CHARACTER_SPECIALS
from hone.train.learner import Passes
from hone.train.policy import PolicyTrainer
from hone.train.roles import Roles
from hone.types import Batch

ARCHITECTURES = {
    "small vocabulary": ("qwen3", 128, 384, 4, 4, 2, 32, 30, True),
    "large vocabulary": ("qwen3", 128, 384, 2, 4, 2, 32, 16_000, True),
    "deep, untied": ("llama", 96, 256, 8, 6, 2, 16, 1000, False),
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 4}
CASES = [
    pytest.param(name, marks=() if name == "small vocabulary" else pytest.mark.slow("trains a larger model"))
    for name in ARCHITECTURES
]
MORE = pytest.mark.slow("an update and a logprob pass for each way of checkpointing")
PROMPTS, GROUP, PROMPT_TOKENS, RESPONSE_TOKENS = 2, 4, 64, 64


def built(name, **more):
    family, hidden, inner, layers, heads, kv_heads, head_dim, vocab, tied = ARCHITECTURES[name]
    keys = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        **more,
    }
    model = init_model(keys, vocab_size=vocab, seed=0, dtype=torch.float32, device="cpu")
    return model, architecture_from({**keys, "vocab_size": vocab})


def random_batch(vocab):
    rng, samples = torch.Generator().manual_seed(0), PROMPTS * GROUP
    tokens = samples * RESPONSE_TOKENS
    prompts = torch.randint(0, vocab, (PROMPTS, PROMPT_TOKENS), generator=rng).tolist()
    return Batch(
        prompts=tuple(map(tuple, prompts)),
        prompt_S=torch.arange(PROMPTS).repeat_interleave(GROUP),
        length_S=torch.full((samples,), RESPONSE_TOKENS),
        token_ids_T=torch.randint(0, vocab, (tokens,), generator=rng),
        loss_mask_T=torch.ones(tokens),
        sampler_logprobs_T=torch.full((tokens,), -1.0),
        reward_S=torch.ones(samples),
        columns={"advantages_T": torch.randn(tokens, generator=rng)},
    )


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=MORE), "bfloat16"])
@pytest.mark.parametrize(
    "checkpointing",
    [pytest.param("none", marks=MORE), "selective", pytest.param("full", marks=MORE), pytest.param(2, marks=MORE)],
)
@pytest.mark.parametrize("name", CASES)
def test_update_and_logprobs_take_what_is_planned(name, checkpointing, precision):
    compare(name, checkpointing, precision)


@pytest.mark.slow("compiles kernels with a C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@needs("a C++ compiler", any(map(shutil.which, ("c++", "g++", "clang++"))))
def test_with_fused_kernels_too():
    """Most of it is logits: a vocabulary of 16,000, in one chunk. In bfloat16 a CPU converts the output weight besides,
    which a GPU does not."""
    use_fused_kernels("cpu")
    try:
        compare("large vocabulary", "none", "float32", fused=True, chunk_tokens=4096)
    finally:
        use_fused_kernels(None)


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=MORE), "bfloat16"])
def test_stored_products_of_experts_take_what_is_planned(precision):
    """Of an update; a pass without gradients has more copies of the residual stream than is planned."""
    more = {"model_type": "qwen3_moe", **EXPERTS}
    planned, update, *_ = measured("small vocabulary", "selective", precision, "transformers", rows="one", **more)
    assert -0.03 < planned / update - 1 < 0.20


def compare(*of_model, **others):
    planned, update, passed, logprobs = measured(*of_model, **others)
    assert -0.03 < planned / update - 1 < 0.20
    assert -0.03 < passed / logprobs - 1 < 0.35


def measured(
    name, checkpointing, precision, implementation="hone", *, fused=False, chunk_tokens=128, rows=None, **more
):
    """Bytes of an update as planned and as taken, and of a pass for logprobs."""
    model, arch = built(name, **more)
    model.checkpointing = checkpointing
    passes = Passes(precision, tokens_per_microbatch=4096, logprob_chunk_tokens=chunk_tokens, temperature=1.0)
    trainer = Roles(policy=PolicyTrainer(model, passes, optimizer=OptimizerSection(), total_optimizer_steps=10))
    batch, algorithm = random_batch(arch.vocab), Algorithm(AlgorithmSection(), correction="none")
    trainer.update(batch, algorithm)
    update = allocated(lambda: trainer.update(batch, algorithm))
    logprobs = allocated(lambda: trainer.logprobs(batch), scratch=False)
    responses = PROMPTS * GROUP * RESPONSE_TOKENS
    work = Pass(
        arch,
        implementation,
        4 if precision == "float32" else 2,
        tokens=PROMPTS * PROMPT_TOKENS + PROMPTS * GROUP * (RESPONSE_TOKENS - 1),
        response_tokens=responses,
        longest=PROMPT_TOKENS + RESPONSE_TOKENS,
        checkpointing=checkpointing,
        chunk_tokens=chunk_tokens,
        fused=fused,
        rows=rows,
    )
    planned = max(moment.bytes for moment in local.update_moments("", work, [], trained=True))
    passed = max(moment.bytes for moment in local.forward_moments(work, []))
    return planned, update, passed, logprobs


def test_a_character_tokenizer_has_the_tokens_that_are_planned():
    assert len(character_tokenizer("abc")) == 3 + len(CHARACTER_SPECIALS)


def saved_bytes(forward):
    """Of all tensors that autograd saves."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        forward()
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_capped_scores_of_attention_are_counted(dtype):
    """Against what autograd saves with the cap and without it, of rows that need no mask."""
    keys = {"model_type": "gemma2", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    keys |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 20}
    rows, length, layers, heads = 2, 160, 3, 4
    saved, planned = [], []
    for cap in (50.0, None):
        model = init_model({**keys, "attn_logit_softcapping": cap}, vocab_size=None, seed=0, dtype=dtype, device="cpu")
        saved.append(saved_bytes(partial(model.body, torch.zeros(rows, length, dtype=torch.int64), use_cache=False)))
        architecture = replace(architecture_from({**keys, "attn_logit_softcapping": cap}), caps_scores=cap is not None)
        work = Pass(architecture, "transformers", dtype.itemsize, rows * length, 1, length)
        planned.append(activations.kept_by_layers(work)[0])
    assert planned[0] - planned[1] == 8 * layers * heads * rows * length**2
    assert saved[0] - saved[1] == pytest.approx(planned[0] - planned[1], rel=0.1)
