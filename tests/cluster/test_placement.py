"""Placements on this machine, where the run file leaves the number of devices to it."""

import pytest

from hone.config.run import RunConfig
from hone.devices import FoundDevices, devices_of_machines
from hone.errors import PlacementError
from hone.services.gpus import topology_on


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


FOUR, CORES = FoundDevices("cuda", "GPU", 4), FoundDevices("cpu", "CPU", 2)


def test_all_gpus_that_are_found():
    assert topology_on(run(), FOUR).num_devices == 4
    assert topology_on(run(), CORES).num_devices == 2
    assert topology_on(run(backend="local"), FOUR).num_devices == 1


def test_processes_share_the_cores_of_a_machine_without_gpus():
    topology = topology_on(run(pools=apart(2, 3)), CORES)
    assert (topology.num_devices, topology.devices_per_node) == (5, 5)


def test_what_the_machine_does_not_have_is_reported_before_anything_starts():
    with pytest.raises(
        PlacementError, match=r"ask for 4 \+ 2 = 6 devices; .* 1 x 4 = 4. Nearest: cluster.nodes = 2; or"
    ):
        topology_on(run(pools=apart(4, 2)), FOUR)
    with pytest.raises(PlacementError, match=r"devices_per_node = 8, and this machine has 4 GPUs. Nearest: 4"):
        topology_on(run(devices_per_node=8), FOUR)
    with pytest.raises(PlacementError, match=r"shard must divide the 4 devices of policy \(got 3\). Nearest: 2 or 4"):
        topology_on(run(trainer={"shard": 3}), FOUR)


def test_a_cluster_elsewhere_is_taken_at_its_word():
    topology = topology_on(run(nodes=2, devices_per_node=8, address="auto"), CORES)
    assert (topology.num_devices, topology.trainer.nodes[-1]) == (16, 1)


GPU_MACHINE, HEAD = {"CPU": 16.0, "GPU": 8.0, "accelerator_type:H100": 1.0}, {"CPU": 4.0}


@pytest.mark.parametrize(
    ("machines", "wanted", "nodes", "found"),
    [
        # a driver on a head node without GPUs starts a run on the GPUs of the others
        ([HEAD, GPU_MACHINE, GPU_MACHINE], "auto", 2, FoundDevices("cuda", "GPU", 8, True)),
        ([GPU_MACHINE, {"CPU": 8.0, "GPU": 4.0}], "cuda", 2, FoundDevices("cuda", "GPU", 4, True)),
        ([HEAD, {"CPU": 96.0, "NPU": 16.0}], "auto", 1, FoundDevices("npu", "NPU", 16, True)),
        ([{"CPU": 8.0, "GPU": 4.0, "accelerator_type:V100": 1.0}], "auto", 1, FoundDevices("cuda", "GPU", 4)),
        ([HEAD, GPU_MACHINE], "cpu", 1, FoundDevices("cpu", "CPU", 16)),
        ([HEAD, HEAD], "auto", 2, FoundDevices("cpu", "CPU", 4)),
    ],
)
def test_the_cluster_s_resources_decide(machines, wanted, nodes, found):
    assert devices_of_machines(machines, wanted, nodes) == found


@pytest.mark.parametrize(
    ("machines", "wanted", "why"),
    [
        ([HEAD], "cuda", r"run.device = cuda: no machine of the Ray cluster has any"),
        ([GPU_MACHINE], "npu", r"run.device = npu: no machine"),
        ([HEAD, {"CPU": 8.0, "TPU": 4.0}], "auto", r"has TPU, which Hone does not know .* say so: run.device = cpu"),
    ],
)
def test_what_the_cluster_does_not_have_is_never_replaced_by_its_cores(machines, wanted, why):
    with pytest.raises(PlacementError, match=why):
        devices_of_machines(machines, wanted, 1)


def test_a_cluster_s_machines_have_fewer_than_the_run_file_says():
    with pytest.raises(PlacementError, match=r"devices_per_node = 8, and the cluster's machines have 4 GPUs. Nearest"):
        topology_on(run(devices_per_node=8, address="head:6379"), FOUR)
