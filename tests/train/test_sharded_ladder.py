"""One rank runs out of memory: all try again with the same setting, and learn what they would have learnt."""

from dataclasses import replace

import pytest
import torch
from ladder_cases import CLIMBS_TOGETHER, trained_with_failure
from sharded_cases import Case

CASE = Case("kl_and_entropy", samples_per_optimizer_step=8, tokens_per_microbatch=60, moved=False)
MORE = pytest.mark.slow("two updates on two ranks for each failing allocation")


@MORE
@CLIMBS_TOGETHER
@pytest.mark.parametrize("points", [30])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CASE, id="sharded"),
        pytest.param(Case("kl_and_entropy", lora=True, moved=False), id="adapter"),
        pytest.param(
            Case(implementation="transformers", tokens_per_microbatch=60, checkpointing="full"),
            id="transformers, full",
        ),
    ],
)
def test_a_failure_of_one_rank_at_any_allocation_leaves_the_same_weights(pair, case, points):
    """`points` allocations of rank 1, spread evenly over all of them, fail one at a time."""
    unfailed = pair(trained_with_failure, case, 1, None)
    count = unfailed[1].allocations
    failed_in = set()
    for fails_at in sorted({1 + i * (count - 1) // (points - 1) for i in range(points)}):
        found = pair(trained_with_failure, case, 1, fails_at)
        assert not any(one.error for one in found), f"allocation {fails_at} of {count}: {found}"
        assert found[1].failed_in, f"allocation {fails_at} of {count} did not fail"
        failed_in.add(found[1].failed_in)
        for one in found:
            assert [phase for phase, _, _ in one.changes] == [found[1].failed_in]
            assert one.changes == found[0].changes and one.settings == found[0].settings
            assert one.redone == 1
            assert one.optimizer_steps == unfailed[0].optimizer_steps
            for name, weight in unfailed[0].weights.items():
                torch.testing.assert_close(one.weights[name], weight, rtol=1e-6, atol=1e-9)
    assert failed_in >= {"update", "logprobs"} if case.algorithm == "kl_and_entropy" else {"update"}


@MORE
@pytest.mark.parametrize(
    ("case", "inside", "why"),
    [
        pytest.param(CASE, True, "inside of a collective", id="collective"),
        pytest.param(replace(CASE, mesh={"sequence_parallel": 2}), False, "sequence_parallel divide", id="sequence"),
        pytest.param(replace(CASE, mesh={"tensor_parallel": 2}), False, "tensor_parallel", id="tensor"),
        pytest.param(
            replace(CASE, algorithm="grpo", tokens_per_microbatch=1000, mesh={"shard": 1}),
            False,
            "summed over replicas",
            id="replicas",
        ),
    ],
)
def test_where_ranks_cannot_try_again_together_they_start_again_with_less(pair, case, inside, why):
    """On both ranks, so that none waits for the other; in a run the driver ends those that wait."""
    for one in pair(trained_with_failure, case, None, 4 if inside else 700, inside=inside):
        assert f"of 2 ran out of memory in {'logprobs' if inside else 'update'}" in one.error
        assert why in one.error
        assert one.restart.is_down and one.restart.reason == "out of memory on one rank"
        assert one.settings[one.restart.key] == one.restart.old, "a rank that ends changes nothing"
