"""Trainers whose ranks divide layers or tokens besides weights and samples: the same updates as one process makes.

One case of each is in test_sharded_pair.py, which runs every time.
"""

import pytest
from sharded_cases import Case, trained
from test_sharded_pair import assert_same

pytestmark = pytest.mark.slow("four ranks, each a process with torch")

TENSOR, SEQUENCE = {"tensor_parallel": 2}, {"sequence_parallel": 2}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("kl_and_entropy", vocab_size=14, mesh=TENSOR, updates=4), id="layers and vocabulary"),
        pytest.param(Case("ppo", vocab_size=14, mesh=TENSOR, updates=2), id="layers of a critic"),
        pytest.param(Case(implementation="transformers", mesh=TENSOR, vocab_size=14), id="layers of another class"),
        pytest.param(Case("ppo", mesh=SEQUENCE, updates=2, samples_per_optimizer_step=7), id="tokens of a critic"),
        pytest.param(Case("kl_and_entropy", lora=True, mesh=SEQUENCE, updates=2), id="tokens under an adapter"),
        pytest.param(Case("kl_and_entropy", lora=True, mesh=TENSOR, updates=3), id="layers with an adapter"),
        pytest.param(
            Case("ppo", implementation="transformers", mesh=SEQUENCE, updates=3), id="tokens of another class, critic"
        ),
        pytest.param(
            Case("kl_and_entropy", lora=True, implementation="transformers", mesh=TENSOR, updates=3),
            id="layers of another class with an adapter",
        ),
    ],
)
def test_two_ranks_that_divide_layers_or_tokens(pair, case):
    assert_same(pair(trained, case), trained(case, alone=True))


def test_in_bfloat16_they_stay_close(pair):
    """Sums over ranks are rounded: 2^-8 each, over two layers."""
    alone = trained(Case(precision="bfloat16", vocab_size=14), alone=True)
    for mesh in (TENSOR, SEQUENCE):
        ranks = pair(trained, Case(precision="bfloat16", vocab_size=14, mesh=mesh))
        for one in ranks:
            assert (one.logprobs_T - alone.logprobs_T).abs().mean() < 0.05
            assert one.dtypes == alone.dtypes
            for name, gradient in one.gradients[0].items():
                assert gradient.equal(ranks[0].gradients[0][name])


@pytest.mark.parametrize("algorithm", ["kl_and_entropy", "ppo"])
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({**TENSOR}, id="shards of layers"),
        pytest.param({**TENSOR, "shard": 1}, id="replicas of layers"),
        pytest.param({**SEQUENCE}, id="two pairs that divide tokens"),
        pytest.param({**SEQUENCE, "shard": 2}, id="replicas of two shards that divide tokens"),
    ],
)
def test_four_ranks(four, algorithm, mesh):
    case = Case(algorithm, vocab_size=14, mesh=mesh, updates=4, num_groups=7)
    assert_same(four(trained, case), trained(case, alone=True))


@pytest.mark.parametrize("implementation", ["hone", "transformers"])
def test_four_ranks_that_divide_layers_with_an_adapter(four, implementation):
    case = Case(lora=True, mesh=TENSOR, updates=3, implementation=implementation)
    assert_same(four(trained, case), trained(case, alone=True))


def test_four_ranks_that_divide_an_odd_vocabulary(four):
    case = Case(mesh=TENSOR, updates=2)
    assert_same(four(trained, case), trained(case, alone=True))
