"""examples/cluster/kuberay.yaml: its pods have what the run asks for, and its command trains on a Ray that is there."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from raylets import free_port, left_behind, ray_logs, rays_folder, until_open, write_run

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
    page = (ROOT / "docs" / "jobs.md").read_text("utf-8")
    for place in ("image", "entrypoint", "replicas", "nvidia.com/gpu", "claimName", "sizeLimit", "backoffLimit"):
        assert f"`{place}`" in page


@pytest.mark.slow("starts two raylets, and runs on them")
@pytest.mark.timeout(400)
def test_the_entrypoint_trains_on_two_raylets_and_resumes_when_started_again(spec, tmp_path):
    """As the operator does it: Ray on every machine first, then the command with RAY_ADDRESS in its environment."""
    write_run(tmp_path)
    hone, verb, _, resume, _, *settings = shlex.split(spec["entrypoint"])
    settings = [setting for setting in settings if not setting.startswith(("cluster.nodes", "cluster.devices"))]
    settings += ["run.dir=out", "cluster.nodes=2", "cluster.devices_per_node=2"]
    port = free_port()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PATH": path, "OMP_NUM_THREADS": "1"}
    (container,) = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    environment |= {each["name"]: each["value"] for each in container["env"]}
    environment["HOME"] = str(tmp_path)  # as in a new pod, which has no token of Ray's
    start = ["ray", "start", "--num-cpus=2", "--num-gpus=0", "--block"]
    (head,) = [spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]]
    assert head == {}, "the operator's own way to start Ray"
    pods = [[*start, "--head", f"--port={port}", "--include-dashboard=false"], [*start, f"--address=127.0.0.1:{port}"]]
    with rays_folder() as short, open(tmp_path / "pods.log", "w") as log:
        environment["RAY_TMPDIR"] = str(short)
        started = []
        try:
            for pod in pods:
                started.append(subprocess.Popen(pod, env=environment, stdout=log, stderr=log, start_new_session=True))
                until_open(port, started[0], tmp_path / "pods.log")
            environment["RAY_ADDRESS"] = f"127.0.0.1:{port}"
            for steps in (2, 4):
                command = [hone, verb, "run.yaml", resume, *settings, f"run.steps={steps}"]
                done = subprocess.run(
                    command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
                )
                assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}{ray_logs(short)}"
                lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
                assert lines[-1]["step"] == steps
            assert "resuming from" in done.stdout, "the second one goes on"
            assert all(pod.poll() is None for pod in started), "what the run did not start it leaves"
            ours = ("ray::TrainerRank", "ray::EngineActor")
            assert not [command for command in left_behind(short).values() if command.startswith(ours)]
        finally:
            for pod in started:
                pod.kill()
                pod.wait()
