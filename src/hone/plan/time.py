"""Step time by phase: a roofline with stated efficiencies, over the distribution of response lengths.

Every phase is counted in operations and in bytes, and takes as long as the slower of the two at a stated share of what
the device can do. The shares are priors that hold for good kernels on large models within a factor of two; small models
and one-process runs have more overhead per operation than is modelled. A machine's own figures replace them
(`Efficiency`). Not modelled: stragglers between machines, rewards computed on the host, and evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from hone.config.run import Checkpointing
from hone.plan.activations import recomputed_layers
from hone.plan.architecture import Architecture
from hone.plan.hardware import Hardware
from hone.plan.workload import Lengths


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a device's peak that real work reaches, and what a decoding step costs besides."""

    training_flops: float
    forward_flops: float
    decode_flops: float
    decode_bandwidth: float
    link: float
    decode_overhead_s: float
    """Per decoding step."""
    microbatch_overhead_s: float
    """Per microbatch: layout, launches, what small products lose."""


GPU = Efficiency(0.40, 0.50, 0.50, 0.60, 0.60, 0.003, 0.030)
GPU_EAGER = Efficiency(0.40, 0.50, 0.50, 0.60, 0.60, 0.020, 0.030)
"""Without captured graphs: every operation is launched from Python."""
CPU = Efficiency(0.35, 0.40, 0.30, 0.40, 1.0, 0.002, 0.005)

