"""Presets change memory and speed and never the algorithm; rules name the nearest legal values."""

import textwrap

import pytest

from hone.errors import DataError
from hone.plan.hardware import find_hardware
from hone.plan.inputs import changed, value_of
from hone.plan.knobs import scoring, whole_run
from hone.plan.ledger import gib
from hone.plan.planner import plan, plan_inputs
from hone.plan.search import GOALS, beyond, propose

RAY = ("cluster.backend=ray", "cluster.engines.use=vllm")
ALGORITHM = (
    "train.prompts_per_step",
    "rollout.group_size",
    "train.samples_per_optimizer_step",
    "train.passes_per_batch",
    "rollout.max_response_tokens",
    "data.max_prompt_tokens",
    "run.precision",
    "rollout.max_staleness",
)
EIGHT = find_hardware("8xH100-80G")
SPEED = ("safe", "recommended", "aggressive")


@pytest.fixture(scope="module")
def today(configured):
    """Qwen3-8B on eight GPUs, with more tokens in a microbatch than fit."""
    return plan(
        configured(*RAY, "train.prompts_per_step=64", "train.tokens_per_microbatch=32768"),
        EIGHT,
    )


@pytest.fixture(scope="module")
def proposals(today):
    return {preset: propose(today, preset) for preset in SPEED}


@pytest.mark.slow("searches for three presets")
@pytest.mark.parametrize("preset", SPEED)
def test_a_preset_fits_with_its_headroom_and_keeps_the_algorithm(today, proposals, preset):
    found = proposals[preset]
    assert today.verdict.level == "does not fit"
    assert found.plan.verdict.level in ("fits", "tight")
    for ledger in found.plan.ledgers:
        assert ledger.peak.bytes <= (1 - GOALS[preset].headroom) * ledger.capacity_bytes
    assert found.plan.inputs.workload == today.inputs.workload
    assert found.plan.inputs.config.algorithm == today.inputs.config.algorithm
    for key in ALGORITHM:
        assert value_of(found.plan.inputs.config, key) == value_of(today.inputs.config, key)
    assert all(change.key not in ALGORITHM for change in found.changes)


def test_the_lattice_has_no_key_of_the_algorithm(today):
    assert not {key for block in whole_run(today.inputs) for key in block} & set(ALGORITHM)


@pytest.mark.slow("searches for three presets")
def test_less_headroom_is_never_slower(proposals):
    seconds = [proposals[preset].plan.time.step_s for preset in ("safe", "recommended", "aggressive")]
    assert seconds[0] >= 0.99 * seconds[1] and seconds[1] >= 0.99 * seconds[2]


@pytest.mark.slow("searches for three presets")
def test_every_change_is_needed(proposals):
    """Undone alone, it breaks something, costs time or costs memory; and it says which."""
    best = proposals["recommended"].plan
    assert proposals["recommended"].changes
    for change in proposals["recommended"].changes:
        assert change.before != change.after
        undone = plan_inputs(changed(best.inputs, {change.key: change.before}))
        if change.why.startswith("without it: "):
            assert change.why.removeprefix("without it: ") in undone.verdict.problems
            assert len(undone.verdict.problems) > len(best.verdict.problems)
        elif change.why.startswith("without it "):
            assert undone.impossible(GOALS["recommended"].headroom) > 0
        elif "shorter steps" in change.why:
            assert undone.time.step_s > 1.01 * best.time.step_s
        else:
            assert "freed, at the same speed" in change.why
            assert undone.memory_utilisation > best.memory_utilisation


def test_what_stays_broken_is_no_reason_for_a_change(configured):
    """A model that no settings fit: each reason is about the change."""
    found = propose(plan(configured("model.path=qwen2.5-32b"), find_hardware("RTX4090")), "recommended")
    assert found.plan.verdict.level == "does not fit" and found.changes
    for change in found.changes:
        assert not any(problem in change.why for problem in found.plan.verdict.problems)
        phases = [f"{one.peak.phase} would take {gib(one.peak.bytes)}" for one in found.plan.ledgers]
        assert not any(phase in change.why for phase in phases), "it takes as much with the change"


