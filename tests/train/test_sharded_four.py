"""Four ranks, and one: shards, replicas of shards, and a mesh of one rank do what one process does."""

import contextlib
from functools import partial

import pytest
import torch
from gang import Gang
from sharded_cases import Case, trained
from test_sharded_pair import assert_same

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
@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_compiled_layers_compute_the_same(pair, implementation):
    """In few shapes: every other one is traced anew."""
    case = Case(compile=True, updates=2, num_groups=2, tokens_per_microbatch=60, implementation=implementation)
    assert_same(pair(traced, case), trained(case, alone=True))
