"""Routing in mixtures of experts: which experts each token is sent to, recorded while sampling, replayed in training.

A small difference of arithmetic between engine and trainer may send a token to other experts, and its logprobs then
differ a lot. With the choice replayed they cannot (R3, arXiv:2510.11370): the trainer's router still scores all experts
and weighs the chosen ones by its own scores, so that it has a gradient.

Transformers' classes differ in how they score and weigh experts, but all of them choose with `topk` over a score per
token and expert, within the block that has the module `experts`. That one call is where a choice is recorded and
replaced; what the class makes of it is the class's own. Not here: classes that choose otherwise, which are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hone.errors import DataError
from hone.experts import UNRECORDED, ExpertIds
from hone.sizes import ONE_BYTE_EXPERTS


class Routing:
    """The mixture-of-experts layers of a model, in order, and what they do about routing.

    Args:
        body: the module that gives hidden states; its blocks get hooks.
        name: of the architecture, for messages.
    Raises:
        DataError: it has no such layers.
    """

    def __init__(self, body: nn.Module, name: str) -> None:
        self._name = name
        blocks = [block for block in body.modules() if isinstance(getattr(block, "experts", None), nn.Module)]
        self._counts = [_number_of_experts(block) for block in blocks]
        if not blocks or None in self._counts:
            raise DataError(no_experts(name))
        if elsewhere := _routers_elsewhere(body, blocks):
            raise DataError(_other_means(name, f"in {elsewhere} modules outside of blocks of experts"))
        self._replayed_NLK: Tensor | None = None
        self._recorded: dict[int, Tensor] | None = None
        self._open: dict[int, _Choices] = {}
        for layer, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before, layer))
            block.register_forward_hook(partial(self._after, layer), always_call=True)

    @property
    def num_layers(self) -> int:
        """Mixture-of-experts layers."""
        return len(self._counts)

    @property
    def fewest(self) -> int:
        """Experts of the layer that has the fewest."""
        return min(filter(None, self._counts))

    @property
    def dtype(self) -> type[np.int8] | type[np.int16]:
        """Smallest type that has every expert and `UNRECORDED`."""
        return record_dtype(max(filter(None, self._counts)))

    def replay(self, experts_NLK: Tensor | None) -> None:
        """Send the N tokens of the next forward pass, and of its second pass where activations are made again, to these
        experts; None: to those that routers choose.

        Args:
            experts_NLK: (tokens, layers, experts of a token) integers; `UNRECORDED` leaves a token to the router.
        """
        if experts_NLK is not None and experts_NLK.shape[1] != self.num_layers:
            raise DataError(
                f"routing was recorded in {experts_NLK.shape[1]} layers, but {self._name} has {self.num_layers} with "
                "experts here. Engine and trainer need the same model."
            )
        self._replayed_NLK = experts_NLK

    @contextmanager
    def recording(self) -> Iterator[Callable[[], ExpertIds]]:
        """Inside, routers choose for themselves. The function that is yielded gives the choices of the newest forward
        pass: (tokens, layers, experts of a token) on the host."""
        self._replayed_NLK, self._recorded = None, {}
        try:
            yield self._take
        finally:
            self._recorded = None

    def _take(self) -> ExpertIds:
        assert self._recorded is not None, "only inside of `recording`"
        missing = self.num_layers - len(self._recorded)
        if missing:
            raise DataError(
                _other_means(self._name, f"in {missing} of {self.num_layers} layers by other means than topk")
            )
        found = torch.stack([self._recorded[layer] for layer in range(self.num_layers)], dim=1)
        self._recorded.clear()
        return found.to(torch.int16).cpu().numpy().astype(self.dtype, copy=False)

    def _before(self, layer: int, _block: nn.Module, _inputs: Any) -> None:
        if self._recorded is None and self._replayed_NLK is None:
            return
        replayed = None if self._replayed_NLK is None else self._replayed_NLK[:, layer]
        count = self._counts[layer]
        assert count is not None
        self._open[layer] = choices = _Choices(count, replayed, self._name)
        choices.__enter__()

    def _after(self, layer: int, _block: nn.Module, _inputs: Any, _output: Any) -> None:
        choices = self._open.pop(layer, None)
        if choices is None:
            return
        choices.__exit__(None, None, None)
        if self._recorded is not None and choices.made is not None:
            self._recorded[layer] = choices.made


class _Choices(TorchFunctionMode):
    """Inside, `topk` over the scores of experts gives the replayed experts, or is remembered in `made`."""

    def __init__(self, count: int, replayed_NK: Tensor | None, name: str) -> None:
        super().__init__()
        self._count, self._replayed_NK, self._name = count, replayed_NK, name
        self.made: Tensor | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return found
        scores_NE = args[0] if args else (kwargs or {})["input"]
        if scores_NE.dim() != 2 or scores_NE.shape[1] != self._count:
            return found  # of groups of experts
        chosen_NK = found.indices
        if self._replayed_NK is not None:
            if self._replayed_NK.shape != chosen_NK.shape:
                raise DataError(
                    f"routing was recorded as {tuple(self._replayed_NK.shape)} (tokens, experts of each), but "
                    f"{self._name} chooses {tuple(chosen_NK.shape)} here. Engine and trainer need the same model."
                )
            chosen_NK = torch.where(self._replayed_NK == UNRECORDED, chosen_NK, self._replayed_NK.long())
            found = torch.return_types.topk((scores_NE.gather(1, chosen_NK), chosen_NK))
        self.made = chosen_NK
        return found


def record_dtype(most_experts: int) -> type[np.int8] | type[np.int16]:
    """Smallest type of a record, for layers of at most `most_experts` experts: every expert and `UNRECORDED` fit in."""
    return np.int8 if most_experts <= ONE_BYTE_EXPERTS else np.int16


class LoadBalance:
    """What a forward pass with gradient says about the load of experts.

    No dataclass: of those FSDP2 hands on copies.
    """

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        """The architecture's auxiliary loss, without its coefficient; where the load is even, experts per token."""


