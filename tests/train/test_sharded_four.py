"""Four ranks, and one: shards, replicas of shards, and a mesh of one rank do what one process does."""

import contextlib
from functools import cache, partial

import pytest
import torch
from gang import Gang
from sharded_cases import Case, trained
from test_sharded_pair import assert_same
from torch._dynamo.utils import counters

from hone.model import kernels

pytestmark = pytest.mark.slow("four ranks, each a process with torch")

HYBRID = {"shard": 2}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(updates=5), id="shards"),
        pytest.param(Case(updates=5, mesh=HYBRID, tokens_per_microbatch=15), id="replicas of shards"),
        pytest.param(Case("ppo", updates=3, mesh=HYBRID, samples_per_optimizer_step=7), id="critic"),
        pytest.param(Case("kl_and_entropy", lora=True, mesh=HYBRID, updates=2), id="adapter"),
        pytest.param(Case(implementation="transformers", mesh=HYBRID, tokens_per_microbatch=40), id="transformers"),
        pytest.param(Case("kl_and_entropy", updates=2, mesh=HYBRID, offload=("parameters", "reference")), id="offload"),
        pytest.param(Case(num_groups=1, updates=2), id="one group"),
        pytest.param(Case("kl_and_entropy", mesh={"sequence_parallel": 4}, updates=2), id="a ring"),
        pytest.param(Case("ppo", mesh={"sequence_parallel": 4}, checkpointing="full"), id="a ring, critic"),
        pytest.param(Case(samples_with_advantage=2, updates=2, mesh=HYBRID), id="ranks with nothing to do"),
        pytest.param(Case(updates=2, checkpointing="full", mesh=HYBRID, offload=("optimizer",)), id="less memory"),
    ],
)
def test_four_ranks_are_one_process(four, case):
    assert_same(four(trained, case), trained(case, alone=True))


def test_a_mesh_of_one_rank_is_one_process():
    with contextlib.closing(Gang(1)) as gang:
        for case in (Case(updates=3), Case("ppo", updates=2), Case(offload=("parameters",)), Case(lora=True)):
            assert_same(gang(trained, case), trained(case, alone=True))


def traced(case):
    """As `trained`, with layers traced as for compilation, and run without a compiler, which takes a minute."""
    compile = torch.compile
    torch.compile = partial(compile, backend="aot_eager")
    try:
        return trained(case)
    finally:
        torch.compile = compile


@pytest.mark.timeout(300)
def test_compiled_layers_compute_the_same(pair):
    """In few shapes: every other one is traced anew."""
    case = Case(compile=True, updates=2, num_groups=2, tokens_per_microbatch=60, implementation="transformers")
    assert_same(pair(traced, case), trained(case, alone=True))


def fused(case):
    """As `trained`, with fused kernels, traced and run without a compiler."""
    compiled = kernels._compiled
    kernels._compiled = cache(partial(torch.compile, fullgraph=True, backend="aot_eager"))
    kernels.use_fused_kernels("cpu")
    graphs = counters["stats"]["unique_graphs"]
    try:
        return trained(case), counters["stats"]["unique_graphs"] - graphs
    finally:
        kernels._compiled = compiled
        kernels.use_fused_kernels(None)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("kl_and_entropy", updates=2, checkpointing="selective"), id="shards"),
        pytest.param(Case("kl_and_entropy", lora=True, mesh={"tensor_parallel": 2}), id="layers, adapter"),
    ],
)
def test_fused_kernels_on_ranks(pair, case):
    found, graphs = zip(*pair(fused, case), strict=True)
    assert min(graphs) > 0
    assert_same(found, trained(case, alone=True))
