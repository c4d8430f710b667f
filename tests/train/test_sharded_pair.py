"""Two ranks do what one process does: gradients, metrics, weights, columns."""

import pytest
import torch
from ladder_cases import CLIMBS_TOGETHER, trained_with_failure
from sharded_cases import Case, Found, trained


def assert_same(found: list[Found], expected: Found, *, rtol=1e-5, atol=1e-7):
    def close(ours, theirs, what):
        assert ours.shape == theirs.shape, what
        assert (ours - theirs).norm() <= rtol * theirs.norm() + atol, f"{what} differs"

    for rank, one in enumerate(found):
        close(one.logprobs_T, expected.logprobs_T, "logprobs")
        for column in ("reference_T", "values_T"):
            if getattr(expected, column) is not None:
                close(getattr(one, column), getattr(expected, column), column)
        for ours, theirs in zip(one.metrics, expected.metrics, strict=True):
            assert ours == found[0].metrics[one.metrics.index(ours)], f"rank {rank} tells other metrics"
            passes = {"train/microbatches"}
            one_process = {"train/gradient_signal", "train/gradient_noise"}  # a rank has a part of the gradient
            assert set(ours) == set(theirs) - one_process
            for name in set(ours) - passes:
                assert ours[name] == pytest.approx(theirs[name], rel=rtol, abs=atol, nan_ok=True), name
        for kind in ("gradients", "critic_gradients"):
            for ours, theirs in zip(getattr(one, kind), getattr(expected, kind), strict=True):
                assert set(ours) == set(theirs)
                for name in ours:
                    close(ours[name], theirs[name], f"gradient of {name}")
        for kind in ("weights", "trained", "master"):
            ours, theirs = getattr(one, kind), getattr(expected, kind)
            assert set(ours) == set(theirs)
            for name in ours:
                close(ours[name], theirs[name], name)


MORE = pytest.mark.slow("more of the same on two ranks")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(updates=5), id="five updates", marks=MORE),
        pytest.param(Case(precision="float32"), id="float32", marks=MORE),
        pytest.param(
            Case(implementation="transformers", updates=2, tokens_per_microbatch=40), id="transformers", marks=MORE
        ),
        pytest.param(Case("kl_and_entropy", updates=2), id="reference", marks=MORE),
        pytest.param(Case(lora=True, updates=2), id="adapter", marks=MORE),
        pytest.param(Case("kl_and_entropy", lora=True, precision="float32"), id="adapter and its base", marks=MORE),
        pytest.param(Case("kl_and_entropy", updates=2, offload=("parameters", "reference")), id="offload", marks=MORE),
        pytest.param(Case(updates=3, offload=("optimizer",)), id="moments on the host"),
        pytest.param(Case(mesh={"shard": 1}, updates=2), id="replicas", marks=MORE),
        pytest.param(Case(mesh={"tensor_parallel": 2}, updates=2), id="tensor parallel"),
        pytest.param(Case("kl_and_entropy", mesh={"sequence_parallel": 2}, updates=2), id="sequence parallel"),
        pytest.param(Case("ppo", updates=3, samples_per_optimizer_step=7), id="critic"),
        pytest.param(Case(tokens_per_microbatch=11, updates=2), id="more microbatches on one rank", marks=MORE),
        pytest.param(Case(samples_with_advantage=1, updates=2), id="a rank with nothing to do", marks=MORE),
        pytest.param(Case(samples_with_advantage=0, updates=2), id="nothing to do at all", marks=MORE),
        pytest.param(Case(checkpointing="selective", lora=True), id="selective, adapter", marks=MORE),
        pytest.param(Case(checkpointing="selective", tokens_per_microbatch=60), id="selective", marks=MORE),
        pytest.param(Case(checkpointing="full", tokens_per_microbatch=60), id="full", marks=MORE),
        pytest.param(
            Case(checkpointing="selective", implementation="transformers", tokens_per_microbatch=60),
            id="selective, transformers",
            marks=MORE,
        ),
    ],
)
def test_two_ranks_are_one_process(pair, case):
    assert_same(pair(trained, case), trained(case, alone=True))


def test_a_gradient_that_is_not_finite_is_skipped_by_all_alike(pair):
    case = Case(updates=3, poisoned_updates=(1,), samples_with_advantage=5)
    found, expected = pair(trained, case), trained(case, alone=True)
    for one in (*found, expected):
        assert [metrics["train/skipped_steps"] for metrics in one.metrics] == [0, 1, 0]
        assert not all(gradient.isfinite().all() for gradient in one.gradients[1].values())  # it did happen
    for one in found:
        for name, weight in expected.master.items():
            assert (one.master[name] - weight).norm() <= 1e-5 * weight.norm()


def test_bfloat16_computes_with_float32_master_weights_and_reduction(pair):
    case = Case(precision="bfloat16", updates=2)
    found, expected = pair(trained, case), trained(case, alone=True)
    for one in found:
        assert one.dtypes == {torch.bfloat16}
        assert {weight.dtype for weight in one.master.values()} == {torch.float32}
        assert (one.logprobs_T - expected.logprobs_T).abs().max() < 0.05
        for name, gradient in expected.gradients[0].items():
            assert one.gradients[0][name].dtype == torch.float32
            assert (one.gradients[0][name] - gradient).norm() < 0.03 * gradient.norm()
    assert all(torch.equal(found[0].master[name], weight) for name, weight in found[1].master.items())


@CLIMBS_TOGETHER
def test_a_rank_that_runs_out_of_memory_takes_the_other_along_to_a_lower_setting(pair):
    """In the middle of an update; every other place is in test_sharded_ladder.py."""
    case = Case(samples_per_optimizer_step=20, tokens_per_microbatch=60)
    unfailed, found = pair(trained_with_failure, case, 1, None), pair(trained_with_failure, case, 1, 300)
    assert [one.failed_in for one in found] == [None, "update"]
    for one in found:
        assert [phase for phase, _, _ in one.changes] == ["update"] and one.changes == found[0].changes
        assert one.redone == 1 and one.optimizer_steps == unfailed[0].optimizer_steps
        for name, weight in unfailed[0].weights.items():
            torch.testing.assert_close(one.weights[name], weight, rtol=1e-6, atol=1e-9)
