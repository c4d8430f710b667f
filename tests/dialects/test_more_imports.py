"""Rules of tools that depend on the program or on other files, and defaults of every version."""

import pytest

from hone.cli.main import main
from hone.config.load import load_config
from hone.dialects.foreign import ForeignRun, defaults_of, known_versions
from hone.dialects.reading import TOOLS, read_foreign
from hone.dialects.translate import dialects, find_row, read_row, translate
from hone.dialects.verdict import ForeignJob

BIASED = {
    ("trl", "top_k"),
    ("trl", "router_aux_loss_coef"),
    ("nanochat", "top_k"),
    ("nanochat", "matrix_lr"),
    ("mindspeed", "rl_config.kl_penalty"),
}
"""Defaults that Hone refuses for what they do: a cut distribution, a loss of routers, k1 in a loss, Muon."""


def lines(text: str, name: str = "run.sh") -> dict:
    return {line.key: line.verdict for line in translate(read_foreign(text, name)).lines}


@pytest.mark.parametrize("tool", TOOLS)
def test_no_default_of_a_tool_is_refused(tool):
    """A key that says what the tool does anyway must not stand in the way."""
    dialect = dialects()[tool]
    for version in known_versions(tool):
        foreign = ForeignRun(tool, "x", ())
        job = ForeignJob(foreign, defaults_of(foreign, version), dialect.aliases)
        for key, value in job.defaults.items():
            row = find_row(dialect.rows, key)
            assert row is not None, (version, key)
            if (tool, key) not in BIASED:
                verdict = read_row(job, row, value)
                assert verdict.kind != "refused", (version, key, value, verdict.note)


MINDSPEED = """\
megatron_training: {stage: STAGE, tokenizer_name_or_path: ./m, global_batch_size: 8, data_path: a.jsonl}
actor_config: {lr: 1e-6, save: ./, micro_batch_size: 4}
critic_config: {lr: 5e-6, weight_decay: 0.02, adam_beta1: 0.8, clip_grad: 2.0, lr_decay_style: constant, load: ./c}
rl_config: {adv_estimator: ESTIMATOR, n_samples_per_prompt: 4, MORE}
"""


def mindspeed(stage: str, estimator: str, more: str) -> dict:
    text = MINDSPEED.replace("STAGE", stage).replace("ESTIMATOR", estimator).replace("MORE", more)
    return lines(text, "a.yaml")


def test_dapo_of_mindspeed_has_no_kl():
    found = mindspeed("ray_dapo", "group_norm", "init_kl_coef: 0.05, kl_penalty: kl")
    for key in ("init_kl_coef", "kl_penalty"):
        assert (found[f"rl_config.{key}"].kind, found[f"rl_config.{key}"].settings) == ("automatic", {})
    assert not mindspeed("ray_dapo", "group_norm", "epochs: 1").keys() & {"rl_config.init_kl_coef"}
    grpo = mindspeed("ray_grpo", "group_norm", "init_kl_coef: 0.05, kl_penalty: low_var_kl")
    assert grpo["rl_config.init_kl_coef"].settings == {"algorithm.kl_loss_coef": 0.05}
    assert "of 4 samples" in grpo["loss"].note


def test_the_critic_of_mindspeed_has_an_optimizer_of_its_own():
    ppo = mindspeed("ray_ppo", "gae", "init_kl_coef: 0.05, use_kl_in_reward: false")
    written = {key: value for verdict in ppo.values() for key, value in verdict.settings.items()}
    ours = "critic.optimizer"
    assert (written[f"{ours}.lr"], written[f"{ours}.weight_decay"], written[f"{ours}.grad_clip"]) == (5e-6, 0.02, 2.0)
    assert written[f"{ours}.betas"] == [0.8, 0.999], "Megatron's default"
    assert (written["train.optimizer.weight_decay"], written["train.optimizer.schedule"]) == (0.01, "linear")
    assert written["algorithm.kl_reward_coef"] == 0.0, "use_kl_in_reward is false"
    assert "run.dir" not in written, "./ holds other things"
    assert ppo["critic_config.load"].kind == "placement"
    grpo = mindspeed("ray_grpo", "group_norm", "epochs: 1")
    assert grpo["critic_config.lr"].kind == "automatic" and not grpo["critic_config.lr"].settings


