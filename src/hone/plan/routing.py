"""Memory of recorded routing (`algorithm.replay_routing`): the experts of each token and layer, on the host."""

from __future__ import annotations

from hone.plan.architecture import Architecture
from hone.plan.ledger import Term, term
from hone.plan.workload import Workload
from hone.sizes import ONE_BYTE_EXPERTS


def routing_records(architecture: Architecture, workload: Workload) -> list[Term]:
    """Records of all samples that may be in flight or trained, and of the batch that is made of those of one update.

    None where routing is not replayed.
    """
    moe, lengths = architecture.experts, workload.lengths
    if not workload.replays_routing or moe is None:
        return []
    layers = architecture.expert_layers
    each = layers * moe.active * (1 if moe.count <= ONE_BYTE_EXPERTS else 2)
    tokens = workload.prompts * lengths.max_prompt + workload.samples * lengths.max_response
    updates = workload.max_staleness + 2
    formula = f"{updates} x {tokens:,} tokens x {each} B ({layers} layers x {moe.active} experts)"
    return [term("routing records", updates * tokens * each, formula, "algorithm.replay_routing")]
