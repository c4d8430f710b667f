"""The part with Hone's own engine: decoding with and without CUDA graphs, in speed, tokens and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.devices import module_of
from hone.model.base import CausalModel
from hone.plan.efficiency import MeasuredDecoding, remember_rates
from hone.plan.families import architecture_from
from hone.plan.kv_cache import CacheRoom
from hone.plan.time import Sampler, fitted_decoding
from hone.rollout.decoding import PREFILL_TOKENS
from hone.rollout.engine import Request
from hone.rollout.graphs import Step, StepGraphs
from hone.rollout.local import graphs_on, make_stepper
from hone.rollout.rows import RowJob
from hone.rollout.scheduler import Scheduler
from hone.sizes import GIB
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    NO_ACCELERATOR,
    PROMPT,
    PartSetting,
    hardware_of,
    random_model,
    random_requests,
    timed,
)
from hone.tools.acceptance.usage import synchronizations, use_figures, watched

GROUP, ROWS, TOKENS = 8, (8, 64, 512), 256
WATCHED_TOKENS = (16, 48)
FEWEST = ROWS[0]
"""Where launching kernels, not computing, is what takes time."""


def decoding(setting: PartSetting) -> Iterator[Figure]:
    """Groups of 8 samples, drawn with kernels launched one by one and by graphs; and whether a replay computes what the
    same step does that is launched."""
    shape = setting.shape()
    dtype = getattr(torch, setting.precision)
    model = random_model(shape, setting.device, dtype=dtype)
    steps: dict[bool, dict[int, float]] = {False: {}, True: {}}
    for rows in ROWS[:1] if setting.tiny else ROWS:
        tokens = 8 if setting.tiny else TOKENS
        case = f"{rows} rows of {tokens} tokens"
        launched_s, drawn = yield from drawing(setting, rollout(model, rows, tokens, None), tokens, f"{case}, launched")
        steps[False][rows] = launched_s / drawn.steps
        graphs = graphs_on(setting.device) or StepGraphs(lambda: launched_again)
        replayed_s, drawn = yield from drawing(setting, rollout(model, rows, tokens, graphs), tokens, f"{case}, graphs")
        steps[True][rows] = replayed_s / drawn.steps
        yield Figure("decoding", "graphs_recorded", graphs.count, case)
        if rows == FEWEST:
            yield Figure("decoding", "graph_speedup", launched_s / replayed_s, case)
        held = reserved_bytes(setting)
        graphs.drop()
        if setting.is_gpu:
            yield Figure("decoding", "graph_gib", (held - reserved_bytes(setting)) / GIB, case)
        again = rollout(model, rows, tokens, StepGraphs(lambda: launched_again))(tokens)
        same = [np.array_equal(a, b) for a, b in zip(drawn.samples, again.samples, strict=True)]
        yield Figure("decoding", "same_samples", sum(same) / len(same), case)
    if setting.is_gpu:
        found = [measured_steps(setting, shape, dtype.itemsize, steps[graphs], graphs) for graphs in steps]
        print(f"efficiencies of decoding steps are in {remember_rates(decoding=found)}")


def measured_steps(
    setting: PartSetting, shape: Mapping[str, Any], bytes_each: int, steps: Mapping[int, float], graphs: bool
) -> MeasuredDecoding:
    """What the plan's formula makes of steps.

    Args:
        bytes_each: of a number that is computed with.
        steps: seconds of one by its rows, with CUDA graphs or without; of fewest and most rows they count.
    """
    architecture, hardware = architecture_from(shape), hardware_of(setting.device)
    sampler = Sampler(architecture, 1, 1, max(steps), math.inf, PREFILL_TOKENS, bytes_each)
    few, many = ((rows, steps[rows]) for rows in (min(steps), max(steps)))
    share, overhead_s = fitted_decoding(sampler, hardware, PROMPT + TOKENS / 2, few, many)
    return MeasuredDecoding(hardware.name, architecture.total_parameters, bytes_each, graphs, share, overhead_s)


@dataclass(frozen=True, slots=True)
class DrawnSteps:
    """What the scheduler did."""

    samples: list[np.ndarray]
    """Their tokens, in the order of the requests."""
    steps: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.samples))


def drawing(
    setting: PartSetting, draw: Callable[[int], DrawnSteps], tokens: int, case: str
) -> Generator[Figure, None, tuple[float, DrawnSteps]]:
    """Speed of samples of `tokens` tokens, and what steps do on the device. Returns seconds and samples."""
    seconds, drawn = timed(partial(draw, tokens), repeats=1)
    yield Figure("decoding", "decode_tokens_per_s", drawn.tokens / seconds, case)
    yield Figure("decoding", "decode_step_ms", 1000 * seconds / drawn.steps, case)
    if setting.is_gpu:
        yield from use_of_steps(draw, case)
    else:
        yield Figure("decoding", "left_out", 1.0, f"kernels and waiting, {case}", NO_ACCELERATOR)
    return seconds, drawn


def use_of_steps(draw: Callable[[int], DrawnSteps], case: str, part: str = "decoding") -> Iterator[Figure]:
    """How often the host waits in a step, and shares of the time."""
    few, more = (partial(draw, tokens) for tokens in WATCHED_TOKENS)
    steps = more().steps - few().steps
    waits = synchronizations(more) - synchronizations(few)  # without those of computing prompts
    yield Figure(part, "syncs_per_step", waits / steps, case)
    yield from use_figures(part, watched(more), case)


def launched_again(step: Step, inputs: Sequence[Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A `Capture` that records nothing: the step of the same shapes, launched each time."""
    out = step(*inputs)

    def replay() -> None:
        out.copy_(step(*inputs))

    return replay, out


def rollout(model: CausalModel, rows: int, tokens: int, graphs: StepGraphs | None) -> Callable[[int], DrawnSteps]:
    """A function that draws the same samples, to as many tokens as it is asked for, with one cache for all calls."""
    prompts = rows // GROUP
    room = CacheRoom(PROMPT, tokens, 2 * prompts, rows)
    scheduler = Scheduler(make_stepper(model, rows, PREFILL_TOKENS, room, graphs=graphs), lambda ids: "", rows)
    return partial(drawn_by, scheduler, random_requests(model.vocab_size, [tokens] * prompts, GROUP))


@torch.no_grad()
def drawn_by(scheduler: Scheduler, requests: Sequence[Request], tokens: int) -> DrawnSteps:
    """Samples of all requests, drawn together."""
    jobs = [RowJob(request, tokens, ()) for request in requests]
    for job in jobs:
        scheduler.add(job)
    steps = 0
    while not scheduler.idle:
        scheduler.step(0)
        steps += 1
    return DrawnSteps([sample.token_ids for job in jobs for sample in job.samples], steps)


def reserved_bytes(setting: PartSetting) -> int:
    """Device memory that tensors and graphs keep."""
    if not setting.is_gpu:
        return 0
    module = module_of(setting.device)
    module.empty_cache()
    return module.memory_reserved()
