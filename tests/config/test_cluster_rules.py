"""One case per rule of a placement: what breaks it, and the nearest placement that a person is told."""

import json

import pytest

from hone.config.load import load_config
from hone.config.rules.placement import CLUSTER_RULES
from hone.config.run import RunConfig
from hone.errors import ConfigError

SHAPE = {"model_type": "qwen3", "num_attention_heads": 12, "num_key_value_heads": 4}
HEAD = {
    "model": {"characters": "01", "init": SHAPE},
    "data": {"train": "x/y", "answer_column": "answer"},
    "reward": {"components": [{"use": "exact"}]},
}
JUDGED = {
    "reward": {"components": [{"use": "judge", "args": {"service": "grm"}}]},
    "services": {"grm": {"policy": "a/b", "engine": {"tensor_parallel_size": 2}}},
}
RATED = {"reward": {"components": [{"use": "reward_model", "args": {"path": "a/b"}}]}}
GAE = {"algorithm": {"credit": "gae"}}


def ray(**keys: object) -> dict:
    return {"cluster": {"backend": "ray", **keys}}


def apart(train: int = 2, sample: int = 2, *, also: tuple[str, ...] = (), **keys: object) -> dict:
    """Trainer and engines on devices of their own."""
    pools = {
        "train": {"devices": train, "roles": ["policy", *also]},
        "sample": {"devices": sample, "roles": ["rollout"]},
    }
    return ray(pools=pools, **keys)


def pools(**sizes: tuple[int, str]) -> dict[str, dict]:
    """Name -> devices and roles, roles in one word."""
    return {name: {"devices": devices, "roles": roles.split()} for name, (devices, roles) in sizes.items()}


BIG = {"algorithm": {"credit": "gae", "kl_loss_coef": 0.01}} | {
    "reward": {"components": [{"use": "reward_model", "args": {"path": "a/b"}}]}
}
ON_48 = {"nodes": 6, "devices_per_node": 8, "address": "auto"}

