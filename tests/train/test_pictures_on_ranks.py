"""Two ranks that share a vision tower and a language model do what one process does, wherever the pictures are."""

import pytest
from picture_cases import Case, seen

pytestmark = pytest.mark.slow("two ranks, with a tower each")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), id="tower learns"),
        pytest.param(Case(learns=False), id="frozen tower"),
        pytest.param(Case("qwen3_vl", pictures=(0, 0, 0, 2)), id="deeper features, all pictures on one rank"),
        pytest.param(Case(patches_per_pass=1), id="a pass for each picture"),
        pytest.param(Case(pictures=(0, 0, 0, 0)), id="no pictures"),
        pytest.param(Case(checkpointing="full"), id="full"),
        pytest.param(Case("qwen2_vl", learns=False, lora=True), id="adapter"),
        pytest.param(Case(mesh={"shard": 1}), id="replicas"),
        pytest.param(Case("internvl"), id="tiles"),
    ],
)
def test_two_ranks_are_one_process(pair, case):
    expected, found = seen(case, alone=True), pair(seen, case)
    for one in found:
        assert (one.logprobs_T - expected.logprobs_T).abs().max() < 1e-5
        assert len(one.gradients) == len(expected.gradients) == case.updates
        for ours, theirs in zip(one.gradients, expected.gradients, strict=True):
            if any(case.pictures):
                assert any("visual.blocks" in name or "vision_tower" in name for name in ours) == case.learns
            for name, gradient in theirs.items():
                own = ours.get(name, 0 * gradient)  # no pass, no gradient
                assert (own - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name
        for name, weight in expected.weights.items():
            if name.endswith("k_proj.bias"):
                continue  # a softmax takes no notice of it: its gradient is rounding, which AdamW makes large
            assert (one.weights[name] - weight).norm() <= 1e-4 * weight.norm() + 1e-6, name


def test_a_rank_computes_the_pictures_of_its_samples_alone(pair):
    found = pair(seen, Case(learns=False, pictures=(2, 3, 1, 2)))
    assert all(0 < one.num_computed < 8 for one in found)
    assert sum(one.num_computed for one in found) >= 8
