"""The part on Transformers' own classes: a mixture of experts, windows and other norms, attention sinks; in one row
without padding against padded rows, and with compiled layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.devices import devices_here, give_back_memory, module_of
from hone.memory.gauges import GIB
from hone.model.hf import TransformersModel
from hone.model.load import init_model
from hone.tools.acceptance.decoding import WATCHED_TOKENS, rollout, use_of_steps
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    NO_ACCELERATOR,
    PartSetting,
    make_algorithm,
    make_trainer,
    random_batch,
    timed,
    update,
)
from hone.train.fsdp_ranks import compile_layers
from hone.types import Batch

EXPERTS = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4}
KEYS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "gemma3_text": {"sliding_window": 128},
    "gpt_oss": {**EXPERTS, "sliding_window": 128},
}
"""Model types, and what each has besides the sizes: routed experts; windows in some layers; experts, windows, sinks."""
KEYS_IN_ROWS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"sliding_window": 128},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
"""Of types that compute padded rows, which only decode here: capped scores; states of convolutions in some layers."""
SIZES, TINY_SIZES = (
    {
        "vocab_size": vocab,
        "hidden_size": 16 * head_dim,
        "intermediate_size": 48 * head_dim,
        "moe_intermediate_size": 12 * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
    }
    for vocab, head_dim, layers in ((32768, 64, 6), (256, 4, 2))
)
GROUPS, SAMPLES = 2, 8
"""Few, for in padded rows gpt-oss's class keeps the scores of every layer."""
COMPARED = (2, 4)
"""Groups and samples of each against float64, which is computed on the CPU."""


def classes(setting: PartSetting) -> Iterator[Figure]:
    """Each class: numbers against float64 in padded rows on the CPU; then time and memory of an update; decoding."""
    dtype = "bfloat16" if setting.is_gpu and devices_here("auto").bfloat16 else "float32"
    sizes = TINY_SIZES if setting.tiny else SIZES
    for model_type, more in KEYS.items():
        shape = {"model_type": model_type, **sizes, **more}
        yield from numbers_of(setting, shape, dtype)
        yield from ways_of(setting, shape, dtype)
        yield from steps_of(setting, shape, dtype)
        give_back_memory()
    for model_type, more in KEYS_IN_ROWS.items():
        yield from steps_of(setting, {"model_type": model_type, **sizes, **more}, dtype)
        give_back_memory()


