"""Parts that time a trainer against the plan: passes at each length, memory and calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from hone.algo.algorithm import Algorithm
from hone.devices import devices_here, module_of
from hone.model.load import init_model
from hone.plan import time as roofline
from hone.plan.efficiency import MeasuredRates, remember_rates
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.planned import PlannedUpdate
from hone.tools.acceptance.setting import (
    NO_ACCELERATOR,
    TINY,
    PartSetting,
    make_algorithm,
    make_trainer,
    shape_of,
    timed,
    update,
)
from hone.tools.acceptance.usage import synchronizations, watched
from hone.train.policy import PolicyTrainer


def trainer_part(size: str) -> Callable[[PartSetting], Iterator[Figure]]:
    """The part that times one model's passes at every length, and remembers what share of the peak they reach."""

    def part(setting: PartSetting) -> Iterator[Figure]:
        name = f"trainer-{size}"
        shape = TINY if setting.tiny else shape_of(size)
        dtype = "bfloat16" if setting.is_gpu and devices_here("auto").bfloat16 else "float32"
        model = init_model(shape, vocab_size=None, seed=0, dtype=torch.float32, device=setting.device)
        found: list[MeasuredRates] = []
        trainer, algorithm = make_trainer(model, dtype, setting.budget), make_algorithm()
        for length in setting.lengths:
            work = PlannedUpdate(setting, size, length, dtype)
            trainer.passes.tokens_per_microbatch = work.budget
            yield from trainer_at(name, setting, trainer, algorithm, work, found)
        if setting.is_gpu:
            print(f"efficiencies of {len(found)} shapes are in {remember_rates(found)}")

    return part


def trainer_at(
    name: str,
    setting: PartSetting,
    trainer: PolicyTrainer,
    algorithm: Algorithm,
    work: PlannedUpdate,
    found: list[MeasuredRates],
) -> Iterator[Figure]:
    """Figures of one length."""
    tokens, case = work.tokens, work.case
    forward_s, _ = timed(lambda: trainer.logprobs(work.batch))
    yield Figure(name, "logprob_tokens_per_s", tokens / forward_s, case)
    mode = next(iter(work.fitting), None)
    yield Figure(name, "logprob_mfu", work.flops / forward_s / work.peak_flops, case)
    if mode is None:
        yield Figure(name, "left_out", 1.0, f"update, {case}", "the plan does not fit")
        return
    case, trainer.model.checkpointing = f"{case}, checkpointing {mode}", mode
    if setting.is_gpu:
        module_of(setting.device).reset_peak_memory_stats()
    update_s, metrics = timed(lambda: update(trainer, work.batch, algorithm))
    yield Figure(name, "update_tokens_per_s", tokens / update_s, case)
    yield Figure(name, "update_mfu", 3 * work.flops / update_s / work.peak_flops, case)
    if not setting.is_gpu:
        yield Figure(name, "left_out", 1.0, f"memory, kernels and waiting, {case}", NO_ACCELERATOR)
        return
    yield work.peak_over_plan(name, mode, case, module_of(setting.device).max_memory_allocated())
    yield from use_of_update(name, case, lambda: update(trainer, work.batch, algorithm), metrics)
    seconds = (forward_s, update_s, metrics["train/microbatches"] * roofline.GPU.microbatch_overhead_s)
    found.append(work.rates(mode, seconds))


def use_of_update(name: str, case: str, work: Callable[[], object], metrics: Mapping[str, float]) -> Iterator[Figure]:
    """What an update, which took `metrics`, does on the device and how the host waits for it."""
    microbatches = max(metrics["train/microbatches"], 1)
    yield Figure(name, "syncs_per_microbatch", synchronizations(work) / microbatches, case)
    use = watched(work)
    yield Figure(name, "kernels_per_microbatch", use.kernels / microbatches, case)
    yield Figure(name, "host_ms_per_microbatch", 1000 * use.host_s / microbatches, case)
    yield Figure(name, "update_busy", use.busy_frac, case)
