"""Sampler-trainer agreement: the gate before the first update, and the canary after some publishes.

Policy-gradient training is silently wrong when the engine that samples and the trainer that learns disagree:
another temperature, weights that were not published, tokens shifted by one. None of these raises; the curve only
bends less. So before the first update of a process the trainer recomputes the logprobs of the very tokens that
were sampled. A difference that a named cause explains stops the run; each hypothesis is tested on the data. So does a
very large one. A smaller one that nothing explains may be rounding (bfloat16, experts, a cache in 8 bits): the run is
warned, and continues.

A fingerprint proves that every byte of new weights arrived, but not that an engine which converts, fuses or divides
them still computes the same. So after some publishes each replica samples a few tokens, and at the next update, while
the engines are offloaded and before anything is trained on this version, the trainer computes their logprobs. A few
tokens say little: gaps between two correct programs have heavy tails. So all replicas are pooled, what counts is how
much larger the gap is than the one that the gate measured, and a first finding is a warning. The next one of the same
replicas stops the run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.config.derived import starts_from_adapter
from hone.config.run import RunConfig
from hone.data.pack import collate, joined
from hone.errors import EngineError, GateError
from hone.rollout.engine import Engine, Request, Sampling
from hone.train.trainer import Trainer
from hone.types import Batch, Group, Picture, Prompt, Sample

NOTICEABLE = {"float32": 1e-3, "bfloat16": 3e-2}
"""Mean |trainer - sampler| logprob, nats, above which a cause is searched for. Dense models stay well below."""
LARGEST = 0.2
"""Mean |trainer - sampler| logprob, nats, that no rounding explains."""

CANARY_PROMPTS, CANARY_SAMPLES, CANARY_TOKENS = 2, 2, 16
"""What the canary lets each replica sample."""
CANARY_GROWTH = 3.0
"""A canary gap is suspicious at this multiple of the gap before the first update."""

Pictures = tuple[tuple[Picture, ...], ...]

TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)


def check_first_step(
    config: RunConfig,
    trainer: Trainer,
    engine: Engine,
    groups: Sequence[Group],
    batch: Batch,
    *,
    step: int,
    sampling: Sampling,
    eos_ids: Collection[int],
    needs: Collection[str],
    warn: Callable[[str], object],
) -> dict[str, float]:
    """Metrics of the agreement between sampler and trainer.

    Args:
        batch: of `groups`, sampled by `engine`.
        step: updates made; the version of the weights that the engine must have.
        needs: of the algorithm; see `Algorithm.needs`.
        warn: receives a difference that is noticeable, unexplained and no reason to stop.
    Raises:
        GateError: naming what differs and the likely cause. Nothing has been trained on then.
    """
    noticeable, largest = NOTICEABLE[config.run.compute_dtype], config.gate.max_logprob_gap or LARGEST
    check_weights(trainer, engine, step)
    check_final_tokens(groups, sampling, eos_ids)
    check_mask(groups, batch)
    trainer_T = trainer.logprobs(batch)
    gap = mean_gap(trainer_T, batch.sampler_logprobs_T, batch.loss_mask_T)
    ordered = (trainer_T - batch.sampler_logprobs_T).abs()[batch.loss_mask_T > 0].sort().values
    # `torch.quantile` takes no more than 16 million.
    places = (max(math.ceil(share * len(ordered)) - 1, 0) for share in (0.5, 0.99, 1.0))
    half, p99, most = (float(ordered[place]) if len(ordered) else 0.0 for place in places)
    if not gap <= min(noticeable, largest):
        cause = likely_cause(trainer, batch, trainer_T, gap, temperature=sampling.temperature)
        found = (
            f"first-step gate: trainer and sampler logprobs differ by {gap:.3g} nats per token on average "
            f"(median {half:.2g}, 99 % below {p99:.2g}, largest {most:.2g})"
        )
        if cause is not None or not gap <= largest:
            raise GateError(
                f"{found}, bound {largest:g} without a cause. Likely cause: {cause or UNKNOWN}. "
                "Nothing was trained. gate.max_logprob_gap sets the bound; gate.enabled=false disables the gate."
            )
        warn(
            f"{found}, more than the {noticeable:g} that {config.run.compute_dtype} explains in a dense model. Not the "
            "temperature, not a shift by one, not swapped prompts: experts, an 8-bit cache or a divided model may "
            "round so much. The run continues; algorithm.correction weighs the difference."
        )
    ratio_T = (trainer_T - batch.sampler_logprobs_T).exp() * batch.loss_mask_T
    metrics = {
        "gate/logprob_gap": gap,
        "gate/logprob_gap_p99": p99,
        "gate/logprob_gap_max": most,
        "gate/ratio_mean": float(ratio_T.sum() / batch.loss_mask_T.sum().clamp(min=1)),
    }
    if "ref_logprobs" in needs and step == 0 and not starts_from_adapter(config, "rl"):
        reference_T = trainer.logprobs(batch, reference=True)
        metrics["gate/reference_gap"] = mean_gap(trainer_T, reference_T, batch.loss_mask_T)
        if not metrics["gate/reference_gap"] <= noticeable:
            raise GateError(
                f"first-step gate: the policy has not moved, yet it differs from its reference by "
                f"{metrics['gate/reference_gap']:.3g} nats per token (bound {noticeable:g}): the reference was loaded "
                "from other weights. Nothing was trained."
            )
    return metrics


def check_weights(trainer: Trainer, engine: Engine, step: int) -> None:
    """The engine must hold the trainer's weights, byte for byte, under the trainer's version."""
    if engine.version != step:
        raise GateError(
            f"first-step gate: the engine says it holds version {engine.version}, the trainer is at "
            f"{step}. Likely cause: stale weights, the last publish did not arrive. Nothing was trained."
        )
    ours, theirs = trainer.fingerprint(), engine.fingerprint()
    if ours != theirs:
        raise GateError(
            f"first-step gate: the engine's weights hash to {theirs[:12]}, the trainer's to {ours[:12]}. "
            "Likely cause: stale weights, the last publish did not arrive or arrived in part. Nothing was trained."
        )


def check_final_tokens(groups: Sequence[Group], sampling: Sampling, eos_ids: Collection[int]) -> None:
    """What stopped by token must end with a stop token, each turn too: without it, stopping is never learned."""
    if sampling.stop:
        return  # a stop string may end a response on any token
    stop_ids, stopped = {*eos_ids, *sampling.stop_token_ids}, []
    for sample in (sample for group in groups for sample in group.samples):
        # Where the policy stopped by itself: after each turn that another one follows, and at the end if not cut.
        ends = [turn.end for turn in sample.turns] or [len(sample.token_ids)]
        stopped += [sample.token_ids[:end] for end in (ends if sample.finish_reason == "stop" else ends[:-1])]
    missing = sum(not len(token_ids) or int(token_ids[-1]) not in stop_ids for token_ids in stopped)
    if missing:
        raise GateError(
            f"first-step gate: {missing} of {len(stopped)} responses that stopped do not end with a stop token. "
            "Likely cause: the final token of each response is dropped between engine and trainer, so that the policy "
            "would never learn to stop. Nothing was trained."
        )


def check_mask(groups: Sequence[Group], batch: Batch) -> None:
    """Exactly the policy's own tokens of scored samples may carry loss."""
    expected = [
        written(sample) & (reward is not None)
        for group in groups
        for sample, reward in zip(group.samples, group.rewards, strict=True)
    ]
    expected_T = torch.from_numpy(joined(expected, np.float32)).to(batch.loss_mask_T.device)
    if expected_T.shape != batch.loss_mask_T.shape or not torch.equal(expected_T, batch.loss_mask_T.float()):
        wrong = "another number of tokens"
        if expected_T.shape == batch.loss_mask_T.shape:
            wrong = f"{int((expected_T != batch.loss_mask_T).sum())} of {len(expected_T)} tokens"
        raise GateError(
            f"first-step gate: the loss mask differs from what the policy wrote in {wrong}. Likely cause: a mask that "
            "is off by one, so that prompt or tool tokens are trained on and final tokens are not. Nothing was trained."
        )