def no_balance(name: str) -> str:
    """That an architecture has no auxiliary loss."""
    return (
        f"algorithm.load_balancing_coef > 0: Transformers' class of {name} has no load-balancing loss "
        "(load_balancing_loss_func over router logits). Set algorithm.load_balancing_coef=0."
    )


def _other_means(name: str, how: str) -> str:
    """That the hook misses choices of an architecture."""
    return (
        f"algorithm.replay_routing = true: {name} chooses experts {how}, so they can be neither recorded nor replayed. "
        "Set algorithm.replay_routing=false."
    )


def _routers_elsewhere(body: Any, blocks: Sequence[nn.Module]) -> int:
    """Modules that Transformers itself calls routers and that are in none of the blocks: JetMoE's of attention."""
    recorders = (getattr(body, "_can_record_outputs", None) or {}).get("router_logits", ())
    found = recorders if isinstance(recorders, list | tuple) else (recorders,)
    kinds = tuple(kind for one in found if (kind := getattr(one, "target_class", None)) not in (None, nn.Linear))
    seen = {module for block in blocks for module in block.modules()}
    return sum(isinstance(module, kinds) and module not in seen for module in body.modules())


def no_experts(name: str) -> str:
    """That an architecture has no routing."""
    return (
        f"algorithm.replay_routing = true: {name} has no layers with experts (a module `experts` that says how many "
        "there are), so there is no routing to replay. Set algorithm.replay_routing=false."
    )


def _number_of_experts(block: Any) -> int | None:
    """How many experts a block chooses from."""
    owners = [block.experts, block, getattr(block, "router", None), getattr(block, "gate", None)]
    for owner in filter(None, owners):
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if isinstance(count := getattr(owner, name, None), int):
                return count
    return len(block.experts) if isinstance(block.experts, nn.ModuleList) else None
