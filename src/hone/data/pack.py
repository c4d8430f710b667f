"""Batches: from scored groups to a batch, and from it to optimizer steps and microbatches.

Everything here picks whole samples by index and never reorders a batch, so columns stay aligned. How a
microbatch is laid out for the model (prompt computed once for its samples) is `model.layout`'s business; what is
counted here is the tokens that layout computes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hone.errors import DataError
from hone.experts import joined_experts, unrecorded
from hone.ragged import Ints, ends_of, ranges, starts_of
from hone.types import Batch, Group, Picture, Sample, Score, Totals

TOKENS_AT_ONCE = 1 << 20


def collate(groups: Sequence[Group]) -> Batch:
    """Flat CPU tensors of all samples of `groups`, in order. An unscored sample has reward NaN and loss mask 0."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [reward for group in groups for reward in group.rewards or (None,) * len(group.samples)]
    lengths = np.fromiter((len(s.token_ids) for s in samples), np.int64, len(samples))

    reward_S = np.array([math.nan if reward is None else reward for reward in rewards], np.float32)
    mask_T = _of_tokens((~np.isnan(reward_S)).astype(np.float32), lengths)
    if any(s.loss_mask is not None for s in samples):
        mask_T *= torch.from_numpy(joined([s.is_written_T for s in samples], np.float32))
    # Environment tokens may carry any logprob, even NaN; 0 x NaN would reach the loss.
    sampler_logprobs_T = torch.from_numpy(joined([s.sampler_logprobs for s in samples], np.float32))
    sampler_logprobs_T.masked_fill_(mask_T == 0, 0)
    group_sizes = [len(group.samples) for group in groups]
    columns = {"truncated_S": torch.tensor([float(s.finish_reason == "length") for s in samples])}
    if engines := tuple(sorted({s.engine for s in samples} - {""})):
        places = np.array([engines.index(s.engine) if s.engine else len(engines) for s in samples], np.float32)
        columns["engine_T"] = _of_tokens(places, lengths)
    if any(group.greedy for group in groups):
        columns |= _greedy_columns(groups)
    if any(turn.reward for s in samples for turn in s.turns):
        columns["turn_reward_T"] = _turn_rewards(samples, lengths)
    return Batch(
        prompts=tuple(group.prompt.token_ids for group in groups),
        prompt_S=torch.from_numpy(np.repeat(np.arange(len(groups)), group_sizes)),
        length_S=torch.from_numpy(lengths),
        token_ids_T=torch.from_numpy(joined([s.token_ids for s in samples], np.int64)),
        loss_mask_T=mask_T,
        sampler_logprobs_T=sampler_logprobs_T,
        reward_S=torch.from_numpy(reward_S),
        columns=columns,
        pictures=pictures_of([group.prompt.pictures for group in groups]),
        engines=engines,
        **_routing(groups),
    )


