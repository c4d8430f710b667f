"""Kinds of accelerators: their names in torch, drivers, torch.distributed and Ray, and what this machine has.

The only module that knows a kind of accelerator by name. What the driver lists is found without torch; what torch
computes on is `torch.accelerator`'s, and torch is imported when it is asked.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, get_args

from hone.errors import DataError, PlacementError

if TYPE_CHECKING:
    import torch

DeviceName = Literal["auto", "cpu", "cuda", "npu"]
"""What a run file may ask for: torch's types of the kinds below."""
_DRIVER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One kind of accelerator."""

    vendor: str
    device_type: Literal["cuda", "npu"]
    """torch's name."""
    backend: str
    """Backend of torch.distributed."""
    resource: str
    """Ray's name."""
    variable: str
    """Environment variable that lists the devices that a process may use."""


NVIDIA = Accelerator("NVIDIA", "cuda", "nccl", "GPU", "CUDA_VISIBLE_DEVICES")
AMD = Accelerator("AMD", "cuda", "nccl", "GPU", "HIP_VISIBLE_DEVICES")
ASCEND = Accelerator("Ascend", "npu", "hccl", "NPU", "ASCEND_RT_VISIBLE_DEVICES")
KINDS = (NVIDIA, AMD, ASCEND)
RESOURCES: Mapping[str, str] = {kind.resource: kind.device_type for kind in reversed(KINDS)}
"""Ray's name -> torch's type."""
FOREIGN_RESOURCES = ("TPU", "HPU", "neuron_cores", "RBLN", "FURIOSA", "TTNPU", "MBLT")
"""Ray's names of accelerators that Hone does not know."""
WITHOUT_BFLOAT16 = ("T4", "V100", "P100", "P4", "K80")
"""Ray's names of NVIDIA GPUs below compute capability 8.0."""


# ---- the machine, without torch


def machine_kind(root: Path = Path("/")) -> Accelerator:
    """Kind of this machine's accelerators, by the files of their drivers; NVIDIA where there are none."""
    if _amd_nodes(root):
        return AMD
    return ASCEND if _ascend_devices(root) else NVIDIA


def visible_devices(root: Path = Path("/")) -> list[str]:
    """What the kind's variable lists, else the numbers of the machine's devices. Loads no library of a driver."""
    kind = machine_kind(root)
    return _chosen(kind, _nvidia_gpus() if kind is NVIDIA and kind.variable not in os.environ else {}, root)


def _chosen(kind: Accelerator, gpus: Mapping[str, float], root: Path = Path("/")) -> list[str]:
    """See `visible_devices`; `gpus`: NVIDIA's."""
    listed = os.environ.get(kind.variable)
    if listed is not None:
        return [part.strip() for part in listed.split(",") if part.strip()]
    if kind is NVIDIA:
        return [*gpus]
    count = len(_amd_nodes(root) if kind is AMD else _ascend_devices(root))
    return [str(number) for number in range(count)]


def _nvidia_gpus() -> dict[str, float]:
    """Compute capability of each GPU by its number, NaN where the driver does not say; none without a driver."""
    for fields in ("index,compute_cap", "index"):  # before 510 drivers refuse the second field
        try:
            lines = [line.split(", ") for line in nvidia_smi(fields).splitlines()]
            return {index: float(capability) for index, capability in ([*line, "nan"][:2] for line in lines)}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, subprocess.SubprocessError):
            continue
    return {}


def nvidia_smi(fields: str) -> str:
    """A line of comma-separated fields for each GPU, memory in MiB.

    Raises:
        OSError: there is no such program.
        subprocess.SubprocessError: it fails, or hangs.
    """
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=True)
    return done.stdout


def driver_memory_bytes(visible: str) -> tuple[int, int] | None:
    """Memory of NVIDIA's GPUs that all processes use, and all of it, as the driver says: for processes without torch.

    Args:
        visible: the GPUs' numbers or UUIDs, as CUDA_VISIBLE_DEVICES lists them.
    Returns:
        Sums over them; None where the driver does not say, or knows one by no such name.
    """
    wanted = [name.strip() for name in visible.split(",") if name.strip()]
    try:
        lines = [line.split(", ") for line in nvidia_smi("index,uuid,memory.used,memory.total").splitlines()]
        gpus = [(index, uuid, int(used) << 20, int(total) << 20) for index, uuid, used, total in lines]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    found = [gpu for name in wanted for gpu in gpus if name == gpu[0] or gpu[1].startswith(name)]
    if not found or len(found) != len(wanted):
        return None
    return sum(used for *_, used, _ in found), sum(total for *_, total in found)


def _amd_nodes(root: Path) -> list[Path]:
    """GPUs among the nodes of AMD's driver; a CPU's node has 0 as its GPU's id."""
    files = sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id"))
    return [file for file in files if file.read_text().strip() not in ("", "0")]


def _ascend_devices(root: Path) -> list[Path]:
    return sorted((root / "dev").glob("davinci[0-9]*"))


# ---- the machines of a run


@dataclass(frozen=True, slots=True)
class FoundDevices:
    """What the devices of a run are, and how many of them each of its machines has."""

    device_type: str
    """torch's name: `cpu` is cores."""
    resource: str
    """Ray's name."""
    per_node: int
    bfloat16: bool = False
    """Whether they compute in it faster than in float32."""


