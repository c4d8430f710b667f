"""Parts that time updates against the plan: passes at each length, modes of checkpointing, kernels of both kinds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from hone.algo.algorithm import Algorithm
from hone.config.run import Checkpointing, RunConfig
from hone.devices import forget_peak, peak_bytes
from hone.model.decoder import Decoder
from hone.model.kernels import use_fused_kernels, uses_fused_kernels
from hone.plan import time as roofline
from hone.plan.efficiency import MeasuredRates, remember_rates
from hone.plan.engine import CONTEXT_BYTES
from hone.plan.hardware import Hardware
from hone.plan.planner import Plan, plan
from hone.sizes import GIB
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    NO_ACCELERATOR,
    PROMPT,
    TINY,
    PartSetting,
    UpdateFigures,
    hardware_of,
    make_algorithm,
    make_passes,
    make_trainer,
    measured_update,
    peak_figure,
    random_batch,
    random_model,
    timed,
    update,
    within_memory,
)
from hone.tools.acceptance.usage import synchronizations, watched
from hone.train.policy import PolicyTrainer

MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
OF_A_RUN = ("CUDA context", "KV cache", "CUDA graphs")
"""Terms of a plan that an update alone does not allocate: the driver's, and those of a run's engine."""


class PlannedUpdate:
    """Samples of one length in groups of up to eight, and a plan for each mode of checkpointing.

    Args:
        size: of Qwen3's shapes, "0.6b".
        length: tokens of a sample with its prompt.
        dtype: of the arithmetic.
        microbatches: worth of samples, of `setting.budget` tokens each.
        modes: of checkpointing, in the order in which they are preferred.
    """

    def __init__(
        self,
        setting: PartSetting,
        size: str,
        length: int,
        dtype: str,
        *,
        microbatches: int = 2,
        modes: tuple[Checkpointing, ...] = MODES,
    ) -> None:
        samples = max(microbatches, microbatches * setting.budget // length)
        self._prompts, self._length, self._dtype = max(1, samples // 8), length, dtype
        self._response = max(length - PROMPT, 1)
        self.budget = max(setting.budget, length + PROMPT)
        """Tokens of a microbatch, at most."""
        self.hardware: Hardware = hardware_of(setting.device)
        self.shape = setting.shape(size)
        self.batch = random_batch(
            [self._response] * samples, self._prompts, vocab=self.shape["vocab_size"], prompt_tokens=PROMPT
        )
        self.logit_tokens = samples * self._response
        self.tokens = self._prompts * PROMPT + self.logit_tokens
        """Each prompt counted once."""
        self.case = f"{samples} x {length} tokens, {dtype}"
        model: dict[str, object] = {"path": f"Qwen/Qwen3-{size.upper()}"}
        if setting.tiny:
            model = {"init": dict(TINY), "characters": "0123456789"}
        group = max(samples // self._prompts, 1)
        self.plans: dict[Checkpointing, Plan] = {mode: self._plan(model, group, mode) for mode in modes}

    @property
    def fitting(self) -> list[Checkpointing]:
        """Modes that fit on this device, by the plan."""
        return [mode for mode, one in self.plans.items() if one.verdict.level != "does not fit"]

    @cached_property
    def flops(self) -> float:
        """Operations of one forward pass."""
        first = next(iter(self.plans))
        lengths = self.plans[first].inputs.workload.lengths
        return roofline.pass_flops(self._learner(first), self.tokens, lengths, self.logit_tokens)

    @property
    def peak_flops(self) -> float:
        """Operations per second that the device can do at most."""
        return self.hardware.flops(self._bytes_each)

    @property
    def holds_states(self) -> bool:
        """Whether weights, gradient and moments have room on this device."""
        return self._tensor_bytes(next(iter(self.plans)), "optimizer") + CONTEXT_BYTES <= self.hardware.memory_bytes

    @property
    def holds_weights(self) -> bool:
        """Whether there is room for the weights alone, in the numbers that are computed with."""
        count = next(iter(self.plans.values())).inputs.architecture.total_parameters
        return self._bytes_each * count + CONTEXT_BYTES <= self.hardware.memory_bytes

    def _tensor_bytes(self, mode: Checkpointing, phase: str) -> int:
        """Most bytes of tensors in a phase, by the plan."""
        phases = {moment.phase: moment for moment in self.plans[mode].ledgers[0].phase_peaks()}
        return sum(term.bytes for term in phases[phase].terms if term.name not in OF_A_RUN)

    def peak_over_plan(self, part: str, mode: Checkpointing, case: str, measured: int) -> Figure:
        """Most bytes of tensors in an update over the plan's."""
        expected = self._tensor_bytes(mode, "update")
        note = f"{measured / GIB:.1f} of {expected / GIB:.1f} GiB"
        return Figure(part, "peak_over_plan", measured / expected, case, note)

    def rates(self, mode: Checkpointing, seconds: tuple[float, float, float]) -> MeasuredRates:
        """The shares of the peak with which the plan's formulas give the seconds that were measured.

        Args:
            seconds: of a pass without gradients, of an update, and what the plan adds to that for its microbatches.
        """
        forward_s, update_s, overhead_s = seconds
        learner, hardware = self._learner(mode), self.hardware
        architecture = learner.architecture
        again = roofline.recomputed_frac(learner) * self.flops
        again += 2 * architecture.vocab * architecture.hidden * self.logit_tokens
        arithmetic = update_s - overhead_s - roofline.optimizer_s(learner, hardware, roofline.GPU)
        done = (3 * self.flops + again) / max(arithmetic, update_s / 10)
        return MeasuredRates(
            device=hardware.name,
            parameters=architecture.total_parameters,
            tokens=self._length,
            bytes_each=learner.bytes_each,
            training_flops=min(done / self.peak_flops, 1.0),
            forward_flops=min(self.flops / forward_s / self.peak_flops, 1.0),
        )

    @property
    def _bytes_each(self) -> int:
        return 2 if self._dtype == "bfloat16" else 4

    def _learner(self, mode: Checkpointing) -> roofline.LearnerTime:
        architecture = self.plans[mode].inputs.architecture
        return roofline.LearnerTime(
            architecture=architecture,
            devices=1,
            checkpointing=mode,
            bytes_each=self._bytes_each,
            trained_parameters=architecture.total_parameters,
            microbatches=1,
        )

    def _plan(self, model: dict[str, object], group: int, mode: Checkpointing) -> Plan:
        config = RunConfig.model_validate(
            {
                "model": model,
                "data": {"train": "rows.jsonl", "max_prompt_tokens": PROMPT},
                "reward": {"components": [{"use": "exact"}]},
                "run": {"precision": self._dtype},
                "cluster": {"backend": "local"},
                "rollout": {
                    "group_size": group,
                    "max_response_tokens": self._response,
                    "max_concurrent_samples": 1,
                },
                "train": {
                    "prompts_per_step": self._prompts,
                    "tokens_per_microbatch": self.budget,
                    "activation_checkpointing": mode,
                },
            }
        )
        return plan(
            config,
            self.hardware,
            mean_prompt_tokens=float(PROMPT),
            mean_response_tokens=float(self._response),
        )


