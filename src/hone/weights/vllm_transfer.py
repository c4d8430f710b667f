# pyright: reportMissingImports=false
"""New weights straight to the workers of a vLLM replica that is divided over several (tensor parallel).

vLLM has a protocol of its own for it (`vllm.distributed.weight_transfer`, of version 0.32): start, update, finish, on
every worker, with a way in that others may register. This one's is a group as any engine's, with each worker as a
member: the same buckets, the same fingerprint, the same deadlines. vLLM's own NCCL way has none of the last two.

Only vLLM loads this module, into its workers. A worker that is interrupted does not wait for the next
group: it is busy with its update, and vLLM has no way to tell it. The engine ends then, and is started again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from hone.errors import EngineError
from hone.model.fingerprint import Fingerprint
from hone.rollout.vllm_weights import complete, in_parts
from hone.rollout.vllm_worker import WeightsExtension, begin_reload, finish_reload, load_weights
from hone.weights.meeting import Link, MeetingInlet
from hone.weights.publish import Incoming
from hone.weights.receiving import new_inlet
from hone.weights.sending import Way, member_name


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """For joining a group; vLLM calls that the start of a transfer engine."""

    way: Way
    link: Link
    name: str
    """Of the engine."""
    timeout_s: float


@dataclass
class TakeInfo(WeightTransferUpdateInfo):
    """For one version; vLLM calls that an update."""

    version: int
    shapes: dict[str, tuple[int, ...]]
    """Of all weights that must come."""


class Transfer(WeightTransferEngine[JoinInfo, TakeInfo]):
    """One worker's way in."""

    init_info_cls = JoinInfo
    update_info_cls = TakeInfo
    _inlet: MeetingInlet | None = None
    fingerprint: str | None = None
    """Of what arrived last."""

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        self.shutdown()
        name = member_name(init_info.name, self.parallel_config.rank)
        self._inlet = new_inlet(init_info.way, init_info.link, name, self.device, init_info.timeout_s)

    def start_weight_update(self) -> None:
        begin_reload(self.model, self.vllm_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's, but for a wait for a GPU that may not be there."""
        info = self.parse_update_info(update_info)
        try:
            self.receive_weights(info)
        except Exception as error:  # the boundary of the engine: whatever it is, the sender must hear of it
            self.inlet.failed(f"{type(error).__name__}: {error}")
            raise

    def receive_weights(self, update_info: TakeInfo) -> None:
        incoming = Incoming(self.inlet, update_info.version)
        for part in in_parts(complete(incoming, update_info.shapes, Fingerprint())):
            load_weights(self.model, self.vllm_config, part)
        self.fingerprint = incoming.fingerprint

    def finish_weight_update(self) -> None:
        finish_reload(self.model, self.model_config, self.vllm_config)
        assert self.fingerprint is not None
        self.inlet.held(self.fingerprint)

    def shutdown(self) -> None:
        if self._inlet is not None:
            self._inlet.close()
            self._inlet = None

    @property
    def inlet(self) -> MeetingInlet:
        if self._inlet is None:
            raise EngineError("weights were announced to a worker that is in no group.")
        return self._inlet


class TransferExtension(WeightsExtension):
    """Beside the methods of vLLM's workers."""

    weight_transfer_engine: Transfer

    def hone_fingerprint(self) -> str | None:
        return self.weight_transfer_engine.fingerprint


WeightTransferEngineFactory.register_engine("hone", Transfer)
