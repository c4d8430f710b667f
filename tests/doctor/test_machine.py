"""`hone doctor` without a run: what it says of machines that lack something."""

import json
import os
import socket
from collections import namedtuple
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hone.cli.main import main
from hone.run import machine
from hone.run.machine import disk_check, gpu_checks, is_taken, package_check
from hone.sizes import GIB

H100 = "NVIDIA H100 80GB HBM3, 81559, 4, 570.86.15\n"
HELD = "NVIDIA H100 80GB HBM3, 81559, 70000, 570.86.15\n"
SHARED = "NVIDIA GB10, [N/A], [N/A], 580.95.05\n"
HIDDEN = "NVIDIA H100 80GB HBM3, 81559, [Insufficient Permissions], 570.86.15\n"


def test_gpus_are_listed_and_one_that_another_process_holds_is_a_warning():
    free, held = gpu_checks(H100 + HELD, torch_version="2.13.0+cu128")
    assert (free.what, free.state) == ("GPU 0", "ok") and "81,555 of 81,559 MiB free, driver 570.86.15" in free.found
    assert (held.what, held.state) == ("GPU 1", "warning") and "nvidia-smi" in held.do


@pytest.mark.parametrize("listing", [SHARED, HIDDEN])
def test_a_driver_that_does_not_say_the_memory_is_no_failure(listing):
    (check,) = gpu_checks(listing, torch_version="2.13.0+cu128")
    assert check.state == "ok" and "does not say how much memory is free" in check.found


@pytest.mark.parametrize(
    ("driver", "torch_version", "cuda_runtime", "state"),
    [
        ("570.86.15", "2.13.0+cu130", None, "warning"),
        ("580.95.05", "2.13.0+cu130", None, None),
        ("570.86.15", "2.13.0", "13.0.48", "warning"),
        ("570.86.15", "2.13.0", "12.8.90", None),
        ("470.57.02", "2.13.0+cu126", None, "warning"),
        ("[N/A]", "2.13.0+cu130", None, None),
        ("570.86.15", "2.13.0", None, None),
        ("570.86.15", "2.13.0+rocm6.4", None, None),
    ],
)
def test_a_driver_is_held_against_the_cuda_of_torch(driver, torch_version, cuda_runtime, state):
    listing = f"NVIDIA H100 80GB HBM3, 81559, 4, {driver}\n"
    _, *found = gpu_checks(listing, torch_version=torch_version, cuda_runtime=cuda_runtime)
    assert [(check.what, check.state) for check in found] == ([("driver", state)] if state else [])
    assert all(driver in check.found and "update the driver" in check.do for check in found)


def test_a_torch_without_cuda_beside_gpus_is_a_problem():
    assert [c.state for c in gpu_checks(H100, torch_version="2.13.0+cpu")] == ["ok", "problem"]
    assert list(gpu_checks("", torch_version="2.13.0+cpu")) == []


@pytest.mark.parametrize(
    ("package", "version", "state"),
    [("vllm", "0.32.1", "ok"), ("vllm", "0.40.0", "warning"), ("vllm", None, "ok"), ("torch", None, "problem")],
)
def test_packages_are_held_against_the_versions_that_hone_works_with(package, version, state):
    check = package_check(package, version, Requirement(f"{package}>=0.32,<0.33"))
    assert check.state == state
    assert bool(check.do) is (state != "ok")


@pytest.mark.parametrize(("free_gib", "state"), [(50, "ok"), (5, "warning"), (0.5, "problem")])
def test_room_on_a_disk(free_gib, state, monkeypatch):
    usage = namedtuple("usage", "total used free")(100 * GIB, 0, free_gib * GIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    check = disk_check("disk", Path("/data"), 10, "make room")
    assert (check.state, check.do) == (state, "" if state == "ok" else "make room")


def test_a_folder_for_temporary_files_that_is_not_there_is_a_problem(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert main(["doctor", "--json"]) == 1
    checks = {check["what"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    check = checks["temporary files"]
    assert check["state"] == "problem" and f"{tmp_path / 'missing'}: No such file" in check["found"]
    assert check["do"] == "make this folder, or set TMPDIR to a larger disk"


def test_memory_is_what_the_container_may_use(monkeypatch):
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: GIB)
    (check,) = [check for check in machine._host(Path()) if check.what == "memory"]
    assert check.state == "warning" and check.found == "1.0 of 1.0 GiB available"


def test_gpus_that_a_driver_lists_without_figures(monkeypatch, tmp_path, capsys):
    """With an nvidia-smi of that kind, first in the path."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{SHARED.strip()}\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    main(["doctor", "--json"])
    checks = {check["what"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["GPU 0"]["state"] == "ok" and "NVIDIA GB10" in checks["GPU 0"]["found"]


def test_a_port_that_something_listens_on_is_taken():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        assert not is_taken(server.getsockname()[1])
        server.listen()
        assert is_taken(server.getsockname()[1])


def test_a_driver_that_does_not_answer_is_a_problem(monkeypatch, tmp_path, capsys):
    """With an nvidia-smi that fails, first in the path."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["doctor", "--json"]) == 1
    checks = {check["what"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["GPUs"]["state"] == "problem" and "run.device=cpu" in checks["GPUs"]["do"]
    assert {"torch", "memory", "disk", "host name", "sandbox"} <= set(checks)
    main(["doctor"])
    assert "problem  GPUs" in capsys.readouterr().out
