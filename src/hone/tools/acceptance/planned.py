"""An update of the acceptance run, and what the plan says of it: whether it fits, its memory, its operations."""

from __future__ import annotations

from functools import cached_property

from hone.config.run import Checkpointing, RunConfig
from hone.memory.gauges import GIB
from hone.plan import time as roofline
from hone.plan.efficiency import MeasuredRates
from hone.plan.hardware import find_hardware
from hone.plan.planner import Plan, plan
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import PROMPT, TINY, PartSetting, random_batch, shape_of

MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")


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
        self.shape = TINY if setting.tiny else shape_of(size)
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
        return next(iter(self.plans.values())).inputs.hardware.flops(self._bytes_each)

    def peak_over_plan(self, part: str, mode: Checkpointing, case: str, measured: int) -> Figure:
        """Most bytes of tensors in an update over the plan's."""
        phases = {moment.phase: moment for moment in self.plans[mode].ledgers[0].phase_peaks()}
        expected = sum(term.bytes for term in phases["update"].terms if term.name != "CUDA context")
        note = f"{measured / GIB:.1f} of {expected / GIB:.1f} GiB"
        return Figure(part, "peak_over_plan", measured / expected, case, note)

    def rates(self, mode: Checkpointing, seconds: tuple[float, float, float]) -> MeasuredRates:
        """The shares of the peak with which the plan's formulas give the seconds that were measured.

        Args:
            seconds: of a pass without gradients, of an update, and what the plan adds to that for its microbatches.
        """
        forward_s, update_s, overhead_s = seconds
        learner, hardware = self._learner(mode), self.plans[mode].inputs.hardware
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
            find_hardware("this"),
            mean_prompt_tokens=float(PROMPT),
            mean_response_tokens=float(self._response),
        )
