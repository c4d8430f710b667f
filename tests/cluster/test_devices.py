"""Which GPUs training and services see, from what the run file says and what this process may see."""

import pytest

from hone.config.run import RunConfig
from hone.errors import ServiceError
from hone.services import gpus as devices
from hone.services.gpus import Split, split_devices, visible_devices


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
    tool.write_text("#!/bin/sh\necho 0\necho 1\n")
    tool.chmod(0o755)
    assert visible_devices() == ["0", "1"]
    assert devices.VARIABLE == "CUDA_VISIBLE_DEVICES"
