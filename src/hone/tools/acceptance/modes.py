"""The part on ways to compute the same update: kernels compiled or torch's own, activations stored or made again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hone.config.run import Checkpointing
from hone.devices import devices_here, give_back_memory, module_of
from hone.memory.gauges import GIB
from hone.model.kernels import use_fused_kernels, uses_fused_kernels
from hone.model.load import init_model
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.planned import MODES, PlannedUpdate
from hone.tools.acceptance.setting import (
    NO_ACCELERATOR,
    PartSetting,
    UpdateFigures,
    make_trainer,
    measured_update,
)

KERNELS = ("torch's kernels", "compiled kernels")
WORK = (("0.6b", 2048), ("0.6b", 16384), ("1.7b", 2048), ("4b", 2048))
"""Sizes and lengths: what fits, with one microbatch each."""
BESIDE_FIRST = ("mode_time_ratio", "mode_memory_ratio", "mode_logprob_difference", "mode_grad_difference")
"""Against the first mode that fits with the same kernels: it stores most."""
BESIDE_TORCH = ("mode_kernels_ratio", "mode_kernels_memory", "kernels_logprob_difference", "kernels_grad_difference")
"""Compiled kernels against torch's own in the same mode."""


@dataclass(frozen=True, slots=True)
class Way:
    """What one way made of an update."""

    figures: UpdateFigures
    peak_bytes: int
    """Of tensors; 0 on a CPU."""


def modes(setting: PartSetting) -> Iterator[Figure]:
    """Every mode of checkpointing that fits, with each kind of kernels, from the same weights and samples."""
    dtype = "bfloat16" if setting.is_gpu and devices_here("auto").bfloat16 else "float32"
    if not setting.is_gpu:
        yield Figure("modes", "left_out", 1.0, "memory", NO_ACCELERATOR)
    for size, length in (("0.6b", setting.lengths[0]),) if setting.tiny else WORK:
        yield from modes_of(setting, size, length, dtype)


def modes_of(setting: PartSetting, size: str, length: int, dtype: str) -> Iterator[Figure]:
    """Of one model and one length."""
    some_layers = PlannedUpdate(setting, size, length, dtype).shape["num_hidden_layers"] // 2
    work = PlannedUpdate(setting, size, length, dtype, microbatches=1, modes=(*MODES[:2], some_layers, MODES[2]))
    for mode in work.plans.keys() - set(work.fitting):
        yield Figure("modes", "left_out", 1.0, f"{size}, {work.case}, {named(mode)}", "the plan does not fit")
    ways: dict[tuple[str, Checkpointing], Way] = {}
    for kernels in KERNELS:
        try:
            use_fused_kernels(setting.device.type if kernels == KERNELS[1] else None)
            if kernels == KERNELS[1] and not uses_fused_kernels(setting.device):
                yield Figure("modes", "left_out", 1.0, f"{size}, {kernels}", "the compiler does not work here")
                continue
            for mode in work.fitting:
                ways[kernels, mode] = way = measured_way(setting, work, mode, dtype)
                case = f"{size}, {work.case}, {named(mode)}, {kernels}"
                yield from cost_of(setting, work, way, case)
                if kernels == KERNELS[1] and setting.is_gpu:
                    yield work.peak_over_plan("modes", mode, case, way.peak_bytes)
                yield from beside(way, ways[kernels, work.fitting[0]], BESIDE_FIRST, case)
                yield from beside(way, ways[KERNELS[0], mode], BESIDE_TORCH, case)
        finally:
            use_fused_kernels(None)


def named(mode: Checkpointing) -> str:
    """A mode in the words of a case."""
    return f"checkpointing {mode}" if isinstance(mode, str) else f"checkpointing of {mode} layers"


def measured_way(setting: PartSetting, work: PlannedUpdate, mode: Checkpointing, dtype: str) -> Way:
    """A new trainer's update."""
    give_back_memory()
    model = init_model(work.shape, vocab_size=None, seed=0, dtype=torch.float32, device=setting.device)
    model.checkpointing = mode
    trainer = make_trainer(model, dtype, work.budget)
    if not setting.is_gpu:
        return Way(measured_update(trainer, work.batch), 0)
    module = module_of(setting.device)
    module.reset_peak_memory_stats()
    return Way(measured_update(trainer, work.batch), module.max_memory_allocated())


def cost_of(setting: PartSetting, work: PlannedUpdate, way: Way, case: str) -> Iterator[Figure]:
    """Time and memory of one way."""
    seconds = way.figures.seconds
    yield Figure("modes", "mode_tokens_per_s", work.tokens / seconds, case)
    yield Figure("modes", "mode_mfu", 3 * work.flops / seconds / work.peak_flops, case)
    if setting.is_gpu:
        yield Figure("modes", "mode_peak_gib", way.peak_bytes / GIB, case)


def beside(way: Way, other: Way, names: tuple[str, str, str, str], case: str) -> Iterator[Figure]:
    """Time, memory, logprobs and gradient against another way's, under these names of figures."""
    if way is other:
        return
    time_ratio, memory_ratio, logprob_difference, grad_difference = names
    yield Figure("modes", time_ratio, way.figures.seconds / other.figures.seconds, case)
    if other.peak_bytes:
        yield Figure("modes", memory_ratio, way.peak_bytes / other.peak_bytes, case)
    apart = float((way.figures.logprobs_T - other.figures.logprobs_T).abs().mean())
    yield Figure("modes", logprob_difference, apart, case)
    yield Figure("modes", grad_difference, abs(way.figures.grad_norm / other.figures.grad_norm - 1), case)
