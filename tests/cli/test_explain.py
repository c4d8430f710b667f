import json

import pytest

from hone.cli.explain import as_text, explain_key
from hone.cli.main import main
from hone.config.load import load_config
from hone.config.schema import all_keys


def explain(capsys, *arguments: object) -> str:
    assert main(["explain", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_key_with_every_layer_and_what_derives_from_it(run_file, capsys):
    assert explain(capsys, run_file, "rollout.group_size", "rollout.group_size=8").splitlines() == [
        "rollout.group_size = 8 samples per prompt",
        "  Samples drawn for each prompt (G).",
        "  a whole number, at least 1; default 8",
        "",
        "Set by",
        f"  default{' ' * (len(str(run_file)) - 5)}  8",
        f"  {run_file}:5  16",
        f"> command line{' ' * (len(str(run_file)) - 10)}  8  wins",
        "",
        "Derives",
        "  samples per update = 256 samples  (prompts_per_step x group_size)",
        "  optimizer steps per update = 1 optimizer steps  "
        "(passes_per_batch x prompts_per_step x group_size / samples_per_optimizer_step)",
        "  optimizer steps in all = 100 optimizer steps  "
        "((steps, less critic.warmup_updates with a critic) x optimizer steps per update)",
        "  samples in all = 25600 samples  (steps x prompts_per_step x group_size)",
        "  response tokens per update = 16384 tokens at most  (prompts_per_step x group_size x max_response_tokens)",
    ]


def test_a_preset_and_the_default_are_layers_too(run_file, capsys):
    out = explain(capsys, run_file, "algorithm.clip_high")
    assert "> preset algorithm/dapo:9  0.28  wins" in out
    assert "policy ratio kept in = 0.8 to 1.28" in out
    assert "> default  1.0  wins" in explain(capsys, run_file, "rollout.temperature")


def test_a_required_key_has_no_default(run_file, capsys):
    out = explain(capsys, run_file, "data.train")
    assert "text, or a list of texts and mappings; required" in out
    assert "default" not in out


def test_weights_derive_shares(run_file, capsys):
    sources = "data.train=[{path: a/b, weight: 3}, c/d, {path: a/b, weight: 0, name: twice}]"
    out = explain(capsys, run_file, "data.train", sources, "data.train.1.weight=1")
    assert "shares of the prompts = a/b 75.0%, c/d 25.0%, twice 0.0%" in out
    assert explain(capsys, run_file, "data.train.1.path", sources, "data.train.1.weight=1").startswith(
        "data.train.1.path = c/d\n"
    )


def test_parts_of_a_free_mapping(run_file, capsys):
    out = explain(capsys, run_file, "model.init.hidden_size", "model.init.hidden_size=64")
    assert out.startswith("model.init.hidden_size = 64\n")
    assert "  preset model/qwen3-1m:7  128\n> command line             64  wins" in out
    whole = explain(capsys, run_file, "model.init")
    assert "model.init.head_dim = 32  wins" in whole
    assert "  default " in whole


def test_a_section_and_the_whole_file(run_file, capsys):
    section = explain(capsys, run_file, "rollout")
    assert section.splitlines()[1].split() == ["group_size:", "16", "#", f"{run_file}:5"]
    whole = explain(capsys, run_file)
    assert "  group_size: 16 " in whole
    assert "# preset algorithm/dapo:10" in whole
    assert explain(capsys, run_file, "reward.components") == explain(capsys, run_file, "reward")


def test_json(run_file, capsys):
    data = json.loads(explain(capsys, run_file, "rollout.group_size", "--json"))
    assert (data["value"], data["unit"], data["default"]) == (16, "samples per prompt", 8)
    assert data["layers"][-1] == {"where": f"{run_file}:5", "path": "rollout.group_size", "value": 16, "wins": True}
    assert data["derives"][0]["value"] == 512
    whole = json.loads(explain(capsys, run_file, "--json"))
    assert whole["values"]["rollout"]["group_size"] == 16
    assert whole["origins"]["rollout.group_size"] == f"{run_file}:5"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("rollout.groupsize", "unknown key. Did you mean rollout.group_size?"),
        ("reward.components.7.use", "reward.components.7.use: the run file has no such entry"),
        ("nothing.like.it", "unknown key. The top level has: seed, stages, run"),
        ("lr", "unknown key here. Did you mean train.optimizer.lr or critic.optimizer.lr or sft.optimizer.lr?"),
    ],
)
def test_an_unknown_key(run_file, capsys, key, said):
    assert main(["explain", str(run_file), key]) == 2
    assert said in capsys.readouterr().err


def test_ranks_and_replicas_are_derived(run_file, capsys):
    pools = "cluster.pools={a: {devices: 8, roles: [policy]}, b: {devices: 6, roles: [rollout]}}"
    cluster = [
        "cluster.backend=ray",
        pools,
        "cluster.trainer.shard=2",
        "cluster.engines={use: vllm, tensor_parallel_size: 2}",
    ]
    out = explain(capsys, run_file, "cluster.pools.a.devices", *cluster)
    assert "  trainer = 8 ranks  (devices of the pool with policy)\n" in out
    assert "  copies of weights and states = 4 copies  (trainer ranks / (shard x tensor_parallel))\n" in out
    assert "  engines = 3 replicas" in explain(capsys, run_file, "cluster.engines.tensor_parallel_size", *cluster)
    assert "engines = " not in explain(
        capsys, run_file, "cluster.engines.tensor_parallel_size", "cluster.backend=local"
    )


def test_every_key_can_be_explained(run_file):
    pools = "cluster.pools.gpus={devices: 2, roles: [policy, rollout, reference]}"
    loaded = load_config(run_file, ["services.judge.policy=a/b", "cluster.backend=ray", pools])
    for path, key in all_keys().items():
        concrete = path.replace("services.*", "services.judge").replace("pools.*", "pools.gpus").replace("*", "0")
        assert key.meaning in as_text(explain_key(loaded, concrete))
