"""Experts that the engine sends tokens to, recorded, and replayed by the trainer."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import TEXT
from model_zoo import architecture as keys_of
from test_env_episodes import played
from tiny_engines import EOS, generate, letters, random_prompts, request
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.run import OptimizerSection
from hone.data.pack import collate
from hone.errors import DataError, HoneError
from hone.experts import UNRECORDED
from hone.model.load import init_model
from hone.model.lora import merged_copy
from hone.plan.kv_cache import CacheRoom
from hone.rollout.env import Observation
from hone.rollout.local import LocalEngine, make_stepper
from hone.train.learner import Passes
from hone.train.policy import PolicyTrainer
from hone.types import Batch, Group

MIXED = [
    name for name, keys in TEXT.items() if "num_experts_per_tok" in keys and name not in ("minimax", "llama4_text")
]


def of_kinds(*quick: str) -> Any:
    slow = pytest.mark.slow("builds many architectures")
    return pytest.mark.parametrize("kind", [pytest.param(n, marks=() if n in quick else slow) for n in MIXED])


def model_of(kind: str, dtype: torch.dtype = torch.float32, **keys: Any) -> Any:
    model: Any = init_model({**keys_of(kind), **keys}, vocab_size=None, seed=0, dtype=torch.float32, device="cpu")
    if dtype == torch.float64:  # which PyTorch's grouped product does not know
        model.hf.set_experts_implementation("eager")
    return model.to(dtype)


def sampled(model: Any, *, max_tokens: int = 5) -> list[Group]:
    """Three groups of four, of which rows end at other times."""
    prompts = random_prompts(3, longest=9)
    requests = [request(p, index=i, samples=4, max_tokens=max_tokens + i) for i, p in enumerate(prompts)]
    found = generate(model, requests, records_routing=True)
    return [Group(r.prompt, group).scored({}, (0.0, 1.0, 0.0, 1.0)) for r, group in zip(requests, found, strict=True)]


def batch_of(groups: Sequence[Group]) -> Batch:
    batch = collate(groups)
    return batch.with_column("advantages_T", (2 * batch.reward_S - 1).repeat_interleave(batch.length_S))


def trainer_of(model: Any, precision: Any = "float32", tokens: int = 512) -> PolicyTrainer:
    passes = Passes(precision, tokens_per_microbatch=tokens, logprob_chunk_tokens=64, temperature=1.0)
    return PolicyTrainer(model, passes, optimizer=OptimizerSection(lr=1e-3), total_optimizer_steps=1)


def blocks_of(model: Any) -> list[Any]:
    return [block for block in model.body.modules() if isinstance(getattr(block, "experts", None), torch.nn.Module)]


def seen_by_experts(model: Any, compute: Any) -> list[tuple[Tensor, Tensor]]:
    """What `compute` makes routers give to experts: indices and gate weights, layer by layer."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [b.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1:])) for b in blocks_of(model)]
    compute()
    for hook in hooks:
        hook.remove()
    return seen


@of_kinds("qwen3_moe")
def test_what_is_recorded_is_what_routers_choose_for_the_sequence_alone(kind):
    """Of prompts with padding in front, of rows that were moved, and with a cache."""
    model = model_of(kind)
    for group in sampled(model):
        prompt = group.prompt.token_ids.tolist()
        assert [s.prompt_routing is None for s in group.samples] == [False, True, True, True]
        for sample in group.samples:
            ids = torch.tensor([[*prompt, *sample.token_ids[:-1].tolist()]])
            with torch.no_grad():
                seen = seen_by_experts(model, lambda ids=ids: model.body(input_ids=ids, use_cache=False))
            expected = torch.stack([index for index, _ in seen], dim=1).numpy()
            assert sample.routing.dtype == np.int8
            found = np.concatenate([group.samples[0].prompt_routing, sample.routing[:-1]])
            assert np.array_equal(np.sort(found), np.sort(expected))
            assert (sample.routing[-1] == UNRECORDED).all(), "the last token was no input"


