"""Parts that time a trainer against the plan: passes at each length, memory, calibration, and the export."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hone.algo.algorithm import Algorithm
from hone.config.run import RunConfig
from hone.devices import devices_here, module_of
from hone.memory.gauges import GIB
from hone.model.load import init_model
from hone.model.recompute import Checkpointing
from hone.plan import time as roofline
from hone.plan.efficiency import MeasuredRates, remember_rates
from hone.plan.hardware import Hardware, find_hardware
from hone.plan.planner import Plan, plan
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    PROMPT,
    TINY,
    PartSetting,
    make_algorithm,
    make_trainer,
    random_batch,
    shape_of,
    timed,
    update,
)
from hone.train.policy import PolicyTrainer

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")


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
            trainer.passes.tokens_per_microbatch = max(setting.budget, length + PROMPT)
            yield from trainer_at(name, setting, trainer, algorithm, shape, length, dtype, found)
        if setting.is_gpu:
            print(f"efficiencies of {len(found)} shapes are in {remember_rates(found)}")

    return part


def trainer_at(
    name: str,
    setting: PartSetting,
    trainer: PolicyTrainer,
    algorithm: Algorithm,
    shape: Mapping[str, Any],
    length: int,
    dtype: str,
    found: list[MeasuredRates],
) -> Iterator[Figure]:
    """Figures of one length: two microbatches' worth of samples in groups of up to eight."""
    samples = max(2, 2 * setting.budget // length)
    prompts, response = max(1, samples // 8), max(length - PROMPT, 1)
    batch = random_batch([response] * samples, prompts, vocab=shape["vocab_size"], prompt_tokens=PROMPT)
    sizes = (prompts, samples // prompts, response, trainer.passes.tokens_per_microbatch)
    plans: dict[Checkpointing, Plan] = {mode: plan_of(setting, name, sizes, dtype, mode) for mode in CHECKPOINTING}
    fitting: list[Checkpointing] = [mode for mode, one in plans.items() if one.verdict.level != "does not fit"]
    mode: Checkpointing = fitting[0] if fitting else "full"
    planned, trainer.model.checkpointing = plans[mode], mode
    tokens, logit_tokens = prompts * PROMPT + samples * response, samples * response
    architecture, hardware = planned.inputs.architecture, planned.inputs.hardware
    learner = roofline.LearnerTime(
        architecture=architecture,
        devices=1,
        checkpointing=mode,
        bytes_each=2 if dtype == "bfloat16" else 4,
        trained_parameters=architecture.total_parameters,
        microbatches=1,
    )
    flops = roofline.pass_flops(learner, tokens, planned.inputs.workload.lengths, logit_tokens)
    peak = hardware.flops(learner.bytes_each)
    case = f"{samples} x {length} tokens, {dtype}"
    forward_s, _ = timed(lambda: trainer.logprobs(batch))
    yield Figure(name, "logprob_tokens_per_s", tokens / forward_s, case)
    yield Figure(name, "logprob_mfu", flops / forward_s / peak, case)
    if not fitting:
        print(f"{name}, {case}: no update, the plan does not fit")
        return
    case = f"{case}, checkpointing {mode}"
    if setting.is_gpu:
        module_of(setting.device).reset_peak_memory_stats()
    update_s, metrics = timed(lambda: update(trainer, batch, algorithm))
    yield Figure(name, "update_tokens_per_s", tokens / update_s, case)
    yield Figure(name, "update_mfu", 3 * flops / update_s / peak, case)
    if not setting.is_gpu:
        return
    measured = module_of(setting.device).max_memory_allocated()
    phases = {moment.phase: moment for moment in planned.ledgers[0].phase_peaks()}
    expected = sum(term.bytes for term in phases["update"].terms if term.name != "CUDA context")
    yield Figure(name, "peak_over_plan", measured / expected, case, f"{measured / GIB:.1f} of {expected / GIB:.1f} GiB")
    syncs = synchronizations(lambda: update(trainer, batch, algorithm))
    yield Figure(name, "syncs_per_microbatch", syncs / max(metrics["train/microbatches"], 1), case)
    seconds = (forward_s, update_s, metrics["train/microbatches"] * roofline.GPU.microbatch_overhead_s)
    found.append(rates_of(learner, hardware, length, flops, logit_tokens, seconds))


def rates_of(
    learner: roofline.LearnerTime,
    hardware: Hardware,
    length: int,
    flops: float,
    logit_tokens: int,
    seconds: tuple[float, float, float],
) -> MeasuredRates:
    """The shares of the peak with which the plan's formulas give the seconds that were measured.

    Args:
        flops: of one forward pass.
        seconds: of a pass without gradients, of an update, and what the plan adds to that for its microbatches.
    """
    forward_s, update_s, overhead_s = seconds
    architecture, peak = learner.architecture, hardware.flops(learner.bytes_each)
    again = roofline.recomputed_frac(learner) * flops
    again += 2 * architecture.vocab * architecture.hidden * logit_tokens
    arithmetic = update_s - overhead_s - roofline.optimizer_s(learner, hardware, roofline.GPU)
    return MeasuredRates(
        device=hardware.name,
        parameters=architecture.total_parameters,
        tokens=length,
        bytes_each=learner.bytes_each,
        training_flops=min((3 * flops + again) / max(arithmetic, update_s / 10) / peak, 1.0),
        forward_flops=min(flops / forward_s / peak, 1.0),
    )


def plan_of(setting: PartSetting, name: str, sizes: tuple[int, int, int, int], dtype: str, mode: Checkpointing) -> Plan:
    """The plan of such an update on this machine; sizes: prompts, group, response tokens, tokens per microbatch."""
    prompts, group, response, budget = sizes
    size = name.removeprefix("trainer-").upper()
    model = {"init": dict(TINY), "characters": "0123456789"} if setting.tiny else {"path": f"Qwen/Qwen3-{size}"}
    config = RunConfig.model_validate(
        {
            "model": model,
            "data": {"train": "rows.jsonl", "max_prompt_tokens": PROMPT},
            "reward": {"components": [{"use": "exact"}]},
            "run": {"precision": dtype},
            "cluster": {"backend": "local"},
            "rollout": {"group_size": max(group, 1), "max_response_tokens": response, "max_concurrent_samples": 1},
            "train": {
                "prompts_per_step": prompts,
                "tokens_per_microbatch": budget,
                "activation_checkpointing": mode,
            },
        }
    )
    return plan(
        config,
        find_hardware("this"),
        mean_prompt_tokens=float(PROMPT),
        mean_response_tokens=float(response),
    )


def synchronizations(work: Callable[[], object]) -> int:
    """How often the host waits for the GPU meanwhile."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def export(setting: PartSetting) -> Iterator[Figure]:
    """Writing the weights: how fast, and how much of the device it takes."""
    shape = TINY if setting.tiny else shape_of("0.6b")
    model = init_model(shape, vocab_size=None, seed=0, dtype=torch.float32, device=setting.device)
    trainer = make_trainer(model, "float32", 1024)
    with TemporaryDirectory(prefix="hone-gpu-") as folder:
        before = module_of(setting.device).memory_allocated() if setting.is_gpu else 0
        if setting.is_gpu:
            module_of(setting.device).reset_peak_memory_stats()
        started = time.perf_counter()
        trainer.write_weights(Path(folder), torch.bfloat16)
        seconds = time.perf_counter() - started
        written = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    yield Figure("export", "export_gib_per_s", written / GIB / seconds)
    if setting.is_gpu:
        taken = module_of(setting.device).max_memory_allocated() - before
        yield Figure("export", "export_device_gib", taken / GIB)
