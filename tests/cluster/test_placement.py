"""Placements on this machine, where the run file leaves the number of devices to it."""

import pytest

from hone.config.run import RunConfig
from hone.errors import PlacementError
from hone.services.gpus import topology_here


def run(**cluster) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "a/b"},
            "data": {"train": "a/b"},
            "reward": {"components": [{"use": "exact"}]},
            "cluster": {"backend": "ray", **cluster},
        }
    )


def apart(train: int, sample: int) -> dict:
    return {"train": {"devices": train, "roles": ["policy"]}, "sample": {"devices": sample, "roles": ["rollout"]}}


def test_all_gpus_that_are_found(monkeypatch):
    assert topology_here(run(), list("0123")).num_devices == 4
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert topology_here(run(), []).num_devices == 2
    assert topology_here(run(backend="local"), list("0123")).num_devices == 1


def test_processes_share_the_cores_of_a_machine_without_gpus(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    topology = topology_here(run(pools=apart(2, 3)), [])
    assert (topology.num_devices, topology.devices_per_node) == (5, 5)


def test_what_the_machine_does_not_have_is_told_before_anything_starts():
    with pytest.raises(
        PlacementError, match=r"ask for 4 \+ 2 = 6 devices; .* 1 x 4 = 4. Nearest: cluster.nodes = 2; or"
    ):
        topology_here(run(pools=apart(4, 2)), list("0123"))
    with pytest.raises(PlacementError, match=r"devices_per_node = 8, and this machine has 4 GPUs. Nearest: 4"):
        topology_here(run(devices_per_node=8), list("0123"))
    with pytest.raises(PlacementError, match=r"shard must divide the 4 devices of policy \(got 3\). Nearest: 2 or 4"):
        topology_here(run(trainer={"shard": 3}), list("0123"))


def test_a_cluster_elsewhere_is_taken_at_its_word():
    topology = topology_here(run(nodes=2, devices_per_node=8, address="auto"), [])
    assert (topology.num_devices, topology.trainer.nodes[-1]) == (16, 1)