def devices_here(wanted: str) -> FoundDevices:
    """This machine's, as its driver lists them; cores where it has none, torch is for CPUs, or `wanted` is `cpu`."""
    if wanted != "cpu" and not torch_is_for_cpus():
        kind = machine_kind()
        gpus = _nvidia_gpus() if kind is NVIDIA else {}
        if visible := _chosen(kind, gpus):
            bfloat16 = kind is not NVIDIA or (bool(gpus) and min(gpus.values()) >= 8)
            return FoundDevices(kind.device_type, kind.resource, len(visible), bfloat16)
    return FoundDevices("cpu", "CPU", len(os.sched_getaffinity(0)))


def torch_is_for_cpus() -> bool:
    """Whether the installed torch cannot use an accelerator."""
    try:
        return metadata.version("torch").endswith("+cpu") and importlib.util.find_spec("torch_npu") is None
    except metadata.PackageNotFoundError:
        return False


def devices_of_machines(machines: Sequence[Mapping[str, float]], wanted: str, nodes: int) -> FoundDevices:
    """Devices of a Ray cluster's machines.

    Args:
        machines: Ray's resources of each.
        wanted: what the run file asks for.
        nodes: machines that the run needs; those with most devices are taken.
    Raises:
        PlacementError: no machine has what is wanted, or they have what Hone does not know.
    """
    for resource, device_type in RESOURCES.items():
        counts = sorted((int(machine.get(resource, 0)) for machine in machines), reverse=True)[:nodes]
        if wanted in ("auto", device_type) and counts and counts[0]:
            has_old = any(machine.get(f"accelerator_type:{name}") for machine in machines for name in WITHOUT_BFLOAT16)
            return FoundDevices(device_type, resource, min(count for count in counts if count), not has_old)
    unknown = sorted({name for machine in machines for name in FOREIGN_RESOURCES if machine.get(name)})
    if wanted == "auto" and unknown:
        raise PlacementError(
            f"run.device = auto: the Ray cluster has {', '.join(unknown)}, which Hone does not know (it knows "
            f"{', '.join(RESOURCES)}). To compute on its CPUs, say so: run.device = cpu."
        )
    if wanted not in ("auto", "cpu"):
        raise PlacementError(f"run.device = {wanted}: no machine of the Ray cluster has any. Nearest: auto.")
    counts = sorted((int(machine.get("CPU", 0)) for machine in machines), reverse=True)[:nodes]
    return FoundDevices("cpu", "CPU", max(min(counts, default=1), 1))


# ---- torch


def torch_kind() -> Accelerator | None:
    """What torch computes on here; None where it sees no accelerator.

    Raises:
        DataError: an accelerator that Hone does not know.
    """
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    if found.type == "cuda" and torch.version.hip:
        return AMD
    known = {kind.device_type: kind for kind in (ASCEND, NVIDIA)}
    if found.type in known:
        return known[found.type]
    raise DataError(
        f"torch computes on an accelerator of type `{found.type}` here, which Hone does not know (it knows "
        f"{' and '.join(known)}). To compute on the CPU, say so: cpu."
    )


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is one of the kinds above, and not the CPU (or `meta`)."""
    return any(device.type == kind.device_type for kind in KINDS)


def kind_of(device: torch.device) -> Accelerator | None:
    """The kind of a device; None for the CPU (and for `meta`)."""
    return torch_kind() if is_accelerator(device) else None


def device_of(wanted: str, key: str) -> torch.device:
    """The device that a run file asks for; `auto` is the accelerator that torch sees, or else the CPU.

    Raises:
        DataError: naming the key; the accelerator is not there, or Hone does not know it.
    """
    import torch

    if wanted == "cpu":
        return torch.device("cpu")
    try:
        kind = torch_kind()
    except DataError as error:
        raise DataError(f"{key}: {wanted}, but {error}") from error
    if wanted == "auto":
        return torch.device("cpu" if kind is None else kind.device_type)
    if kind is None or kind.device_type != wanted:
        seen = "no GPU" if kind is None else f"an accelerator of type `{kind.device_type}`"
        plugin = " and that torch_npu is installed" if wanted == "npu" else ""
        raise DataError(f"{key}: {wanted}, but torch sees {seen}. Set it to cpu or auto, or check the driver{plugin}.")
    return torch.device(wanted)


def module_of(device: torch.device) -> ModuleType:
    """`torch.cuda`, or the module of the same functions of another accelerator."""
    import torch

    return torch.get_device_module(device)


def module_in_use() -> ModuleType | None:
    """`module_of` the accelerator that this process has begun to use; None if it uses none."""
    import torch

    found = torch.accelerator.current_accelerator()
    if found is None or not is_accelerator(found):
        return None
    module = module_of(found)
    return module if module.is_initialized() else None


def give_back_memory() -> None:
    """Release torch's cached memory to the device, for other processes."""
    if (module := module_in_use()) is not None:
        if hasattr(module, "ipc_collect"):  # first, so that shared memory that others have closed is cached
            module.ipc_collect()
        module.empty_cache()


def synchronize() -> None:
    """Wait until the accelerator has done what it was asked, if this process uses one."""
    if (module := module_in_use()) is not None:
        module.synchronize()


def peak_bytes() -> int:
    """Most bytes that torch's tensors held on this process's accelerator; 0 without one."""
    module = module_in_use()
    return 0 if module is None else module.max_memory_allocated()


def forget_peak() -> None:
    """Let `peak_bytes` say the most from now on."""
    if (module := module_in_use()) is not None:
        module.reset_peak_memory_stats()


def used_and_total_bytes() -> tuple[int, int] | None:
    """Memory of this process's accelerator that all processes use, and all of it; None without one."""
    module = module_in_use()
    if module is None:
        return None
    free, total = module.mem_get_info()
    return total - free, total


assert {kind.device_type for kind in KINDS} < set(get_args(DeviceName))
