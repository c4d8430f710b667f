"""Weights from a trainer to engines on the same GPU, through memory that both see (CUDA IPC): nothing is sent.

The sender shares the buffer that it packed; an engine copies what it needs, on the GPU, and says so; then the buffer is
packed anew. Both are processes of one machine, with the same physical GPU, whatever number each has for it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hone.errors import EngineError
from hone.weights.buckets import Bucket
from hone.weights.meeting import Link, MeetingInlet, MeetingOutlet


class IpcOutlet(MeetingOutlet):
    """The sending end; see `MeetingOutlet`. `device` is the GPU."""

    def _join(self) -> None:
        """There is nothing to join: each bucket is opened by itself."""

    def _send_data(self, number: int, bucket: Bucket) -> Callable[[], bool]:
        torch.cuda.current_stream(self.device).synchronize()  # the bucket is packed
        keys = {engine: f"memory/{number}/{engine}" for engine in self.engines}
        for key in keys.values():  # one handle for each: the memory is counted as used until all were opened and closed
            self.store.set(key, _handle_of(bucket.data))

        def taken() -> bool:
            if any(self.last_taken(engine) < number for engine in self.engines):
                return False
            for key in keys.values():
                self.store.delete_key(key)
            return True

        return taken

    def _end(self) -> None:
        """Nothing is held open."""


class IpcInlet(MeetingInlet):
    """The receiving end; see `MeetingInlet`. `device` is this process's number of the sender's GPU."""

    def __init__(self, link: Link, engine: str, *, device: torch.device, timeout_s: float) -> None:
        super().__init__(link, engine, device=device, timeout_s=timeout_s)
        self.store.set(f"{engine}/ready", "")

    def close(self) -> None:
        """Nothing is held open."""

    def _receive(self, number: int, header: str) -> Tensor:
        shared = _opened(self.store.get(f"memory/{number}/{self.engine}"), self.device)
        data = shared[: json.loads(header)["bytes"]].clone()
        torch.cuda.current_stream(self.device).synchronize()  # copied: the sender may write to it again
        return data


def _handle_of(data: Tensor) -> str:
    """What another process needs to see the memory of a tensor, as JSON."""
    _, *handle = data.untyped_storage()._share_cuda_()
    said = [{"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part for part in handle]
    return json.dumps({"gpu": _uuid(data.device), "first_byte": data.storage_offset(), "handle": said})


def _opened(text: str | bytes, device: torch.device) -> Tensor:
    """The memory that `_handle_of` told of: (bytes,) uint8 on `device`."""
    said: dict[str, Any] = json.loads(text)
    if said["gpu"] != _uuid(device):
        raise EngineError(
            f"the trainer's weights lie on GPU {said['gpu']}, this engine is on {_uuid(device)}: only processes of one "
            "GPU can share memory."
        )
    handle = [base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in said["handle"]]
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *handle)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[said["first_byte"] :]


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
