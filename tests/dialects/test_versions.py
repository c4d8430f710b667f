"""What a command means at the version of its tool, and which version its spelling is of."""

import pytest

from hone.dialects.reading import read_foreign
from hone.dialects.translate import Imported, translate

VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=gsm8k.parquet actor_rollout_ref.rollout.n=4 "
    "actor_rollout_ref.model.path=m "
)
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --reward_pretrain r "


def imported(text: str, version: str | None = None, name: str = "run.sh") -> Imported:
    return translate(read_foreign(text, name), version)


def settings(found: Imported) -> dict:
    return {key: value for key, (value, _) in found.settings().items()}


@pytest.mark.parametrize(
    ("version", "given", "temperature", "samples"),
    [
        ("0.9.1", "temperature=1.0", 1.0, 16),
        ("0.6.1", "temperature=1.0", 0.0, None),
        ("0.6.1", "temperature=1.0 actor_rollout_ref.rollout.mode=async", 1.0, 16),
        ("0.9.1", "do_sample=True", 0.0, None),
    ],
)
def test_agent_loops_of_verl_sample_evaluation_without_do_sample(version, given, temperature, samples):
    prefix = "actor_rollout_ref.rollout.val_kwargs."
    found = settings(imported(f"{VERL}{prefix}{given} {prefix}n=16", version))
    assert (found["eval.temperature"], found.get("eval.samples")) == (temperature, samples)


@pytest.mark.parametrize(
    ("loss", "version", "given", "expected"),
    [
        ("gspo", "0.9.0", "token-mean", "sample_mean"),
        ("gspo", "0.9.1", "token-mean", "token_mean"),
        ("gspo", "0.9.1", "seq-mean-token-mean", "sample_mean"),
        ("sapo", "0.9.1", "token-mean", "sample_mean"),
        ("geo_mean", "0.9.1", "token-mean", "sample_mean"),
    ],
)
def test_some_losses_of_verl_have_a_mean_of_their_own(loss, version, given, expected):
    prefix = "actor_rollout_ref.actor."
    found = settings(imported(f"{VERL}{prefix}policy_loss.loss_mode={loss} {prefix}loss_agg_mode={given}", version))
    assert found["algorithm.aggregate"] == expected


@pytest.mark.parametrize(
    ("estimator", "expected"), [("grpo", None), ("rloo", None), ("gae", 0.9), ("reinforce_plus_plus", 0.9)]
)
def test_gamma_of_verl_is_read_by_two_estimators(estimator, expected):
    found = settings(imported(f"{VERL}algorithm.gamma=0.9 algorithm.adv_estimator={estimator}"))
    assert found.get("algorithm.gamma") == expected


def test_a_discount_that_is_not_read_may_be_unknown():
    found = imported(f"{VERL}algorithm.gamma=$GAMMA algorithm.adv_estimator=grpo")
    assert not found.gaps


@pytest.mark.parametrize(
    ("given", "version", "kl", "temperature", "aggregate"),
    [
        ("vllm_device: auto", "0.16.1", 0.04, 0.9, "token_mean"),
        ("max_prompt_length: 512", "0.26.2", None, None, "token_mean"),
        ("max_tool_calling_iterations: 3", "1.16.0", None, None, "token_mean"),
    ],
)
def test_arguments_that_trl_removed_say_its_version(given, version, kl, temperature, aggregate):
    text = f"model_name_or_path: m\ndataset_name: d\nnum_generations: 8\nuse_vllm: true\n{given}\n"
    found = imported(text, name="a.yaml")
    assert found.version == version
    ours = settings(found)
    assert (ours.get("algorithm.kl_loss_coef"), ours.get("rollout.temperature")) == (kl, temperature)
    assert ours["algorithm.aggregate"] == aggregate


def test_the_first_loss_of_trl_was_a_mean_of_means():
    found = settings(imported("model_name_or_path: m\nnum_generations: 8\n", "0.14.0", "a.yaml"))
    assert found["algorithm.aggregate"] == "sample_mean"


def test_no_correction_is_written_where_the_tool_has_none():
    """`auto` corrects in a cluster, which these tools do not unless asked to."""
    assert settings(imported(OPENRLHF))["algorithm.correction"] == "none"
    assert (
        settings(imported("use_vllm: true\nnum_generations: 8\nvllm_device: auto\n", name="a.yaml"))[
            "algorithm.correction"
        ]
        == "none"
    )
    text = "rl_config: {n_samples_per_prompt: 4}\nmegatron_training: {stage: ray_grpo}\n"
    assert settings(imported(text, name="a.yaml"))["algorithm.correction"] == "none"


