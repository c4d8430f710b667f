"""PPO with everything that is carried along, through the whole program: stopped and resumed it is the same run."""

import json

import pytest
from tiny import metrics_of, weights_of, write_run

from hone.cli.main import main

PPO = [
    "algorithm.credit=gae",
    "algorithm.aggregate=token_mean",
    "algorithm.kl_loss_coef=0",
    "algorithm.kl_reward_coef=0.05",
    "algorithm.kl_estimator=k1",
    "algorithm.kl_target=0.02",
    "algorithm.kl_horizon_samples=200",
    "algorithm.reference_refresh_every=2",
    "algorithm.normalize_rewards=true",
    "train.samples_per_optimizer_step=16",
    "critic.optimizer.lr=1e-3",
    "critic.warmup_updates=1",
]


def train(folder, *arguments, settings=PPO, steps=5):
    return main(["train", str(write_run(folder, steps=steps)), *settings, *arguments])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    assert train(folder) == 0
    return folder


def test_ppo_logs_its_critic_and_its_controller(uninterrupted):
    steps = [line for line in metrics_of(uninterrupted) if "rollout/reward_mean" in line]
    assert len(steps) == 5
    assert all("critic/loss" in line and "train/kl_ref_sequence" in line for line in steps)
    assert ["train/loss" in line for line in steps] == [False, True, True, True, True]
    coefs = [line["train/kl_coef"] for line in steps]
    assert coefs[0] == 0.05
    assert len(set(coefs)) > 2, "the controller moved it"
    assert steps[1]["train/kl_ref"] == steps[0]["train/kl_ref"] == 0, "the policy has not moved"


def test_resuming_ppo_changes_nothing(uninterrupted, tmp_path):
    """The last checkpoint is torn, so the run goes on from update 4: after a refresh, with the coefficient moved."""
    assert train(tmp_path) == 0
    newest = tmp_path / "run" / "checkpoints" / "step-000005" / "state.json"
    newest.write_bytes(newest.read_bytes()[:-7])
    before = json.loads((newest.parents[1] / "step-000004" / "state.json").read_text())["progress"]["control"]
    assert before["kl_coef"] not in (None, 0.05)
    assert before["reward_count"] == 4 * 8 * 4
    assert train(tmp_path, "--resume") == 0
    assert "step-000004" in (tmp_path / "run" / "logs" / "training.log").read_text()
    assert weights_of(tmp_path) == weights_of(uninterrupted)
    assert metrics_of(tmp_path) == metrics_of(uninterrupted)


NO_KL = "algorithm.kl_loss_coef=0"
ROWS = {
    "remax": ["algorithm.credit=remax", "rollout.group_size=1", NO_KL],
    "reinforce_pp": ["algorithm.credit=reinforce_pp", "rollout.group_size=1", "algorithm.kl_reward_coef=0.01", NO_KL],
    "stale": ["algorithm.clip=clip_cov", "rollout.max_staleness=1"],
    "components": [
        "algorithm.credit=gdpo",
        "algorithm.clip=kl_cov",
        "algorithm.rejection=sample_max_k3",
        "algorithm.top_entropy_frac=0.5",
        "algorithm.entropy_target=100",
        "reward.components=[{use: exact}, {use: exact, name: again, weight: 0.5}]",
    ],
    "bypass": ["algorithm.old_logprobs=sampler", "rollout.max_staleness=1", "algorithm.truncated_reward_factor=0.5"],
}
MORE = pytest.mark.slow("a run for each row")


@pytest.mark.parametrize("name", [name if name == "stale" else pytest.param(name, marks=MORE) for name in ROWS])
def test_a_row_runs_and_only_stale_samples_are_corrected(tmp_path, name):
    assert train(tmp_path, settings=ROWS[name], steps=2) == 0
    last = [line for line in metrics_of(tmp_path) if "train/loss" in line][-1]
    assert abs(last["train/loss"]) < 10
    assert ("train/correction_mean" in last) == (name == "stale")
    if name == "components":
        assert (last["train/rejected_frac"], last["train/entropy_coef"]) == (0.0, 0.005), "sampler and trainer agree"
