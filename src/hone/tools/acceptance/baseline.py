"""The part with a baseline: Transformers' own class with SDPA beside Hone's trainer, same weights and samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hone.devices import devices_here, give_back_memory
from hone.model.load import init_model, save_hf
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    PROMPT,
    TINY,
    PartSetting,
    UpdateFigures,
    make_trainer,
    measured_update,
    random_batch,
    shape_of,
    timed,
)
from hone.types import Batch

GROUP, LR = 8, 1e-6


def transformers(setting: PartSetting) -> Iterator[Figure]:
    """An update by each, of groups of 8 samples: short ones, and ones of 4,096 tokens."""
    shape = TINY if setting.tiny else shape_of("0.6b")
    dtype = "bfloat16" if setting.is_gpu and devices_here("auto").bfloat16 else "float32"
    for length in setting.lengths[:1] if setting.tiny else (setting.lengths[0], setting.lengths[2]):
        # Half of a run's: the baseline has the logits of all of its tokens in memory, and their gradient.
        budget = max(setting.budget // 2, length + PROMPT)
        samples = max(GROUP, budget // length // GROUP * GROUP)
        batch = random_batch([length] * samples, samples // GROUP, vocab=shape["vocab_size"], prompt_tokens=PROMPT)
        with TemporaryDirectory(prefix="hone-gpu-") as name:
            ours = by_hone(setting, shape, dtype, batch, budget, Path(name))
            give_back_memory()
            plain = by_transformers(PlainTrainer(Path(name), setting.device, getattr(torch, dtype), budget), batch)
            give_back_memory()
        case = f"{samples} x ({PROMPT} + {length}) tokens, {dtype}"
        yield Figure("transformers", "transformers_tokens_per_s", samples * length / plain.seconds, case)
        yield Figure("transformers", "transformers_speedup", plain.seconds / ours.seconds, case)
        apart = float((ours.logprobs_T - plain.logprobs_T).abs().mean())
        yield Figure("transformers", "transformers_logprob_difference", apart, case)
        apart = abs(ours.grad_norm / plain.grad_norm - 1)
        yield Figure("transformers", "transformers_grad_difference", apart, case)


def by_hone(
    setting: PartSetting, shape: Mapping[str, Any], dtype: Any, batch: Batch, budget: int, folder: Path
) -> UpdateFigures:
    """Hone's trainer, whose first weights stay in the folder."""
    model = init_model(shape, vocab_size=None, seed=0, dtype=torch.float32, device=setting.device)
    save_hf(folder, model.hf_config, model.named_weights())
    return measured_update(make_trainer(model, dtype, budget), batch)


def by_transformers(trainer: PlainTrainer, batch: Batch) -> UpdateFigures:
    """The same by the plain loop."""
    logprobs_T, norm = trainer.logprobs(batch), trainer.update(batch)
    seconds, _ = timed(lambda: trainer.update(batch))
    return UpdateFigures(logprobs_T, norm, seconds)


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
