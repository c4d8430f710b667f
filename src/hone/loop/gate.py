"""Sampler-trainer agreement before the first update: the first-step gate.

Policy-gradient training is silently wrong when the engine that samples and the trainer that learns disagree:
another temperature, weights that were not published, tokens shifted by one. None of these raises; the curve only
bends less. So before the first update of a process the trainer recomputes the logprobs of the very tokens that
were sampled. A difference that a named cause explains stops the run; each hypothesis is tested on the data. So does a
very large one. A smaller one that nothing explains may be rounding (bfloat16, experts, a cache in 8 bits): the run is
warned, and continues. `canary.py` compares again after some publishes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.config.derived import starts_from_adapter
from hone.config.run import RunConfig
from hone.data.pack import joined
from hone.errors import GateError
from hone.rollout.engine import Engine, Sampling
from hone.train.trainer import Trainer
from hone.types import Batch, Group, Picture, Sample

NOTICEABLE = {"float32": 1e-3, "bfloat16": 3e-2}
"""Mean |trainer - sampler| logprob, nats, from which a cause is looked for. Dense models stay well below."""
LARGEST = 0.2
"""Mean |trainer - sampler| logprob, nats, that no rounding explains."""

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
    noticeable, largest = noticeable_gap(config), config.gate.max_logprob_gap or LARGEST
    check_weights(trainer, engine, step)
    check_final_tokens(groups, sampling, eos_ids)
    check_mask(groups, batch)
    trainer_T = trainer.logprobs(batch)
    gap = mean_gap(trainer_T, batch.sampler_logprobs_T, batch.loss_mask_T)
    half, p99, most = quantiles((trainer_T - batch.sampler_logprobs_T).abs()[batch.loss_mask_T > 0], (0.5, 0.99, 1.0))
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


def noticeable_gap(config: RunConfig) -> float:
    """Mean difference between the logprobs of trainer and sampler that two correct programs do not reach, nats."""
    return NOTICEABLE[config.run.compute_dtype]


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
    stop_ids = {*eos_ids, *sampling.stop_token_ids}
    stopped = [s.token_ids[:end] for g in groups for s in g.samples for end in stops(s)]
    missing = sum(not len(token_ids) or int(token_ids[-1]) not in stop_ids for token_ids in stopped)
    if missing:
        raise GateError(
            f"first-step gate: {missing} of {len(stopped)} responses that stopped do not end with a stop token. "
            "Likely cause: the final token of each response is dropped between engine and trainer, so that the policy "
            "would never learn to stop. Nothing was trained."
        )


def stops(sample: Sample) -> list[int]:
    """Where the policy stopped by itself: after each turn that another one follows, and at the end if not cut."""
    ends = [turn.end for turn in sample.turns] or [len(sample.token_ids)]
    return ends if sample.finish_reason == "stop" else ends[:-1]


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
    """Which tokens the policy wrote: what its turns say, where it had turns, and not what the mask claims."""
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
    explained = {
        "tokens and logprobs are shifted against each other by one (off-by-one)": shifted_gap(trainer_T, batch),
        "prompts are swapped: responses were matched with their neighbour's prompt": swapped_gap(trainer, batch),
    }
    for name, pictures in wrong_pictures(batch):
        at_T = trainer.logprobs(replace(batch, pictures=pictures))
        found = mean_gap(at_T, batch.sampler_logprobs_T, batch.loss_mask_T)
        explained[name] = min(found, explained.get(name, found))
    for other in TEMPERATURES:
        at_T = trainer.logprobs(batch, temperature=other)
        name = f"wrong temperature: the engine sampled at about {other:g}, the trainer uses {temperature:g}"
        explained[name] = mean_gap(at_T, batch.sampler_logprobs_T, batch.loss_mask_T)
    cause, rest = min(explained.items(), key=lambda item: item[1])
    if rest < 0.5 * gap:
        return f"{cause} (this explains all but {rest:.2g} nats)"
    return None


def mean_gap(a_T: Tensor, b_T: Tensor, mask_T: Tensor) -> float:
    """Mean |a - b| over the masked tokens; NaN anywhere gives NaN, which no bound accepts."""
    return float(((a_T - b_T).abs() * mask_T).sum() / mask_T.sum().clamp(min=1))


def quantiles(values: Tensor, shares: Sequence[float]) -> list[float]:
    """The values below which such shares of all of them are; `torch.quantile` takes no more than 16 million."""
    ordered = values.flatten().sort().values
    return [float(ordered[max(math.ceil(share * len(ordered)) - 1, 0)]) if len(ordered) else 0.0 for share in shares]


def shifted_gap(trainer_T: Tensor, batch: Batch) -> float:
    """The smaller gap when one side is moved by one token, within samples (edges between samples are few)."""
    sampler_T, mask_T = batch.sampler_logprobs_T, batch.loss_mask_T
    later = mean_gap(trainer_T[1:], sampler_T[:-1], mask_T[1:])
    return min(later, mean_gap(trainer_T[:-1], sampler_T[1:], mask_T[1:]))


def wrong_pictures(batch: Batch) -> Iterator[tuple[str, Pictures]]:
    """What an engine may do to the pictures of prompts: in words, and what the trainer computes if it does the same."""
    every, n = batch.pictures, len(batch.pictures)
    if not every:
        return
    for order in orders(max(map(len, every))):
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
        pictures = tuple(tuple(resized(picture, resample) for picture in own) for own in every)
        yield f"the engine resizes pictures otherwise, about as {resample}", pictures


def orders(count: int) -> Iterator[tuple[int, ...]]:
    """Other orders of so many pictures: all of the first three, and for more reversed and moved by one."""
    yield from (order for order in permutations(range(min(count, 3))) if order != tuple(range(len(order))))
    if count > 3:
        forward = tuple(range(count))
        yield from (forward[::-1], (*forward[1:], 0), (count - 1, *forward[:-1]))


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


def resized(picture: Picture, resample: str) -> Picture:
    """The picture, read with another filter."""
    return replace(picture, digest=f"{picture.digest} {resample}", read=partial(picture.read, resample=resample))


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