BROKEN = [
    ({"cluster": {"nodes": 2}}, "cluster.backend: is required with cluster.nodes"),
    (ray() | {"run": {"devices": [0, 1]}}, "run.devices: = [0, 1] is for one process"),
    (ray(nodes=2, devices_per_node=1), "cluster.address: is required with cluster.nodes = 2"),
    (ray(nodes=2, address="auto"), "cluster.devices_per_node: is required with cluster.nodes = 2"),
    (ray(address="ray://head:1"), "cluster.address: must be auto, or host:port (got 'ray://head:1')"),
    (ray(pools=pools(**{"a b": (1, "policy rollout")})), "cluster.pools.a b: must be named with at most 40 letters"),
    (
        ray(pools=pools(all=(8, "policy rollout critic"), more=(8, "critic"))) | GAE,
        "cluster.pools.more.roles: critic is also in all, and every pool has devices of its own: together they would "
        "ask for 16. Leave it in one of them",
    ),
    (ray(pools=pools(all=(1, "policy policy rollout"))), "cluster.pools.all.roles: must name policy once"),
    (
        ray(pools=pools(all=(1, "policy"))),
        "cluster.pools.all.roles: rollout is in no pool, and the run needs it (stage rl samples). Nearest: rollout in "
        "the roles of all",
    ),
    (apart() | GAE, "cluster.pools.train.roles: critic is in no pool, and the run needs it (algorithm.credit = gae)"),
    (apart() | {"algorithm": {"kl_loss_coef": 0.1}}, "reference is in no pool, and the run needs it (a KL coefficient"),
    (
        apart() | {"reward": BIG["reward"]},
        "reward_model is in no pool, and the run needs it (a reward `reward_model` scores on a device)",
    ),
    (
        ray(pools=pools(all=(1, "policy rollout"), critic=(2, "critic"))),
        "cluster.pools.critic.roles: critic: none of its roles is used by this run; its 2 devices would idle",
    ),
    # practice C: the recipe for 48 GPUs, with a reference and a reward model that nobody sized and that got 8 each
    (
        BIG
        | ray(
            pools=pools(
                rollout=(16, "rollout"),
                policy=(16, "policy"),
                critic=(16, "critic"),
                reference=(8, "reference"),
                reward=(8, "reward_model"),
            ),
            **ON_48,
        ),
        "cluster.pools: ask for 16 + 16 + 16 + 8 + 8 = 64 devices; there are nodes x devices_per_node = 6 x 8 = 48. "
        "Nearest: cluster.nodes = 8; or reference and reward_model taking turns in another pool, such as rollout, "
        "instead of reference and reward",
    ),
    # practice C: all of them together, and critic with reward model "besides"
    (
        BIG
        | ray(
            devices_per_node=8,
            pools=pools(all=(8, "policy rollout reference critic reward_model"), besides=(8, "critic reward_model")),
        ),
        "ask for 8 + 8 = 16 devices; there are nodes x devices_per_node = 1 x 8 = 8. Nearest: cluster.nodes = 2; or "
        "critic and reward_model taking turns in another pool, such as all, instead of besides",
    ),
    (
        apart(6, 4, devices_per_node=8),
        "ask for 6 + 4 = 10 devices; there are nodes x devices_per_node = 1 x 8 = 8. Nearest: cluster.nodes = 2; or "
        "cluster.pools.train.devices = 4",
    ),
    (
        apart(6, 2, devices_per_node=8) | {"services": {"grm": {"policy": "a/b", "devices": [7]}}},
        "ask for 6 + 2 + 1 of services = 9 devices",
    ),
    (
        ray(devices_per_node=2) | {"services": {"grm": {"policy": "a/b", "devices": [2]}}},
        "services.grm.devices: must be below cluster.devices_per_node = 2 each (got 2)",
    ),
    (
        ray(devices_per_node=2) | {"services": {"grm": {"policy": "a/b", "devices": [0, 1]}}},
        "services: have all 2 devices, and none is left for the run",
    ),
    (
        apart(6, 2, trainer={"tensor_parallel": 4}),
        "cluster.trainer.tensor_parallel: must divide the 6 devices of policy (got 4). Nearest: 3 or 6",
    ),
    (
        apart(6, 2, trainer={"tensor_parallel": 2, "shard": 2}),
        "cluster.trainer.shard: must divide the 6 devices of policy / tensor_parallel = 3 (got 2). Nearest: 1 or 3",
    ),
    (
        apart(6, 2, trainer={"sequence_parallel": 4}),
        "cluster.trainer.sequence_parallel: must divide the 6 devices of policy (got 4). Nearest: 3 or 6",
    ),
    (
        ray(pools=pools(a=(4, "policy rollout"), c=(2, "critic")), trainer={"shard": 4}) | GAE,
        "cluster.trainer.shard: must divide the 2 devices of critic (got 4). Nearest: 2",
    ),
    (
        apart(2, 6, engines={"use": "vllm", "tensor_parallel_size": 4}),
        "cluster.engines.tensor_parallel_size: must divide the 6 devices of pool sample (got 4). Nearest: 3 or 6; 2 "
        "would idle",
    ),
    (
        JUDGED | ray(pools=pools(a=(1, "policy rollout"), j=(3, "judge"))),
        "services.grm.engine.tensor_parallel_size: must divide the 3 devices of pool j (got 2). Nearest: 1 or 3;",
    ),
    (
        ray(devices_per_node=8, trainer={"tensor_parallel": 8}),
        "cluster.trainer.tensor_parallel: must divide the model's 4 key-value heads (got 8). Nearest: 4",
    ),
    (
        ray(devices_per_node=6, engines={"use": "vllm", "tensor_parallel_size": 3}),
        "cluster.engines.tensor_parallel_size: must divide the model's 4 key-value heads or be a multiple of them (got "
        "3). Nearest: 2 or 4",
    ),
    (
        ray(devices_per_node=8, trainer={"tensor_parallel": 2, "sequence_parallel": 4})
        | {"model": {**HEAD["model"], "implementation": "transformers"}},
        "sequence_parallel: must divide the model's key-value heads / tensor_parallel = 2 (got 4). Nearest: 2",
    ),
    (
        ray(devices_per_node=4, trainer={"tensor_parallel": 2, "compile": True}),
        "cluster.trainer.compile: is for whole layers, and cluster.trainer.tensor_parallel = 2 divides them",
    ),
    (
        ray(
            pools=pools(a=(2, "policy"), b=(4, "rollout"), c=(2, "critic")),
            engines={"use": "vllm", "tensor_parallel_size": 4},
            nodes=2,
            devices_per_node=4,
            address="auto",
        )
        | GAE,
        "cluster.engines.tensor_parallel_size: = 4 puts devices 2 to 5, of pool b, together, and they are on machines "
        "0 and 1, of 4 devices each. Nearest: the pools in the order a, c, b",
    ),
    (
        apart(6, 12, engines={"use": "vllm", "tensor_parallel_size": 6}, nodes=3, devices_per_node=8, address="auto"),
        "Let sizes of pools be multiples of what divides a machine",
    ),
    (
        apart(8, 12, engines={"use": "vllm", "tensor_parallel_size": 12}, nodes=3, devices_per_node=8, address="auto"),
        "cluster.engines.tensor_parallel_size: = 12 is more than a machine has (8). Nearest: 6",
    ),
    (
        apart(4, 2) | {"train": {"samples_per_optimizer_step": 2}},
        "train.samples_per_optimizer_step: must be at least the 4 data-parallel ranks (got 2): 2 would compute "
        "nothing. Nearest: 4; or more cluster.trainer.tensor_parallel",
    ),
    (
        ray(devices_per_node=4) | {"stages": ["sft", "rl"], "sft": {"rows_per_step": 3}},
        "sft.rows_per_step: must be at least the 4 data-parallel ranks (got 3)",
    ),
    (
        ray(devices_per_node=4) | {"rollout": {"max_staleness": 2}},
        "rollout.max_staleness: = 2 lets sampling run ahead, but policy and rollout share their devices",
    ),
    (
        GAE | ray(pools=pools(a=(1, "policy"), b=(1, "rollout critic"))) | {"rollout": {"max_staleness": 2}},
        "rollout.max_staleness: = 2 lets sampling run ahead, but critic and rollout share their devices",
    ),
    (
        GAE
        | ray(pools=pools(a=(2, "policy"), b=(1, "rollout"), c=(8, "critic")))
        | {"train": {"samples_per_optimizer_step": 4}},
        "train.samples_per_optimizer_step: must be at least the 8 data-parallel ranks (got 4): 4 would compute nothing",
    ),
    (
        ray(engines={"use": "vllm"}) | {"rollout": {"compile": True}},
        "rollout.compile: = true compiles Hone's own engine; vllm compiles its own model",
    ),
    (
        ray(engines={"gpu_memory_utilization": 0.9}),
        "cluster.engines.gpu_memory_utilization: is only used by use = vllm",
    ),
    (ray(engines={"max_num_seqs": 1}), "cluster.engines.max_num_seqs: is only used by use = vllm"),
    (
        ray(engines={"tensor_parallel_size": 2}, devices_per_node=2),
        "cluster.engines.tensor_parallel_size: is only used by use =",
    ),
    (
        ray(pools=pools(a=(1, "policy rollout"), j=(1, "judge"))),
        "cluster.pools.j.roles: judge is one service with `policy`, a model that a reward `judge` names (got none). "
        "Add one",
    ),
    (
        JUDGED
        | ray(pools=pools(a=(1, "policy rollout judge")))
        | {"services": {"grm": {"policy": "a/b", "devices": [3]}}},
        "services.grm.devices: contradicts the pool with judge in its roles, where this service runs. Set it to []",
    ),
    (
        JUDGED
        | ray(pools=pools(a=(1, "policy rollout"), j=(1, "judge")))
        | {"services": {"grm": {"policy": "a/b", "port": 8000}}},
        "services.grm.port: = 8000 is of a service beside the run; in pool j every replica takes a free port. Set it "
        "to 0, or take judge out of the roles of j",
    ),
    (
        JUDGED
        | ray(pools=pools(a=(1, "policy rollout"), j=(2, "judge")))
        | {"services": {"grm": {"policy": "a/b", "engine": {"use": "hone", "tensor_parallel_size": 2}}}},
        "services.grm.engine.tensor_parallel_size: = 2, and use = hone is an engine on one device. Set it to 1",
    ),
    (
        JUDGED
        | ray(pools=pools(a=(2, "policy rollout judge")), engines={"use": "vllm", "gpu_memory_utilization": 0.4}),
        "services.grm.engine.gpu_memory_utilization: 0.9 + the policy's engines' 0.4 = 1.3 > 0.9 of each device "
        "of a: the judge scores while the policy's engines sample. Nearest: 0.45 each; or a pool of its own for judge",
    ),
    (
        JUDGED | ray(pools=pools(a=(2, "policy judge"), b=(1, "rollout"))) | {"rollout": {"max_staleness": 1}},
        "rollout.max_staleness: = 1 lets samples be scored while the policy is trained, but judge shares its devices "
        "and sleeps then. Nearest: 0; or a pool of its own for judge",
    ),
    (
        RATED | ray(pools=pools(a=(1, "policy reward_model"), b=(1, "rollout"))) | {"rollout": {"max_staleness": 1}},
        "but reward_model shares its devices and sleeps then",
    ),
    (
        apart(transport="ipc"),
        "= ipc is for a trainer and engines on the same GPUs, and policy and rollout are in pools of their own",
    ),
]
RIGHT = [
    ray(),
    ray(devices_per_node=8),
    apart(),
    apart() | {"rollout": {"max_staleness": 1}},
    apart(4, 4, devices_per_node=8, trainer={"shard": 2}, engines={"use": "vllm", "tensor_parallel_size": 2}),
    ray(devices_per_node=4, trainer={"tensor_parallel": 2, "sequence_parallel": 2}),
    ray(devices_per_node=8, trainer={"tensor_parallel": 2, "sequence_parallel": 4}),
    GAE | apart(also=("critic", "reference")),
    {"cluster": {"backend": "local", "nodes": 2}, "rollout": {"max_staleness": 1}},
    JUDGED | ray(pools=pools(a=(2, "policy rollout"), j=(2, "judge"))),
    JUDGED | ray(pools=pools(a=(2, "policy rollout judge"))),
    JUDGED | ray(pools=pools(a=(2, "policy"), b=(2, "rollout judge"))) | {"rollout": {"max_staleness": 1}},
    JUDGED
    | ray(pools=pools(a=(2, "policy rollout judge")), engines={"use": "vllm", "gpu_memory_utilization": 0.4})
    | {"services": {"grm": {"policy": "a/b", "engine": {"gpu_memory_utilization": 0.5}}}},
    RATED | ray(pools=pools(a=(1, "policy rollout"), r=(2, "reward_model"))) | {"rollout": {"max_staleness": 0}},
    JUDGED | ray(devices_per_node=3) | {"services": {"grm": {"policy": "a/b", "devices": [2]}}},
    BIG
    | ray(
        pools=pools(rollout=(16, "rollout"), policy=(16, "policy reference"), critic=(16, "critic reward_model")),
        **ON_48,
    ),
]


