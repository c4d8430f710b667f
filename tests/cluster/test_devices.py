"""Which GPUs training and services see, from what the run file says and what this process may see."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hone.cluster import service_host
from hone.config.run import RunConfig
from hone.devices import (
    AMD,
    ASCEND,
    NVIDIA,
    FoundDevices,
    device_of,
    devices_here,
    driver_memory_bytes,
    give_back_memory,
    machine_kind,
    peak_bytes,
    visible_devices,
)
from hone.errors import DataError, ServiceError
from hone.services.gpus import Split, split_devices


def config(training=None, **services):
    return RunConfig.model_validate(
        {
            "model": {"path": "a/b"},
            "data": {"train": "a/b"},
            "run": {"devices": training},
            "services": {name: {"policy": "a/b", "devices": numbers} for name, numbers in services.items()},
        }
    )


@pytest.mark.parametrize(
    ("training", "services", "visible", "split"),
    [
        # practice B: training has GPUs 0-6, the reward service GPU 7
        (None, {"judge": [7]}, "01234567", Split("0,1,2,3,4,5,6", {"judge": "7"})),
        ([0, 1], {"judge": [7]}, "01234567", Split("0,1", {"judge": "7"})),
        # numbers count within what CUDA_VISIBLE_DEVICES lists, names of GPUs as it has them
        (None, {"a": [1], "b": []}, ["GPU-x", "GPU-y", "GPU-z"], Split("GPU-x,GPU-z", {"a": "GPU-y", "b": ""})),
        # a service without GPUs sees none, and training keeps what it has
        (None, {"judge": []}, "01", Split(None, {"judge": ""})),
        (None, {"judge": [0]}, "0", Split("", {"judge": "0"})),
    ],
)
def test_each_sees_its_own(training, services, visible, split):
    assert split_devices(config(training, **services), list(visible)) == split


def test_without_a_gpu_everything_runs_and_that_is_said():
    split = split_devices(config([0], judge=[7]), [])
    assert split.training is None and split.services == {"judge": ""}
    assert set(split.notes) == {
        "run.devices = [0]: there is no GPU here, so it runs without",
        "services.judge.devices = [7]: there is no GPU here, so it runs without",
    }


def test_a_gpu_that_is_not_there():
    with pytest.raises(ServiceError, match=r"services.judge.devices = \[7\]: there are 4 GPUs here, numbers 0 to 3"):
        split_devices(config(judge=[7]), list("0123"))


@pytest.mark.parametrize(("value", "seen"), [("2, 3", ["2", "3"]), ("", []), ("GPU-a", ["GPU-a"])])
def test_what_is_visible_is_what_the_environment_lists(monkeypatch, value, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_devices() == seen


def test_otherwise_the_driver_is_asked(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_devices() == [], "no driver, no GPU"
    tool = tmp_path / "nvidia-smi"
    refuses = "case $1 in *compute_cap*) exit 2;; *) echo 0; echo 1;; esac"  # as drivers before 510
    tool.write_text(f"#!/bin/sh\n{refuses}\n")
    tool.chmod(0o755)
    assert visible_devices() == ["0", "1"]
    monkeypatch.setattr("hone.devices.torch_is_for_cpus", lambda: True)
    assert devices_here("auto").resource == devices_here("cpu").resource == "CPU"
    monkeypatch.setattr("hone.devices.torch_is_for_cpus", lambda: False)
    assert (devices_here("auto"), devices_here("cpu").resource) == (FoundDevices("cuda", "GPU", 2), "CPU")
    tool.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/calls\necho 0, 9.0\necho 1, 8.0\n")
    assert devices_here("auto") == FoundDevices("cuda", "GPU", 2, bfloat16=True)
    assert (tmp_path / "calls").read_text() == "asked\n", "once"
    tool.write_text("#!/bin/sh\necho 0, 9.0\necho 1, 7.5\n")
    assert devices_here("auto") == FoundDevices("cuda", "GPU", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert devices_here("auto").per_node == len(visible_devices()) == 1


def test_memory_of_gpus_is_what_the_driver_says(monkeypatch, tmp_path):
    """Of those that are listed, by number or UUID; nothing where one is missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_memory_bytes("0") is None, "no driver"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0, GPU-aa1, 10, 100\necho 1, GPU-bb2, 20, 200\n")
    tool.chmod(0o755)
    assert driver_memory_bytes("0, 1") == (30 << 20, 300 << 20)
    assert driver_memory_bytes("GPU-bb") == (20 << 20, 200 << 20)
    assert driver_memory_bytes("") is None and driver_memory_bytes("0,MIG-cc3") is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(service_host, "end_with_ray", lambda: None)  # this process is no actor
    assert asyncio.run(service_host.ServiceHostActor().device_memory()) == (20 << 20, 200 << 20), "of Ray's devices"
    tool.write_text("#!/bin/sh\necho 0, GPU-aa1, [N/A], [N/A]\n")
    assert driver_memory_bytes("0") is None


