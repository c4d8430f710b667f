"""What the call of a bucket carries instead of its bytes or with them, and how a process that loads weights opens it.

NDArray        the bytes, in Ray's object store, where all processes of a machine read them
Path           the bytes in a file in memory, for the worker processes of an engine
IpcHandle      the sender's buffer, in the memory of a GPU that both processes see (CUDA IPC)
None           nothing: the bytes come by broadcast
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.errors import EngineError
from hone.weights.buckets import Header
from hone.weights.groups import BroadcastGroup, GroupAddress

SHARED_MEMORY = "/dev/shm"


@contextmanager
def shared_file(data: NDArray[np.uint8]) -> Iterator[Path]:
    """The bytes in a file that is removed at the end. Raises EngineError when the machine's shared memory is too
    small."""
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, prefix="hone-weights-") as file:
        try:
            data.tofile(file)
            file.flush()
        except OSError as error:
            raise EngineError(
                f"a bucket of {len(data):,} bytes does not fit into {SHARED_MEMORY} ({error.strerror}). Give the "
                "container more shared memory, or lower cluster.bucket_mib."
            ) from error
        yield Path(file.name)


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """Memory of a GPU, for another process that sees the same GPU."""

    gpu: str
    """UUID."""
    first_byte: int
    handle: tuple[Any, ...]
    """As torch shares a CUDA storage."""


class CudaMemory:
    """GPUs, as far as two processes share their memory."""

    def uuid(self, device: torch.device) -> str:
        """The same in every process, whatever number it has for the GPU."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def share(self, data: Tensor) -> IpcHandle:
        """For one process: torch counts the memory as used until each handle was opened and closed."""
        _, *handle = data.untyped_storage()._share_cuda_()
        return IpcHandle(self.uuid(data.device), int(data.storage_offset()), tuple(handle))

    def open(self, handle: IpcHandle, num_bytes: int, device: torch.device) -> Tensor:
        """(num_bytes,) uint8 on `device`: the sender's own memory."""
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *handle.handle)
        shared = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        return shared[handle.first_byte : handle.first_byte + num_bytes]

    def synchronize(self, device: torch.device) -> None:
        """Wait for what this thread has started."""
        torch.cuda.current_stream(device).synchronize()


CUDA = CudaMemory()
BucketPart = NDArray[np.uint8] | Path | IpcHandle | None


class PartOpener:
    """Opens the parts of buckets, in a process that loads weights.

    Args:
        gpu: on which weights arrive by NCCL and by CUDA IPC.
    """

    def __init__(self, gpu: torch.device, memory: CudaMemory = CUDA) -> None:
        self._gpu, self._memory = gpu, memory
        self._group: BroadcastGroup | None = None

    def join(self, address: GroupAddress, rank: int) -> None:
        """Join a group, which takes the place of the one before. Raises EngineError."""
        self.leave()
        device = self._gpu if address.backend == "nccl" else torch.device("cpu")
        self._group = BroadcastGroup(address, rank, device=device)

    def leave(self) -> None:
        """End the group; a broadcast that is awaited raises."""
        group, self._group = self._group, None
        if group is not None:
            group.end()

    def open(self, header: Header, parts: Sequence[BucketPart]) -> Tensor:
        """The bucket's data, (bytes,) uint8: not to be written to, and valid for as long as it is referred to.

        Args:
            parts: from each of the ranks that send to this engine. Of handles the one on this process's GPU is taken.
        Raises:
            EngineError: it did not arrive, or lies on another GPU.
        """
        (first, *_), num_bytes = parts, header.num_bytes
        if first is None:
            if (group := self._group) is None:
                raise EngineError("weights were announced as a broadcast, and this process is in no group.")
            data = torch.empty(num_bytes, dtype=torch.uint8, device=group.device)
            group.finish(group.broadcast(data))
            return data
        if isinstance(first, IpcHandle):
            return self._copy([part for part in parts if isinstance(part, IpcHandle)], num_bytes)
        if isinstance(first, Path):  # mapped, so it may be removed
            return torch.from_file(str(first), shared=True, size=num_bytes, dtype=torch.uint8)
        return torch.from_numpy(np.asarray(_Writable(first)))

    def _copy(self, handles: Sequence[IpcHandle], num_bytes: int) -> Tensor:
        """Copied on the GPU: vLLM keeps weights until their layer is whole, and the sender packs its buffer anew."""
        own = self._memory.uuid(self._gpu)
        here = [handle for handle in handles if handle.gpu == own]
        if not here:
            raise EngineError(
                f"the trainer's weights lie on GPU {', '.join(handle.gpu for handle in handles)}, this engine is on "
                f"{own}: only processes of one GPU can share memory."
            )
        data = self._memory.open(here[0], num_bytes, self._gpu).clone()
        self._memory.synchronize(self._gpu)
        return data


class _Writable:
    """An array that numpy takes for writable, although Ray made it read-only: torch knows no read-only tensors. It
    stays in the object store as long as a view of it lives."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
