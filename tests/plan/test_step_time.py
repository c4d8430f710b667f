"""Times: orders of magnitude that can be checked by hand, and what must make a step longer or shorter."""

import pytest
from shapes import shape

from hone.plan.hardware import find_hardware, this_machine
from hone.plan.planner import plan
from hone.plan.time import forward_flops, weights_read_bytes
from hone.plan.workload import Lengths

EIGHT = find_hardware("8xH100-80G")
RAY = ("cluster.backend=ray", "cluster.engines.use=vllm")


def test_a_forward_pass_is_two_operations_per_parameter_and_token():
    """planner.md's count of Qwen3-8B over 4,096 tokens, attention left out: 6.200e13."""
    arch = shape("qwen3-8b")
    assert forward_flops(arch, 4096, 0, logit_tokens=4096) == pytest.approx(6.2e13, rel=0.001)


def test_a_decoding_step_reads_all_weights_but_experts_without_tokens():
    dense, moe = shape("qwen3-8b"), shape("qwen3-30b-a3b")
    assert weights_read_bytes(dense, 1, 2) == 2 * (8_190_735_360 - 151_936 * 4096)
    one, many = (weights_read_bytes(moe, tokens, 2) for tokens in (1, 4096))
    assert one < 0.15 * many
    assert many == pytest.approx(2 * (moe.total_parameters - 151_936 * 2048), rel=1e-6)


def test_lengths_have_the_mean_they_are_given():
    lengths = Lengths(max_prompt=100, max_response=1000, mean_prompt=50, mean_response=300)
    quantiles = lengths.response_quantiles()
    assert quantiles == sorted(quantiles) and max(quantiles) <= 1000
    assert sum(quantiles) / len(quantiles) == pytest.approx(300, rel=0.02)
    assert Lengths(100, 1000, 50, 1000).response_quantiles() == [1000.0] * len(quantiles)


@pytest.mark.parametrize(
    "longer",
    [
        "train.activation_checkpointing=full",
        "algorithm.kl_loss_coef=0.1",
        "algorithm.credit=gae",
        "rollout.group_size=16",
        "train.passes_per_batch=2",
    ],
)
def test_more_work_takes_longer(configured, longer):
    assert plan(configured(*RAY, longer), EIGHT).time.step_s > 1.02 * plan(configured(*RAY), EIGHT).time.step_s


def test_more_devices_take_less_time(configured):
    seconds = [plan(configured(*RAY, f"cluster.devices_per_node={n}"), EIGHT).time.step_s for n in (2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)


def test_phases_add_up_unless_they_overlap(configured):
    apart = "cluster.pools={train: {devices: 4, roles: [policy]}, sample: {devices: 4, roles: [rollout]}}"
    for staleness, overlaps in ((0, False), (1, True)):
        time = plan(configured(*RAY, apart, f"rollout.max_staleness={staleness}"), EIGHT).time
        total = sum(time.phases.values())
        assert (time.step_s < 0.95 * total) if overlaps else (time.step_s == pytest.approx(total))


def test_cost_is_devices_times_hours(configured):
    time = plan(configured(*RAY), EIGHT).time
    assert time.cost_of_1000_steps(2.0, 8) == pytest.approx(2.0 * 8 * 1000 * time.step_s / 3600)


def test_a_judge_takes_time_and_memory(configured):
    found = plan(
        configured(
            *RAY,
            "services.grm={policy: deepseek-v2-lite, engine: {gpu_memory_utilization: 0.6}}",
            "reward.components=[{use: judge, args: {service: grm}}]",
            "cluster.pools={all: {devices: 8, roles: [policy, rollout, judge]}}",
            "cluster.engines.gpu_memory_utilization=0.3",
        ),
        EIGHT,
    )
    assert found.time.phases["reward"] > 0
    judging = next(moment for moment in found.ledgers[0].moments if moment.phase == "rollout")
    weights = next(term for term in judging.terms if term.name == "judge: weights")
    assert weights.bytes == 2 * 15_706_484_224


@pytest.mark.parametrize("engine", ["null", "{use: hone}", "{use: hone, max_num_seqs: 64}"])
def test_a_judge_in_hone_s_own_engine_is_planned_as_it_runs(configured, engine):
    """Its cache grows with what is in flight; no share of the device is taken for it."""
    judge = f"services.grm={{policy: qwen2.5-7b, engine: {engine}}}"
    score = "reward.components=[{use: judge, args: {service: grm, prompt_length: 4096, response_length: 1024}}]"
    pools = "cluster.pools={train: {devices: 7, roles: [policy, rollout]}, score: {devices: 1, roles: [judge]}}"
    found = plan(configured(*RAY, judge, score, pools), EIGHT)
    (ledger,) = (one for one in found.ledgers if "score" in one.device)
    terms = {one.name: one.bytes for one in ledger.peak.terms}
    parameters, per_token = 7_615_616_512, 2 * 28 * 4 * 128 * 2
    assert terms["judge: weights"] == 2 * parameters
    assert terms["judge: KV cache"] == 64 * (4096 + 1024) * per_token
    assert (
        sum(terms.values())
        < 0.6 * EIGHT.memory_bytes
        < plan(configured(*RAY, judge.replace(engine, "{}"), score, pools), EIGHT).scoring_bytes
    )
    assert found.time.phases["reward"] > 0


def test_this_machine_is_measured():
    found = this_machine()
    assert found.devices >= 1 and found.memory_bytes > 2**30
    assert found.fp32_flops > 1e9 and found.bandwidth > 1e8