def test_flags_of_openrlhf_between_two_releases():
    more = "--prompt_max_len 1024 --generate_max_len 8192 --stop_properly_penalty_coef 0.0"
    found = imported(f"{OPENRLHF}{more} --enable_vllm_is_correction --vllm_is_truncated_threshold 0.5 5 --use_icepop")
    assert not found.gaps
    ours = settings(found)
    assert (ours["data.max_prompt_tokens"], ours["rollout.max_response_tokens"]) == (1024, 8192)
    assert (ours["algorithm.correction"], ours["algorithm.correction_high"]) == ("icepop", 5.0)


def test_wandb_of_openrlhf_has_a_project_of_its_own():
    found = imported(f"{OPENRLHF}--use_wandb $WANDB_KEY")
    assert settings(found)["observe.wandb"] == "openrlhf_train_ppo"
    assert "observe.wandb" not in settings(imported(OPENRLHF))


def test_a_key_written_twice_in_a_foreign_file_counts_once():
    found = imported("model_name_or_path: m\nnum_generations: 8\nseed: 1\nseed: 2\n", name="a.yaml")
    assert settings(found)["seed"] == 2
    assert found.foreign.notes == ("seed is written twice: that of line 4 counts, as in the tool",)


OPEN_R1 = """\
model_name_or_path: m
dataset_name: org/data
dataset_prompt_column: problem
system_prompt: Think.
num_generations: 8
overwrite_output_dir: true
reward_funcs: [accuracy, tag_count]
eval_strategy: steps
eval_steps: 100
save_strategy: STRATEGY
num_train_epochs: EPOCHS
parallel_code_exec_per_proc: 2
"""


@pytest.mark.parametrize(
    ("strategy", "epochs", "gap"), [("epoch", 1, False), ("epoch", 3, True), ("no", 3, False), ("steps", 3, False)]
)
def test_a_recipe_of_a_script_on_trl(strategy, epochs, gap):
    found = imported(OPEN_R1.replace("STRATEGY", strategy).replace("EPOCHS", str(epochs)), name="a.yaml")
    ours = settings(found)
    assert (ours["data.prompt_column"], ours["data.system"]) == ("problem", "Think.")
    assert (ours["data.eval"], ours["data.eval_split"], ours["eval.every"]) == ("org/data", "test", 100)
    gaps = {line.key: line.verdict.kind for line in found.gaps}
    assert gaps == {"reward_funcs": "hole", "parallel_code_exec_per_proc": "hole"} | (
        {"save_strategy": "hole"} if gap else {}
    )


def test_a_share_of_a_run_of_known_length_is_counted():
    text = "model_name_or_path: m\nnum_generations: 8\nmax_steps: 250\nsave_steps: 0.1\n"
    assert settings(imported(text, name="a.yaml"))["checkpoint.every"] == 25


def test_what_is_not_known_of_the_devices_is_one_hole_and_hides_nothing():
    command = "python3 -m recipe.one_step_off_policy.main_ppo data.train_files=gsm8k.parquet "
    command += "actor_rollout_ref.model.path=m "
    found = imported(f"{command} actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=grpo trainer.nnodes=$NODES")
    assert [line.key for line in found.gaps] == ["devices"]
    assert "set cluster.nodes" in found.gaps[0].verdict.note
    ours = settings(found)
    assert (ours["rollout.max_staleness"], ours["cluster.engines.use"]) == (1, "vllm")


def test_trl_without_vllm_corrects_nothing_on_several_devices():
    command = "accelerate launch --num_processes 8 x.py --model_name_or_path m --num_generations 8 --beta $BETA"
    ours = settings(imported(command))
    assert (ours["algorithm.correction"], ours["data.chat"]) == ("none", True)


def test_openrlhf_corrects_by_its_ppo_loss_only():
    more = "--vllm_enable_is_correction --vllm_is_truncated_threshold 0.5 5"
    ppo, gspo = (imported(f"{OPENRLHF}{more} --policy_loss_type {loss}", "0.9.10") for loss in ("ppo", "gspo"))
    assert (settings(ppo)["algorithm.correction"], settings(gspo)["algorithm.correction"]) == ("tis", "none")
    line = next(line for line in ppo.lines if "algorithm.correction" in line.verdict.settings)
    assert "weights below 0.5" in line.verdict.note


def test_commas_of_a_list_are_no_part_of_its_names():
    found = imported('trl grpo --model_name_or_path m --use_peft --lora_target_modules "q_proj", "v_proj"')
    assert settings(found)["lora.targets"] == ["q_proj", "v_proj"]


