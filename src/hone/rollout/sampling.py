"""Token sampling: counter-based randomness, truncation, one draw per row, and its logprob.

Everything works on whole batches of rows and knows nothing of requests, caches or models. Each row's result
depends on its own logits, controls and key only, so a batch may be composed in any way.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 64  # tokens per block of the two-level search: the vocabulary is read once, in sums


def request_key(seed: int, stream: str, prompt_index: int) -> int:
    """The 64-bit key of a request's randomness, the same on every machine and in every process."""
    words = f"{seed}/{stream}/{prompt_index}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def row_keys(request_key: int, sample_index_B: np.ndarray) -> np.ndarray:
    """(B,) uint64 keys of a request's samples."""
    return _mix(np.uint64(request_key) + sample_index_B.astype(np.uint64) * _INCREMENT)


def uniforms(key_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
    """(B,) float64 in [0, 1): the draw of each row's token at that position of its response.

    splitmix64 (Steele, Lea, Flood 2014) in counter mode: stateless, so a row can be resumed or moved freely.
    """
    return (_bits(key_B, position_B) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_seed(request_key: int, sample_index: int, position: int) -> int:
    """63 bits for a generator that draws a sample from this position on: for engines that count no draws."""
    key_B = row_keys(request_key, np.array([sample_index]))
    return int(_bits(key_B, np.array([position]))[0] >> np.uint64(1))


def _bits(key_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
    return _mix(key_B + (position_B.astype(np.uint64) + np.uint64(1)) * _INCREMENT)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Controls:
    """Each row's sampling settings, as (B,) arrays with the meaning they have in `Sampling`."""

    temperature_B: np.ndarray
    top_k_B: np.ndarray
    top_p_B: np.ndarray
    min_p_B: np.ndarray


def sample(logits_BV: Tensor, controls: Controls, uniform_B: np.ndarray) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits_BV: (B, V) in any float type; not kept, and overwritten when it is float32.
        uniform_B: (B,) float64 in [0, 1).
    Returns:
        (B,) int64 tokens and (B,) float32 logprobs of the distribution really sampled from: after temperature
        and truncation. A row of temperature 0 gets its argmax and the logprob of the plain softmax.
    """
    logits_BV = logits_BV.float()
    greedy_B = controls.temperature_B == 0
    if (controls.temperature_B != 1).any():
        scale_B = np.where(greedy_B, 1, controls.temperature_B).astype(np.float32)
        logits_BV.div_(_column(scale_B, logits_BV))
    truncated_B = (controls.top_k_B > 0) | (controls.top_p_B < 1) | (controls.min_p_B > 0)
    if (truncated_B & ~greedy_B).any():
        truncate_(logits_BV, controls)
    probs_BV = torch.softmax(logits_BV, -1)
    if greedy_B.all():
        token_B = probs_BV.argmax(-1)
        mass_B1 = probs_BV.sum(-1, keepdim=True)
    else:
        token_B, mass_B1 = _inverse_cdf(probs_BV, upload(uniform_B, probs_BV.device))
        if greedy_B.any():
            token_B = torch.where(upload(greedy_B, token_B.device), probs_BV.argmax(-1), token_B)
    logprob_B = (probs_BV.gather(1, token_B[:, None]) / mass_B1).log_().squeeze(1)
    return token_B, logprob_B.float()


def on_host(token_B: Tensor, logprob_B: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What `sample` drew, on the host: one copy, for which the host waits."""
    drawn = torch.stack([token_B.double(), logprob_B.double()]).cpu().numpy()  # each exact in float64
    return drawn[0].astype(np.int64), drawn[1].astype(np.float32)


def truncate_(logits_BV: Tensor, controls: Controls) -> None:
    """Set to -inf, in place, what top-k, top-p and min-p exclude; greedy rows keep all.

    The order and the renormalisation between the three are those of Transformers' processors. Every rule keeps a
    prefix of the sorted row, so one cut-off value per row says it all; tokens that tie with it stay.
    """
    width = logits_BV.shape[-1]
    greedy_B = controls.temperature_B == 0
    top_k_B = np.where((controls.top_k_B > 0) & ~greedy_B, np.minimum(controls.top_k_B, width), width)
    sorted_BK = logits_BV.topk(int(top_k_B.max()), -1).values
    rank_K = torch.arange(sorted_BK.shape[-1], device=logits_BV.device)
    keep_BK = rank_K < _column(top_k_B, logits_BV)
    probs_BK = torch.softmax(sorted_BK.masked_fill(~keep_BK, -torch.inf), -1)
    mass_before_BK = probs_BK.cumsum(-1, dtype=torch.float64) - probs_BK
    keep_BK &= mass_before_BK < _column(
        np.where(greedy_B, 2.0, np.where(controls.top_p_B < 1, controls.top_p_B, 2.0)), logits_BV
    )
    keep_BK &= (
        probs_BK >= _column(np.where(greedy_B, 0.0, controls.min_p_B).astype(np.float32), logits_BV) * probs_BK[:, :1]
    )
    cutoff_B1 = sorted_BK.gather(1, keep_BK.sum(-1, keepdim=True) - 1)
    logits_BV.masked_fill_(logits_BV < cutoff_B1, -torch.inf)


def _inverse_cdf(probs_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which each row's cumulative probability passes `uniform_B`, and the row's total (B, 1).

    Two levels: sums of blocks of the vocabulary, then inside one block; in float64 where it is small. A token of
    probability 0 is never chosen, not even when rounding puts the target at the very end.
    """
    num_rows, width = probs_BV.shape
    if width < _BLOCK:  # one block, which is not whole: no first level
        total_B1 = probs_BV.sum(-1, keepdim=True).double()
        target_B1 = _strictly_below(uniform_B[:, None] * total_B1, total_B1)
        ends_BV = probs_BV.cumsum(1, dtype=torch.float64)
        return (ends_BV <= _strictly_below(target_B1, ends_BV[:, -1:])).sum(1), total_B1
    whole = width // _BLOCK
    block_sums = probs_BV[:, : whole * _BLOCK].view(num_rows, whole, _BLOCK).sum(-1)
    rest = probs_BV[:, whole * _BLOCK :].sum(-1, keepdim=True)
    block_ends = torch.cat([block_sums, rest], 1).cumsum(1, dtype=torch.float64)
    total_B1 = block_ends[:, -1:]
    target_B1 = _strictly_below(uniform_B[:, None] * total_B1, total_B1)
    block_B1 = (block_ends <= target_B1).sum(1, keepdim=True)
    before_B1 = torch.where(block_B1 > 0, block_ends.gather(1, (block_B1 - 1).clamp_min_(0)), 0.0)
    token_BK = block_B1 * _BLOCK + torch.arange(_BLOCK, device=probs_BV.device)
    inside_BK = probs_BV.gather(1, token_BK.clamp(max=width - 1)).masked_fill_(token_BK >= width, 0.0)
    ends_BK = inside_BK.cumsum(1, dtype=torch.float64)
    offset_B1 = _strictly_below((target_B1 - before_B1).clamp_min_(0), ends_BK[:, -1:])
    token_B = (block_B1 * _BLOCK + (ends_BK <= offset_B1).sum(1, keepdim=True)).squeeze(1)
    return token_B, total_B1


def _strictly_below(x: Tensor, bound: Tensor) -> Tensor:
    return torch.minimum(x, torch.nextafter(bound, torch.zeros_like(bound)))


def _column(value_B: np.ndarray, like: Tensor) -> Tensor:
    return upload(value_B, like.device)[:, None]


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device; on a CPU the same memory.

    The driver takes a copy before this returns, so the array may change afterwards. A plain `.to(device)` would wait
    until the device has done all that it was asked: one for each token and array is what an engine would mostly do.
    """
    return torch.from_numpy(values).to(device, non_blocking=True)
