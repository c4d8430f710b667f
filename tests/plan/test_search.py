"""Presets change memory and speed and never the algorithm; rules name the nearest legal values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.plan.hardware import find_hardware
from hone.plan.placement import placement_from
from hone.plan.planner import plan
from hone.plan.rules import nearest_legal
from hone.plan.search import MARGINS, beyond, loss, propose, sampling, training
from hone.plan.settings import changed, setting

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


@pytest.fixture(scope="module")
def today(configured):
    """Qwen3-8B on eight GPUs, with more tokens in a microbatch than fit."""
    return plan(
        configured("train.prompts_per_step=64", "train.tokens_per_microbatch=32768"), find_hardware("8xH100-80G")
    )


@pytest.fixture(scope="module")
def proposals(today):
    return {preset: propose(today, preset) for preset in MARGINS}


@pytest.mark.parametrize("preset", MARGINS)
def test_a_preset_fits_with_its_headroom_and_keeps_the_algorithm(today, proposals, preset):
    found = proposals[preset]
    assert today.verdict.level == "does not fit"
    assert found.plan.verdict.level in ("fits", "tight")
    for ledger in found.plan.ledgers:
        assert ledger.peak.bytes <= (1 - MARGINS[preset]) * ledger.capacity_bytes
    assert found.plan.inputs.workload == today.inputs.workload
    assert found.plan.inputs.config.algorithm == today.inputs.config.algorithm
    for key in ALGORITHM:
        assert setting(found.plan.inputs, key) == setting(today.inputs, key)
    assert all(change.key not in ALGORITHM for change in found.changes)


def test_the_lattice_has_no_key_of_the_algorithm(today):
    assert not {*training(today.inputs), *sampling(today.inputs), *loss(today.inputs)} & set(ALGORITHM)


def test_less_headroom_is_never_slower(proposals):
    seconds = [proposals[preset].plan.time.step_s for preset in ("safe", "recommended", "aggressive")]
    assert seconds[0] >= 0.99 * seconds[1] and seconds[1] >= 0.99 * seconds[2]


def test_every_change_is_needed(proposals):
    """Undone alone, it breaks something, costs time or costs memory; and it says which."""
    found = proposals["recommended"]
    assert found.changes
    for change in found.changes:
        assert change.before != change.after
        assert change.why.startswith("without it") or "shorter steps" in change.why or "freed" in change.why


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
    inputs = changed(today.inputs, {"train.tokens_per_microbatch": 7, "placement.engine.memory_frac": 0.7})
    assert setting(inputs, "train.tokens_per_microbatch") == 7
    assert setting(inputs, "placement.engine.memory_frac") == 0.7
    assert setting(today.inputs, "placement.engine.memory_frac") == 0.5


# ---- rules


@pytest.mark.parametrize(
    ("overrides", "placement", "message"),
    [
        (
            (),
            ["tensor_parallel=3"],
            "placement.tensor_parallel = 3 does not divide the query heads (32). Nearest: 2 or 4.",
        ),
        ((), ["engine.tensor_parallel=6"], "does not divide the query heads (32). Nearest: 4 or 8."),
        ((), ["tensor_parallel=8", "context_parallel=8"], "context_parallel = 8 times tensor_parallel = 8"),
        ((), ["shard=3"], "placement.shard = 3 does not divide the devices (8). Nearest: 2 or 4."),
        (
            ("rollout.max_response_tokens=40000", "train.tokens_per_microbatch=50000"),
            [],
            "but the model has 40960 positions. Take 64 off.",
        ),
        (("rollout.max_staleness=1",), [], "colocated engines sleep while the trainer works"),
        ((), ["engine.max_batched_tokens=100"], "Set it to at least 512."),
        ((), ["mode=separate", "engine_devices=8"], "8 devices are too few"),
        ((), ["engine.memory_frac=0.2"], "At least 0.24 is needed"),
    ],
)
def test_misfits_come_with_a_way_out(configured, overrides, placement, message):
    found = plan(
        configured(*overrides),
        find_hardware("8xH100-80G"),
        placement=placement_from([f"placement.{word}" for word in placement]),
    )
    assert found.verdict.level == "does not fit"
    assert any(message in problem for problem in found.verdict.problems), found.verdict.problems


@given(value=st.integers(1, 300), whole=st.integers(1, 300))
def test_nearest_legal_values_are_legal_and_nearest(value, whole):
    legal = nearest_legal(value, lambda n: whole % n == 0, high=whole)
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    assert set(legal) <= set(divisors)
    assert min(abs(value - n) for n in legal) == min(abs(value - n) for n in divisors)
