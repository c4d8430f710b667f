"""One case per cross-field rule: what breaks it, and what a person is told."""

import pytest

from hone.config.rules.engines import ENGINE_RULES
from hone.config.rules.placement import CLUSTER_RULES
from hone.config.rules.rules import RULES
from hone.config.run import RunConfig
from hone.config.yaml_tree import read_yaml

SFT = {"stages": "[sft, rl]"}
NO_RATIO = {"algorithm": "{ratio: none, clip: none}"}


def judge(keys: str) -> dict[str, str]:
    return {"services": f"{{judge: {{{keys}}}}}"}


def init(keys: str) -> dict[str, str]:
    return {"model__init": f"{{model_type: x, {keys}}}"}


BROKEN = [
    ({"model__init": None}, "model.path: is required: a model directory or hub name"),
    ({"model__path": "a/b", "model__characters": None}, "model.path: contradicts model.init"),
    ({"model__init": "{hidden_size: 8}"}, "model.init.model_type: is required, such as qwen3"),
    ({"model__characters": None}, "model.tokenizer: is required with model.init"),
    ({"model__tokenizer": "a/b"}, "model.characters: contradicts model.tokenizer"),
    ({"model__init": None, "model__path": "a/b"}, "model.characters: is for model.init only"),
    (
        {"model__override": "{max_position_embeddings: 9}"},
        "model.override: replaces keys of the config.json in model.path: with model.init, write them there",
    ),
    (
        {
            "model__override": "{model_type: llama}",
            "model__init": None,
            "model__path": "a/b",
            "model__characters": None,
        },
        "model.override.model_type: cannot be replaced",
    ),
    ({"train__activation_checkpointing": "0"}, "must be at least 1 layer, or none, selective or full (got 0)"),
    ({"rollout__kv_cache_tokens": "5"}, "must hold the longest sample"),
    (
        {"run__deterministic": "true", "rollout__max_staleness": "1"},
        "run.deterministic: = true cannot be guaranteed with rollout.max_staleness = 1: which weights "
        "sample a token then depends on",
    ),
    ({"run__name": "a/b"}, "run.name: must be letters, digits, blanks and _ . + = -, at most 128"),
    ({"run__name": "..", "run__dir": "'{name}'"}, "run.name: must be letters"),
    ({"model__characters": "''"}, "model.characters: must hold at least one character"),
    ({"data__template": "'{prompt}'", "data__chat": "true"}, "data.template: contradicts data.chat = true"),
    ({"data__system": "hi"}, "data.system: is only used by a chat template"),
    ({"data__template": "'{{prompt}} { }'"}, "data.template: names no column in braces"),
    (
        {"data__train": "[a/b, {path: c/d, weight: 1}]"},
        "data.train.0.weight: is required, as data.train.1.weight is set: give every source a weight, or none",
    ),
    ({"data__train": "[{path: a/b, weight: 0}]"}, "data.train.0.weight: every weight is 0"),
    ({"data__train": "[]"}, "data.train: names no source"),
    (
        {"data__eval": "[a/b, {path: c/d, weight: 1}]"},
        "data.eval.1.weight: every row of data.eval is used once, so its sources have no weights. Leave it out",
    ),
    (
        {"data__train": "[a/b, {path: c/d, system: hi}]"},
        "data.train.1.system: is only used by a chat template: set data.train.1.chat to true",
    ),
    (
        {"data__train": "[a/b, {path: c/d, template: hi}]", "data__chat": "true"},
        "data.train.1.template: names no column in braces",
    ),
    (
        {"data__train": "[a/b, {path: c/d, chat: true, template: '{q}'}]"},
        "data.train.1.template: contradicts data.train.1.chat = true",
    ),
    ({"data__order": "ascending"}, "data.order_column: is required with data.order = ascending"),
    ({"data__order_column": "level"}, "data.order_column: is only used with data.order = ascending or descending"),
    (
        {
            "data__train": "[{path: a/b, weight: 1}, {path: c/d, weight: 2}]",
            "data__order": "descending",
            "data__order_column": "level",
        },
        "data.order: = descending sorts the rows of all sources together, so weights cannot be used",
    ),
    ({"data__pass_rate_bounds": "[0.9, 0.1]"}, "data.pass_rate_bounds: must be two numbers from 0 to 1"),
    (
        {"stages": "[sft]", "data__order": "pass_rate"},
        "data.order: = pass_rate needs stage rl, which measures pass rates",
    ),
    ({"data__train_rows": "'100'"}, "data.train_rows: must be start:stop as in Python"),
    ({"cluster__env": "{9LIVES: cat}"}, "cluster.env.9LIVES: is not an environment variable's name"),
    (judge("policy: a/b, env: {CUDA_VISIBLE_DEVICES: '0'}"), "services.judge.env.CUDA_VISIBLE_DEVICES: is set by Hone"),
    ({"sft__rows": "a:b"}, "sft.rows: must be start:stop"),
    ({"stages": "[rl, rl]"}, "stages: must name each stage once (got rl, rl)"),
    ({"reward__components": "[]"}, "reward.components: is required for stage rl"),
    ({"reward__components": "[{use: exact, weight: 0}]"}, "reward.components: every weight is 0"),
    ({"data__last_turn": "answer"}, "data.last_turn: answer needs data.chat = true"),
    (SFT | {"data__answer_column": None}, "sft.response_column: is required for stage sft (or data.answer_column)"),
    (
        {"stages": "[sft, reward_model, rl]"},
        "stages: reward_model must come last and without rl (got sft, reward_model, rl)",
    ),
    ({"stages": "[reward_model]"}, "data.eval: is required for stage reward_model: held-out pairs"),
    (
        {"stages": "[sft]", "sft": "{messages_column: talk, response_column: a}"},
        "sft.messages_column: contradicts sft.response_column",
    ),
    (
        {"stages": "[reward_model]", "data__eval": "x/y", "train__tokens_per_microbatch": "2000"},
        "must hold the longest pair of stage reward_model, twice max_prompt_tokens + max_response_tokens",
    ),
    ({"reward__components": "[{use: exact, name: a/b}]"}, "reward.components.0.name: must be letters, digits and _"),
    ({"reward__components": "[{use: exact}, {use: exact}]"}, "components.1.name: 'exact' is also entry 0's name"),
    ({"rollout__environment": "{args: {a: 1}}"}, "rollout.environment.use: is required with rollout.environment.args"),
    (
        {
            "rollout__environment": "{use: 'hone.errors:HoneError'}",
            "reward__components": "[{use: exact, name: environment}]",
        },
        "reward.components.0.name: 'environment' is the name of the environment's own reward",
    ),
    (
        {"observe": "{stop_on: [mismatches]}"},
        "observe.stop_on: has 'mismatches', which is not an alarm. Did you mean mismatch?",
    ),
    ({"services": "{training: {command: [sh, '{port}']}}"}, "services.training: must be named with at most 40 letters"),
    (judge("port: 80"), "services.judge: needs exactly one of reward, policy and command (got none of them)"),
    (judge("policy: a/b, command: [sh, '{port}']"), "(got policy and command). Set the others to null"),
    (judge("command: [sh, serve]"), "services.judge.command: must have {port} in one of its words"),
    (judge("policy: a/b, health: ready"), "services.judge.health: must begin with / (got 'ready'). Nearest: /ready"),
    (
        {"services": "{a: {policy: x/y, port: 8000}, b: {policy: x/y, port: 8000}}"},
        "services.b.port: 8000 is also a's. Set one of them to 0",
    ),
    (
        {"services": "{a: {policy: x/y, devices: [6, 7]}, b: {policy: x/y, devices: [7]}}"},
        "services.b.devices: GPU 7 is also in services.a.devices. A GPU belongs to training or to one service",
    ),
    (
        {"services": "{a: {policy: x/y, devices: [7], engine: {use: vllm}}, b: {policy: x/y, devices: [7]}}"},
        "services.b.devices: GPU 7 is also in services.a.devices",
    ),
    (
        {
            "services": "{a: {policy: x/y, devices: [7], engine: {gpu_memory_utilization: 0.6}}, "
            "b: {policy: x/y, devices: [7], engine: {gpu_memory_utilization: 0.4}}}"
        },
        "services.a.engine.gpu_memory_utilization: on GPU 7: a 0.6 + b 0.4 = 1 > 0.9. Lower them",
    ),
    (
        judge("policy: x/y, devices: [5, 6, 7], engine: {tensor_parallel_size: 2}"),
        "engine.tensor_parallel_size: = 2 must divide the service's GPUs (got 3). Nearest: give it 2",
    ),
    (
        judge("policy: x/y, engine: {enable_chunked_prefill: false, max_model_len: 20480}"),
        "max_num_batched_tokens: must be at least max_model_len (got 8192 < 20480)",
    ),
    (
        judge("policy: x/y, engine: {max_num_batched_tokens: 8}"),
        "engine.max_num_batched_tokens: = 8 < max_num_seqs = 64",
    ),
    (judge("command: [sh, '{port}'], engine: {use: vllm}"), "services.judge.engine: is for a service with `policy`"),
    (
        judge("policy: x/y, devices: [6, 7], engine: {use: hone}"),
        "services.judge.engine.use: = hone is an engine on one device (got 2 GPUs)",
    ),
    (
        judge("policy: x/y, engine: {max_model_len: 18000}")
        | {"reward__components": "[{use: judge, args: {service: judge, prompt_length: 17000, response_length: 2048}}]"},
        "prompt_length 17000 + response_length 2048 + 32 for the chat template = 19080 tokens > its engine's "
        "max_model_len 18000",
    ),
    (
        {"run__devices": "[0, 7]"} | judge("policy: x/y, devices: [7]"),
        "services.judge.devices: GPU 7 is also in run.devices",
    ),
    (judge("policy: x/y, devices: [7, 7]"), "services.judge.devices: must name each GPU once (got [7, 7])"),
    (judge("policy: x/y, devices: [-1]"), "services.judge.devices: must be at least 0 each (got -1)"),
    (
        judge("policy: x/y") | {"reward__components": "[{use: exact, args: {a: {service: judgee}}}]"},
        "reward.components.0.args.a.service: no service is called 'judgee'. Did you mean judge?",
    ),
    (
        {"reward__components": "[{use: exact, args: {service: judge}}]"},
        "args.service: no service is called 'judge'. This file has none; add it there, or give its url",
    ),
    ({"train__samples_per_optimizer_step": "100"}, "x group_size = 32 x 8 = 256 (got 100). Nearest: 64 or 128"),
    ({"train__samples_per_optimizer_step": "999"}, "(got 999). Nearest: 256"),
    (NO_RATIO | {"train__passes_per_batch": "2"}, "train.passes_per_batch: = 2 needs algorithm.ratio = token"),
    (NO_RATIO | {"train__samples_per_optimizer_step": "64"}, "= 64 of 256 makes 4 optimizer steps of an update"),
    ({"algorithm__ratio": "none"}, "algorithm.clip: = ppo bounds a ratio, but algorithm.ratio = none"),
    (
        {"algorithm": "{dual_clip: 3, clip: cispo}"},
        "algorithm.dual_clip: is only used by clip = ppo, clip_cov and tv_mask (got clip = cispo)",
    ),
    ({"algorithm": "{ratio: sequence, clip: geo_mean}"}, "algorithm.ratio: must be token for clip = geo_mean"),
    ({"algorithm__sapo_tau": "[1, 0]"}, "algorithm.sapo_tau: must be above 0 each (got [1.0, 0.0])"),
    ({"algorithm__correction_low": "3"}, "must be below algorithm.correction_high = 2.0 (got 3.0)"),
    ({"rollout__group_size": "1"}, "rollout.group_size: must be at least 2 for algorithm.credit = group_norm (got 1)"),
    ({"algorithm": "{drop_uninformative: true, credit: remax}", "rollout__group_size": "1"}, "(got 1): the one reward"),
    ({"critic__path": "a/b"}, "critic.path: = a/b, but only algorithm.credit = gae in stage rl has a critic"),
    ({"algorithm__credit": "gae", "critic__warmup_updates": "100"}, "must be below run.steps = 100 (got 100)"),
    ({"algorithm": "{kl_loss_coef: 0.1, kl_estimator: k1}"}, "algorithm.kl_estimator: = k1 has no gradient on average"),
    (
        {"algorithm": "{kl_estimator: weighted_k3, kl_reward_coef: 1}"},
        "algorithm.kl_estimator: = weighted_k3 is the KL",
    ),
    ({"algorithm__kl_target": "0.1"}, "algorithm.kl_target: steers one KL coefficient"),
    ({"algorithm": "{kl_loss_coef: 1, kl_reward_coef: 1}"}, "algorithm.kl_loss_coef: is set, and kl_reward_coef too"),
    (
        {"algorithm__reference_refresh_every": "5"},
        "algorithm.reference_refresh_every: = 5, but both KL coefficients are 0",
    ),
    ({"algorithm": "{old_logprobs: sampler, correction: tis}"}, "algorithm.correction: = tis weighs the trainer's"),
    ({"algorithm": "{old_logprobs: sampler, ratio: none, clip: none}"}, "algorithm.old_logprobs: = sampler is what"),
    ({"algorithm__kl_cov": "[0, 1]"}, "algorithm.kl_cov: must be [share, coefficient] with a share between 0 and 1"),
    (
        {"algorithm": "{rejection: token_k1, old_logprobs: sampler, correction: none}"},
        "algorithm.rejection: = token_k1 compares the trainer's old logprobs with the sampler's",
    ),
    ({"algorithm": "{rejection: token_k1, rejection_high: 1}"}, "algorithm.rejection_high: must be above the lower"),
    (
        {
            "algorithm": "{replay_routing: true}",
            "cluster": "{backend: ray, engines: {use: vllm, enable_prefix_caching: false}}",
        },
        "algorithm.replay_routing: = true with vLLM needs its prefix cache",
    ),
    (
        {"algorithm": "{replay_routing: true}", "cluster": "{backend: ray, trainer: {compile: true}}"},
        "algorithm.replay_routing: = true replaces the choice of experts inside of layers",
    ),
    (
        {
            "algorithm": "{load_balancing_coef: 0.1}",
            "cluster": "{backend: ray, trainer: {sequence_parallel: 2}}",
        },
        "algorithm.load_balancing_coef: = 0.1 needs the load of whole sequences",
    ),
    ({"algorithm": "{rejection: token_k2, rejection_low: 1}"}, "algorithm.rejection_low: is only used with k1"),
    (
        {"algorithm": "{credit: gdpo, normalize_rewards: true}"},
        "algorithm.normalize_rewards: shapes the sum of the reward's components, which credit = gdpo does not read",
    ),
    (
        {"algorithm": "{entropy_target: 1, entropy_coef: 2}"},
        "algorithm.entropy_coef: must be from 0 to algorithm.entropy_coef_max = 1",
    ),
    ({"algorithm__clip_cov": "[0.1, 5, 1]"}, "must be [share, low, high] with a share between 0 and 1 and low below"),
    ({"reward__min_valid_per_group": "9"}, "must be at most rollout.group_size = 8 (got 9)"),
    ({"rollout__top_k": "5"}, "rollout.top_k: = 5 samples from a truncated distribution"),
    ({"rollout__top_p": "0.9"}, "rollout.top_p: = 0.9 samples from a truncated distribution"),
    ({"rollout__min_p": "0.1"}, "rollout.min_p: = 0.1 samples from a truncated distribution"),
    (NO_RATIO | {"rollout__top_k": "5"}, "gate.enabled = false"),
    ({"rollout__stop": "['']"}, "rollout.stop: holds an empty text"),
    ({"rollout__stop_token_ids": "[-1]"}, "rollout.stop_token_ids: must be at least 0 each (got -1)"),
    ({"rollout__stop_token_ids": "[9]"} | init("vocab_size: 9"), "must be below the vocabulary's size, 9 (got 9)"),
    ({"train__tokens_per_microbatch": "1000"}, "= 1024 + 256 = 1280 (got 1000). Nearest: 1280"),
    (init("max_position_embeddings: 1200"), "= 1024 + 256 = 1280, exceeds the model's context"),
    (init("max_position_embeddings: 1200"), "rollout.max_response_tokens = 176 or data.max_prompt_tokens = 944"),
    (init("max_position_embeddings: 100"), "100. Lower both"),
    ({"algorithm__reward_clip": "[1, 1]"}, "must be [low, high] with low below high (got [1.0, 1.0])"),
    ({"train__optimizer": "{betas: [0.9, 1.0]}"}, "train.optimizer.betas: must be at least 0 and below 1 each"),
    ({"critic__optimizer": "{betas: [0.9, 1.0]}"}, "critic.optimizer.betas: must be at least 0 and below 1 each"),
    ({"sft__optimizer": "{betas: [-0.1, 0.9]}"}, "sft.optimizer.betas: must be at least 0 and below 1 each"),
    ({"eval__pass_k": "[1, 4]"}, "eval.pass_k: must be between 1 and eval.samples = 1 each (got 4)"),
    ({"eval__temperature": "0", "eval__samples": "4"}, "eval.samples: must be 1 with eval.temperature = 0 (got 4)"),
    ({"eval__every": "5"}, "eval.every: = 5 needs data.eval"),
    ({"checkpoint__best": "eval/acuracy"}, "must be one of eval/accuracy, eval/reward_mean, eval/pass@1, of which"),
    ({"checkpoint__best": "eval/accuracy[a=1]", "eval__by": "b"}, "eval/accuracy[b=...], of which more is better"),
    ({"checkpoint__best": "eval/accuracy"}, "checkpoint.best: = eval/accuracy needs evaluations to choose from"),
    ({"lora__alpha": "8"}, "lora.rank: is required with lora.alpha: without it every weight is trained"),
    ({"lora": "{rank: 4, targets: [q_proj, lm_head]}"}, "lora.targets: may not name lm_head"),
    ({"lora__rank": "4", "model__freeze": "[]"}, "model.freeze: must name vision with an adapter"),
    ({"lora": "{rank: 4, stages: [sft]}"}, "lora.stages: names sft, and this run's stages are rl"),
    ({"lora__rank": "4"}, "lora.stages: includes rl, which starts from random weights (model.init)"),
    (
        SFT | {"lora": "{rank: 4, stages: [rl]}", "algorithm": "{reference_refresh_every: 5, kl_loss_coef: 0.1}"},
        "algorithm.reference_refresh_every: = 5, but with an adapter the reference is its base model",
    ),
    (
        SFT | {"lora": "{rank: 4, stages: [rl], publish: adapter}"},
        "lora.publish: = adapter is for cluster.engines.use = vllm",
    ),
    ({"run__dir": "'runs/{nme}'"}, "run.dir: may hold {name} and no other brace"),
    ({"run__dir": "."}, "run.dir: must be a folder of the run's own"),
    ({"run__dir": "/"}, "run.dir: must be a folder of the run's own"),
    ({"run__dir": "/dev/null"}, "run.dir: /dev/null is a file"),
    ({"run__dir": "/dev/null/runs"}, "run.dir: /dev/null is a file; the run needs a folder there"),
    ({"data__answer_column": None}, "data.answer_column: is required by reward exact"),
]


