"""`hone import`: what becomes of a command, its exit code, its report; nothing is executed and no secret is kept."""

import json

import pytest

from hone.cli.main import main
from hone.config.load import load_config
from hone.dialects.reading import read_foreign
from hone.dialects.translate import translate
from hone.dialects.writing import run_file_of

VERL = """\
export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567
N=${N:-8}
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 \\
  data.train_files=$HOME/data/gsm8k/train.parquet data.max_response_length=$((2 * 512)) \\
  actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.actor.optim.lr=3e-6 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=$N \\
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.rollout.name=vllm \\
  trainer.n_gpus_per_node=1 trainer.total_epochs=3 trainer.save_freq=20 {more}
"""


def settings(text: str, name: str = "run.sh", version: str | None = None) -> dict:
    return {key: value for key, (value, _) in translate(read_foreign(text, name), version).settings().items()}


def test_a_verl_command(tmp_path):
    (tmp_path / "job.sh").write_text(VERL.replace("{more}", ""))
    assert main(["import", str(tmp_path / "job.sh"), "--to", str(tmp_path / "run.yaml")]) == 0
    text = (tmp_path / "run.yaml").read_text()
    assert "# actor_rollout_ref.actor.optim.lr = 3e-6" in text
    config = load_config(tmp_path / "run.yaml", ["data.train=a/b"]).config
    assert (config.train.prompts_per_step, config.rollout.group_size) == (64, 8)
    assert config.train.samples_per_optimizer_step == 16 * 8, "prompts to samples"
    assert (config.train.optimizer.lr, config.train.optimizer.betas) == (3e-6, (0.9, 0.999))
    assert (config.algorithm.dual_clip, config.algorithm.aggregate) == (3.0, "token_mean"), "verl's defaults"
    assert (config.algorithm.kl_loss_coef, config.algorithm.kl_reward_coef) == (0.001, 0.0)
    assert (config.run.epochs, config.checkpoint.every, config.data.chat) == (3, 20, True)
    assert config.reward.components[0].use == "gsm8k"


