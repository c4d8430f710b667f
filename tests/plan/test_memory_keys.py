"""Every key of a run file that changes what a run allocates changes its plan: keys are found by tracing, not listed.

A tiny run is built by the code of `hone train` while reads of the configuration are recorded. Each key that was read is
given other values; where torch's allocator then hands out another number of bytes, the plan must have moved too.
"""

import asyncio
import gc
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import pytest
import torch
from measuring import allocated

from hone.algo.algorithm import Algorithm
from hone.assemble import models
from hone.assemble.sampling import embedded_engine, sampling_of
from hone.config.derived import correction
from hone.config.load import load_config
from hone.config.render import inline
from hone.config.section import Section
from hone.data.chat import load_tokenizer
from hone.errors import ConfigError, DataError
from hone.memory.gauges import HostGauge, Meter
from hone.memory.guard import UNGUARDED
from hone.memory.ladder import Ladder
from hone.memory.rungs import PREFILL, ROWS
from hone.model.load import init_model
from hone.plan.hardware import find_hardware, memory_limit_bytes
from hone.plan.planner import plan
from hone.rollout.engine import Request
from hone.sizes import GIB
from hone.types import Batch, Prompt

RUN = """
model:
  characters: "abcdefghijklmnopqrstuvwxyz"
  init: {model_type: qwen3, hidden_size: 64, intermediate_size: 192, num_hidden_layers: 2, num_attention_heads: 4,
    num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 512, tie_word_embeddings: true}
data: {train: a/b, answer_column: answer, max_prompt_tokens: 32}
rollout: {group_size: 4, max_response_tokens: 48, max_concurrent_samples: 8}
train: {prompts_per_step: 4, tokens_per_microbatch: 512, logprob_chunk_tokens: 64}
algorithm: {kl_loss_coef: 0.1, rejection_high: 1e9}  # no sample is left out, whatever random weights say of it
run: {precision: float32, device: cpu}
reward: {components: [{use: exact}]}
"""
LEAST_BYTES = 16384
"""Smaller differences are not the model's: the profiler's events, alignment, and numbers per token of the batch."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "run.yaml"
    file.write_text(RUN)
    return file


@contextmanager
def reads_of(config):
    """The dotted keys that are read meanwhile, without those of sections."""
    names, found, original = {}, set(), Section.__getattribute__

    def walk(section, path):
        names[id(section)] = path
        for name in type(section).model_fields:
            if isinstance(value := original(section, name), Section):
                walk(value, f"{path}{name}.")

    def spy(self, name):
        value = original(self, name)
        path = names.get(id(self))
        if path is not None and name in type(self).model_fields and not isinstance(value, Section):
            found.add(path + name)
        return value

    walk(config, "")
    Section.__getattribute__ = spy
    try:
        yield found
    finally:
        del Section.__getattribute__


def full_batch(config, vocab):
    """A step's samples, all as long as may be."""
    prompts, group = config.train.prompts_per_step, config.rollout.group_size
    length, samples = config.rollout.max_response_tokens, prompts * group
    rng, tokens = torch.Generator().manual_seed(0), samples * length
    ids = torch.randint(0, vocab, (prompts, config.data.max_prompt_tokens), generator=rng).tolist()
    return Batch(
        prompts=tuple(map(tuple, ids)),
        prompt_S=torch.arange(prompts).repeat_interleave(group),
        length_S=torch.full((samples,), length),
        token_ids_T=torch.randint(0, vocab, (tokens,), generator=rng),
        loss_mask_T=torch.ones(tokens),
        sampler_logprobs_T=torch.full((tokens,), -1.0),
        reward_S=torch.rand(samples, generator=rng),
        columns={
            "greedy_reward_N": torch.zeros(prompts),
            "greedy_truncated_N": torch.zeros(prompts),
            "greedy_length_N": torch.ones(prompts),
            "truncated_S": torch.zeros(samples),
            "score/exact_S": torch.rand(samples, generator=rng),
        },
    )