OF_TRL = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser
config, model = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
config.model_init_kwargs = dict(revision=model.model_revision, dtype=getattr(torch, model.dtype))
data = load_dataset("org/math", split="train[:5%]")
GRPOTrainer(model=model.model_name_or_path, args=config, train_dataset=data, reward_funcs=[accuracy_reward])
"""


def test_a_script_of_trl_without_its_command_says_what_to_import():
    found = {line.key: line.verdict for line in imported(OF_TRL, name="x.py").lines}
    assert found["GRPOConfig"].kind == "hole"
    assert "import the command that starts it" in found["GRPOConfig"].note
    share = found["train_dataset"]
    assert (share.kind, share.settings["data.train"]) == ("refused", "org/math")
    assert "data.train_rows" in share.note


def test_the_dtype_of_a_model_need_not_be_known():
    command = "accelerate launch x.py --model_name_or_path m --num_generations 8"
    found = translate(read_foreign(command, "run.sh", script=lambda path: OF_TRL))
    assert "model_init_kwargs" not in {line.key for line in found.gaps}


PRIME_RL = """\
max_steps = 20
[model]
name = "m"
[orchestrator]
batch_size = 128
group_size = 16
[trainer.optim]
lr = 3e-6
betas1 = 0.8
[trainer.loss]
LOSS
[trainer.scheduler]
type = "linear"
warmup_steps = 5
"""


def test_the_loss_of_prime_rl_is_written_out():
    ours = settings(imported(PRIME_RL.replace("LOSS", "dppo_mask_high = 0.3"), name="rl.toml"))
    assert (ours["algorithm.clip"], ours["algorithm.old_logprobs"]) == ("tv_mask", "sampler")
    assert (ours["algorithm.credit"], ours["algorithm.aggregate"]) == ("group_mean", "token_mean")
    assert (ours["algorithm.clip_high"], ours["rollout.max_staleness"]) == (0.3, 1)
    assert ours["train.optimizer.betas"] == [0.8, 0.999]
    assert (ours["train.optimizer.schedule"], ours["train.optimizer.warmup_steps"]) == ("linear", 5)


@pytest.mark.parametrize(
    ("loss", "refused"), [("kl_tau = 0.001", False), ("kl_tau = 0.1", True), ("token_mask_low = 0.5", True)]
)
def test_another_loss_of_prime_rl_is_no_placement(loss, refused):
    found = imported(PRIME_RL.replace("LOSS", loss), name="rl.toml")
    kinds = {line.key: line.verdict.kind for line in found.lines}
    assert (kinds[f"trainer.loss.{loss.split()[0]}"] == "refused") == refused


@pytest.mark.parametrize(
    ("groups", "nodes", "per_node"),
    [
        ("--actor_num_gpus_per_node 4 --ref_num_gpus_per_node 4 --colocate_actor_ref --vllm_num_engines 4", 1, 8),
        ("--actor_num_gpus_per_node 4 --colocate_actor_ref --vllm_num_engines 2", 1, 6),
        ("--actor_num_nodes 4 --actor_num_gpus_per_node 8 --colocate_actor_ref --vllm_num_engines 8", 5, 8),
    ],
)
def test_groups_that_fit_one_machine_are_on_one(groups, nodes, per_node):
    command = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --remote_rm_url r.py"
    ours = settings(imported(f"{command} --advantage_estimator rloo --n_samples_per_prompt 4 {groups}"))
    assert (ours["cluster.nodes"], ours["cluster.devices_per_node"]) == (nodes, per_node)


def test_a_comment_that_ends_a_command_is_named():
    text = f"{VERL}\\\n  # the model \\\n  actor_rollout_ref.model.path=m \\\n  data.seed=3\n"
    found = imported(text)
    assert "data.seed" not in {line.key for line in found.keys}
    assert found.foreign.notes == (
        "line 3: arguments without a program, which no command gets: a comment or a line without \\ ends the one above",
    )
    alone = imported("actor_rollout_ref.model.path=m data.seed=3")
    assert (settings(alone)["seed"], alone.foreign.notes) == (3, ())


def test_a_key_that_becomes_nothing_is_not_called_mapped():
    found = imported("model_name_or_path: m\nnum_generations: 8\nmax_steps: -1\n", name="a.yaml")
    line = next(line for line in found.keys if line.key == "max_steps")
    assert (line.verdict.kind, line.verdict.note) == ("automatic", "off")


def test_a_module_of_trl_is_its_command():
    found = imported("accelerate launch --num_processes 2 -m trl.scripts.grpo --model_name_or_path m --dataset_name d")
    assert (found.foreign.program, {line.key for line in found.gaps}) == ("trl grpo", {"reward_funcs"})
    assert settings(found)["cluster.devices_per_node"] == 2


def test_rloo_with_a_reward_model_is_no_older_version():
    found = imported("trl rloo --model_name_or_path m --dataset_name d --reward_model_name_or_path r")
    assert found.version == "1.16.0"
    assert settings(found).get("train.passes_per_batch", 1) == 1
    assert (
        imported("python x.py --model_name_or_path m --rloo_k 4 --num_ppo_epochs 2 --dataset_name d").version < "0.22"
    )


def test_epochs_of_the_asynchronous_program_are_its_own():
    command = "python3 -m verl.experimental.fully_async_policy.fully_async_main data.train_files=gsm8k.parquet "
    found = imported(f"{command} rollout.total_epochs=10 actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=grpo")
    assert settings(found)["run.epochs"] == 10
    assert "trainer.total_epochs" not in {line.key for line in found.others}


@pytest.mark.parametrize(
    ("text", "name", "gaps"),
    [
        (
            "python3 -m verl.trainer.main_ppo data.train_files=gsm8k.parquet algorithm.adv_estimator=gae",
            "a.sh",
            ["model.path"],
        ),
        ("python3 -m openrlhf.cli.train_ppo_ray --reward_pretrain r", "a.sh", ["model.path", "data.train"]),
        (
            "trl grpo --num_generations 8 --reward_funcs accuracy_reward",
            "a.sh",
            ["train_dataset", "model_name_or_path"],
        ),
        (
            "rl_config: {n_samples_per_prompt: 4, kl_penalty: low_var_kl}",
            "a.yaml",
            ["megatron_training.data_path", "model.path"],
        ),
    ],
)
def test_a_command_without_model_or_data_is_not_complete(text, name, gaps):
    assert [line.key for line in imported(text, name=name).gaps] == gaps


def test_a_template_keeps_its_blanks():
    command = f'{OPENRLHF}--input_template "User: {{}}\\nAssistant: "'
    assert settings(imported(command))["data.template"] == "User: {prompt}\nAssistant: "


@pytest.mark.parametrize(("defaults", "gaps"), [("[ppo_trainer, _self_]", []), ("[ppo_trainer, mine]", ["defaults"])])
def test_the_parts_of_a_hydra_file_are_the_tools_or_holes(defaults, gaps):
    text = f"""\
