"""Memory of a vLLM engine, awake and asleep.

It reserves a fraction of the device's *whole* memory for weights, workspace and, with the rest, the KV cache. So a
smaller fraction does not help against "no room for the cache", and the fractions of two engines on one device add up.
Sources: vLLM's `determine_available_memory` and `sleep`; workspace and graphs are estimates. Before vLLM 0.32 sizes its
cache, `GPUModelRunner.profile_run` sends as many of the largest pictures through a vision tower as its encoder budget
allows (`compute_mm_encoder_budget`: `max_num_batched_tokens`, or one picture if that has more tokens), and keeps their
features while the language model makes its step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hone.errors import DataError
from hone.plan import towers
from hone.plan.architecture import Architecture, adapter_room
from hone.plan.ledger import Term, gib, term
from hone.sizes import GIB

CONTEXT_BYTES = 512 << 20
"""CUDA context of a process, outside what an engine asks for; an estimate."""
GRAPH_BYTES = GIB
"""Captured graphs; an estimate. They cannot be given back."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One replica of an engine, as one of its devices sees it."""

    architecture: Architecture
    tensor_parallel_size: int
    gpu_memory_utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    """Tokens of the longest sequence that it must be able to hold."""
    section: str
    """Of the file that its settings are in."""
    lengths: tuple[int, int] = (0, 0)
    """Of a judge: tokens of the longest prompt and the longest response, for times."""
    answers: int = 1
    """Of a judge: responses to one prompt."""
    picture_pixels: int = 0
    """Of the largest picture of a prompt, for a model with a vision tower; 0: unknown, or none."""
    graphs: bool = True
    prefix: str = ""
    weight_bytes: int = 2
    """Per parameter."""
    kv_bytes: int = 2
    """Per number in the cache."""
    fixed_cache_bytes: int | None = None
    """`kv_cache_memory_bytes`: the cache's size, whatever the fraction; None: what the fraction leaves."""
    offload_bytes: int = 0
    """Weights of each device that are on the host."""
    adapter_rank: int = 0
    """Of the adapter that vLLM has room for beside its weights; 0: none."""


