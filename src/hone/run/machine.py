"""Checks of the machine itself, for `hone doctor` without a run: devices, packages, memory, disk, network, sandbox.

Looks only: it starts no training and allocates nothing on a device. Needs no torch.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from hone.devices import nvidia_smi
from hone.plan.hardware import memory_limit_bytes
from hone.sizes import GIB

PACKAGES = ("torch", "transformers", "ray", "vllm")
RAY_PORTS = {6379: "Ray's head", 8265: "Ray's dashboard"}
SANDBOX_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """One check and its result."""

    what: str
    state: Literal["ok", "warning", "problem"]
    found: str
    do: str = ""
    """What to do about a warning or a problem."""


def _devices(_: Path) -> Iterator[MachineCheck]:
    try:
        listing = nvidia_smi("name,memory.total,memory.used,driver_version")
    except FileNotFoundError:
        yield MachineCheck("GPUs", "ok", "no NVIDIA driver: runs use the CPU")
        return
    except (OSError, subprocess.SubprocessError) as error:
        yield MachineCheck("GPUs", "problem", f"nvidia-smi fails: {error}", "repair the driver, or set run.device=cpu")
        return
    runtimes = (d.version for d in metadata.distributions() if (d.name or "").startswith("nvidia-cuda-runtime"))
    yield from gpu_checks(listing, torch_version=_version("torch"), cuda_runtime=next(runtimes, None))


def gpu_checks(listing: str, *, torch_version: str | None, cuda_runtime: str | None = None) -> Iterator[MachineCheck]:
    """Checks of GPUs from nvidia-smi's lines of name, total and used memory in MiB, and driver.

    Args:
        cuda_runtime: version of the CUDA runtime that is installed as a package, for a torch whose version names none.
    """
    driver = ""
    for number, line in enumerate(filter(None, listing.splitlines())):
        what, parts = f"GPU {number}", [part.strip() for part in line.rsplit(",", 3)]
        if len(parts) < 4:
            yield MachineCheck(what, "problem", f"nvidia-smi says: {line}", "repair the driver, or set run.device=cpu")
            continue
        name, total, used, driver = parts
        if not (total.isdigit() and used.isdigit()):  # GPUs that share the host's memory, containers with few rights
            yield MachineCheck(what, "ok", f"{name}, the driver does not say how much memory is free, driver {driver}")
            continue
        found = f"{name}, {int(total) - int(used):,} of {int(total):,} MiB free, driver {driver}"
        if int(used) > 0.1 * int(total):
            do = "another process holds its memory: nvidia-smi names it; or choose other devices with run.devices"
            yield MachineCheck(what, "warning", found, do)
        else:
            yield MachineCheck(what, "ok", found)
    if listing.strip() and torch_version is not None and torch_version.endswith("+cpu"):
        do = "install torch for CUDA (https://pytorch.org)"
        yield MachineCheck("torch", "problem", f"torch {torch_version} cannot use the GPUs", do)
    elif driver and torch_version is not None:
        yield from driver_check(driver, torch_version, cuda_runtime)


OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> major version of the oldest driver for Linux that runs it (release notes of NVIDIA's CUDA
Toolkit, minor version compatibility)."""


def driver_check(driver: str, torch_version: str, cuda_runtime: str | None) -> Iterator[MachineCheck]:
    """A warning where the driver is older than torch's CUDA needs; nothing where one of the two is not known."""
    named = re.search(r"\+cu(\d+)\d$", torch_version)
    cuda = named[1] if named else (cuda_runtime or "").partition(".")[0]
    oldest, major = OLDEST_DRIVERS.get(int(cuda)) if cuda.isdigit() else None, driver.partition(".")[0]
    if oldest is not None and major.isdigit() and int(major) < oldest:
        found = f"{driver} is older than {oldest}, which torch {torch_version} with CUDA {cuda} needs"
        do = "update the driver, install torch for an older CUDA (https://pytorch.org), or NVIDIA's cuda-compat package"
        yield MachineCheck("driver", "warning", found, do)


def _packages(_: Path) -> Iterator[MachineCheck]:
    allowed = {r.name: r for r in map(Requirement, metadata.requires("hone-rl") or ())}
    for package in PACKAGES:
        yield package_check(package, _version(package), allowed.get(package))
    if nccl := next((d for d in metadata.distributions() if d.name.startswith("nvidia-nccl")), None):
        settings = ", ".join(f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("NCCL_"))
        yield MachineCheck("NCCL", "ok", f"{nccl.version}; {settings or 'no NCCL_ variables set'}")