def taken(loaded, make=models.rl_roles):
    """Bytes at the fullest moment of each phase of one step, and those of the engine's cache."""
    config, folder = loaded.config, loaded.run_file.parent
    tokenizer = load_tokenizer(config.model, folder)
    tokenizer.eos_ids = ()  # so that a response has its full length, whatever its tokens are
    source = SimpleNamespace(
        loaded=loaded, folder=None, tokenizer=tokenizer, device=torch.device("cpu"), guard=UNGUARDED
    )
    length = config.rollout.max_response_tokens
    algorithm = Algorithm(
        config.algorithm, correction=correction(config), max_response_tokens=length, weights={"exact": 1.0}
    )
    batch = full_batch(config, tokenizer.vocab_size)
    made = []
    start = allocated(lambda: made.append(make(source, held=models.roles_of_needs(algorithm.needs))))
    (trainer,) = made
    forward = allocated(lambda: trainer.logprobs(batch, reference=trainer.reference is not None))
    measured = replace(batch, columns=dict(batch.columns) | trainer.measure(batch, algorithm.needs))
    ready, _ = algorithm.assign(measured)
    update = allocated(lambda: trainer.update(ready, algorithm))

    async def sample():
        engine = embedded_engine(config, tokenizer, trainer.policy.model)
        requests = [
            Request(Prompt(str(n), n, "", ids), config.rollout.group_size, sampling_of(config), config.seed, "train")
            for n, ids in enumerate(batch.prompts)
        ]
        await asyncio.gather(*map(engine.generate, requests))
        room = engine.cache_use().room_bytes
        await engine.close()
        return room

    return {"start": start, "logprobs": forward, "update": update, "cache": asyncio.run(sample())}


def differ(ours, theirs):
    """Whether the measurements of a phase, several of each side, lie apart."""

    def gap(phase):
        one, other = [one[phase] for one in ours], [other[phase] for other in theirs]
        return max(min(one) - max(other), min(other) - max(one))

    return any(gap(phase) > LEAST_BYTES for phase in theirs[0])


def planned(loaded):
    found = plan(loaded.config, find_hardware("this"), folder=loaded.run_file.parent)
    return [(moment.phase, moment.name, moment.bytes) for ledger in found.ledgers for moment in ledger.moments]