def test_what_the_command_line_sets_stays(today):
    pinned = frozenset(["train.tokens_per_microbatch"])
    found = propose(today, "recommended", pinned=pinned)
    assert all(change.key not in pinned for change in found.changes)


def test_one_process_is_searched_too(configured):
    today = plan(
        configured("model.path=Qwen/Qwen3-0.6B", "train.tokens_per_microbatch=65536"), find_hardware("RTX4090")
    )
    found = propose(today, "safe")
    assert today.verdict.level == "does not fit" and found.plan.verdict.level == "fits"
    assert {change.key.partition(".")[0] for change in found.changes} <= {"train", "rollout"}


def test_what_would_change_the_algorithm_is_only_said(today):
    lines = beyond(today)
    assert any("train.prompts_per_step" in line and "half as many updates" in line for line in lines)


def test_settings_round_trip(today):
    inputs = changed(today.inputs, {"train.tokens_per_microbatch": 7, "cluster.engines.gpu_memory_utilization": 0.7})
    assert value_of(inputs.config, "train.tokens_per_microbatch") == 7
    assert value_of(inputs.config, "cluster.engines.gpu_memory_utilization") == 0.7
    assert value_of(today.inputs.config, "cluster.engines.gpu_memory_utilization") is None


# ---- judges and reward models

POOLS = "cluster.pools={train: {devices: 4, roles: [policy, rollout]}, score: {devices: 4, roles: [judge]}}"
JUDGE = (
    "services.grm={policy: qwen2.5-7b, engine: {}}",
    "reward.components=[{use: judge, args: {service: grm, prompt_length: 4096, response_length: 1024}}]",
)


@pytest.fixture(scope="module")
def judged(configured, vllm_program):
    """Qwen3-8B with a judge of 7B on half of eight GPUs."""
    return plan(
        configured(*RAY, *JUDGE, POOLS, "train.activation_checkpointing=full", "train.tokens_per_microbatch=4096"),
        EIGHT,
    )


SCORING = ("throughput", "latency", "memory")


@pytest.fixture(scope="module")
def tuned(judged, vllm_program):
    return {preset: propose(judged, preset) for preset in SCORING}


@pytest.mark.slow("searches placements")
@pytest.mark.parametrize("preset", SCORING)
def test_a_preset_of_judges_reaches_its_goal_within_its_bounds(judged, tuned, preset):
    found, goal = tuned[preset], GOALS[preset]
    assert judged.verdict.level == "tight" and found.plan.verdict.level == "fits"
    assert goal.of(found.plan) < 0.9 * goal.of(judged)
    assert goal.of(found.plan) == min(goal.of(other.plan) for other in tuned.values())
    assert found.plan.time.step_s <= (1 + goal.slowdown) * judged.time.step_s
    searched = {key.partition(".pools")[0] for block in scoring(judged.inputs) for key in block}
    assert {change.key.partition(".pools")[0] for change in found.changes} <= searched


@pytest.mark.slow("searches placements")
def test_more_devices_go_to_the_pool_that_a_step_waits_for(configured, vllm_program):
    heavy = ("services.grm={policy: qwen2.5-32b, engine: {tensor_parallel_size: 2}}", JUDGE[1])
    few = "cluster.pools={train: {devices: 6, roles: [policy, rollout]}, score: {devices: 2, roles: [judge]}}"
    small = ("model.path=Qwen/Qwen3-0.6B", "rollout.max_response_tokens=512")
    today = plan(configured(*RAY, *heavy, few, *small), EIGHT)
    found = propose(today, "recommended")
    sizes = {change.key: (change.before, change.after) for change in found.changes if ".pools." in change.key}
    assert sizes == {"cluster.pools.train.devices": (6, 2), "cluster.pools.score.devices": (2, 6)}
    assert found.plan.time.phases["reward"] < 0.6 * today.time.phases["reward"]


