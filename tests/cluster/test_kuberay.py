"""examples/cluster/kuberay.yaml: its command is one that Hone understands, and its pods have what the run asks for."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from hone.config.load import load_config
from hone.config.topology import topology_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    manifest = yaml.safe_load((ROOT / "examples/cluster/kuberay.yaml").read_text("utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    return manifest["spec"]


def test_the_entrypoint_is_a_run_and_the_pods_are_its_machines(spec):
    hone, verb, run_file, resume, *settings = shlex.split(spec["entrypoint"])
    assert (hone, verb, resume) == ("hone", "train", "--resume"), "it may be started again, after a failure"
    here = ROOT / "examples" / run_file.partition("/examples/")[2]
    topology = topology_of(load_config(here, settings).config)
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == topology.nodes - 1
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        for kind in ("requests", "limits"):
            assert container["resources"][kind]["nvidia.com/gpu"] == topology.devices_per_node
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/dev/shm", "/shared"} <= mounts
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in group["template"]["spec"]["volumes"]
        }
    assert all(path.startswith("/shared/") for path in (run_file, settings[0].partition("=")[2]))


def test_its_page_names_every_place_to_change(spec):
    page = (ROOT / "docs" / "kubernetes.md").read_text("utf-8")
    for place in ("image", "entrypoint", "replicas", "nvidia.com/gpu", "claimName", "sizeLimit", "backoffLimit"):
        assert f"`{place}`" in page