ALL_REDUCE_S = 15e-6
"""Latency of one all-reduce between devices of a machine; tensor parallelism needs two per layer and decoding step."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """The devices that generate: `replicas` engines, each on `devices_each`."""

    architecture: Architecture
    replicas: int
    devices_each: int
    concurrent: int
    """Sequences that one replica decodes together."""
    cache_tokens: float
    """Tokens that one replica's cache holds; infinite where it grows."""
    step_tokens: int
    """Most prompt tokens that one replica computes in one step."""
    bytes_each: int = 2


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted seconds of one policy update."""

    phases: Mapping[str, float]
    """Seconds by phase, in order."""
    step_s: float
    """Less than their sum where generating and training overlap."""
    response_tokens: float
    samples: int
    useful_flops: float
    """Operations that the mathematics needs: nothing twice."""
    peak_flops: float
    """Operations per second of all devices."""
    efficiency: Efficiency
    concurrent: float
    """Sequences that one replica really has in flight, given its cache."""
    group_score_s: float | None = None
    """Seconds in which idle judges and reward models score one group; None: there are none on devices."""

    @property
    def tokens_per_s(self) -> float:
        return self.response_tokens / self.step_s

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s

    @property
    def compute_utilisation(self) -> float:
        return self.useful_flops / (self.peak_flops * self.step_s)

    def cost_of_1000_steps(self, price_per_hour: float, devices: int) -> float:
        """At a price per device and hour."""
        return price_per_hour * devices * 1000 * self.step_s / 3600

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "phases_s": dict(self.phases),
            "step_s": self.step_s,
            "response_tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "compute_utilisation": self.compute_utilisation,
            "concurrent_sequences_per_replica": self.concurrent,
            "group_score_s": self.group_score_s,
            "efficiency": asdict(self.efficiency),
        }


def forward_flops(arch: Architecture, tokens: float, mean_context: float, *, logit_tokens: float) -> float:
    """Operations of one forward pass: two per parameter and token, attention, and logits of `logit_tokens`."""
    output = arch.vocab * arch.hidden
    multiplied = arch.active_parameters - (0 if arch.tied else output)
    body = 2 * (multiplied - output) * tokens
    attention = 4 * arch.attention_layers * arch.q_size * mean_context * tokens
    return body + attention + 2 * output * logit_tokens


def weights_read_bytes(arch: Architecture, tokens: float, bytes_each: int) -> float:
    """Bytes of weights that a forward pass of `tokens` tokens reads: of experts, those that get a token."""
    counts = arch.parameters
    dense = counts.total - counts.experts - (0 if arch.tied else counts.embedding)
    if arch.experts is None:
        return bytes_each * dense
    untouched = (1 - arch.experts.active / arch.experts.count) ** tokens
    return bytes_each * (dense + counts.experts * (1 - untouched))


def concurrent_sequences(sampler: Sampler, lengths: Lengths, group: int) -> float:
    """Sequences that a replica has in flight: bounded by its setting, and by the cache at their mean length.

    A prompt is in the cache once for its group, and a sequence in flight is on average half of what it will be.
    """
    tokens_each = lengths.mean_prompt / group + lengths.mean_response / 2
    return max(1.0, min(float(sampler.concurrent), sampler.cache_tokens / max(tokens_each, 1.0)))


@lru_cache(maxsize=4096)  # a search asks again and again for the same engine
def decode_s(
    sampler: Sampler, hardware: Hardware, rates: Efficiency, lengths: Lengths, samples: int, group: int
) -> float:
    """Seconds in which one replica samples its share of `samples` responses, long tail included."""
    share = samples / sampler.replicas
    concurrent = min(concurrent_sequences(sampler, lengths, group), share)
    quantiles = lengths.response_quantiles()
    mean = sum(quantiles) / len(quantiles)
    # While more are waiting, all rows are taken; each of them is somewhere in its response.
    saturated_steps = (share - concurrent) * mean / concurrent
    context = lengths.mean_prompt + mean / 2
    seconds = saturated_steps * _decode_step_s(sampler, hardware, rates, concurrent, context)
    # The last ones start together and end one by one.
    before = 0.0
    for number, length in enumerate(quantiles):
        rows = concurrent * (len(quantiles) - number) / len(quantiles)
        context = lengths.mean_prompt + (before + length) / 2
        seconds += (length - before) * _decode_step_s(sampler, hardware, rates, max(rows, 1.0), context)
        before = length
    return seconds


def _decode_step_s(sampler: Sampler, hardware: Hardware, rates: Efficiency, rows: float, context: float) -> float:
    """Seconds of one decoding step of `rows` sequences of `context` tokens each."""
    arch, tp, p = sampler.architecture, sampler.devices_each, sampler.bytes_each
    cache = arch.kv_bytes_per_token(bytes_each=p, tensor_parallel=tp) * context * rows
    states = 2 * arch.state_bytes(p) * rows  # read and written
    read = weights_read_bytes(arch, rows, p) / tp + cache + states
    flops = forward_flops(arch, rows, context, logit_tokens=rows) / tp
    by_bytes = read / (hardware.bandwidth * rates.decode_bandwidth)
    waiting = 2 * arch.layers * ALL_REDUCE_S if tp > 1 else 0.0
    return max(by_bytes, flops / (hardware.flops(p) * rates.decode_flops)) + rates.decode_overhead_s + waiting


def fitted_decoding(
    sampler: Sampler, hardware: Hardware, context: float, few: tuple[int, float], many: tuple[int, float]
) -> tuple[float, float]:
    """Share of the memory's bandwidth, at most 1, and seconds besides, with which a decoding step takes here what was
    measured.

    Args:
        context: tokens of each sequence, on average.
        few, many: rows of a step, and its seconds.
    """
    whole = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    least_s, most_s = (_decode_step_s(sampler, hardware, whole, rows, context) for rows, _ in (few, many))
    share = min((most_s - least_s) / max(many[1] - few[1], 1e-9), 1.0)
    return share, max(few[1] - least_s / share, 0.0)


def prefill_s(sampler: Sampler, hardware: Hardware, rates: Efficiency, lengths: Lengths, prompts: int) -> float:
    """Seconds in which the replicas compute their prompts, each once, in steps of at most `step_tokens`.

    Every step reads the weights, so small steps cost time.
    """
    arch, tp, p = sampler.architecture, sampler.devices_each, sampler.bytes_each
    each = prompts / min(sampler.replicas, prompts)
    tokens = each * lengths.mean_prompt
    flops = forward_flops(arch, tokens, lengths.mean_prompt / 2, logit_tokens=each) / tp
    steps = math.ceil(tokens / sampler.step_tokens)
    read = steps * weights_read_bytes(arch, tokens / steps, p) / tp
    by_flops = flops / (hardware.flops(p) * rates.forward_flops)
    return max(by_flops, read / (hardware.bandwidth * rates.decode_bandwidth)) + steps * rates.decode_overhead_s


@dataclass(frozen=True, slots=True)
class LearnerTime:
    """The devices that train one model."""

    architecture: Architecture
    devices: int
    checkpointing: Checkpointing
    bytes_each: int
    trained_parameters: int
    microbatches: int
    """Microbatches of one device in a policy update, all passes together."""
    tensor_parallel: int = 1
    offloaded: bool = False
    visiting: bool = False
    """Moments come from the host for their part of an optimizer step, and go back."""


RECOMPUTED: Mapping[Checkpointing, float] = {"none": 0.0, "selective": 0.3, "full": 1.0}
"""Forward passes of the layers that the backward pass makes again."""


def recomputed_frac(learner: LearnerTime) -> float:
    """Like `RECOMPUTED`, where some layers are too."""
    if isinstance(learner.checkpointing, int):
        layers = learner.architecture.layers
        return RECOMPUTED["full"] * recomputed_layers(learner.checkpointing, layers) / layers
    return RECOMPUTED[learner.checkpointing]


def pass_flops(learner: LearnerTime, tokens: float, lengths: Lengths, logit_tokens: float) -> float:
    """Operations of one forward pass over a step's tokens."""
    return forward_flops(learner.architecture, tokens, lengths.mean / 2, logit_tokens=logit_tokens)