def trainer_part(size: str) -> Callable[[PartSetting], Iterator[Figure]]:
    """The part that times one model's passes at every length, and remembers what share of the peak they reach."""

    def part(setting: PartSetting) -> Iterator[Figure]:
        name = f"trainer-{size}"
        dtype = setting.precision
        if not PlannedUpdate(setting, size, setting.lengths[0], dtype, modes=("full",)).holds_states:
            yield Figure(name, "left_out", 1.0, size, "the device has no room for weights, gradient and moments")
            return
        yield peak_figure(name, setting)
        model = random_model(setting.shape(size), setting.device)
        trainer, algorithm = make_trainer(model, dtype, setting.budget), make_algorithm()
        for length in setting.lengths:
            work = PlannedUpdate(setting, size, length, dtype)
            trainer.passes.tokens_per_microbatch = work.budget
            figures = trainer_at(name, setting, trainer, algorithm, work)
            yield from within_memory(name, work.case, figures, fits=bool(work.fitting))
            trainer.optimizer.begin_again()  # without the gradient of an update that ran out of memory

    return part


def passes_part(size: str) -> Callable[[PartSetting], Iterator[Figure]]:
    """The part that times passes without gradients of a model whose states have no room on one device of 80 GB."""

    def part(setting: PartSetting) -> Iterator[Figure]:
        name, dtype = f"trainer-{size}", setting.precision
        planned = [PlannedUpdate(setting, size, length, dtype, modes=("full",)) for length in setting.lengths]
        if not planned[0].holds_weights:
            yield Figure(name, "left_out", 1.0, size, "the device has no room for the weights")
            return
        yield peak_figure(name, setting)
        yield Figure(name, "left_out", 1.0, f"update, {size}", "of this size only passes without gradients are timed")
        model = random_model(planned[0].shape, setting.device, dtype=getattr(torch, dtype))
        passes = make_passes(dtype, setting.budget)
        for work in planned:
            passes.tokens_per_microbatch = work.budget
            figures = pass_figures(name, work, partial(passes.logprobs, model, work.batch))
            yield from within_memory(name, work.case, figures, fits=True)

    return part