def test_the_ratio_of_asynchronous_verl_is_of_the_sampler():
    more = "data.train_files=gsm8k.parquet actor_rollout_ref.model.path=a/b algorithm.adv_estimator=grpo "
    more += "actor_rollout_ref.rollout.n=4 trainer.total_training_steps=3"
    correction = "algorithm.rollout_correction"
    for program in ("fully_async_policy.fully_async_main", "one_step_off_policy.main_ppo"):
        found = lines(f"python3 -m verl.experimental.{program} {more}")
        assert found[f"{correction}.bypass_mode"].settings == {"algorithm.old_logprobs": "sampler"}
        off = lines(
            f"python3 -m verl.experimental.{program} {more} {correction}.bypass_mode=False "
            "actor_rollout_ref.actor.use_rollout_log_probs=False"
        )
        assert not any("algorithm.old_logprobs" in verdict.settings for verdict in off.values())
        rejects = lines(
            f"python3 -m verl.experimental.{program} {more} {correction}.rollout_rs=token_k1 "
            f"{correction}.rollout_is=token"
        )
        assert rejects[f"{correction}.rollout_rs"].kind == "refused"
        assert rejects[f"{correction}.rollout_is"].settings == {"algorithm.correction": "none"}
    assert f"{correction}.bypass_mode" not in lines(f"python3 -m verl.trainer.main_ppo {more}")


def test_rloo_of_older_trl():
    older = "rloo_k=4, kl_coef=0.1, num_ppo_epochs=2, response_length=64, cliprange=0.3"
    found = lines(f"from trl import RLOOConfig\nRLOOConfig({older}, total_episodes=1000)\n", "a.py")
    assert found["rloo_k"].settings == {"rollout.group_size": 4}
    assert found["kl_coef"].settings["algorithm.kl_reward_coef"] == 0.1
    assert found["num_ppo_epochs"].settings == {"train.passes_per_batch": 2}
    assert found["response_length"].settings == {"rollout.max_response_tokens": 64}
    assert found["cliprange"].settings == {"algorithm.clip_low": 0.3, "algorithm.clip_high": 0.3}
    assert found["total_episodes"].kind == "refused"


def test_a_command_of_trl_reads_its_configuration_file(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    (tmp_path / "grpo.yaml").write_text(
        "model_name_or_path: a/b\ndataset_name: rows.jsonl\nlearning_rate: 1.0e-6\nnum_generations: 4\n"
        "reward_funcs: [accuracy_reward]\nper_device_train_batch_size: 8\nenv: {HF_HOME: x}\n"
    )
    (tmp_path / "run.sh").write_text("trl grpo --config grpo.yaml --learning_rate 3e-6\n")
    main(["import", str(tmp_path / "run.sh"), "--to", str(tmp_path / "run.yaml")])
    assert "grpo.yaml was read too" in capsys.readouterr().out
    config = load_config(tmp_path / "run.yaml", ["data.answer_column=answer"]).config
    assert (config.train.optimizer.lr, config.rollout.group_size, config.model.path) == (3e-6, 4, "a/b")
    found = lines("trl grpo --config missing.yaml --model_name_or_path a/b")
    assert found["config"].kind == "hole"


def test_older_flags_of_openrlhf_have_the_defaults_of_their_version():
    """Since 0.9.10 one `max_len` of 2048 counts; before, each part has a limit of its own."""
    flags = "--pretrain a/b --prompt_data c/d --remote_rm_url r.py --label_key l"
    older = lines(f"python3 -m openrlhf.cli.train_ppo_ray {flags} --prompt_max_len 1024 --generate_max_len 3000")
    assert "data.max_len" not in older
    assert older["generate_max_len"].settings == {"rollout.max_response_tokens": 3000}
    assert translate(read_foreign(f"python3 -m openrlhf.cli.train_ppo_ray {flags}", "a.sh")).version == "0.10.1"


def test_no_before_an_argument_of_trl():
    found = lines("trl grpo --model_name_or_path a/b --no_gradient_checkpointing --no-bf16 --no_remove_unused_columns")
    written = {key: value for verdict in found.values() for key, value in verdict.settings.items()}
    assert "train.activation_checkpointing" not in written and written["run.precision"] == "float32"
    assert not {"gradient_checkpointing", "bf16"} & found.keys(), "not their defaults"
