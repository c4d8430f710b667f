"""The first-step gate: before anything is learned, prove that sampler and trainer are the same policy.

Policy-gradient training is silently wrong when the engine that samples and the trainer that learns disagree:
another temperature, weights that were not published, tokens shifted by one. None of these raises; the curve only
bends less. So before the first update of a process the trainer recomputes the logprobs of the very tokens that
were sampled. A failure stops the run and names the likely cause, found by testing each hypothesis on the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hone.config.run import RunConfig
from hone.errors import GateError
from hone.types import Batch, Group, Sample

if TYPE_CHECKING:
    from hone.loop.run import PolicyRun

DEFAULT_GAP = {"float32": 1e-3, "bfloat16": 3e-2}
"""Largest mean |trainer - sampler| logprob, nats. Two correct programs of one precision stay well below."""

TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)


def check_first_step(run: PolicyRun, groups: Sequence[Group], batch: Batch) -> dict[str, float]:
    """Metrics of the agreement between sampler and trainer.

    Raises:
        GateError: naming what differs and the likely cause. Nothing has been trained on then.
    """
    if not run.config.gate.enabled:
        return {}
    bound = logprob_bound(run.config)
    check_weights(run)
    check_final_tokens(run, groups)
    check_mask(groups, batch)
    trainer_T = run.trainer.logprobs(batch)
    gap = mean_gap(trainer_T, batch.sampler_logprobs_T, batch.loss_mask_T)
    if not gap <= bound:
        raise GateError(
            f"first-step gate: trainer and sampler logprobs differ by {gap:.3g} nats per token on average "
            f"(bound {bound:g}). Likely cause: {likely_cause(run, batch, trainer_T, gap)}. "
            "Nothing was trained. gate.max_logprob_gap moves the bound; gate.enabled=false goes on regardless."
        )
    metrics = {"gate/logprob_gap": gap, "gate/ratio_mean": mean_ratio(trainer_T, batch)}
    if "ref_logprobs" in run.algorithm.needs and run.progress.step == 0:
        reference_T = run.trainer.logprobs(batch, reference=True)
        metrics["gate/reference_gap"] = mean_gap(trainer_T, reference_T, batch.loss_mask_T)
        if not metrics["gate/reference_gap"] <= bound:
            raise GateError(
                f"first-step gate: the policy has not moved, yet it differs from its reference by "
                f"{metrics['gate/reference_gap']:.3g} nats per token (bound {bound:g}): the reference was loaded from "
                "other weights. Nothing was trained."
            )
    return metrics


def logprob_bound(config: RunConfig) -> float:
    """Largest mean difference between the logprobs of trainer and sampler that is no fault, nats."""
    return config.gate.max_logprob_gap or DEFAULT_GAP[config.run.precision]


def check_weights(run: PolicyRun) -> None:
    """The engine must hold the trainer's weights, byte for byte, under the trainer's version."""
    if run.engine.version != run.progress.step:
        raise GateError(
            f"first-step gate: the engine says it holds version {run.engine.version}, the trainer is at "
            f"{run.progress.step}. Likely cause: stale weights, the last publish did not arrive. Nothing was trained."
        )
    ours, theirs = run.trainer.fingerprint(), run.engine.fingerprint()
    if ours != theirs:
        raise GateError(
            f"first-step gate: the engine's weights hash to {theirs[:12]}, the trainer's to {ours[:12]}. "
            "Likely cause: stale weights, the last publish did not arrive or arrived in part. Nothing was trained."
        )


def check_final_tokens(run: PolicyRun, groups: Sequence[Group]) -> None:
    """What stopped by token must end with a stop token, each turn too: without it, stopping is never learned."""
    if run.sampling.stop:
        return  # a stop string may end a response on any token
    stop_ids = {*run.eos_ids, *run.sampling.stop_token_ids}
    stopped = [s.token_ids[:end] for g in groups for s in g.samples for end in stops(s)]
    missing = sum(not token_ids or token_ids[-1] not in stop_ids for token_ids in stopped)
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
        float(reward is not None and own)
        for group in groups
        for sample, reward in zip(group.samples, group.rewards, strict=True)
        for own in written(sample)
    ]
    expected_T = torch.tensor(expected, device=batch.loss_mask_T.device)
    if expected_T.shape != batch.loss_mask_T.shape or not torch.equal(expected_T, batch.loss_mask_T.float()):
        wrong = "another number of tokens"
        if expected_T.shape == batch.loss_mask_T.shape:
            wrong = f"{int((expected_T != batch.loss_mask_T).sum())} of {len(expected)} tokens"
        raise GateError(
            f"first-step gate: the loss mask differs from what the policy wrote in {wrong}. Likely cause: a mask that "
            "is off by one, so that prompt or tool tokens are trained on and final tokens are not. Nothing was trained."
        )


def written(sample: Sample) -> Sequence[bool]:
    """Which tokens the policy wrote: what its turns say, where it had turns, and not what the mask claims."""
    if not sample.turns:
        return sample.loss_mask or (True,) * len(sample.token_ids)
    own = [False] * len(sample.token_ids)
    for turn in sample.turns:
        own[turn.start : turn.end] = [True] * (turn.end - turn.start)
    return own


def likely_cause(run: PolicyRun, batch: Batch, trainer_T: Tensor, gap: float) -> str:
    """The hypothesis that explains the gap: each is tried on the data; the best one wins if it closes most of it."""
    explained = {
        "tokens and logprobs are shifted against each other by one (off-by-one)": shifted_gap(trainer_T, batch),
        "prompts are swapped: responses were matched with their neighbour's prompt": swapped_gap(run, batch),
    }
    for temperature in TEMPERATURES:
        at_T = run.trainer.logprobs(batch, temperature=temperature)
        name = f"wrong temperature: the engine sampled at about {temperature:g}, the trainer uses "
        explained[name + f"{run.sampling.temperature:g}"] = mean_gap(at_T, batch.sampler_logprobs_T, batch.loss_mask_T)
    cause, rest = min(explained.items(), key=lambda item: item[1])
    if rest < 0.5 * gap:
        return f"{cause} (this explains all but {rest:.2g} nats)"
    return "unknown: not the temperature, not a shift by one, not swapped prompts; suspect the model implementations"


def mean_gap(a_T: Tensor, b_T: Tensor, mask_T: Tensor) -> float:
    """Mean |a - b| over the masked tokens; NaN anywhere gives NaN, which no bound accepts."""
    return float(((a_T - b_T).abs() * mask_T).sum() / mask_T.sum().clamp(min=1))


def mean_ratio(trainer_T: Tensor, batch: Batch) -> float:
    """Mean of exp(trainer - sampler) over the policy's tokens: 1 when all is well."""
    ratio_T = (trainer_T - batch.sampler_logprobs_T).exp() * batch.loss_mask_T
    return float(ratio_T.sum() / batch.loss_mask_T.sum().clamp(min=1))


def shifted_gap(trainer_T: Tensor, batch: Batch) -> float:
    """The smaller gap when one side is moved by one token, within samples (edges between samples are few)."""
    sampler_T, mask_T = batch.sampler_logprobs_T, batch.loss_mask_T
    later = mean_gap(trainer_T[1:], sampler_T[:-1], mask_T[1:])
    return min(later, mean_gap(trainer_T[:-1], sampler_T[1:], mask_T[1:]))


def swapped_gap(run: PolicyRun, batch: Batch) -> float:
    """The smaller gap when every response is put behind the next or the previous prompt."""
    n = len(batch.prompts)
    gaps = []
    for shift in (1, n - 1):
        prompts = tuple(batch.prompts[(i + shift) % n] for i in range(n))
        swapped_T = run.trainer.logprobs(replace(batch, prompts=prompts))
        gaps.append(mean_gap(swapped_T, batch.sampler_logprobs_T, batch.loss_mask_T))
    return min(gaps)