def others(value, annotation):
    """Other values of a key that its rules may accept."""
    kinds = [annotation, *get_args(annotation)]
    if isinstance(value, bool) or (value is None and bool in kinds):
        yield not value
    elif isinstance(value, (int, float)) and value:
        yield from (2 * value, value / 2 if isinstance(value, float) else value // 2)
    elif value in (0, None) and {int, float} & {*kinds}:
        yield from (4, 0.25)
    for kind in kinds:
        if get_origin(kind) is Literal:
            yield from (one for one in get_args(kind) if one != value)


@pytest.fixture(scope="module")
def first(run_file):
    """(keys that are read, bytes taken) by the run file as it is."""
    loaded = load_config(run_file)
    taken(loaded)  # what is allocated once per process is allocated here
    gc.collect()
    gc.freeze()  # each measurement collects garbage first; what is there already is not looked at again
    with reads_of(loaded.config) as keys:
        before = taken(loaded)
    yield frozenset(keys), before
    gc.unfreeze()


def is_apart(other, loaded, before, make):
    """Whether another run file takes other memory; what seems so is measured again, the two in turn."""
    once = taken(other, make)
    if not differ([once], [before]):
        return False
    again = [(taken(loaded), taken(other, make)) for _ in range(2)]
    return differ([once, *(with_it for _, with_it in again)], [before, *(without for without, _ in again)])


def walked(run_file, first, section, make=models.rl_roles):
    """(keys of a section that change what is allocated, those among them that leave the plan as it is)."""
    keys, before = first
    keys -= {"rollout.compile"}  # what a compiler allocates is no plan's
    loaded = load_config(run_file)
    moves, missed, expected = set(), set(), planned(loaded)
    for key in sorted(key for key in keys if key.startswith(f"{section}.")):
        *sections, name = key.split(".")
        here = loaded.config
        for part in sections:
            here = getattr(here, part)
        for value in others(getattr(here, name), type(here).model_fields[name].annotation):
            try:
                other = load_config(run_file, [f"{key}={inline(value)}"])
                changes_memory = is_apart(other, loaded, before, make)
            except (ConfigError, DataError):  # rules refuse the value, or the model's class does
                continue
            if changes_memory:
                moves.add(key)
                missed |= {f"{key}={value}"} if planned(other) == expected else set()
            if section in LARGE and isinstance(value, (int, float)):
                break
    return moves, missed


READ = ("algorithm", "data", "lora", "model", "rollout", "run", "train")
"""Sections of which a run of one process reads keys while it builds, samples and trains."""
MOVES = {
    "run": {"run.precision"},
    "rollout": {"rollout.group_size", "rollout.max_concurrent_samples", "rollout.max_response_tokens"},
    "train": {"train.activation_checkpointing", "train.samples_per_optimizer_step", "train.tokens_per_microbatch"},
    "algorithm": {"algorithm.credit"},
}
"""Some that must be found: else the walk sees nothing."""
LARGE = ("algorithm", "rollout", "train")
"""Sections of many keys: of numbers one other value is tried, the first that the rules accept."""


@pytest.mark.slow("builds and trains a model for each value of each key")
@pytest.mark.parametrize("section", READ)
def test_every_key_that_changes_memory_changes_the_plan(run_file, first, section):
    moves, missed = walked(run_file, first, section)
    assert moves >= MOVES.get(section, set())
    assert not missed


@pytest.mark.slow("builds and trains a model")
def test_all_sections_that_are_read_are_walked(first):
    """What is read of others is of a cluster, whose keys tests/plan/test_engine_keys.py walks."""
    keys, _ = first
    assert {key.partition(".")[0] for key in keys} == {*READ, "cluster", "seed", "stages"}
    assert {key for key in keys if key.startswith("cluster.")} == {"cluster.backend", "cluster.engines.enforce_eager"}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["rollout.kv_cache_tokens=200"],
        ["rollout.max_concurrent_samples=3", "run.precision=bfloat16"],
        ["rollout.max_concurrent_samples=64", "rollout.max_staleness=1"],
        ["plan.memory_budget_gib=0.0001"],
    ],
)
def test_an_engine_takes_the_cache_that_is_planned(run_file, words):
    """To the byte: both ask `plan.kv_cache`."""
    loaded = load_config(run_file, words)
    tokenizer = load_tokenizer(loaded.config.model, run_file.parent)
    dtype = getattr(torch, loaded.config.run.compute_dtype)
    model = init_model(loaded.config.model.init, vocab_size=tokenizer.vocab_size, seed=0, dtype=dtype, device="cpu")
    budget = loaded.config.plan.memory_budget_gib
    settings = {ROWS: loaded.config.rollout.max_concurrent_samples, PREFILL: loaded.config.rollout.prefill_tokens}
    gauge = HostGauge(memory_limit_bytes())
    ladder = Ladder(Meter(gauge), settings=settings, budget_bytes=int((budget or 1) * GIB))
    prompt = Prompt("p", 0, "", (5, 6, 7))

    async def room():
        engine = embedded_engine(loaded.config, tokenizer, model, ladder=ladder if budget else None)
        engine._guard = UNGUARDED  # which would find at once that the budget is nothing
        await engine.generate(Request(prompt, 1, replace(sampling_of(loaded.config), max_tokens=2), 0, "train"))
        await engine.close()
        return engine.cache_use().room_bytes

    found = plan(loaded.config, find_hardware("this"), folder=run_file.parent)
    sampling = next(one for one in found.ledgers[0].moments if one.name == "sampling")
    assert {term.bytes for term in sampling.terms if term.name == "KV cache"} == {asyncio.run(room())}


@pytest.mark.slow("builds and trains models")
def test_a_key_that_the_plan_does_not_know_is_caught(run_file, first):
    """`model.trust_remote_code` stands for a new key, with which a trainer keeps a gathered copy of the weights."""

    def make(source, **more):
        trainer = models.rl_roles(source, **more)
        if source.loaded.config.model.trust_remote_code:
            vars(trainer)["gathered"] = [parameter.detach().clone() for parameter in trainer.policy.model.parameters()]
        return trainer

    keys, before = first
    _, missed = walked(run_file, (keys | {"model.trust_remote_code"}, before), "model", make)
    assert missed == {"model.trust_remote_code=True"}