@of_kinds("qwen3_moe")
def test_tokens_go_to_the_recorded_experts_by_the_weights_of_the_trainers_router(kind):
    model, groups = model_of(kind, torch.float64), sampled(model_of(kind))
    batch, trainer = batch_of(groups), trainer_of(model, "float64")
    assert batch.routing_T is not None
    count = model.routing.fewest
    other = replace(
        batch,
        routing_T=np.where(batch.routing_T < 0, batch.routing_T, (batch.routing_T + 1) % count),
        prompt_routing=tuple((experts + 1) % count for experts in batch.prompt_routing),
    )
    logits: list[Tensor] = []
    for block in blocks_of(model):
        router = getattr(block, "gate", None) or block.router
        router.register_forward_hook(lambda _m, _i, out: logits.append(out if isinstance(out, Tensor) else out[0]))
    seen = seen_by_experts(model, lambda: trainer.logprobs(other))
    wanted = {tuple(row.tolist()) for e in (other.routing_T, *other.prompt_routing) for row in e[:, 0] if row[0] >= 0}
    assert {tuple(row.tolist()) for row in seen[0][0]} <= wanted
    if kind in WEIGHTS:
        for (index, weights), scores in zip(seen, logits, strict=True):
            expected = WEIGHTS[kind](scores, scores.gather(1, index))
            torch.testing.assert_close(weights.double(), expected.double(), rtol=0, atol=1e-6)


WEIGHTS = {
    "qwen3_moe": lambda scores, chosen: chosen.exp() / scores.exp().sum(-1, keepdim=True),
    "mixtral": lambda _, chosen: chosen.softmax(-1),
    "gpt_oss": lambda _, chosen: chosen.softmax(-1),
    "deepseek_v3": lambda _, chosen: 2.5 * chosen.sigmoid() / chosen.sigmoid().sum(-1, keepdim=True),
}
"""Gate weights, by the router's logits of all experts and of those chosen, as the papers define them."""


def test_an_engine_that_rounds_has_a_smaller_mismatch_when_its_routing_is_replayed():
    """bfloat16 in the engine, float32 in the trainer: tokens go to other experts, and logprobs have a long tail."""
    model = model_of("qwen3_moe", num_experts=8, num_local_experts=8)
    batch, trainer = batch_of(sampled(merged_copy(model).to(torch.bfloat16), max_tokens=24)), trainer_of(model)
    anew = replace(batch, routing_T=None)
    chosen, own = (seen_by_experts(model, lambda one=one: trainer.logprobs(one)) for one in (batch, anew))
    flipped = [(x.sort(-1).values != y.sort(-1).values).any(-1) for (x, _), (y, _) in zip(chosen, own, strict=True)]
    assert torch.stack(flipped).sum() > 3, "the planted fault must happen"
    replayed_T, anew_T = ((trainer.logprobs(one) - one.sampler_logprobs_T).abs() for one in (batch, anew))
    assert replayed_T.mean() < 0.7 * anew_T.mean()
    assert replayed_T.quantile(0.99) < 0.5 * anew_T.quantile(0.99)


def test_a_record_of_the_own_choice_changes_nothing_and_unrecorded_tokens_are_routed():
    model = model_of("qwen3_moe")
    batch, trainer = batch_of(sampled(model)), trainer_of(model)
    assert batch.routing_T is not None
    plain = trainer.logprobs(replace(batch, routing_T=None))
    torch.testing.assert_close(trainer.logprobs(batch), plain, rtol=0, atol=1e-5)
    unknown = replace(
        batch,
        routing_T=np.full_like(batch.routing_T, UNRECORDED),
        prompt_routing=tuple(np.full_like(experts, UNRECORDED) for experts in batch.prompt_routing),
    )
    assert torch.equal(trainer.logprobs(unknown), plain)


@pytest.mark.parametrize(
    "checkpointing",
    ["full", *(pytest.param(how, marks=pytest.mark.slow("one is enough")) for how in ("none", "selective"))],
)
def test_gradients_of_replayed_routing_are_those_of_any_microbatches_and_checkpointing(checkpointing):
    """Activations that are made again go to the recorded experts too, and routers have a gradient."""
    batch = batch_of(sampled(model_of("qwen3_moe")))
    assert batch.routing_T is not None
    shifted = replace(
        batch,
        routing_T=np.where(batch.routing_T < 0, batch.routing_T, (batch.routing_T + 1) % 4),
        prompt_routing=tuple((experts + 1) % 4 for experts in batch.prompt_routing),
    )
    found = []
    for tokens, how in ((512, "none"), (24, checkpointing)):
        model = model_of("qwen3_moe", torch.float64)
        model.checkpointing = how
        trainer = trainer_of(model, "float64", tokens)
        trainer.update(shifted, Algorithm(AlgorithmSection()), [np.arange(12)])
        found.append({name: weight.clone() for name, weight in model.named_weights()})
    before = dict(model_of("qwen3_moe", torch.float64).named_weights())
    for name, weight in found[0].items():
        # AdamW divides by the gradient's size, which magnifies the rounding of the smallest.
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=1e-6)
    assert all(not torch.equal(found[0][name], before[name]) for name in before if "gate.weight" in name)


