"""What a row needs and a run cannot give is refused before anything starts: every row against every missing input."""

from dataclasses import dataclass

import pytest

from hone.algo.advantage import CREDIT
from hone.algo.algorithm import Algorithm
from hone.config.algorithm import AlgorithmSection
from hone.config.layers import PRESETS, preset_names
from hone.config.load import load_config
from hone.config.rules.algorithm import NO_SIBLINGS
from hone.config.yaml_tree import read_yaml
from hone.errors import ConfigError

ROWS = [name for name in preset_names() if name.startswith("algorithm/")]


def row_of(name: str) -> AlgorithmSection:
    node, _ = read_yaml((PRESETS / f"{name}.yaml").read_text(), name)
    return AlgorithmSection(**node.plain()["algorithm"])


def needs_of(name: str) -> frozenset[str]:
    return Algorithm(row_of(name), max_response_tokens=8).needs


@dataclass(frozen=True)
class Missing:
    """An input taken away: by which keys, from whom, and what a person is told."""

    keys: tuple[str, ...]
    refused: str
    of: str | None
    """The need that only this input meets; None: every row."""


MISSING = {
    "siblings": Missing(("rollout.group_size=1",), "rollout.group_size: must be at least 2", "siblings"),
    "critic's model": Missing(("critic.path=./nowhere",), "critic.path: ", "values"),
    "updates after the critic's warm-up": Missing(
        ("critic.warmup_updates=9", "run.steps=9"), "critic.warmup_updates: must be below run.steps = 9", "values"
    ),
    "logprobs of what was sampled from": Missing(
        ("rollout.top_k=5", "gate.enabled=false"), "rollout.top_k: = 5 samples from a truncated", "old_logprobs"
    ),
    "rewards": Missing(("reward.components=[]",), "reward.components: is required for stage rl", None),
    "a KL with a gradient": Missing(
        ("algorithm.kl_loss_coef=0.1", "algorithm.kl_reward_coef=0", "algorithm.kl_estimator=k1"),
        "algorithm.kl_estimator: = k1 has no gradient",
        None,
    ),
    "a KL to steer": Missing(
        ("algorithm.kl_target=1", "algorithm.kl_loss_coef=0", "algorithm.kl_reward_coef=0"),
        "algorithm.kl_target: steers one KL coefficient",
        None,
    ),
    "a reference to refresh": Missing(
        ("algorithm.reference_refresh_every=5", "algorithm.kl_loss_coef=0", "algorithm.kl_reward_coef=0"),
        "algorithm.reference_refresh_every: = 5, but both KL coefficients are 0",
        None,
    ),
}


@pytest.fixture
def problems(load, folder):
    """`problems(row, *overrides)` of a run file that extends the row and is right otherwise."""
    load()
    right = (folder / "run.yaml").read_text()

    def of(row: str, *overrides: str) -> list[str]:
        (folder / "run.yaml").write_text(f"extends: {row}\n{right}")
        try:
            load_config(folder / "run.yaml", overrides)
        except ConfigError as error:
            return [problem.partition("  ")[2].strip() for problem in error.problems]
        return []

    return of


@pytest.mark.parametrize("row", ROWS)
def test_a_row_with_all_it_needs_is_let_through(problems, row):
    assert problems(row) == []


@pytest.mark.parametrize("name", MISSING)
@pytest.mark.parametrize("row", ROWS)
def test_a_missing_input_is_refused_where_it_is_needed(problems, row, name):
    missing = MISSING[name]
    found = problems(row, *missing.keys)
    if missing.of is None or missing.of in needs_of(row):
        assert any(problem.startswith(missing.refused) for problem in found), found
    elif missing.of != "values":  # settings of a critic that there is not are refused too, with another message
        assert found == []


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("keys", [("train.passes_per_batch=2",), ("train.samples_per_optimizer_step=64",)])
def test_several_optimizer_steps_are_refused_without_a_ratio(problems, row, keys):
    assert bool(problems(row, *keys)) == ("old_logprobs" not in needs_of(row))


@pytest.mark.parametrize("row", ROWS)
def test_a_critic_is_refused_where_nothing_needs_one(problems, row):
    found = problems(row, "critic.warmup_updates=2")
    assert bool(found) == ("values" not in needs_of(row))
    assert all("critic.warmup_updates: = 2, but only algorithm.credit = gae" in problem for problem in found)


def test_the_rules_know_which_credits_need_siblings():
    assert set(NO_SIBLINGS) == {name for name, entry in CREDIT.items() if "siblings" not in entry.needs}