def written(sample: Sample) -> NDArray[np.bool_]:
    """Which tokens the policy wrote: by its turns, where it had turns, not by the mask."""
    if not sample.turns and sample.loss_mask is not None:
        return sample.loss_mask
    own = np.full(len(sample.token_ids), not sample.turns)
    for turn in sample.turns:
        own[turn.start : turn.end] = True
    return own


UNKNOWN = (
    "unknown: not the temperature, not a shift by one, not swapped prompts or pictures; suspect the implementations of "
    "the model"
)


def likely_cause(trainer: Trainer, batch: Batch, trainer_T: Tensor, gap: float, *, temperature: float) -> str | None:
    """The hypothesis that explains the gap: each is tried on the data; the best one wins if it closes most of it. None
    if none does."""
    sampler_T, mask_T = batch.sampler_logprobs_T, batch.loss_mask_T
    shifted = mean_gap(trainer_T[1:], sampler_T[:-1], mask_T[1:])  # within samples; edges between samples are few
    shifted = min(shifted, mean_gap(trainer_T[:-1], sampler_T[1:], mask_T[1:]))
    explained = {
        "tokens and logprobs are shifted against each other by one (off-by-one)": shifted,
        "prompts are swapped: responses were matched with their neighbour's prompt": swapped_gap(trainer, batch),
    }
    for name, pictures in wrong_pictures(batch):
        found = mean_gap(trainer.logprobs(replace(batch, pictures=pictures)), sampler_T, mask_T)
        explained[name] = min(found, explained.get(name, found))
    for other in TEMPERATURES:
        name = f"wrong temperature: the engine sampled at about {other:g}, the trainer uses {temperature:g}"
        explained[name] = mean_gap(trainer.logprobs(batch, temperature=other), sampler_T, mask_T)
    cause, rest = min(explained.items(), key=lambda item: item[1])
    if rest < 0.5 * gap:
        return f"{cause} (this explains all but {rest:.2g} nats)"
    return None


