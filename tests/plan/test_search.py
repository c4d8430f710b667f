"""Presets change memory and speed and never the algorithm; rules name the nearest legal values."""

import textwrap

import pytest

from hone.plan.hardware import find_hardware
from hone.plan.planner import plan
from hone.plan.search import MARGINS, beyond, loss, propose, sampling, training
from hone.plan.settings import changed, setting

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


@pytest.fixture(scope="module")
def today(configured):
    """Qwen3-8B on eight GPUs, with more tokens in a microbatch than fit."""
    return plan(
        configured(*RAY, "train.prompts_per_step=64", "train.tokens_per_microbatch=32768"),
        find_hardware("8xH100-80G"),
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
    inputs = changed(today.inputs, {"train.tokens_per_microbatch": 7, "cluster.engines.gpu_memory_utilization": 0.7})
    assert setting(inputs, "train.tokens_per_microbatch") == 7
    assert setting(inputs, "cluster.engines.gpu_memory_utilization") == 0.7
    assert setting(today.inputs, "cluster.engines.gpu_memory_utilization") is None


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
    found = plan(configured(*RAY, *overrides), find_hardware("8xH100-80G"))
    assert found.verdict.level == "does not fit"
    assert any(message in problem for problem in found.verdict.problems), found.verdict.problems


def test_one_process_says_how_many_devices_would_idle_and_which_section_uses_them(configured):
    alone = plan(configured(), find_hardware("8xH100-80G"))
    assert [ledger.count for ledger in alone.ledgers] == [1, 1] and alone.verdict.level == "does not fit"
    (note,) = (note for note in alone.notes if "idle" in note)
    assert note.startswith("7 of 8 devices would idle")
    snippet = textwrap.dedent(note.partition("To use all of them:\n")[2])
    keys = [f"cluster.{line.strip().replace(': ', '=', 1)}" for line in snippet.splitlines()[1:]]
    together = plan(configured(*keys), find_hardware("8xH100-80G"))
    assert together.inputs.topology.num_devices == 8 and not any("idle" in note for note in together.notes)
