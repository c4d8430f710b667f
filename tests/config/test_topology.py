"""Ranks, replicas and machines, counted on fingers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.config.cluster import Role
from hone.config.run import RunConfig
from hone.config.topology import ROLES, likely_transport, needed_roles, topology_lines, topology_of

APART = {"train": {"devices": 2, "roles": ["policy"]}, "sample": {"devices": 2, "roles": ["rollout"]}}


def run(cluster: dict, **sections: object) -> RunConfig:
    """A run file's tree, without its checks."""
    tree = {
        "model": {"init": {"model_type": "qwen3"}, "characters": "01"},
        "data": {"train": "x/y", "answer_column": "answer"},
        "reward": {"components": [{"use": "exact"}]},
        "cluster": {"backend": "ray", **cluster},
    }
    return RunConfig.model_validate(tree | sections)


def test_without_pools_all_devices_take_turns():
    topology = topology_of(run({"nodes": 2, "devices_per_node": 2, "address": "auto"}))
    assert [(pool.name, pool.roles, pool.devices, pool.nodes) for pool in topology.pools] == [
        ("all", ("policy", "rollout"), (0, 1, 2, 3), (0, 0, 1, 1))
    ]
    assert topology.colocated
    assert (topology.trainer.world_size, topology.trainer.shard, topology.trainer.data_parallel) == (4, 4, 4)
    assert [(engine.name, engine.devices, engine.nodes) for engine in topology.engines] == [
        ("engine-0", (0,), (0,)),
        ("engine-1", (1,), (0,)),
        ("engine-2", (2,), (1,)),
        ("engine-3", (3,), (1,)),
    ]


def test_pools_take_devices_in_their_order():
    topology = topology_of(run({"pools": APART}))
    assert topology.trainer.devices == (0, 1)
    assert [engine.devices for engine in topology.engines] == [(2,), (3,)]
    assert not topology.colocated
    assert topology.devices_per_node == 4
    assert not topology.shares_devices("policy", "critic")


def test_tensor_parallel_is_innermost_and_copies_are_what_is_left():
    settings = {"trainer": {"shard": 2, "tensor_parallel": 2, "sequence_parallel": 2}}
    trainer = topology_of(run({"devices_per_node": 8, **settings})).trainer
    assert (trainer.replicate, trainer.shard, trainer.tensor_parallel) == (2, 2, 2)
    assert trainer.data_parallel == 2


def test_engines_are_devices_over_tensor_parallel():
    engines = {"engines": {"use": "vllm", "tensor_parallel_size": 4}}
    topology = topology_of(run({"devices_per_node": 8, **engines}))
    assert [engine.devices for engine in topology.engines] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_what_was_found_stands_for_what_the_file_leaves_out():
    assert topology_of(run({}), devices_per_node=4).num_devices == 4
    assert topology_of(run({})).num_devices == 1
    assert topology_of(run({"devices_per_node": 2}), devices_per_node=4).num_devices == 2
    assert topology_of(run({"pools": APART}), devices_per_node=3).pools[1].nodes == (0, 1)


def test_one_process_is_one_device():
    topology = topology_of(run({"backend": "local", "devices_per_node": 8}))
    assert (topology.num_devices, topology.colocated, len(topology.engines)) == (1, True, 1)


def test_devices_of_services_are_not_the_runs():
    services = {"judge": {"policy": "a/b", "devices": [0, 3]}}
    topology = topology_of(run({"devices_per_node": 4}, services=services))
    assert topology.pools[0].devices == (0, 1)
    topology = topology_of(run({"nodes": 2, "devices_per_node": 4, "pools": APART}, services=services))
    assert [(pool.devices, pool.nodes) for pool in topology.pools] == [((0, 1), (0, 0)), ((2, 3), (1, 1))]


def test_roles_follow_from_what_the_run_needs():
    assert needed_roles(run({})) == {"policy", "rollout"}
    assert needed_roles(run({}, algorithm={"credit": "gae", "kl_loss_coef": 0.1})) == {
        *("policy", "rollout", "critic", "reference")
    }
    assert needed_roles(run({}, stages=["sft"])) == {"policy"}
    rewards = [{"use": "reward_model", "args": {"path": "a/b"}}]
    assert "reward_model" in needed_roles(run({}, reward={"components": rewards}))
    rewards[0]["args"]["device"] = "cpu"
    assert "reward_model" not in needed_roles(run({}, reward={"components": rewards}))