def mean_gap(a_T: Tensor, b_T: Tensor, mask_T: Tensor) -> float:
    """Mean |a - b| over the masked tokens; NaN anywhere gives NaN, which no bound accepts."""
    return float(((a_T - b_T).abs() * mask_T).sum() / mask_T.sum().clamp(min=1))


def wrong_pictures(batch: Batch) -> Iterator[tuple[str, Pictures]]:
    """What an engine may do to the pictures of prompts: in words, and what the trainer computes if it does the same."""
    every, n = batch.pictures, len(batch.pictures)
    if not every:
        return
    # Other orders: all of the first three, and for more pictures reversed and moved by one.
    count = max(map(len, every))
    orders = [order for order in permutations(range(min(count, 3))) if order != tuple(range(len(order)))]
    if count > 3:
        forward = tuple(range(count))
        orders += [forward[::-1], (*forward[1:], 0), (count - 1, *forward[:-1])]
    for order in orders:
        pictures = tuple(reordered(own, order) for own in every)
        if pictures != every:
            yield "the engine shows the pictures of a prompt in another order", pictures
    yield "the engine leaves out the last picture of a prompt", tuple(own[:-1] for own in every)
    yield "the engine leaves out the first picture of a prompt", tuple(own[1:] for own in every)
    yield "the engine leaves out all pictures", ((),) * n
    for shift in (1, n - 1):
        others = [every[(i + shift) % n] or every[i] for i in range(n)]
        pictures = tuple(
            tuple(showing(a, other[k % len(other)]) for k, a in enumerate(own))
            for own, other in zip(every, others, strict=True)
        )
        if pictures != every:
            yield "the engine shows another prompt's pictures", pictures
    for resample in ("nearest", "bilinear", "bicubic", "lanczos"):
        pictures = tuple(
            tuple(
                replace(one, digest=f"{one.digest} {resample}", read=partial(one.read, resample=resample))
                for one in own
            )
            for own in every
        )
        yield f"the engine resizes pictures otherwise, about as {resample}", pictures


def reordered(pictures: Sequence[Picture], order: Sequence[int]) -> tuple[Picture, ...]:
    """Each place with another picture, as far as there are as many; the others as they are."""
    kept = [number for number in order if number < len(pictures)]
    whole = [*kept, *range(len(kept), len(pictures))]
    return tuple(showing(place, pictures[number]) for place, number in zip(pictures, whole, strict=True))


def showing(place: Picture, other: Picture) -> Picture:
    """The pixels of another picture in the place of this one; one of another size is stretched."""
    if place.digest == other.digest:
        return place
    if (place.rows, place.columns) == (other.rows, other.columns):
        return replace(other, start=place.start)
    size = place.rows / other.rows, place.columns / other.columns
    digest = f"{other.digest} as {place.rows} x {place.columns}"
    return replace(place, digest=digest, mean=other.mean, std=other.std, read=partial(read_in_size, other.read, size))