@pytest.fixture
def problems(tmp_path):
    """A function: sections -> problems of the run file that has them."""

    def of(sections: dict) -> list[str]:
        file = tmp_path / "run.yaml"
        file.write_text("".join(f"{name}: {json.dumps(tree)}\n" for name, tree in (HEAD | sections).items()))
        try:
            load_config(file)
        except ConfigError as error:
            return error.problems
        return []

    return of


@pytest.mark.parametrize(("sections", "said"), BROKEN, ids=[said[:50] for _, said in BROKEN])
def test_a_broken_rule_says_what_would_do(problems, sections, said):
    found = problems(sections)
    assert any(said in problem for problem in found), found
    assert all("run.yaml:" in problem for problem in found)


@pytest.mark.parametrize("sections", RIGHT, ids=lambda sections: json.dumps(sections)[:60])
def test_what_can_run_is_let_through(problems, sections):
    assert problems(sections) == []


def test_all_problems_come_at_once(problems):
    divided = {"trainer": {"tensor_parallel": 4}, "engines": {"use": "vllm", "tensor_parallel_size": 2}}
    assert len(problems(apart(6, 5, also=("critic",), devices_per_node=8, **divided) | GAE)) == 3
    assert len(problems(apart(6, 5, devices_per_node=8, **divided) | GAE)) == 2, "sizes wait for roles"


def test_every_rule_has_a_case():
    """A rule that none of the cases breaks is one that may never speak."""
    configs = [RunConfig.model_validate_json(json.dumps(HEAD | sections)) for sections, _ in BROKEN]
    broken = {rule for rule in CLUSTER_RULES if any(True for config in configs for _ in rule(config))}
    assert broken == set(CLUSTER_RULES)
