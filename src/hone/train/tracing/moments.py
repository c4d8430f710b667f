"""Where one moment of a pass ends and the next begins: hooks on a decoder, named as in `plan.ledger`.

Forward, the final norm divides the layers from the loss. Backward, the gradient of its output divides the loss from
the layers, and the gradient of the first layer's input divides those from the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hone.train.tracing.memory import LiveMemory, backward_begins


@contextmanager
def marked(memory: LiveMemory, model: nn.Module, *, last: str, prefix: str = "") -> Iterator[None]:
    """Inside, passes of a model tell `memory` which moment it is.

    Args:
        model: has a decoder with `layers` and a final `norm` somewhere in it.
        last: what the ledger calls the moment in which the embedding's gradient arrives.
        prefix: of the moments, where it is not the policy's model.
    """

    def update(moment: str) -> Callable[..., None]:
        return lambda *_: memory.at("update", prefix + moment)

    def begins(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            memory.at("logprobs", "layers")
        elif torch._C._current_graph_task_id() == -1:  # not where the backward pass computes the layer again
            update("layers forward")()
            x = inputs[0] if inputs else named["hidden_states"]
            if x.requires_grad:
                x.register_hook(update(last))

    def ends(_: nn.Module, inputs: Any, hidden: Tensor) -> None:
        if not torch.is_grad_enabled():
            memory.at("logprobs", "logits")
            return
        update("loss forward")()
        hidden.register_hook(update("layer backward"))

    decoder = _decoder(model)
    with ExitStack() as stack:
        stack.enter_context(backward_begins(update("loss backward")))
        for handle in (
            decoder.layers[0].register_forward_pre_hook(begins, with_kwargs=True),
            decoder.norm.register_forward_hook(ends),
        ):
            stack.callback(handle.remove)
        yield


def _decoder(model: nn.Module) -> Any:
    return next(part for part in model.modules() if hasattr(part, "layers") and hasattr(part, "norm"))