def read_in_size(read: Callable[..., NDArray[Any]], factors: tuple[float, float], **named: Any) -> NDArray[Any]:
    """A picture's pixels, with the sides multiplied by these factors; the nearest pixel counts."""
    pixels = read(**named)
    height, width = (round(side * factor) for side, factor in zip(pixels.shape, factors, strict=False))
    rows, columns = (np.arange(new) * old // new for new, old in zip((height, width), pixels.shape, strict=False))
    return pixels[rows][:, columns]


def swapped_gap(trainer: Trainer, batch: Batch) -> float:
    """The smaller gap when every response is put behind the next or the previous prompt."""
    n = len(batch.prompts)
    gaps = []
    for shift in (1, n - 1):
        prompts = tuple(batch.prompts[(i + shift) % n] for i in range(n))
        pictures = tuple(batch.pictures[(i + shift) % n] for i in range(n)) if batch.pictures else ()
        swapped_T = trainer.logprobs(replace(batch, prompts=prompts, pictures=pictures))
        gaps.append(mean_gap(swapped_T, batch.sampler_logprobs_T, batch.loss_mask_T))
    return min(gaps)


@dataclass
class Canary:
    """Comparison of every engine replica with the trainer after some publishes: the state kept in between."""

    expected_gap: float | None = None
    """Mean |trainer - sampler| logprob that the first-step gate measured, nats; None: it was disabled."""
    sampled: Mapping[str, Sequence[Group]] = field(default_factory=dict)
    """Samples of the newest version by replica, until they are compared."""
    version: int = 0
    suspects: frozenset[str] = frozenset()
    """Replicas whose gap was too large the last time."""

    async def sample(
        self, config: RunConfig, replicas: Mapping[str, Engine], prompts: Sequence[Prompt], sampling: Sampling
    ) -> None:
        """Have each replica sample. One that cannot is skipped: the next request to it reports the failure."""
        sampling = replace(sampling, max_tokens=min(CANARY_TOKENS, sampling.max_tokens))
        requests = [Request(prompt, CANARY_SAMPLES, sampling, config.seed, "eval") for prompt in prompts]
        found = await asyncio.gather(*(_sampled(e, requests, config.rollout.timeout_s) for e in replicas.values()))
        self.sampled = {name: groups for name, groups in zip(replicas, found, strict=True) if groups}

    def compare(
        self,
        config: RunConfig,
        logprobs: Callable[[Batch], Tensor],
        warn: Callable[[str], object],
    ) -> dict[str, float]:
        """Metrics of what was sampled, compared with the trainer's logprobs of the same tokens; none if nothing was.

        Raises:
            EngineError: see `judge`.
        """
        sampled, self.sampled = self.sampled, {}
        gaps: dict[str, float] = {}
        for name, groups in sampled.items():
            batch = collate(groups)
            gaps[name] = mean_gap(logprobs(batch), batch.sampler_logprobs_T, batch.loss_mask_T)
        return self.judge(config, gaps, warn) if gaps else {}

    def judge(self, config: RunConfig, gaps: Mapping[str, float], warn: Callable[[str], object]) -> dict[str, float]:
        """Metrics of the mean gaps |trainer - sampler| of a few tokens of each replica.

        Raises:
            EngineError: replicas sample from another distribution, for the second time in a row.
        """
        pooled = fmean(gaps.values())
        of_all, of_one = self.bounds(config)
        wrong = frozenset(name for name, gap in gaps.items() if not gap <= of_one)
        if not pooled <= of_all:
            wrong |= {name for name, gap in gaps.items() if not gap <= of_all}
        again = sorted(wrong & self.suspects)
        self.suspects = wrong
        if wrong:
            names = again or sorted(wrong)
            worst = max(names, key=lambda name: gaps[name])
            message = (
                f"{', '.join(names)}: holds version {self.version} and samples from another policy: its logprobs "
                f"differ from the trainer's by {gaps[worst]:.3g} nats per token on average (bound {of_one:.3g}; all "
                f"replicas: {pooled:.3g}, bound {of_all:.3g}), though all bytes of the weights arrived. Does it "
                "convert or quantise them? cluster.canary_every = 0 disables this check."
            )
            if again:
                raise EngineError(message)
            warn(f"{message} A second time in a row stops the run.")
        named = {f"engine/{name}_logprob_gap": gap for name, gap in gaps.items()}
        return {"engine/canary_gap": pooled, **named}

    def bounds(self, config: RunConfig) -> tuple[float, float]:
        """Largest mean gap of all replicas together, and of one, nats."""
        if config.gate.max_logprob_gap is not None:
            return config.gate.max_logprob_gap, config.gate.max_logprob_gap
        noticeable = NOTICEABLE[config.run.compute_dtype]
        expected = noticeable if self.expected_gap is None else self.expected_gap
        of_all = max(CANARY_GROWTH * expected, noticeable)
        return of_all, max(of_all, CANARY_GROWTH * noticeable)


async def _sampled(engine: Engine, requests: Sequence[Request], timeout_s: float) -> Sequence[Group]:
    try:
        async with asyncio.timeout(timeout_s):
            sampled = await asyncio.gather(*(engine.generate(request) for request in requests))
    except (EngineError, TimeoutError):
        return ()
    return [
        Group(request.prompt, samples).scored({}, (0.0,) * len(samples))
        for request, samples in zip(requests, sampled, strict=True)
    ]