def _of_tokens(value_S: NDArray[np.float32], lengths: Ints) -> torch.Tensor:
    """(T,) each sample's value at all of its tokens. By torch, which lets other threads run meanwhile, and in pieces,
    as it makes an index of 8 bytes a token."""
    count = max(1, TOKENS_AT_ONCE // int(lengths.max(initial=1)))
    values, counts = torch.from_numpy(value_S).split(count), torch.from_numpy(lengths).split(count)
    return torch.cat([value.repeat_interleave(times) for value, times in zip(values, counts, strict=True)])


def _routing(groups: Sequence[Group]) -> dict[str, Any]:
    """The fields of a `Batch` that say where the engine sent tokens; empty where no sample has a record."""
    found = [sample.routing for group in groups for sample in group.samples]
    like = next((experts for experts in found if experts is not None), None)
    if like is None:
        return {}
    prompts = []
    for group in groups:
        recorded = (sample.prompt_routing for sample in group.samples)
        first = next((experts for experts in recorded if experts is not None), None)
        prompts.append(unrecorded(len(group.prompt.token_ids), like) if first is None else first)
    lengths = [len(sample.token_ids) for group in groups for sample in group.samples]
    each = [unrecorded(n, like) if e is None else e for n, e in zip(lengths, found, strict=True)]
    return {"routing_T": joined_experts(each), "prompt_routing": tuple(prompts)}


def score_columns(groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    """`score/NAME_S`: (S,) score of each reward component, NaN where a sample has none."""
    names = dict.fromkeys(name for group in groups for name in group.scores)
    missing = (Score(None),)
    return {
        f"score/{name}_S": torch.tensor(
            [
                math.nan if score.value is None else score.value
                for group in groups
                for score in group.scores.get(name, missing * len(group.samples))
            ],
            dtype=torch.float32,
        )
        for name in names
    }


def pictures_of(pictures: Sequence[tuple[Picture, ...]]) -> tuple[tuple[Picture, ...], ...]:
    """Like `Batch.pictures`, from those of each prompt."""
    return tuple(pictures) if any(pictures) else ()


def first_prompts(batch: Batch, count: int) -> Batch:
    """The samples of the first prompts, without the columns that were added on the way."""
    num_samples = int((batch.prompt_S < count).sum())
    num_tokens = int(batch.length_S[:num_samples].sum())
    return Batch(
        prompts=batch.prompts[:count],
        prompt_S=batch.prompt_S[:num_samples],
        length_S=batch.length_S[:num_samples],
        token_ids_T=batch.token_ids_T[:num_tokens],
        loss_mask_T=batch.loss_mask_T[:num_tokens],
        sampler_logprobs_T=batch.sampler_logprobs_T[:num_tokens],
        reward_S=batch.reward_S[:num_samples],
        pictures=batch.pictures[:count],
        routing_T=None if batch.routing_T is None else batch.routing_T[:num_tokens],
        prompt_routing=batch.prompt_routing[:count],
    )


def _greedy_columns(groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    """(N,) reward (NaN where unscored), length and truncation of each group's greedy sample."""
    rewards, lengths, truncated = [], [], []
    for group in groups:
        assert group.greedy is not None, f"prompt {group.prompt.id} has no greedy sample, others have"
        sample, reward = group.greedy.samples[0], group.greedy.rewards[0]
        rewards.append(math.nan if reward is None else reward)
        lengths.append(len(sample.token_ids))
        truncated.append(float(sample.finish_reason == "length"))
    return {
        "greedy_reward_N": torch.tensor(rewards, dtype=torch.float32),
        "greedy_length_N": torch.tensor(lengths),
        "greedy_truncated_N": torch.tensor(truncated),
    }


def _turn_rewards(samples: Sequence[Sample], lengths: Ints) -> torch.Tensor:
    """(T,) what an environment gave for each turn, at the turn's last token."""
    reward_T = np.zeros(int(lengths.sum()), np.float32)
    for start, sample in zip(starts_of(lengths).tolist(), samples, strict=True):
        for turn in sample.turns:
            if turn.end > turn.start:
                reward_T[start + turn.end - 1] = turn.reward
    return torch.from_numpy(reward_T)


def joined(arrays: Sequence[ArrayLike], dtype: type) -> NDArray:
    """Arrays one after another, as a new one."""
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="unsafe")


@dataclass(frozen=True)
class Shape:
    """Lengths and offsets of a batch as numpy arrays; read once per update."""

    prompt_S: Ints
    """Prompt of each sample, non-decreasing."""
    length_S: Ints
    """Response tokens."""
    start_S: Ints
    """Where each sample's tokens begin in the batch's per-token columns."""
    prompt_tokens_N: Ints
    """Tokens of each prompt."""

    @classmethod
    def of(cls, batch: Batch) -> Shape:
        length_S = batch.length_S.cpu().numpy()
        return cls(
            prompt_S=batch.prompt_S.cpu().numpy(),
            length_S=length_S,
            start_S=starts_of(length_S),
            prompt_tokens_N=np.fromiter(map(len, batch.prompts), np.int64, len(batch.prompts)),
        )

    def count(self, chosen_T: NDArray[np.bool_]) -> Ints:
        """(S,) how many of each sample's tokens are chosen."""
        before = ends_of(chosen_T.astype(np.int64))
        return before[self.start_S + self.length_S] - before[self.start_S]

    def tokens_of(self, samples: Ints) -> Ints:
        """Index into the per-token columns of every token of `samples`, sample by sample."""
        return ranges(self.start_S[samples], self.length_S[samples])


def count_totals(loss_tokens_S: Ints) -> Totals:
    """Denominators of one optimizer step, from the loss tokens of all its samples.

    Samples without loss tokens (unscored, empty, or environment tokens alone) do not count.
    """
    return Totals(loss_tokens=float(loss_tokens_S.sum()), samples=float((loss_tokens_S > 0).sum()))


def optimizer_steps(
    num_samples: int, *, samples_per_step: int | None, passes: int, seed: int, update: int
) -> Iterator[Ints]:
    """The samples of each optimizer step of one update, in ascending order within a step.

    Each pass goes over all samples once. Where a pass is more than one step its samples (not whole groups) are
    shuffled by (seed, update, pass), so that steps are alike and every run is the same. Steps of a pass differ in
    size by at most one sample.
    """
    steps_per_pass = math.ceil(num_samples / samples_per_step) if samples_per_step else 1
    for number in range(passes):
        if steps_per_pass <= 1:
            yield np.arange(num_samples)
            continue
        order = np.random.default_rng([seed, update, number]).permutation(num_samples)
        yield from (np.sort(part) for part in np.array_split(order, steps_per_pass))


def plan_microbatches(shape: Shape, samples: Ints, tokens_per_microbatch: int) -> list[Ints]:
    """Divide `samples` (ascending) into microbatches of at most `tokens_per_microbatch` computed tokens each.

    A prompt counts once in each microbatch that has samples of it, and a response without its last token, from which
    nothing is predicted. Samples of a prompt stay together unless they alone exceed the budget. Few microbatches,
    of nearly equal size: units are placed largest first, each where there is least. A plan changes time and memory,
    never the result.

    Raises:
        DataError: one sample alone exceeds the budget.
    """
    if not len(samples):
        return []
    units = _units(shape, samples, tokens_per_microbatch)
    cost_U = np.array([cost for cost, _ in units])
    order = np.argsort(-cost_U, kind="stable")
    count = math.ceil(cost_U.sum() / tokens_per_microbatch)
    while True:  # ends at the latest with one unit each, for every unit fits
        bins = _place(cost_U[order].tolist(), count, tokens_per_microbatch)
        if bins is not None:
            break
        count += 1
    members: list[list[Ints]] = [[] for _ in range(count)]
    for unit, place in zip(order.tolist(), bins, strict=True):
        members[place].append(units[unit][1])
    plan = [np.sort(np.concatenate(parts)) for parts in members if parts]
    return sorted(plan, key=lambda part: int(part[0]))


def divide_over_ranks(
    shape: Shape, samples: Ints, num_ranks: int, tokens_per_microbatch: int, *, whole_groups: bool = False
) -> list[list[Ints]]:
    """Divide `samples` (ascending) over ranks that work in step, and each rank's share into microbatches.

    Every rank gets as many microbatches, the last ones empty where its share needs fewer. Computed tokens are balanced:
    a group stays on one rank, which computes its prompt once, unless cutting groups shortens the longest share.

    Args:
        whole_groups: no group is cut; each fits into the budget.
    Raises:
        DataError: one sample alone exceeds the budget.
    """
    if not len(samples):
        return [[] for _ in range(num_ranks)]
    longest = _longest(shape, samples, tokens_per_microbatch)
    whole = computed_tokens(shape, samples)
    fair = math.ceil(whole / num_ranks)
    smaller = () if whole_groups else (fair, fair // 2, fair // 4)
    sizes = (max(size, longest) for size in (whole, *smaller))
    candidates = [_shares(shape, samples, num_ranks, size) for size in sizes]
    shares = min(candidates, key=lambda shares: max(computed_tokens(shape, share) for share in shares))
    plans = [plan_microbatches(shape, share, tokens_per_microbatch) for share in shares]
    count = max(map(len, plans))
    return [plan + [np.empty(0, np.int64)] * (count - len(plan)) for plan in plans]


def _shares(shape: Shape, samples: Ints, num_ranks: int, most: int) -> list[Ints]:
    """Each rank's samples (ascending) when groups of more than `most` computed tokens are cut.

    The largest piece goes first, each to the rank that has least.
    """
    units = _units(shape, samples, most)
    order = sorted(range(len(units)), key=lambda unit: -units[unit][0])
    places = _place([units[unit][0] for unit in order], num_ranks, sum(cost for cost, _ in units)) or []
    shares: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in range(num_ranks)]
    for unit, place in zip(order, places, strict=True):
        shares[place].append(units[unit][1])
    return [np.sort(np.concatenate(share)) for share in shares]


def computed_tokens(shape: Shape, samples: Ints) -> int:
    """Tokens that a microbatch of these samples computes: each prompt once, no response's last token."""
    responses = np.maximum(shape.length_S[samples] - 1, 0).sum()
    return int(shape.prompt_tokens_N[np.unique(shape.prompt_S[samples])].sum() + responses)


def _longest(shape: Shape, samples: Ints, budget: int) -> int:
    """Computed tokens of the longest of `samples` with its prompt. Raises DataError if they exceed the budget."""
    longest = int((shape.prompt_tokens_N[shape.prompt_S[samples]] + np.maximum(shape.length_S[samples] - 1, 0)).max())
    if longest > budget:
        raise DataError(
            f"a sample of {longest} tokens (prompt and response) does not fit into train.tokens_per_microbatch = "
            f"{budget}. Raise it to at least {longest}, or lower data.max_prompt_tokens or rollout.max_response_tokens."
        )
    return longest


def _units(shape: Shape, samples: Ints, budget: int) -> list[tuple[int, Ints]]:
    """(computed tokens, samples) of what stays together: the samples of a prompt, or as many as fit."""
    _longest(shape, samples, budget)
    prompt = shape.prompt_S[samples]
    response_tokens = np.maximum(shape.length_S[samples] - 1, 0)
    starts = np.flatnonzero(np.diff(prompt, prepend=-1))
    sums = np.add.reduceat(response_tokens, starts) + shape.prompt_tokens_N[prompt[starts]]
    units: list[tuple[int, Ints]] = []
    for start, stop, cost in zip(starts.tolist(), [*starts[1:].tolist(), len(samples)], sums.tolist(), strict=True):
        if cost <= budget:
            units.append((cost, samples[start:stop]))
        else:
            prompt_tokens = int(shape.prompt_tokens_N[prompt[start]])
            units += _split(prompt_tokens, response_tokens[start:stop], samples[start:stop], budget)
    return units


def _split(prompt_tokens: int, response_tokens: Ints, samples: Ints, budget: int) -> list[tuple[int, Ints]]:
    """A group too large for one microbatch, in runs of consecutive samples that each fit with the prompt."""
    units, first, cost = [], 0, prompt_tokens
    for i, tokens in enumerate(response_tokens.tolist()):
        if cost + tokens > budget:
            units.append((cost, samples[first:i]))
            first, cost = i, prompt_tokens
        cost += tokens
    return [*units, (cost, samples[first:])]


def _place(costs: list[int], count: int, budget: int) -> list[int] | None:
    """Which of `count` microbatches each unit goes to, the emptiest first; None if one does not fit anywhere."""
    heap = [(0, i) for i in range(count)]  # (tokens so far, microbatch)
    places = []
    for cost in costs:
        load, i = heap[0]
        if load + cost > budget:
            return None
        heapq.heapreplace(heap, (load + cost, i))
        places.append(i)
    return places
