"""Keys of other tools that are typed into a run file or on the command line by habit get their counterpart."""

import pytest

from hone.config.load import load_config
from hone.config.messages import OTHER_NAMES, foreign_names, unknown_key
from hone.errors import ConfigError
from hone.tools.foreign_names import FILE, foreign_names_text


def test_the_file_is_made_from_the_tables():
    assert FILE.read_text("utf-8") == foreign_names_text()


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("data.train_batch_size", "train.prompts_per_step"),
        ("algorithm.adv_estimator", "algorithm.credit"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_reward_coef"),
        ("init_kl_coef", "algorithm.kl_reward_coef"),
        ("train.adv_estimator", "algorithm.credit"),
        ("num_generations", "rollout.group_size"),
    ],
)
def test_a_key_by_habit(path, ours):
    assert ours in unknown_key(path)


def test_kl_in_the_reward_is_never_called_kl_in_the_loss():
    assert OTHER_NAMES["init_kl_coef"] == OTHER_NAMES["kl_coef"] == "algorithm.kl_reward_coef"


@pytest.mark.parametrize("on_command_line", [True, False])
def test_a_whole_section_by_habit(tmp_path, on_command_line):
    text = "model: {path: a/b}\ndata: {train: a/b, answer_column: a}\nreward: {components: [{use: exact}]}\n"
    foreign = "actor_rollout_ref: {actor: {optim: {lr: 1.0e-6}}}\n"
    (tmp_path / "run.yaml").write_text(text if on_command_line else text + foreign)
    words = ["actor_rollout_ref.actor.optim.lr=1e-6"] if on_command_line else []
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.actor\.optim\.lr is train\.optimizer\.lr"):
        load_config(tmp_path / "run.yaml", words)


def test_every_name_is_of_another_tool():
    assert len(foreign_names()) > 500