def test_the_right_file_breaks_no_rule(problems_of):
    assert problems_of() == []


@pytest.mark.parametrize(("changes", "said"), BROKEN, ids=[said[:40] for _, said in BROKEN])
def test_a_broken_rule_says_what_to_do(problems_of, changes, said):
    problems = problems_of(**changes)
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": "[sft]", "reward__components": "[]", "rollout__group_size": "1"},
        {"rollout__top_k": "5", "algorithm": "{ratio: none, clip: none}", "gate__enabled": "false"},
        {"model__init": "{model_type: something_new}"},
        {"data__template": "'Q: {prompt} {{answer}} { }'"},
        {"train__samples_per_optimizer_step": "256", "algorithm": "{ratio: none, clip: none}"},
        {"data__train_rows": "':-100'"},
        SFT | {"lora": "{rank: 4, stages: [rl]}"},
        {"lora": "{rank: 0, alpha: 8}"},
    ],
)
def test_what_is_unusual_and_right_is_let_through(problems_of, changes):
    assert problems_of(**changes) == []


def test_the_run_folder_may_not_hold_the_run_file(folder, problems_of, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert problems_of(run__dir="'{name}/x'") == []
    for path in ("'{name}'", str(folder.parent), f"{folder}/../{folder.name}"):
        assert "run.dir: must be a folder of the run's own" in problems_of(run__dir=path)[0]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("max_num_sequences: 3", "max_num_sequences: unknown key. Did you mean services.judge.engine.max_num_seqs?"),
        ("gpu_memory_utilization: 30", "gpu_memory_utilization: must be above 0 and at most 1 (got 30). Nearest: 1"),
        ("skip_tokenizer_init: true", "skip_tokenizer_init: is set by Hone, which relies on it"),
        ("micro_batch_size_per_gpu: 8", "micro_batch_size_per_gpu: is max_num_seqs"),
    ],
)
def test_an_engines_keys_are_checked(problems_of, engine, said):
    found = problems_of(services=f"{{judge: {{policy: x/y, engine: {{{engine}}}}}}}")
    assert any(f"services.judge.engine.{said}" in problem for problem in found), found


def test_every_rule_has_a_case():
    """A rule that none of the cases wakes is one that may never speak."""
    configs = [config_of(changes) for changes, _ in BROKEN]
    spoken = {rule for config in configs for rule in RULES if list(rule(config))}
    elsewhere = {*CLUSTER_RULES, *ENGINE_RULES}  # these have files of tests of their own
    assert {rule.__name__ for rule in {*RULES} - elsewhere - spoken} == set()


def config_of(changes: dict[str, str | None]) -> RunConfig:
    """The changed run file without its layers and checks of the world outside."""
    data: dict = {
        "model": {"init": {"model_type": "qwen3"}, "characters": "01"},
        "data": {"train": "x/y", "answer_column": "answer"},
        "reward": {"components": [{"use": "exact"}]},
    }
    for name, text in changes.items():
        *parents, key = name.split("__")
        section = data
        for parent in parents:
            section = section.setdefault(parent, {})
        node, _ = read_yaml(text or "null", "")
        section[key] = node.plain() if node else None
    return RunConfig.model_validate(data)