def pass_figures(name: str, work: PlannedUpdate, logprobs: Callable[[], object]) -> Generator[Figure, None, float]:
    """Speed of passes without gradients over all samples. Returns their seconds."""
    seconds, _ = timed(logprobs)
    yield Figure(name, "logprob_tokens_per_s", work.tokens / seconds, work.case)
    yield Figure(name, "logprob_mfu", work.flops / seconds / work.peak_flops, work.case)
    return seconds


def trainer_at(
    name: str,
    setting: PartSetting,
    trainer: PolicyTrainer,
    algorithm: Algorithm,
    work: PlannedUpdate,
) -> Iterator[Figure]:
    """Figures of one length. What share of the peak it reached is remembered at once."""
    tokens, case = work.tokens, work.case
    forward_s = yield from pass_figures(name, work, partial(trainer.logprobs, work.batch))
    mode = next(iter(work.fitting), None)
    if mode is None:
        yield Figure(name, "left_out", 1.0, f"update, {case}", "the plan does not fit")
        return
    case, trainer.model.checkpointing = f"{case}, checkpointing {mode}", mode
    forget_peak()
    update_s, metrics = timed(lambda: update(trainer, work.batch, algorithm))
    yield Figure(name, "update_tokens_per_s", tokens / update_s, case)
    yield Figure(name, "update_mfu", 3 * work.flops / update_s / work.peak_flops, case)
    if not setting.is_gpu:
        yield Figure(name, "left_out", 1.0, f"memory, kernels and waiting, {case}", NO_ACCELERATOR)
        return
    yield work.peak_over_plan(name, mode, case, peak_bytes())
    yield from use_of_update(name, case, trainer, algorithm, work)
    seconds = (forward_s, update_s, metrics["train/microbatches"] * roofline.GPU.microbatch_overhead_s)
    print(f"efficiencies of {case} are in {remember_rates([work.rates(mode, seconds)])}")