def test_a_pool_of_reward_models_shrinks_to_what_a_step_needs(configured):
    """A reward model of 0.6B reads what a policy of 8B writes many times faster than that is written."""
    pools = "cluster.pools={train: {devices: 4, roles: [policy, rollout]}, score: {devices: 4, roles: [reward_model]}}"
    component = "reward.components=[{use: reward_model, args: {path: Qwen/Qwen3-0.6B}}]"
    today = plan(configured(*RAY, component, pools), EIGHT)
    found = propose(today, "memory")
    assert found.plan.inputs.config.cluster.pools["score"].devices == 1
    assert found.plan.scoring_bytes == today.scoring_bytes / 4


def test_a_reward_model_is_planned_with_its_batch(configured):
    pools = "cluster.pools={train: {devices: 4, roles: [policy, rollout]}, score: {devices: 4, roles: [reward_model]}}"
    component = "reward.components=[{{use: reward_model, args: {{path: Qwen/Qwen3-8B{}}}}}]"
    sizes = [
        plan(configured(*RAY, pools, component.format(more)), EIGHT).scoring_bytes
        for more in (", batch_tokens: 8192", "", ", batch_tokens: 16384", ", batch_tokens: 32768")
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[1] == sizes[2] < sizes[3]


def test_a_judge_takes_time_for_every_vote(configured):
    one, four = (
        plan(configured(*RAY, JUDGE[0], JUDGE[1].replace("service:", f"votes: {n}, service:"), POOLS), EIGHT).time
        for n in (1, 4)
    )
    assert 2 * one.phases["reward"] < four.phases["reward"] < 4 * one.phases["reward"], "the prompt is read once"


def test_a_preset_of_judges_needs_one(today):
    with pytest.raises(DataError, match="--preset latency is for judges and reward models"):
        propose(today, "latency")


# ---- rules


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("cluster.trainer.tensor_parallel=16", "cluster.devices_per_node=16"),
            "8 key-value heads (got 16). Nearest: 8",
        ),
        (
            ("cluster.engines.tensor_parallel_size=5", "cluster.devices_per_node=5"),
            "32 query heads (got 5). Nearest: 4 or 8",
        ),
        (
            ("rollout.max_response_tokens=40000", "train.tokens_per_microbatch=50000"),
            "but the model has 40960 positions. Take 64 off.",
        ),
        (
            ("cluster.trainer.shard=3",),
            "cluster.trainer.shard: must divide the 8 devices of policy (got 3). Nearest: 2 or 4",
        ),
        (("cluster.pools={all: {devices: 16, roles: [policy, rollout]}}",), "have 16 devices, and 8 x H100-80G are"),
        (("cluster.engines.gpu_memory_utilization=0.2",), "At least 0.25 is needed"),
    ],
)
def test_violations_come_with_a_cure(configured, overrides, message):
    """Rules that need a model of a hub name, or devices of `--hardware`, which a run file need not say."""
    found = plan(configured(*RAY, *overrides), EIGHT)
    assert found.verdict.level == "does not fit"
    assert any(message in problem for problem in found.verdict.problems), found.verdict.problems


def test_one_process_says_how_many_devices_would_idle_and_which_section_uses_them(configured):
    alone = plan(configured(), EIGHT)
    assert [ledger.count for ledger in alone.ledgers] == [1, 1] and alone.verdict.level == "does not fit"
    (note,) = (note for note in alone.notes if "idle" in note)
    assert note.startswith("7 of 8 devices would idle")
    snippet = textwrap.dedent(note.partition("To use all of them:\n")[2])
    keys = [f"cluster.{line.strip().replace(': ', '=', 1)}" for line in snippet.splitlines()[1:]]
    together = plan(configured(*keys), EIGHT)
    assert together.inputs.topology.num_devices == 8 and not any("idle" in note for note in together.notes)