def refuse_states(architecture: Architecture) -> None:
    """Raises DataError for a model with layers with states: vLLM lays their states out in pages of its own size."""
    if architecture.states:
        raise DataError(
            f"{architecture.model_type}: hone plan cannot count vLLM's cache of layers with states, only that of "
            "Hone's own engine (cluster.engines.use=hone)."
        )


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What becomes of an engine's share of one device."""

    settings: EngineSettings
    capacity_bytes: int

    def __post_init__(self) -> None:
        refuse_states(self.settings.architecture)

    @property
    def requested_bytes(self) -> int:
        return round(self.settings.gpu_memory_utilization * self.capacity_bytes)

    @property
    def _count(self) -> int:
        """Parameters, those of a vision tower among them."""
        arch = self.settings.architecture
        return arch.total_parameters + (arch.tower.parameters if arch.tower else 0)

    @property
    def _share_bytes(self) -> int:
        """A device's share of the weights."""
        return self.settings.weight_bytes * self._count // self.settings.tensor_parallel_size

    @property
    def offloaded_bytes(self) -> int:
        """Those of a device's weights that are on the host."""
        return min(self.settings.offload_bytes, self._share_bytes)

    @property
    def weights_bytes(self) -> int:
        """Those on the device."""
        return self._share_bytes - self.offloaded_bytes

    @property
    def adapter_bytes(self) -> int:
        """Of an adapter beside the weights, as large as its rank allows."""
        settings = self.settings
        return settings.weight_bytes * adapter_room(
            settings.architecture, settings.adapter_rank, settings.tensor_parallel_size
        )

    @property
    def _fixed_bytes(self) -> int:
        """All but the cache."""
        return self.weights_bytes + self.adapter_bytes + self.workspace_bytes + self.graph_bytes

    @property
    def workspace_bytes(self) -> int:
        """Activations of one step of `max_num_batched_tokens`, and the sampler's copies of the logits; or the pass of a
        vision tower over its budget of picture tokens, if that takes more."""
        settings, arch = self.settings, self.settings.architecture
        width = 4 * arch.active_inner // settings.tensor_parallel_size + 6 * arch.hidden
        layer = 2 * settings.max_num_batched_tokens * width
        sampler = 12 * settings.max_num_seqs * arch.vocab
        if arch.tower is None:
            return layer + sampler
        p, tokens, tower = settings.weight_bytes, self.seen_tokens, arch.tower
        divided = replace(tower, inner=tower.inner // settings.tensor_parallel_size)
        each = towers.forward_per_patch(divided, p) + (4 + p) * tower.values_per_patch  # patches in float32, then in p
        return p * tower.out * tokens + max(layer + sampler, each * tokens * tower.patches_per_token)

    @property
    def seen_tokens(self) -> int:
        """Picture tokens that go through a vision tower together; 0: there is no tower."""
        settings, tower = self.settings, self.settings.architecture.tower
        if tower is None:
            return 0
        largest = settings.picture_pixels // (tower.patches_per_token * tower.patch**2)
        return max(settings.max_num_batched_tokens, largest)

    @property
    def graph_bytes(self) -> int:
        return GRAPH_BYTES if self.settings.graphs else 0

    @property
    def kv_bytes_per_token(self) -> int:
        settings = self.settings
        return settings.architecture.kv_bytes_per_token(
            bytes_each=settings.kv_bytes, tensor_parallel=settings.tensor_parallel_size
        )

    @property
    def cache_bytes(self) -> int:
        """What is left for keys and values; negative when not even the weights fit."""
        if self.settings.fixed_cache_bytes is not None:
            return self.settings.fixed_cache_bytes
        return self.requested_bytes - self._fixed_bytes

    @property
    def cache_tokens(self) -> int:
        return max(self.cache_bytes, 0) // self.kv_bytes_per_token

    @property
    def smallest_frac(self) -> float:
        """The least share of the device with which weights, workspace and one longest sequence fit."""
        return (self._fixed_bytes + self.kv_bytes_per_token * self.settings.max_model_len) / self.capacity_bytes

    def terms(self) -> list[Term]:
        """What it holds while awake; a cache that is not there is not counted, see `problem`."""
        settings, prefix = self.settings, self.settings.prefix
        tp, section = settings.tensor_parallel_size, settings.section
        count = self._count
        seen = f"; vision tower over {self.seen_tokens:,} picture tokens" if self.seen_tokens else ""
        share = f"{settings.gpu_memory_utilization:g} x {gib(self.capacity_bytes)}"
        rest = f"{share} less the rest: {self.cache_tokens:,} tokens"
        return [
            term(
                f"{prefix}weights",
                self.weights_bytes,
                f"{settings.weight_bytes} B x {count:,} parameters / {tp}",
                f"{section}.tensor_parallel_size",
            ),
            term(
                f"{prefix}adapter",
                self.adapter_bytes,
                f"{settings.weight_bytes} B x rank {settings.adapter_rank} of every layer",
                "lora.rank",
            ),
            term(f"{prefix}KV cache", max(self.cache_bytes, 0), rest, f"{section}.gpu_memory_utilization"),
            term(
                f"{prefix}workspace",
                self.workspace_bytes,
                f"{settings.max_num_batched_tokens:,} tokens of one layer, logits of {settings.max_num_seqs:,}{seen} "
                "(estimate)",
                f"{section}.max_num_batched_tokens",
            ),
            *self.asleep_terms(level=2),
        ]

    def asleep_terms(self, level: int) -> list[Term]:
        """What it holds while it sleeps; level 0 does not sleep."""
        if level == 0:
            return self.terms()
        settings = self.settings
        return [
            term(f"{settings.prefix}graphs", self.graph_bytes, "captured, never given back (estimate)"),
            term(f"{settings.prefix}CUDA context", CONTEXT_BYTES, "a process of its own (estimate)"),
        ]

    def problem(self) -> str | None:
        """Why it cannot start, or None."""
        if self.cache_bytes >= self.kv_bytes_per_token * self.settings.max_model_len:
            return None
        settings = self.settings
        needed = self._fixed_bytes
        if self.cache_bytes < 0:
            why = f"weights ({gib(self.weights_bytes)}) and workspace do not fit into it: they take {gib(needed)}"
        else:
            one = self.kv_bytes_per_token * settings.max_model_len
            left = gib(self.cache_bytes)
            why = f"the {left} left for the cache hold no sequence of {settings.max_model_len:,} tokens ({gib(one)})"
        least = math.ceil(100 * self.smallest_frac) / 100
        if least <= 0.95:
            cure = f"At least {least:.2f} is needed, or a larger {settings.section}.tensor_parallel_size."
        else:
            cure = (
                f"No share of one device is enough: raise {settings.section}.tensor_parallel_size above "
                f"{settings.tensor_parallel_size}."
            )
        return (
            f"{settings.section}.gpu_memory_utilization = {settings.gpu_memory_utilization:g} of "
            f"{gib(self.capacity_bytes)} is {gib(self.requested_bytes)}: {why}. {cure}"
        )