def test_samples_with_routing_are_equal_after_a_journey_between_processes():
    sample = sampled(model_of("qwen3_moe"))[0].samples[0]
    arrived = pickle.loads(pickle.dumps(sample))
    assert arrived == sample and arrived.routing.shape == sample.routing.shape
    assert not arrived.routing.flags.writeable
    assert arrived != replace(sample, routing=(sample.routing + 1) % 4)


def test_a_model_without_experts_is_refused():
    for kind in ("qwen3", "gpt2"):
        with pytest.raises(DataError, match=f"{kind} has no layers with experts"):
            sampled(model_of(kind))


def test_routers_that_choose_by_other_means_are_refused():
    model = model_of("qwen3_moe")
    blocks_of(model)[0].forward = lambda hidden: hidden
    with pytest.raises(Exception, match="in 1 of 2 layers by other means than topk"):
        sampled(model)


def test_experts_are_computed_by_grouped_products_in_engine_and_trainer():
    """Transformers' one operation for all experts of a layer, not a loop over them."""

    class Counting(TorchDispatchMode):
        grouped = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.grouped += "_grouped_mm" in str(function)
            return function(*args, **(kwargs or {}))

    model = model_of("qwen3_moe")
    batch, trainer = batch_of(sampled(model)), trainer_of(model)
    with Counting() as counting:
        trainer.logprobs(batch)
    assert counting.grouped == 4, "two layers, two products each"
    stepper = make_stepper(model, 4, 64, CacheRoom(96, 96, 4, 4, None, shares_prompts=False), records_routing=True)
    with Counting() as counting, torch.no_grad():
        (prompt_id,) = stepper.add_prompts([np.array([3, 1, 4], np.int32)])
        stepper.add_rows([prompt_id], [np.zeros(0, np.int32)])
        stepper.advance(np.array([5]))
    assert counting.grouped == 8


def test_samples_that_meet_an_environment_have_the_routing_of_every_input():
    """Of a turn's last token and of what the environment said, from the prefill of the next turn."""
    model = model_of("qwen3_moe")
    engine = LocalEngine(model, decode=letters, eos_ids=(EOS,), max_concurrent=8, timeout_s=30.0, records_routing=True)
    stops = {"max_tokens": 14, "stop_token_ids": (7, 8, 9, 10, 11)}
    requests = [request(p, index=i, samples=2, **stops) for i, p in enumerate(random_prompts(3))]
    answered = played(engine, lambda _, turn, __: Observation("XY") if turn < 2 else None, *requests, max_turns=3)
    turns = [len(sample.turns) for group in answered for sample in group]
    assert max(turns) > 1, "the environment must have answered"
    for one, group in zip(requests, answered, strict=True):
        for sample in group:
            found = np.concatenate([group[0].prompt_routing, sample.routing])
            ids = torch.tensor([[*one.prompt.token_ids.tolist(), *sample.token_ids.tolist()]])
            with torch.no_grad():
                seen = seen_by_experts(model, lambda ids=ids: model.body(input_ids=ids, use_cache=False))
            expected = torch.stack([index for index, _ in seen], dim=1).numpy()
            known = (found >= 0).all((1, 2))
            assert known[: len(one.prompt.token_ids) + sample.turns[-1].end - 1].all()
            assert np.array_equal(np.sort(found[known]), np.sort(expected[known]))


@pytest.mark.slow("builds more architectures")
def test_a_class_that_the_hook_does_not_wholly_cover_is_refused():
    sizes = {**TEXT["mixtral"], "kv_channels": 8}
    for kind, said in (("jetmoe", "outside of blocks of experts"), ("phimoe", "by other means than topk")):
        model = init_model({**sizes, "model_type": kind}, vocab_size=None, seed=0, dtype=torch.float32, device="cpu")
        with pytest.raises(HoneError, match=said):
            sampled(model)