def grouped_batch(setting: PartSetting, shape: Mapping[str, Any], groups: int, samples: int) -> Batch:
    """Groups of ragged samples whose prompt is as long as the longest of them."""
    longest = 24 if setting.tiny else 512
    lengths = np.linspace(longest // 8, longest, samples, dtype=int).tolist()
    return random_batch(lengths * groups, groups, vocab=shape["vocab_size"], prompt_tokens=longest)


@dataclass(frozen=True, slots=True)
class ClassOutcome:
    """Logprobs of a batch on the CPU, and the norm of its gradient."""

    logprobs_T: Tensor
    grad_norm: float


def numbers_of(setting: PartSetting, shape: Mapping[str, Any], dtype: str) -> Iterator[Figure]:
    """One row on the device against padded rows in float64, from the same weights. A few layers show it."""
    shape = {**shape, "num_hidden_layers": 2}
    batch, case = grouped_batch(setting, shape, *COMPARED), f"{shape['model_type']}, {dtype}"
    exact = outcome(made(shape, torch.device("cpu"), exactly=True), "float64", batch)
    found = outcome(made(shape, setting.device), dtype, batch)
    apart = float((found.logprobs_T - exact.logprobs_T).abs().mean())
    yield Figure("classes", "class_logprob_error", apart, case)
    yield Figure("classes", "class_grad_norm_error", abs(found.grad_norm / exact.grad_norm - 1), case)


def made(shape: Mapping[str, Any], device: torch.device, *, exactly: bool = False) -> TransformersModel:
    """A class with random weights; `exactly`: in float64 and in padded rows."""
    model = init_model(shape, vocab_size=None, seed=0, dtype=torch.float32, device=device)
    assert isinstance(model, TransformersModel) and (model.why_rows is None) == (shape["model_type"] in KEYS)
    if exactly:
        model.hf.set_experts_implementation("eager")  # PyTorch's grouped product knows no float64
        model.double().why_rows = "the reference is computed in rows"
    return model


def outcome(model: TransformersModel, precision: str, batch: Batch) -> ClassOutcome:
    """One pass without gradients and one update, in one microbatch."""
    trainer = make_trainer(model, precision, 10**6)
    logprobs_T = trainer.logprobs(batch).double().cpu()
    return ClassOutcome(logprobs_T, update(trainer, batch, make_algorithm())["train/grad_norm"])


@dataclass(frozen=True, slots=True)
class ClassCost:
    """What one way took."""

    grad_norm: float
    """Of the first update."""
    seconds: float
    """Of a later one."""
    peak_bytes: int
    """Most memory of tensors; 0 on a CPU."""


def ways_of(setting: PartSetting, shape: Mapping[str, Any], dtype: str) -> Iterator[Figure]:
    """An update in one row, in padded rows, and in one row with compiled layers."""
    batch = grouped_batch(setting, shape, GROUPS, SAMPLES)
    tokens = sum(map(len, batch.prompts)) + len(batch.token_ids_T)
    case = f"{shape['model_type']}, {GROUPS} x ({len(batch.prompts[0])} + {SAMPLES} samples), {dtype}"
    one_row = cost(setting, shape, dtype, batch)
    padded = cost(setting, shape, dtype, batch, why_rows="the baseline is computed in rows")
    yield Figure("classes", "class_tokens_per_s", tokens / one_row.seconds, case)
    yield Figure("classes", "class_rows_ratio", padded.seconds / one_row.seconds, case)
    if one_row.peak_bytes:
        note = f"{one_row.peak_bytes / GIB:.1f} of {padded.peak_bytes / GIB:.1f} GiB"
        yield Figure("classes", "class_memory_ratio", one_row.peak_bytes / padded.peak_bytes, case, note)
    if setting.tiny and "num_experts" in shape:
        yield Figure("classes", "left_out", 1.0, f"{shape['model_type']}, compiled", "a CPU compiles it for a minute")
        return
    compiled = cost(setting, shape, dtype, batch, is_compiled=True)
    yield Figure("classes", "class_compiled_ratio", compiled.seconds / one_row.seconds, case)
    yield Figure("classes", "class_compiled_difference", abs(compiled.grad_norm / one_row.grad_norm - 1), case)


def steps_of(setting: PartSetting, shape: Mapping[str, Any], dtype: str) -> Iterator[Figure]:
    """How often the host waits in a decoding step of Hone's own engine, and shares of the time."""
    model, rows, tokens = made(shape, setting.device), SAMPLES, 8 if setting.tiny else max(WATCHED_TOKENS)
    case = f"{shape['model_type']}, {rows} rows, {dtype}"
    draw = rollout(model.to(getattr(torch, dtype)), rows, tokens, None)
    if setting.is_gpu:
        yield from use_of_steps(draw, case, "classes")
    else:
        yield Figure("classes", "left_out", 1.0, f"waiting, {case} of {draw(tokens).tokens} tokens", NO_ACCELERATOR)


def cost(
    setting: PartSetting,
    shape: Mapping[str, Any],
    dtype: Any,
    batch: Batch,
    *,
    why_rows: str | None = None,
    is_compiled: bool = False,
) -> ClassCost:
    """Of a new trainer's updates, as if the batch had been sampled from its own weights."""
    give_back_memory()
    model, algorithm = made(shape, setting.device), make_algorithm()
    model.why_rows = why_rows
    if is_compiled:
        compile_layers(model)
    trainer = make_trainer(model, dtype, 10**6)
    batch = replace(batch, sampler_logprobs_T=trainer.logprobs(batch).cpu())
    if setting.is_gpu:
        module_of(setting.device).reset_peak_memory_stats()
    norm = update(trainer, batch, algorithm)["train/grad_norm"]
    seconds, _ = timed(lambda: update(trainer, batch, algorithm))
    return ClassCost(norm, seconds, module_of(setting.device).max_memory_allocated() if setting.is_gpu else 0)
