"""The machines that a plan is made for: known devices by name (hardware.toml), or the machine this runs on.

Figures are a data sheet's; how much of them real work reaches is `time.py`'s business.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hone.config.run import RunConfig
from hone.config.topology import topology_of
from hone.devices import AMD, ASCEND, NVIDIA, machine_kind, nvidia_smi, visible_devices
from hone.errors import DataError, nearest
from hone.sizes import GIB

THIS = "this"
MEASURED_SIZE = 512
"""Rows of the square matrices whose product is timed on this machine's CPU."""
MEASURED_BYTES = 32 << 20
_COUNT = re.compile(r"(?:(\d+)\s*[x×]\s*)?(\S.*)")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device, how many of them, and the machines that they are in."""

    name: str
    kind: Literal["gpu", "cpu"]
    devices: int
    memory_bytes: int
    """Of one device, as a program sees it; of a CPU, the machine's memory."""
    bandwidth: float
    """Bytes per second between a device's memory and its cores."""
    bf16_flops: float
    """Operations per second in matrix products of bfloat16."""
    fp32_flops: float
    link: float
    """Bytes per second from device to device."""
    host_link: float
    """Bytes per second from device to host."""
    per_node: int
    host_bytes: int
    """Memory of one machine."""
    bfloat16: bool = False
    """Whether it computes in bfloat16 faster than in float32."""

    @property
    def names(self) -> tuple[str, str]:
        """torch's and Ray's names of the device."""
        if self.kind == "cpu":
            return "cpu", "CPU"
        kind = ASCEND if self.name.startswith(ASCEND.vendor) else NVIDIA
        return kind.device_type, kind.resource

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.per_node)

    @property
    def title(self) -> str:
        return self.name if self.devices == 1 and self.kind == "cpu" else f"{self.devices} x {self.name}"

    def flops(self, bytes_each: int) -> float:
        return self.bf16_flops if bytes_each == 2 else self.fp32_flops


@cache
def known_devices() -> Mapping[str, Mapping[str, Any]]:
    """Every preset by its name."""
    with (Path(__file__).parent / "hardware.toml").open("rb") as file:
        return tomllib.load(file)


def find_hardware(text: str, *, host_memory_gib: float | None = None) -> Hardware:
    """`8xH100-80G`, `A100-40G`, or `this` for the machine that this runs on.

    Raises:
        DataError: no such device.
    """
    found = this_machine() if text.strip().lower() == THIS else _preset(text)
    return replace(found, host_bytes=int(host_memory_gib * GIB)) if host_memory_gib else found


def in_cluster(hardware: Hardware, text: str, config: RunConfig) -> Hardware:
    """As many devices as the run file's `cluster` section has, unless `text` said how many.

    Processes on a CPU share its memory and its cores.
    """
    match = _COUNT.fullmatch(text.strip())
    if config.cluster.backend != "ray" or (match and match[1]):
        return hardware
    found = hardware.devices if hardware.kind == "gpu" else len(os.sched_getaffinity(0))
    has_own = text.strip().lower() == THIS and (hardware.kind == "gpu" or not config.cluster.pools)
    topology = topology_of(config, found if has_own else None)
    each = topology.devices_per_node
    shared = each if hardware.kind == "cpu" else 1
    return replace(
        hardware,
        devices=topology.nodes * each,
        per_node=each,
        memory_bytes=hardware.memory_bytes // shared,
        bandwidth=hardware.bandwidth / shared,
        bf16_flops=hardware.bf16_flops / shared,
        fp32_flops=hardware.fp32_flops / shared,
    )


def _preset(text: str) -> Hardware:
    match = _COUNT.fullmatch(text.strip())
    count, wanted = (int(match[1] or 1), match[2]) if match else (0, text)
    name = _name_of(wanted)
    if name is None or count < 1:
        close = nearest(wanted, list(known_devices()), cutoff=40)
        hint = f" Did you mean {close}?" if close else ""
        raise DataError(
            f"--hardware {text}: no such device.{hint} Write 8xH100-80G, or `this` for this machine. Known: "
            f"{', '.join(known_devices())}."
        )
    return _of(name, count)