def test_exit_code_and_gap_where_it_belongs(tmp_path, capsys):
    job = VERL.replace(
        "{more}", "actor_rollout_ref.rollout.top_p=0.9 trainer.test_freq=$EVERY data.val_files=v.parquet"
    )
    (tmp_path / "job.sh").write_text(job)
    assert main(["import", str(tmp_path / "job.sh"), "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    verdicts = {line["key"]: line["verdict"] for line in found["keys"]}
    assert verdicts["actor_rollout_ref.rollout.top_p"] == "refused"
    assert verdicts["trainer.test_freq"] == "hole"
    rollout = found["text"].split("rollout:")[1].split("algorithm:")[0]
    assert "# top_p: refused: actor_rollout_ref.rollout.top_p = 0.9" in rollout
    assert "# every: hole: trainer.test_freq = <$EVERY>" in found["text"]


def test_no_secret_is_kept(tmp_path, capsys):
    secret = "0123456789abcdef0123456789abcdef01234567"
    flags = (
        f"--use_wandb {secret} --pretrain a/b --prompt_data c/d --remote_rm_url r.py --wandb_project p --label_key l"
    )
    (tmp_path / "a.sh").write_text(f"python3 -m openrlhf.cli.train_ppo_ray {flags}")
    (tmp_path / "b.sh").write_text(
        VERL.replace("{more}", f"trainer.experiment_name={secret} +a.hf_token=hf_{secret[:20]}")
    )
    (tmp_path / "c.py").write_text(f"x = GRPOConfig(hub_token='hf_{secret[:20]}', output_dir='o')")
    for name in ("a.sh", "b.sh", "c.py"):
        for options in ([], ["--json"]):
            assert main(["import", str(tmp_path / name), *options]) in (0, 5)
            said = "".join(capsys.readouterr())
            assert secret not in said and secret[:20] not in said
            assert "[hidden]" in said


@pytest.mark.parametrize(
    ("value", "is_secret"),
    [
        ("dapo_qwen2-7B-math_28k_fsdp2_fully-async_64-64", False),
        ("qwen3_30b_grpo_mindspeed_dummy_2026-01-02", False),
        ("0123456789abcdef0123456789abcdef01234567", True),
        ("abcd-" + "a1B2c3D4" * 5, True),
    ],
)
def test_names_of_runs_are_no_secrets(value, is_secret):
    text = VERL.replace("{more}", f"trainer.experiment_name={value}")
    assert ("run.name" in settings(text)) != is_secret
    assert (value in run_file_of(translate(read_foreign(text, "run.sh")))) != is_secret


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.sh", "ls -l", "no command or configuration"),
        ("x.yaml", "a: 1", "of no tool that is known"),
        ("x.py", "print(1)", "has no GRPOConfig"),
        ("x.py", "def", "is not Python"),
        ("x.toml", "= 1", "is not TOML"),
        ("x.sh", "a\0b", "is not a script"),
    ],
)
def test_what_cannot_be_read(tmp_path, capsys, name, text, message):
    (tmp_path / name).write_text(text)
    assert main(["import", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_an_existing_run_file_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "job.sh").write_text(VERL.replace("{more}", ""))
    (tmp_path / "run.yaml").write_text("mine")
    assert main(["import", str(tmp_path / "job.sh"), "--to", str(tmp_path / "run.yaml")]) == 2
    assert (tmp_path / "run.yaml").read_text() == "mine"


# ---- what the traps of each tool become


def test_openrlhf_kl_is_in_the_reward_unless_the_command_says_otherwise():
    start = "python3 -m openrlhf.cli.train_ppo_ray --pretrain a/b --init_kl_coef 0.02"
    plain, loss = settings(start), settings(f"{start} --use_kl_loss --kl_estimator k3")
    assert plain["algorithm.kl_reward_coef"] == 0.02 and "algorithm.kl_loss_coef" not in plain
    assert loss["algorithm.kl_loss_coef"] == 0.02 and "algorithm.kl_reward_coef" not in loss


def test_openrlhf_flat_and_dotted_flags_mean_the_same():
    flat = "--pretrain a/b --rollout_batch_size 64 --n_samples_per_prompt 4 --train_batch_size 128 --eps_clip 0.3"
    dotted = "--actor.model_name_or_path a/b --rollout.batch_size 64 --rollout.n_samples_per_prompt 4 "
    dotted += "--train.batch_size 128 --actor.eps_clip 0.3"
    one, other = (
        settings(f"python3 -m openrlhf.cli.train_ppo_ray {flags}", version="0.10.2") for flags in (flat, dotted)
    )
    assert one == other
    assert (one["train.prompts_per_step"], one["train.samples_per_optimizer_step"]) == (64, 128)
    assert one["train.optimizer.schedule"] == "cosine" and one["train.optimizer.final_lr_frac"] == 0.1
    assert one["algorithm.reward_clip"] == [-10, 10]


@pytest.mark.parametrize(("probs", "weights"), [("--prompt_data_probs 0.4,0.5,0.1", [0.4, 0.5, 0.1]), ("", None)])
def test_openrlhf_probabilities_are_weights(probs, weights):
    found = settings(f"python3 -m openrlhf.cli.train_ppo_ray --pretrain a/b --prompt_data c/d,e/f,g.jsonl {probs}")
    paths = ["c/d", "e/f", "g.jsonl"]
    entries = [{"path": path, "weight": weight} for path, weight in zip(paths, weights or (), strict=False)]
    assert found["data.train"] == (entries or paths)


def test_openrlhf_probabilities_of_one_data_set_say_nothing_and_of_another_number_are_refused():
    start = "python3 -m openrlhf.cli.train_ppo_ray --pretrain a/b --prompt_data"
    assert settings(f"{start} c/d --prompt_data_probs 1.0")["data.train"] == "c/d"
    one = translate(read_foreign(f"{start} c/d,e/f --prompt_data_probs 1.0", "a.sh"))
    assert "1 weights for 2 data sets" in [line.verdict.note for line in one.gaps]


def test_a_value_that_is_unknown_is_no_hole_where_it_changes_no_result():
    start = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_dynamic_bsz=True"
    keys = "trainer.experiment_name=a_$(date +%m) actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((2 * unset))"
    one = translate(read_foreign(f"{start} {keys} algorithm.adv_estimator=$(x)", "run.sh"))
    found = {line.key: (line.verdict.kind, dict(line.verdict.settings)) for line in one.keys}
    assert found["trainer.experiment_name"] == ("automatic", {})
    assert found["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"][0] == "placement"
    assert found["algorithm.adv_estimator"][0] == "hole"


def test_trl_joins_its_datasets():
    text = "datasets: [{path: a/b, name: main}, {path: c/d}]\nshuffle_dataset: false\nreward_funcs: [r]\n"
    text += "num_generations: 8\nmodel_name_or_path: m/n\n"
    found = settings(text, "grpo.yaml")
    assert found["data.train"] == ["a/b:main", "c/d"] and found["data.order"] == "source"
    found = settings(text.replace("main", "main, split: test"), "grpo.yaml")
    assert found["data.train"] == [{"path": "a/b:main", "split": "test"}, {"path": "c/d", "split": "train"}]


def test_prime_rl_thresholds_are_bounds_of_the_pass_rate():
    text = "[orchestrator]\nbatch_size = 128\ngroup_size = 16\n[orchestrator.buffer]\n"
    found = settings(f"{text}easy_threshold = 0.9\nhard_threshold = 0.1\n", "rl.toml")
    assert (found["data.order"], found["data.pass_rate_bounds"]) == ("pass_rate", [0.1, 0.9])
    one = translate(read_foreign(f"{text}easy_threshold = 0.9\n", "rl.toml"))
    assert "orchestrator.buffer.easy_threshold" in [line.key for line in one.gaps]


def test_prime_rl_ratios_are_weights_of_files_to_be_named():
    sources = "".join(f'[[orchestrator.train.source]]\nname = "{name}"\n' for name in ("math", "code"))
    text = f"[orchestrator]\nbatch_size = 8\n[orchestrator.buffer]\nenv_ratios = [0.7, 0.3]\n{sources}"
    one = translate(read_foreign(text, "rl.toml"))
    weights = [{"path": "???", "name": "math", "weight": 0.7}, {"path": "???", "name": "code", "weight": 0.3}]
    assert one.settings()["data.train"][0] == weights
    assert '- {path: "???", name: math, weight: 0.7}' in run_file_of(one)


@pytest.mark.parametrize(
    ("path", "expected"), [("a.jsonl", "a.jsonl"), ("[a.parquet, b.json]", ["a.parquet", "b.json"]), ("./data", None)]
)
def test_mindspeed_reads_files_that_hone_can_read(path, expected):
    one = translate(read_foreign(f"megatron_training: {{data_path: {path}}}\nactor_config: {{lr: 1.0e-6}}\n", "a.yaml"))
    (line,) = [line for line in one.keys if line.key.endswith("data_path")]
    assert line.verdict.settings == ({"data.train": expected} if expected else {})
    assert expected or "preprocess_data" in line.verdict.note


def test_openrlhf_roles_on_their_own_devices_are_pools():
    flags = " ".join(f"--{role}_num_gpus_per_node 4" for role in ("actor", "critic", "ref", "reward"))
    text = f"python3 -m openrlhf.cli.train_ppo_ray --pretrain a/b --reward_pretrain c/d {flags} --colocate_actor_ref"
    pools = settings(f"{text} --vllm_num_engines 2 --vllm_tensor_parallel_size 2")["cluster.pools"]
    assert pools["policy"] == {"devices": 4, "roles": ["policy", "reference"]}
    assert pools["rollout"] == {"devices": 4, "roles": ["rollout"]}
    assert pools["critic"]["devices"] == pools["reward"]["devices"] == 4


def test_trl_counts_samples_and_optimizer_steps():
    text = "GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=4, num_generations=8, max_steps=100)"
    found = settings(text, "x.py")
    assert found["train.prompts_per_step"] == 4
    assert found["run.steps"] == 100
    twice = settings(text.replace(")", ", steps_per_generation=8)"), "x.py")
    assert (twice["train.prompts_per_step"], twice["train.samples_per_optimizer_step"]) == (8, 32)
    assert twice["run.steps"] == 50, "two optimizer steps per policy update"


def test_trl_defaults_follow_the_version():
    text = "GRPOConfig(output_dir='x')"
    old, new = settings(text, "x.py", "0.14.0"), settings(text, "x.py", "1.0.0")
    assert old["algorithm.kl_loss_coef"] == 0.04 and "algorithm.kl_loss_coef" not in new
    assert new["algorithm.aggregate"] == "token_mean"


def test_trl_in_python_is_read_as_syntax(tmp_path):
    script = """
import argparse, subprocess
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
subprocess.run(["touch", "WITNESS"])
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=2e-6)
args = parser.parse_args()
G = 4 * 2
dataset = load_dataset("trl-lib/tldr", split="train[:500]")
def short(completions, **kwargs):
    return [-len(c) for c in completions]
config = GRPOConfig(output_dir="out", learning_rate=args.lr, num_generations=G, max_completion_length=unknown(),
                    per_device_train_batch_size=G, reward_weights=[0.5])
trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=short, args=config, train_dataset=dataset)
trainer.train()
""".replace("WITNESS", str(tmp_path / "witness"))
    one = translate(read_foreign(script, "grpo.py"))
    found = {key: value for key, (value, _) in one.settings().items()}
    assert found["train.optimizer.lr"] == 2e-6 and found["rollout.group_size"] == 8
    assert found["data.train"] == "trl-lib/tldr" and found["data.train_rows"] == "0:500"
    assert found["model.path"] == "Qwen/Qwen3-0.6B"
    assert found["reward.components"] == [{"use": "grpo_rewards.py:short", "weight": 0.5}]
    assert [line.key for line in one.gaps] == ["max_completion_length"]
    assert not (tmp_path / "witness").exists()


def test_mindspeed_counts_prompts_and_its_data_is_a_gap():
    text = """
defaults: [{model: [qwen25_7b]}]
megatron_training: {tokenizer_name_or_path: ./Qwen2.5-7B, global_batch_size: 32, data_path: ./data, train_iters: 10}
actor_config: {lr: "1e-6", lr_warmup_fraction: 0.1, load: ./ckpt}
rl_config: {adv_estimator: group_norm, mini_batch_size: 16, n_samples_per_prompt: 4, init_kl_coef: 0.001,
  kl_penalty: low_var_kl, verifier_function: [base_acc, format], verifier_weight: [1.0, 0.5]}
"""
    one = translate(read_foreign(text, "grpo.yaml"))
    found = {key: value for key, (value, _) in one.settings().items()}
    assert (found["train.prompts_per_step"], found["train.samples_per_optimizer_step"]) == (32, 64)
    assert found["train.optimizer.lr"] == 1e-6 and found["algorithm.kl_loss_coef"] == 0.001
    assert found["reward.components"] == [{"use": "base_acc"}, {"use": "format", "weight": 0.5}]
    assert [line.key for line in one.gaps] == ["megatron_training.data_path"]
    assert 'train: "???"' in run_file_of(one)


@pytest.mark.parametrize(
    ("method", "expected"), [("block", 12), ("uniform", "full"), (None, "full")], ids=["block", "uniform", "none"]
)
def test_mindspeed_recomputes_the_first_layers_in_blocks(method, expected):
    keys = {"recompute_granularity": "full", "recompute_num_layers": 12}
    keys |= {"recompute_method": method} if method else {}
    text = f"actor_config: {{lr: 1.0e-6, {', '.join(f'{key}: {value}' for key, value in keys.items())}}}\n"
    assert settings(text, "grpo.yaml")["train.activation_checkpointing"] == expected


def test_the_newer_names_of_mindspeed_s_verifiers():
    text = (
        "rl_config: {verifier_function: [acc_for_dapo, math_17k_acc, math_verify_reward], verifier_weight: [1, 1, 2]}\n"
    )
    text += "megatron_training: {global_batch_size: 32}\nactor_config: {lr: 1.0e-6}\n"
    found = settings(text, "dapo.yaml")["reward.components"]
    second = {"use": "math", "name": "math_verify_reward", "weight": 2.0}
    assert found == [{"use": "math_dapo"}, {"use": "math"}, second]


def test_prime_rl_names_what_is_missing():
    text = """
max_steps = 20
[model]
name = "a/b"
[orchestrator]
batch_size = 128
group_size = 16
[[orchestrator.train.source]]
name = "reverse-text"
"""
    one = translate(read_foreign(text, "rl.toml"))
    found = {key: value for key, (value, _) in one.settings().items()}
    assert (found["run.steps"], found["train.prompts_per_step"], found["rollout.group_size"]) == (20, 8, 16)
    assert "orchestrator.train.source[].name" in [line.key for line in one.gaps]


@pytest.mark.parametrize("name", ["verl", "openrlhf", "trl", "mindspeed", "prime-rl"])
def test_tables_name_keys_that_exist(name):
    from hone.config import schema
    from hone.dialects.translate import dialects, find_row

    dialect = dialects()[name]
    known = {*schema.all_keys(), *schema.all_sections(), *(path.removesuffix(".*") for path in schema.all_sections())}
    wrong = {key: row.to for key, row in dialect.rows.items() if not set(row.to) <= known | {"cluster.pools"}}
    assert wrong == {}
    assert all(find_row(dialect.rows, target) for target in dialect.aliases.values())


@pytest.mark.parametrize(
    ("path", "reward"),
    [
        ("gsm8k/train.parquet", "gsm8k"),
        ("dapo-math-17k.parquet", "math_dapo"),
        ("aime-2024.parquet", "math_dapo"),
        ("MATH-lighteval/train.parquet", "math"),
        ("Eurus-2-RL-Data/train.parquet", "prime_math"),
        ("numina_amc_aime.parquet", "prime_math"),
        ("numina_olympiads.parquet", "prime_math"),
        ("geo3k/train.parquet", "geo3k"),
        ("searchR1/train.parquet", None),
    ],
)
def test_the_reward_that_verl_takes_by_data_source(path, reward):
    text = f"python3 -m verl.trainer.main_ppo data.train_files=/data/{path} algorithm.adv_estimator=grpo"
    one = translate(read_foreign(text, "run.sh"))
    found = [line.verdict for line in one.others if line.key == "reward by data_source"]
    assert [verdict.kind for verdict in found] == ["default" if reward else "hole"]
    assert reward is None or found[0].settings["reward.components"] == [{"use": reward}]


def test_trackers_are_named():
    text = 'python3 -m verl.trainer.main_ppo trainer.logger=["console","swanlab","mlflow"] trainer.project_name=p'
    found = settings(text.replace('"', "'"))
    assert (found["observe.swanlab"], found["observe.mlflow"]) == ("p", "p")
    assert "observe.wandb" not in found


def test_a_verl_command_with_pictures_and_a_config_of_its_own():
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    more = (
        f"data.image_key=images trainer.experiment_name='qwen/vl 7b' {actor}.shuffle=True "
        f"+{model}.override_config.max_position_embeddings=32768 "
        f"+{model}.override_config.model_config.rope_scaling.factor=2.0 "
        f"+{model}.override_config.attn_implementation=eager"
    )
    found = settings(VERL.replace("{more}", more))
    assert found["data.image_columns"] == ["images"] and found["model.freeze"] == [], "verl trains the tower"
    assert found["model.override"] == {"max_position_embeddings": 32768, "rope_scaling": {"factor": 2.0}}
    assert found["run.name"] == "qwen-vl 7b" and "run.dir" not in found
    assert "model.freeze" not in settings(VERL.replace("{more}", ""))
    adapter = settings(
        VERL.replace("{more}", f"{model}.lora_rank=8 {model}.lora_adapter_path=a/b data.image_key=images")
    )
    assert (adapter["lora.rank"], adapter["lora.start"]) == (8, "a/b") and "model.freeze" not in adapter


def test_pictures_leave_the_trainers_layers_whole():
    width = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"
    text, sees = VERL.replace("{more}", width), VERL.replace("{more}", f"{width} data.image_key=images")
    assert settings(text)["cluster.trainer.tensor_parallel"] == 4
    assert "cluster.trainer.tensor_parallel" not in settings(sees)
    (line,) = (one for one in translate(read_foreign(sees, "run.sh")).keys if one.key.endswith("parallel_size"))
    assert line.verdict.kind == "placement" and "refused with cluster.trainer.tensor_parallel = 4" in line.verdict.note


def test_names_groups_and_tags():
    flags = "--actor.model_name_or_path a/b --logger.wandb.run_name first --logger.wandb.group seeds"
    found = settings(f"python3 -m openrlhf.cli.train_ppo_ray {flags}")
    assert (found["run.name"], found["run.group"]) == ("first", "seeds")
    toml = '[orchestrator]\nbatch_size = 8\n[monitors.wandb]\nname = "x"\ngroup = "seeds"\ntags = ["a", "b"]\n'
    found = settings(toml, "rl.toml")
    assert (found["run.name"], found["run.group"], found["run.tags"]) == ("x", "seeds", ["a", "b"])
    assert settings("from trl import GRPOConfig\nGRPOConfig(run_name='try 2')\n", "a.py")["run.name"] == "try 2"


def test_losses_and_rejections_of_verl():
    actor, correction = "actor_rollout_ref.actor", "algorithm.rollout_correction"

    def of(more: str) -> dict:
        return settings(VERL.replace("{more}", more))

    found = of(f"{actor}.policy_loss.loss_mode=kl_cov {actor}.policy_loss.kl_cov_ratio=0.002")
    assert (found["algorithm.clip"], found["algorithm.kl_cov"]) == ("kl_cov", [0.002, 0.1])
    found = of(f"{actor}.policy_loss.loss_mode=dppo_tv {actor}.clip_ratio_low=0.15 {actor}.clip_ratio_high=0.2")
    assert (found["algorithm.clip"], found["algorithm.dual_clip"]) == ("tv_mask", 3.0)
    assert (found["algorithm.clip_low"], found["algorithm.clip_high"]) == (0.15, 0.2)
    found = of(f"{correction}.rollout_rs=seq_mean_k1 {correction}.rollout_rs_threshold=0.99_1.001")
    bounds = found["algorithm.rejection_low"], found["algorithm.rejection_high"]
    assert (found["algorithm.rejection"], *bounds) == ("sample_mean_k1", 0.99, 1.001)
    found = of(f"{correction}.rollout_rs=seq_max_k2 {correction}.rollout_rs_threshold=0.4")
    assert (found["algorithm.rejection"], found["algorithm.rejection_high"]) == ("sample_max_k2", 0.4)
    older = of(f"{correction}.rollout_rs=geometric {correction}.rollout_rs_threshold=1.25")
    assert older["algorithm.rejection"] == "sample_mean_k1", "its ratio is the other way round"
    assert (older["algorithm.rejection_low"], older["algorithm.rejection_high"]) == (0.8, 1.25)


def test_entropy_and_several_rewards_of_trl():
    arguments = "top_entropy_quantile=0.2, use_adaptive_entropy=True, entropy_target=0.5, entropy_coef_delta=0.001"
    found = settings(
        f"from trl import GRPOConfig\nGRPOConfig({arguments}, multi_objective_aggregation='normalize_then_sum')\n",
        "a.py",
    )
    assert (found["algorithm.top_entropy_frac"], found["algorithm.entropy_target"]) == (0.2, 0.5)
    assert (found["algorithm.entropy_coef_step"], found["algorithm.credit"]) == (0.001, "gdpo")
    assert "algorithm.entropy_target" not in settings(
        "from trl import GRPOConfig\nGRPOConfig(entropy_target=0.5)\n", "a.py"
    )
