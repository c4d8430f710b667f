"""Parts on Transformers' classes: beside Hone's trainer, in one row against padded rows, with compiled layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hone.devices import give_back_memory
from hone.model.hf import TransformersModel
from hone.model.load import save_hf
from hone.sizes import GIB
from hone.tools.acceptance.decoding import WATCHED_TOKENS, rollout, use_of_steps
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    NO_ACCELERATOR,
    PROMPT,
    PartSetting,
    UpdateFigures,
    make_algorithm,
    make_trainer,
    measured_update,
    random_batch,
    random_model,
    timed,
    update,
)
from hone.train.fsdp_ranks import compile_layers
from hone.types import Batch

GROUP, LR = 8, 1e-6


def transformers(setting: PartSetting) -> Iterator[Figure]:
    """An update by each, of groups of 8 samples: short ones, and ones of 4,096 tokens."""
    shape = setting.shape()
    dtype = setting.precision
    for length in setting.lengths[:1] if setting.tiny else (setting.lengths[0], setting.lengths[2]):
        # Half of a run's: the baseline has the logits of all of its tokens in memory, and their gradient.
        budget = max(setting.budget // 2, length + PROMPT)
        samples = max(GROUP, budget // length // GROUP * GROUP)
        batch = random_batch([length] * samples, samples // GROUP, vocab=shape["vocab_size"], prompt_tokens=PROMPT)
        with TemporaryDirectory(prefix="hone-gpu-") as name:
            model = random_model(shape, setting.device)
            save_hf(Path(name), model.hf_config, model.named_weights())
            ours = measured_update(make_trainer(model, dtype, budget), batch)
            del model
            give_back_memory()
            trainer = PlainTrainer(Path(name), setting.device, getattr(torch, dtype), budget)
            logprobs_T, norm = trainer.logprobs(batch), trainer.update(batch)
            seconds, _ = timed(partial(trainer.update, batch))
            plain = UpdateFigures(logprobs_T, norm, seconds)
            del trainer
            give_back_memory()
        case = f"{samples} x ({PROMPT} + {length}) tokens, {dtype}"
        yield Figure("transformers", "transformers_tokens_per_s", samples * length / plain.seconds, case)
        yield Figure("transformers", "transformers_speedup", plain.seconds / ours.seconds, case)
        apart = float((ours.logprobs_T - plain.logprobs_T).abs().mean())
        yield Figure("transformers", "transformers_logprob_difference", apart, case)
        apart = abs(ours.grad_norm / plain.grad_norm - 1)
        yield Figure("transformers", "transformers_grad_difference", apart, case)


class PlainTrainer:
    """What a loop of PyTorch's around Transformers does: each sample is a row with its own prompt, in autocast.

    Args:
        budget: tokens of a microbatch.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, budget: int) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self._model = model.to(device)
        self._device, self._dtype, self._budget = device, dtype, budget
        self._adam = torch.optim.AdamW(self._model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """(T,) on the CPU, of samples of one length."""
        parts = self._microbatches(batch)
        return torch.cat([self._logprobs(ids, batch).flatten().cpu() for ids, _ in parts])

    def update(self, batch: Batch) -> float:
        """One step on the mean over tokens of advantage x logprob: the policy gradient where every ratio is 1.

        Returns the norm of the gradient.
        """
        for ids, advantages in self._microbatches(batch):
            (-(advantages * self._logprobs(ids, batch)).sum() / len(batch.token_ids_T)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0, foreach=True)
        self._adam.step()
        self._adam.zero_grad()
        return float(norm)

    def _logprobs(self, ids: Tensor, batch: Batch) -> Tensor:
        """(R, L) float32 of the responses, for rows of prompt + response."""
        response = int(batch.length_S[0])
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=response + 1).logits[:, :-1]
        targets = ids[:, -response:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets, reduction="none")
        return -loss.view(len(ids), response)

    def _microbatches(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """(R, P + L) ids and (R, L) advantages of as many rows as the budget has room for."""
        samples = len(batch.length_S)
        prompts = torch.stack([torch.from_numpy(batch.prompts[int(n)]).long() for n in batch.prompt_S])
        ids = torch.cat([prompts, batch.token_ids_T.view(samples, -1)], dim=1)
        rows = max(1, self._budget // ids.shape[1])
        advantages = batch.columns["advantages_T"].view(samples, -1)
        for first in range(0, samples, rows):
            part = slice(first, first + rows)
            yield ids[part].to(self._device), advantages[part].to(self._device)


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
    sizes = TINY_SIZES if setting.tiny else SIZES
    for model_type, more in KEYS.items():
        shape = {"model_type": model_type, **sizes, **more}
        yield from numbers_of(setting, shape)
        yield from ways_of(setting, shape)
        yield from steps_of(setting, shape)
        give_back_memory()
    for model_type, more in KEYS_IN_ROWS.items():
        yield from steps_of(setting, {"model_type": model_type, **sizes, **more})
        give_back_memory()


def grouped_batch(setting: PartSetting, shape: Mapping[str, Any], groups: int, samples: int) -> Batch:
    """Groups of ragged samples whose prompt is as long as the longest of them."""
    longest = 24 if setting.tiny else 512
    lengths = np.linspace(longest // 8, longest, samples, dtype=int).tolist()
    return random_batch(lengths * groups, groups, vocab=shape["vocab_size"], prompt_tokens=longest)


def numbers_of(setting: PartSetting, shape: Mapping[str, Any]) -> Iterator[Figure]:
    """One row on the device against padded rows in float64, from the same weights. A few layers show it."""
    shape, dtype = {**shape, "num_hidden_layers": 2}, setting.precision
    batch, case = grouped_batch(setting, shape, *COMPARED), f"{shape['model_type']}, {dtype}"
    exact_T, exact_norm = outcome(made(shape, torch.device("cpu"), exactly=True), "float64", batch)
    found_T, norm = outcome(made(shape, setting.device), dtype, batch)
    yield Figure("classes", "class_logprob_error", float((found_T - exact_T).abs().mean()), case)
    yield Figure("classes", "class_grad_norm_error", abs(norm / exact_norm - 1), case)


def made(shape: Mapping[str, Any], device: torch.device, *, exactly: bool = False) -> TransformersModel:
    """A class with random weights; `exactly`: in float64 and in padded rows."""
    model = random_model(shape, device)
    assert isinstance(model, TransformersModel) and (model.why_rows is None) == (shape["model_type"] in KEYS)
    if exactly:
        model.hf.set_experts_implementation("eager")  # PyTorch's grouped product knows no float64
        model.double().why_rows = "the reference is computed in rows"
    return model


def outcome(model: TransformersModel, precision: str, batch: Batch) -> tuple[Tensor, float]:
    """(T,) logprobs on the CPU, and the norm of the gradient: one pass without gradients and one update, in one
    microbatch."""
    trainer = make_trainer(model, precision, 10**6)
    logprobs_T = trainer.logprobs(batch).double().cpu()
    return logprobs_T, update(trainer, batch, make_algorithm())["train/grad_norm"]


def ways_of(setting: PartSetting, shape: Mapping[str, Any]) -> Iterator[Figure]:
    """An update in one row, in padded rows, and in one row with compiled layers."""
    batch = grouped_batch(setting, shape, GROUPS, SAMPLES)
    tokens = sum(map(len, batch.prompts)) + len(batch.token_ids_T)
    case = f"{shape['model_type']}, {GROUPS} x ({len(batch.prompts[0])} + {SAMPLES} samples), {setting.precision}"
    one_row = cost(setting, shape, batch)
    padded = cost(setting, shape, batch, why_rows="the baseline is computed in rows")
    yield Figure("classes", "class_tokens_per_s", tokens / one_row.seconds, case)
    yield Figure("classes", "class_rows_ratio", padded.seconds / one_row.seconds, case)
    if one_row.peak_bytes:
        note = f"{one_row.peak_bytes / GIB:.1f} of {padded.peak_bytes / GIB:.1f} GiB"
        yield Figure("classes", "class_memory_ratio", one_row.peak_bytes / padded.peak_bytes, case, note)
    compiled = cost(setting, shape, batch, is_compiled=True)
    yield Figure("classes", "class_compiled_ratio", compiled.seconds / one_row.seconds, case)
    yield Figure("classes", "class_compiled_difference", abs(compiled.grad_norm / one_row.grad_norm - 1), case)


def steps_of(setting: PartSetting, shape: Mapping[str, Any]) -> Iterator[Figure]:
    """How often the host waits in a decoding step of Hone's own engine, and shares of the time."""
    model, rows, tokens = made(shape, setting.device), SAMPLES, 8 if setting.tiny else max(WATCHED_TOKENS)
    case = f"{shape['model_type']}, {rows} rows, {setting.precision}"
    draw = rollout(model.to(getattr(torch, setting.precision)), rows, tokens, None)
    if setting.is_gpu:
        yield from use_of_steps(draw, case, "classes")
    else:
        yield Figure("classes", "left_out", 1.0, f"waiting, {case} of {draw(tokens).tokens} tokens", NO_ACCELERATOR)


def cost(
    setting: PartSetting,
    shape: Mapping[str, Any],
    batch: Batch,
    *,
    why_rows: str | None = None,
    is_compiled: bool = False,
) -> UpdateFigures:
    """Of a new trainer's updates."""
    give_back_memory()
    model = made(shape, setting.device)
    model.why_rows = why_rows
    if is_compiled:
        compile_layers(model)
    return measured_update(make_trainer(model, setting.precision, 10**6), batch)