def package_check(package: str, version: str | None, allowed: Requirement | None) -> MachineCheck:
    """Whether a package is there in a version that Hone works with."""
    is_needed = package in ("torch", "transformers")
    if version is None:
        do = f"pip install {allowed or package}" if is_needed else ""
        return MachineCheck(package, "problem" if is_needed else "ok", "not installed", do)
    if allowed is not None and not allowed.specifier.contains(version, prereleases=True):
        do = f"install {package}{allowed.specifier}"
        return MachineCheck(
            package, "problem" if is_needed else "warning", f"{version}, outside {allowed.specifier}", do
        )
    return MachineCheck(package, "ok", version)


def _host(_: Path) -> Iterator[MachineCheck]:
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    busy = f"{cores} cores, load {load:.1f}"
    is_busy = load > 1.5 * cores
    yield MachineCheck("CPU", "warning" if is_busy else "ok", busy, "other processes take its time" if is_busy else "")
    limit_bytes = memory_limit_bytes()
    available_bytes = min(psutil.virtual_memory().available, limit_bytes)
    found = f"{available_bytes / GIB:.1f} of {limit_bytes / GIB:.1f} GiB available"
    is_low = available_bytes < 2 * GIB
    yield MachineCheck("memory", "warning" if is_low else "ok", found, "end what holds it" if is_low else "")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_low = files < 4096
    do = "ulimit -n 65536: Ray and services hold many files open" if is_low else ""
    yield MachineCheck("open files", "warning" if is_low else "ok", f"limit {files:,}", do)


def _disks(folder: Path) -> Iterator[MachineCheck]:
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    yield disk_check("disk", existing, 10, "checkpoints need room: set run.dir, or checkpoint.keep lower")
    yield disk_check("temporary files", Path(os.environ.get("TMPDIR") or "/tmp"), 2, "set TMPDIR to a larger disk")
    if Path("/dev/shm").is_dir():
        do = "mount /dev/shm larger (containers: --shm-size=8g); Ray and NCCL share tensors there"
        yield disk_check("shared memory", Path("/dev/shm"), 1, do)


def disk_check(what: str, place: Path, least_gib: float, do: str) -> MachineCheck:
    """Whether a file system has room."""
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        return MachineCheck(what, "problem", f"{place}: {error.strerror}", f"make this folder, or {do}")
    found = f"{place}: {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free >= least_gib * GIB:
        return MachineCheck(what, "ok", found)
    return MachineCheck(what, "problem" if usage.free < 0.1 * least_gib * GIB else "warning", found, do)


def _network(_: Path) -> Iterator[MachineCheck]:
    name = socket.gethostname()
    try:
        yield MachineCheck("host name", "ok", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        do = f"add {name} to /etc/hosts: torch.distributed and Ray look it up"
        yield MachineCheck("host name", "warning", f"{name} does not resolve ({error})", do)
    for port, owner in RAY_PORTS.items():
        if is_taken(port):
            do = "a cluster run may join it: cluster.address says which; otherwise ray stop"
            yield MachineCheck(f"port {port}", "warning", f"in use ({owner} by default)", do)


def is_taken(port: int) -> bool:
    """Whether something listens on this port of the loopback interface."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _sandbox(_: Path) -> Iterator[MachineCheck]:
    program = shutil.which("bwrap")
    if program is None:
        do = "install bubblewrap, which the code reward isolates programs with (docs/rewards-code.md)"
        yield MachineCheck("sandbox", "warning", "bwrap is not installed", do)
        return
    command = [program, "--unshare-all", "--ro-bind", "/", "/", sys.executable, "-c", "print(1)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SANDBOX_TIMEOUT_S, check=False)
        why = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except (OSError, subprocess.SubprocessError) as error:
        why = [str(error)]
    if why:
        do = "allow user namespaces (docs/rewards-code.md); the code reward cannot isolate programs without"
        yield MachineCheck("sandbox", "warning", f"bwrap fails: {why[0]}", do)
    else:
        yield MachineCheck("sandbox", "ok", "bubblewrap isolates programs")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


CHECKS: tuple[Callable[[Path], Iterator[MachineCheck]], ...] = (_devices, _packages, _host, _disks, _network, _sandbox)
"""Checks; each reports problems that a run in the given folder would have."""