def test_machines_of_other_vendors(tmp_path, monkeypatch):
    """AMD's driver has a node for each CPU and GPU; Ascend's a file for each NPU, and one for all."""
    for kind in (NVIDIA, AMD, ASCEND):
        monkeypatch.delenv(kind.variable, raising=False)
    amd, ascend = tmp_path / "amd", tmp_path / "ascend"
    for node, number in enumerate(("0", "4098", "4098")):
        (amd / f"sys/class/kfd/kfd/topology/nodes/{node}").mkdir(parents=True)
        (amd / f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id").write_text(f"{number}\n")
    (ascend / "dev").mkdir(parents=True)
    for name in ("davinci0", "davinci1", "davinci2", "davinci_manager"):
        (ascend / "dev" / name).touch()
    assert (machine_kind(amd), visible_devices(amd)) == (AMD, ["0", "1"])
    assert (machine_kind(ascend), visible_devices(ascend)) == (ASCEND, ["0", "1", "2"])
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert (visible_devices(amd), visible_devices(ascend)) == (["0", "1"], ["2"])


BACKEND = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as set_up

class Module:
    is_initialized = is_available = lambda self: True
    current_device = lambda self: 0
    device_count = lambda self: 4
    max_memory_allocated = lambda self: 123
    mem_get_info = lambda self: (40, 100)
    get_amp_supported_dtype = lambda self: []
    def _is_in_bad_fork(self): return False
    def manual_seed_all(self, seed): pass

class Hooks(torch._C._acc.PrivateUse1Hooks):
    is_available = lambda self: True
    has_primary_context = lambda self, index: True
    is_built = lambda self: True

set_up("npu", Module(), Hooks())
from hone.errors import DataError
from hone import devices
"""
"""A backend of Python alone, as torch_npu is one of C++."""


@pytest.mark.slow("a process of its own imports torch")
def test_an_npu_is_one_of_torch_s_accelerators():
    program = """
kind = devices.torch_kind()
print(devices.device_of("auto", "run.device"), kind.backend, kind.resource, devices.peak_bytes())
print(devices.used_and_total_bytes(), devices.device_of("cpu", "k"))
try: devices.device_of("cuda", "run.device")
except DataError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", BACKEND + program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "npu hccl NPU 123",
        "(60, 100) cpu",
        "run.device: cuda, but torch sees an accelerator of type `npu`. Set it to cpu or auto, or check the driver.",
    ]


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_an_accelerator_that_hone_does_not_know_is_refused_aloud(monkeypatch, wanted):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("xpu"))
    with pytest.raises(DataError, match=rf"run.device: {wanted}, but torch computes on .* `xpu` here, which Hone does"):
        device_of(wanted, "run.device")
    assert device_of("cpu", "run.device").type == "cpu" and peak_bytes() == 0


def test_shared_memory_that_was_closed_elsewhere_is_given_back_too(monkeypatch):
    did = []
    gpu = SimpleNamespace(ipc_collect=lambda: did.append("collect"), empty_cache=lambda: did.append("release"))
    monkeypatch.setattr("hone.devices.module_in_use", lambda: gpu)
    give_back_memory()
    del gpu.ipc_collect  # not every accelerator shares memory so
    give_back_memory()
    assert did == ["collect", "release", "release"]


def test_without_any_accelerator():
    assert device_of("auto", "run.device").type == "cpu"
    with pytest.raises(DataError, match=r"run.device: npu, but torch sees no GPU.* and that torch_npu is"):
        device_of("npu", "run.device")