def test_a_judge_is_a_service_with_a_model_that_rewards_ask():
    sections = {
        "reward": {"components": [{"use": "judge", "args": {"service": "grm"}}]},
        "services": {"grm": {"policy": "a/b"}, "other": {"policy": "a/b"}},
    }
    pools = {
        "train": {"devices": 1, "roles": ["policy", "rollout"]},
        "judge": {"devices": 4, "roles": ["judge"]},
    }
    sections["services"]["grm"]["engine"] = {"tensor_parallel_size": 2}
    topology = topology_of(run({"pools": pools}, **sections))
    assert [(one.name, one.devices) for one in topology.judges] == [("judge-0", (1, 2)), ("judge-1", (3, 4))]
    assert topology_of(run({"pools": pools})).judges == ()
    assert topology_of(run({"devices_per_node": 2}, **sections)).judges == (), "without a pool it stays a service"


def test_a_critic_of_its_own_and_one_on_the_same_ranks():
    gae = {"algorithm": {"credit": "gae", "kl_loss_coef": 0.1}}
    pools = {
        "train": {"devices": 2, "roles": ["policy", "reference", "rollout"]},
        "critic": {"devices": 4, "roles": ["critic"]},
    }
    topology = topology_of(run({"pools": pools}, **gae))
    assert topology.critic and topology.critic.devices == (2, 3, 4, 5)
    assert topology.reference == topology.trainer
    assert topology.apart == {"critic": ("critic",)}
    assert [topology.processes_on(device) for device in range(6)] == [2, 2, 1, 1, 1, 1]
    alone = topology_of(run({"devices_per_node": 2}, **gae))
    assert alone.critic == alone.trainer
    assert alone.apart == {}
    assert topology_of(run({})).critic is None


def test_engines_sleep_for_a_critic_that_has_their_devices():
    pools = {
        "train": {"devices": 1, "roles": ["policy"]},
        "others": {"devices": 2, "roles": ["rollout", "critic", "reference"]},
    }
    topology = topology_of(run({"pools": pools}, algorithm={"credit": "gae", "kl_loss_coef": 0.1}))
    assert topology.sleeps("rollout") and not topology.colocated
    assert topology.apart == {"others": ("critic", "reference")}
    assert [topology.processes_on(device) for device in range(3)] == [1, 2, 2], "critic and reference are one process"
    assert topology_lines(topology)[0] == "placement: 3 of 1 x 3 devices, critic, reference and engines take turns"


SIZES = st.integers(1, 9)


@given(
    sizes=st.lists(st.tuples(SIZES, st.sets(st.sampled_from(ROLES), min_size=1)), max_size=5),
    nodes=st.integers(1, 4),
    per_node=st.none() | SIZES,
    found=st.none() | SIZES,
    shard=st.none() | SIZES,
    ways=st.tuples(SIZES, SIZES, SIZES),
)
def test_any_section_has_a_topology(sizes, nodes, per_node, found, shard, ways):
    """Also those that the rules refuse: rules ask it."""
    tensor, sequence, engine = ways
    pools = {f"pool{number}": {"devices": size, "roles": sorted(roles)} for number, (size, roles) in enumerate(sizes)}
    trainer = {"shard": shard, "tensor_parallel": tensor, "sequence_parallel": sequence}
    section = {"nodes": nodes, "devices_per_node": per_node, "pools": pools, "trainer": trainer}
    topology = topology_of(run({**section, "engines": {"tensor_parallel_size": engine}}), found)
    numbers = [number for pool in topology.pools for number in pool.devices]
    assert sorted(set(numbers)) == numbers, "a device belongs to one pool"
    assert all(len(one.devices) == engine for one in topology.engines)
    held = [number for one in topology.engines for number in one.devices]
    rollout = topology.pool_of("rollout")
    assert len(set(held)) == len(held) == (len(rollout.devices) // engine * engine if rollout else 0)
    group = topology.trainer
    assert group.replicate * group.shard * group.tensor_parallel <= max(group.world_size, group.tensor_parallel)
    for pool in topology.pools:
        assert pool.nodes == tuple(number // topology.devices_per_node for number in pool.devices)


@pytest.mark.parametrize("role", ROLES)
def test_every_role_has_a_word_in_the_run_file(role: Role):
    assert run({"pools": {"a": {"devices": 1, "roles": [role]}}}).cluster.pools["a"].roles == (role,)


@pytest.mark.parametrize(
    ("device", "way"),
    [
        ("cpu", "Ray's object store"),
        ("npu", "Ray's object store"),
        ("cuda", "the memory of their GPU (CUDA IPC)"),
        ("auto", "the memory of their GPU (CUDA IPC); without GPUs Ray's object store"),
    ],
)
def test_every_device_has_a_transport(device, way):
    config = run({"devices_per_node": 2}, run={"device": device})
    assert likely_transport(config, topology_of(config)) == way