def use_of_update(
    name: str, case: str, trainer: PolicyTrainer, algorithm: Algorithm, work: PlannedUpdate
) -> Iterator[Figure]:
    """What an update does on the device and how the host waits for it."""
    waits, microbatches = waits_of_update(trainer, algorithm, work, work.budget)
    more_waits, more_microbatches = waits_of_update(trainer, algorithm, work, work.budget // 2)
    trainer.passes.tokens_per_microbatch = work.budget
    yield Figure(name, "syncs_per_update", waits, case)
    if more_microbatches > microbatches:  # a microbatch has at least one sample
        per_microbatch = (more_waits - waits) / (more_microbatches - microbatches)
        yield Figure(name, "syncs_per_microbatch", per_microbatch, case)
    use = watched(lambda: update(trainer, work.batch, algorithm))
    yield Figure(name, "kernels_per_microbatch", use.kernels / microbatches, case)
    yield Figure(name, "host_ms_per_microbatch", 1000 * use.host_s / microbatches, case)
    yield Figure(name, "update_busy", use.busy_frac, case)


def waits_of_update(
    trainer: PolicyTrainer, algorithm: Algorithm, work: PlannedUpdate, tokens: int
) -> tuple[int, float]:
    """How often the host waits in an update with microbatches of `tokens` tokens, and how many there are."""
    trainer.passes.tokens_per_microbatch = tokens
    metrics = update(trainer, work.batch, algorithm)  # compiles what these sizes need
    return synchronizations(lambda: update(trainer, work.batch, algorithm)), metrics["train/microbatches"]


KERNELS = ("torch's kernels", "compiled kernels")
WORK = (("0.6b", 2048), ("0.6b", 16384), ("1.7b", 2048), ("4b", 2048))
"""Sizes and lengths: what fits, with one microbatch each."""
BESIDE_FIRST = ("mode_time_ratio", "mode_memory_ratio", "mode_logprob_difference", "mode_grad_difference")
"""Against the first mode that fits with the same kernels: it stores most."""
BESIDE_TORCH = ("mode_kernels_ratio", "mode_kernels_memory", "kernels_logprob_difference", "kernels_grad_difference")
"""Compiled kernels against torch's own in the same mode."""


def modes(setting: PartSetting) -> Iterator[Figure]:
    """Every mode of checkpointing that fits, with each kind of kernels, from the same weights and samples."""
    yield peak_figure("modes", setting)
    if not setting.is_gpu:
        yield Figure("modes", "left_out", 1.0, "memory", NO_ACCELERATOR)
    for size, works in groupby((("0.6b", setting.lengths[0]),) if setting.tiny else WORK, key=itemgetter(0)):
        shape = setting.shape(size)
        modes_here: tuple[Checkpointing, ...] = (*MODES[:2], shape["num_hidden_layers"] // 2, MODES[2])
        first = random_decoder(shape)
        for _, length in works:
            work = PlannedUpdate(setting, size, length, setting.precision, microbatches=1, modes=modes_here)
            yield from modes_of(setting, first, work, size)


def random_decoder(shape: Mapping[str, Any]) -> Decoder:
    """Random float32 weights on the host, where 4B take half a minute: each way copies them to the device."""
    model = random_model(shape, torch.device("cpu"))
    assert isinstance(model, Decoder)
    return model


def modes_of(setting: PartSetting, first: Decoder, work: PlannedUpdate, size: str) -> Iterator[Figure]:
    """Of one model and one length.

    Args:
        first: the weights that each way begins with.
    """
    for mode in work.plans.keys() - set(work.fitting):
        yield Figure("modes", "left_out", 1.0, f"{size}, {work.case}, {named(mode)}", "the plan does not fit")
    ways: dict[tuple[str, Checkpointing], UpdateFigures] = {}
    for kernels in KERNELS:
        try:
            use_fused_kernels(setting.device.type if kernels == KERNELS[1] else None)
            if kernels == KERNELS[1] and not uses_fused_kernels(setting.device):
                yield Figure("modes", "left_out", 1.0, f"{size}, {kernels}", "the compiler does not work here")
                continue
            for mode in work.fitting:
                case = f"{size}, {work.case}, {named(mode)}, {kernels}"
                figures = way_at(setting, first, work, kernels, mode, ways, case)
                yield from within_memory("modes", case, figures, fits=True)
        finally:
            use_fused_kernels(None)


def way_at(
    setting: PartSetting,
    first: Decoder,
    work: PlannedUpdate,
    kernels: str,
    mode: Checkpointing,
    ways: dict[tuple[str, Checkpointing], UpdateFigures],
    case: str,
) -> Iterator[Figure]:
    """One way, beside those that are in `ways` already; it is put there too."""
    ways[kernels, mode] = way = measured_way(setting, first, work, mode)
    yield Figure("modes", "mode_tokens_per_s", work.tokens / way.seconds, case)
    yield Figure("modes", "mode_mfu", 3 * work.flops / way.seconds / work.peak_flops, case)
    if setting.is_gpu:
        yield Figure("modes", "mode_peak_gib", way.peak_bytes / GIB, case)
    if kernels == KERNELS[1] and setting.is_gpu:
        yield work.peak_over_plan("modes", mode, case, way.peak_bytes)
    yield from beside(way, ways.get((kernels, work.fitting[0])), BESIDE_FIRST, case)
    yield from beside(way, ways.get((KERNELS[0], mode)), BESIDE_TORCH, case)


def named(mode: Checkpointing) -> str:
    """A mode in the words of a case."""
    return f"checkpointing {mode}" if isinstance(mode, str) else f"checkpointing of {mode} layers"


def measured_way(setting: PartSetting, first: Decoder, work: PlannedUpdate, mode: Checkpointing) -> UpdateFigures:
    """A new trainer's update, of a copy of the model."""
    model = Decoder(first.hf_config, device=setting.device)
    model.load_weights(first.named_weights())
    model.checkpointing = mode
    return measured_update(make_trainer(model, setting.precision, work.budget), work.batch)


def beside(
    way: UpdateFigures, other: UpdateFigures | None, names: tuple[str, str, str, str], case: str
) -> Iterator[Figure]:
    """Time, memory, logprobs and gradient against another way's, under these names of figures; none without another."""
    if other is None or way is other:
        return
    time_ratio, memory_ratio, logprob_difference, grad_difference = names
    yield Figure("modes", time_ratio, way.seconds / other.seconds, case)
    if other.peak_bytes:
        yield Figure("modes", memory_ratio, way.peak_bytes / other.peak_bytes, case)
    apart = float((way.logprobs_T - other.logprobs_T).abs().mean())
    yield Figure("modes", logprob_difference, apart, case)
    yield Figure("modes", grad_difference, abs(way.grad_norm / other.grad_norm - 1), case)