def _of(name: str, count: int) -> Hardware:
    data = known_devices()[name]
    return Hardware(
        name=name,
        kind="gpu",
        devices=count,
        memory_bytes=int(data["memory_gib"] * GIB),
        bandwidth=data["bandwidth_gbs"] * 1e9,
        bf16_flops=data["bf16_tflops"] * 1e12,
        fp32_flops=data["fp32_tflops"] * 1e12,
        link=data["link_gbs"] * 1e9,
        host_link=data["host_gbs"] * 1e9,
        per_node=min(count, data["per_node"]),
        host_bytes=int(data["host_gib"] * GIB),
        bfloat16=not data.get("without_bfloat16", False),
    )


def _name_of(text: str) -> str | None:
    wanted = text.lower().replace(" ", "")
    for name, data in known_devices().items():
        if wanted in (alias.lower().replace(" ", "") for alias in (name, *data["aliases"])):
            return name
    return None


def this_machine() -> Hardware:
    """This machine: its NVIDIA GPUs where it has any that are known, else its CPU, whose speed is measured (50 ms)."""
    kind = machine_kind()
    if kind is not NVIDIA and (found := visible_devices()):
        raise DataError(
            f"--hardware this: {len(found)} accelerators of {kind.vendor}; their model is not detected. Name them, "
            f"such as {len(found)}x{'MI300X-192G' if kind is AMD else 'Ascend910B-64G'}."
        )
    gpus = _nvidia_gpus()
    if gpus:
        name, memory_bytes = gpus[0]
        preset = _name_of(name)
        if preset is None:
            raise DataError(
                f"--hardware this: {name} is not among the known devices. Name one that is like it: "
                f"{', '.join(known_devices())}."
            )
        return replace(
            _of(preset, len(gpus)), memory_bytes=memory_bytes, host_bytes=memory_limit_bytes(), per_node=len(gpus)
        )
    flops, bandwidth = _measured_cpu()
    memory = memory_limit_bytes()
    return Hardware(
        name=f"this CPU, {len(os.sched_getaffinity(0))} threads",
        kind="cpu",
        devices=1,
        memory_bytes=memory,
        bandwidth=bandwidth,
        bf16_flops=flops,
        fp32_flops=flops,
        link=bandwidth,
        host_link=bandwidth,
        per_node=1,
        host_bytes=memory,
    )


def known_gpu() -> Hardware | None:
    """One of this machine's NVIDIA GPUs by its data sheet; None where there is none, or it is not known."""
    gpus = _nvidia_gpus()
    return named_device(gpus[0][0]) if gpus else None


def named_device(name: str) -> Hardware | None:
    """One device by the name that its driver gives it, or any other of hardware.toml; None where it is not there."""
    preset = _name_of(name)
    return None if preset is None else _of(preset, 1)


def memory_limit_bytes() -> int:
    """Memory that this process may use: the machine's, or less where its container says so."""
    import psutil

    total = psutil.virtual_memory().total
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(place).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _nvidia_gpus() -> list[tuple[str, int]]:
    """Name and memory in bytes of each GPU; empty where there is no driver."""
    try:
        listing = nvidia_smi("name,memory.total")
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in listing.splitlines() if "," in line]
    return [(name.strip(), int(mib) << 20) for name, mib in rows if mib.strip().isdigit()]


def _measured_cpu() -> tuple[float, float]:
    """Operations per second in a float32 product, and bytes per second of a copy (read and written).

    The best of several: the others were kept waiting by something else.
    """
    import numpy as np

    a = np.ones((MEASURED_SIZE, MEASURED_SIZE), np.float32)
    source, target = np.ones(MEASURED_BYTES, np.uint8), np.empty(MEASURED_BYTES, np.uint8)
    product_s = [_seconds(lambda: np.matmul(a, a)) for _ in range(20)]
    copy_s = [_seconds(lambda: np.copyto(target, source)) for _ in range(5)]
    return 2 * MEASURED_SIZE**3 / min(product_s), 2 * MEASURED_BYTES / min(copy_s)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