def forward_s(
    learner: LearnerTime, hardware: Hardware, rates: Efficiency, tokens: float, lengths: Lengths, logit_tokens: float
) -> float:
    """Seconds of a pass without gradients."""
    flops = pass_flops(learner, tokens, lengths, logit_tokens)
    return flops / (learner.devices * hardware.flops(learner.bytes_each) * rates.forward_flops)


def update_s(
    learner: LearnerTime, hardware: Hardware, rates: Efficiency, tokens: float, lengths: Lengths, logit_tokens: float
) -> float:
    """Seconds of forward and backward passes over a step's tokens.

    Gathering weights and reducing gradients overlaps with arithmetic, so the slower of the two counts; the all-reduces
    of tensor parallelism stand between operations and are added.
    """
    flops = pass_flops(learner, tokens, lengths, logit_tokens)
    again = recomputed_frac(learner) * pass_flops(learner, tokens, lengths, 0)
    output = learner.architecture.vocab * learner.architecture.hidden
    again += 2 * output * logit_tokens
    flops_s = hardware.flops(learner.bytes_each) * rates.training_flops
    arithmetic = (3 * flops + again) / (learner.devices * flops_s)
    link, host_link = hardware.link * rates.link, hardware.host_link * rates.link
    gathering = 0.0
    if learner.devices > 1:  # a microbatch gathers weights twice (2 B each) and reduces gradients (4 B)
        moved = 8 * learner.architecture.total_parameters / learner.tensor_parallel
        gathering = moved / link
        if learner.offloaded:  # this device's share of weights comes from the host, and of gradients goes there
            gathering = max(gathering, moved / learner.devices / host_link)
    reducing, ways = 0.0, learner.tensor_parallel
    if ways > 1:  # two all-reduces per layer forward, two backward, of the residual stream
        arch, tokens_each = learner.architecture, tokens * ways / learner.devices
        reducing = 4 * arch.layers * 2 * arch.hidden * tokens_each * 2 * (ways - 1) / ways / link
    overhead = learner.microbatches * rates.microbatch_overhead_s
    return max(arithmetic, learner.microbatches * gathering) + reducing + overhead


def optimizer_s(learner: LearnerTime, hardware: Hardware, rates: Efficiency) -> float:
    """Seconds of one optimizer step: 16 bytes per parameter read and written, over the host link if they live there."""
    moved = 32 * learner.trained_parameters / learner.devices
    bandwidth = hardware.host_link * rates.link if learner.offloaded else hardware.bandwidth * rates.decode_bandwidth
    visits = 16 * learner.trained_parameters / learner.devices / (hardware.host_link * rates.link)
    return moved / bandwidth + (visits if learner.visiting and not learner.offloaded else 0.0)