defaults: {defaults}
data: {{train_files: gsm8k.parquet}}
actor_rollout_ref: {{model: {{path: m}}, rollout: {{n: 4}}}}
algorithm: {{adv_estimator: grpo}}
trainer: {{nnodes: "${{oc.env:NNODES,2}}"}}
"""
    found = imported(text, name="a.yaml")
    assert [line.key for line in found.gaps] == gaps
    assert settings(found)["cluster.nodes"] == 2


def test_a_resolver_without_a_default_is_a_hole():
    found = imported(f"{VERL}algorithm.adv_estimator=grpo 'trainer.nnodes=${{oc.env:NNODES}}'")
    assert [line.key for line in found.gaps] == ["devices"]


@pytest.mark.parametrize(("given", "expected"), [("", 10), ("ppo_mini_batch_size=64", 40), ("ppo_epochs=2", 20)])
def test_warm_up_of_verl_counts_policy_updates(given, expected):
    """Its learning rate changes once per update, after the last mini-batch."""
    prefix = "actor_rollout_ref.actor."
    more = f"{prefix}{given}" if given else ""
    found = imported(
        f"{VERL}data.train_batch_size=256 {prefix}optim.lr_warmup_steps=10 critic.optim.lr_warmup_steps=10 {more}"
    )
    ours = settings(found)
    assert (ours["train.optimizer.warmup_steps"], ours["critic.optimizer.warmup_steps"]) == (expected, expected)


def test_rewards_of_openrlhf_are_normalised_by_the_reward_models_own_scale():
    found = settings(imported(f"{OPENRLHF}--normalize_reward"))
    assert found["reward.components"] == [{"use": "reward_model", "args": {"path": "r", "normalize": True}}]
    assert "algorithm.normalize_rewards" not in found
    remote = imported(f"{OPENRLHF}--normalize_reward --remote_rm_url r.py")
    assert settings(remote)["reward.components"] == [{"use": "r.py:reward_func"}]
