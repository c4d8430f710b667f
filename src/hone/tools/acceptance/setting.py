"""What the parts of the acceptance run share: their sizes, models, batches and trainers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from hone.algo.algorithm import Algorithm
from hone.assemble.job import set_up_arithmetic
from hone.config.algorithm import AlgorithmSection
from hone.config.run import OptimizerSection, RunSection
from hone.devices import (
    devices_here,
    forget_peak,
    give_back_memory,
    is_accelerator,
    module_of,
    peak_bytes,
    synchronize,
)
from hone.errors import first_line
from hone.memory.gauges import ran_out_of_memory
from hone.model.base import CausalModel
from hone.model.layout import Layout
from hone.model.load import init_model
from hone.plan.hardware import THIS, Hardware, find_hardware, memory_limit_bytes, named_device
from hone.plan.known_models import named_config
from hone.rollout.engine import Request, Sampling
from hone.runtime.processes import end_with
from hone.tools.acceptance.figures import Figure
from hone.train.learner import Passes
from hone.train.mesh import process_group
from hone.train.policy import PolicyTrainer
from hone.train.ranks import ALONE, Ranks
from hone.types import Batch, Prompt

T = TypeVar("T")
LENGTHS = (300, 2048, 4096, 16384, 32768)
BUDGET, PROMPT = 16384, 128
TINY = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
SMALL = {
    **TINY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}
"""Heads of 64, which vLLM has kernels for everywhere."""
RUN_TIMEOUT_S = 420.0
GROUP_TIMEOUT_S = 120.0
"""Of one collective operation of ranks."""
NO_ACCELERATOR = "no accelerator was found"


@dataclass(frozen=True, slots=True)
class PartSetting:
    """Where a part runs, and in which sizes."""

    device: torch.device
    tiny: bool

    @property
    def is_gpu(self) -> bool:
        return is_accelerator(self.device)

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """Of the arithmetic: bfloat16 where an accelerator has it."""
        return "bfloat16" if self.is_gpu and devices_here("auto").bfloat16 else "float32"

    def shape(self, size: str = "0.6b", *, layers: int | None = None) -> Mapping[str, Any]:
        """A config.json's keys: Qwen3's of a size, with all layers or some; tiny ones where sizes are."""
        if self.tiny:
            return TINY
        return shape_of(size) if layers is None else {**shape_of(size), "num_hidden_layers": layers}

    @property
    def lengths(self) -> Sequence[int]:
        return (48, 96) if self.tiny else LENGTHS

    @property
    def budget(self) -> int:
        return 256 if self.tiny else BUDGET


def shape_of(size: str) -> Mapping[str, Any]:
    """A shipped architecture of Qwen3, as the keys of a config.json."""
    return named_config(f"Qwen/Qwen3-{size.upper()}", Path(), key="model.path")


def random_model(
    shape: Mapping[str, Any], device: torch.device, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> CausalModel:
    """A model of random weights, in float32 by default."""
    return init_model(shape, vocab_size=None, seed=seed, dtype=dtype, device=device)


def random_batch(lengths: Sequence[int], prompts: int, *, vocab: int, prompt_tokens: int) -> Batch:
    """A batch of samples of these lengths, divided over `prompts` prompts in turn, with advantages; by a fixed seed."""
    random = np.random.default_rng(0)
    length_S = torch.tensor(lengths)
    total = int(length_S.sum())
    return Batch(
        prompts=tuple(random.integers(1, vocab, prompt_tokens, dtype=np.int32) for _ in range(prompts)),
        prompt_S=torch.arange(len(lengths)) * prompts // len(lengths),
        length_S=length_S,
        token_ids_T=torch.from_numpy(random.integers(1, vocab, total)),
        loss_mask_T=torch.ones(total),
        sampler_logprobs_T=torch.full((total,), -1.0),
        reward_S=torch.ones(len(lengths)),
        columns={"advantages_T": torch.from_numpy(random.standard_normal(total)).float()},
    )


def laid_out(batch: Batch, device: torch.device) -> Layout:
    """The layout of a batch as one microbatch."""
    columns = (batch.prompt_S.numpy(), batch.length_S.numpy(), batch.token_ids_T.numpy())
    return Layout.from_flat(batch.prompts, *columns, device)


def random_requests(vocab: int, tokens: Sequence[int], group: int) -> list[Request]:
    """A request for each prompt of `PROMPT` tokens, for `group` samples of exactly its `tokens`; by a fixed seed."""
    random = np.random.default_rng(0)
    prompts = random.integers(1, vocab, (len(tokens), PROMPT), dtype=np.int32)
    return [
        Request(
            Prompt(f"p{n}", n, "", token_ids),
            group,
            Sampling(longest, 1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=()),
            seed=0,
            stream="train",
        )
        for n, (token_ids, longest) in enumerate(zip(prompts, tokens, strict=True))
    ]


def make_passes(precision: Any, budget: int, *, deterministic: bool = False, ranks: Ranks = ALONE) -> Passes:
    """Passes with microbatches of `budget` tokens, of one process or one of several."""
    return Passes(
        precision=precision,
        tokens_per_microbatch=budget,
        logprob_chunk_tokens=1024,
        temperature=1.0,
        ranks=ranks,
        deterministic=deterministic,
    )


def make_trainer(
    model: CausalModel, precision: Any, budget: int, *, deterministic: bool = False, ranks: Ranks = ALONE
) -> PolicyTrainer:
    """A policy's trainer, of one process or one of several."""
    passes = make_passes(precision, budget, deterministic=deterministic, ranks=ranks)
    return PolicyTrainer(model, passes, optimizer=OptimizerSection(lr=1e-6), total_optimizer_steps=1000)


@contextmanager
def among_ranks(setting: PartSetting, rank: int, ranks: int, folder: Path) -> Iterator[torch.device]:
    """In a process of `spawn`: the device of a rank, within the group of all that meet in `folder`."""
    end_with(os.getppid())
    kind = setting.device.type
    set_up_arithmetic(RunSection.model_validate({"device": kind}), processes=ranks)
    device = torch.device(kind, rank) if setting.is_gpu else torch.device(kind)
    address = f"file://{folder / 'meet'}"
    with process_group(device, rank=rank, world_size=ranks, address=address, timeout_s=GROUP_TIMEOUT_S):
        yield device


def make_algorithm() -> Algorithm:
    """Plain policy gradient with clipping: every token has a gradient."""
    return Algorithm(AlgorithmSection(aggregate="token_mean", old_logprobs="sampler"), correction="none")


def update(trainer: PolicyTrainer, batch: Batch, algorithm: Algorithm) -> dict[str, float]:
    """One optimizer step on the whole batch."""
    return trainer.update(batch, algorithm, [np.arange(len(batch.length_S))])


def timed(work: Callable[[], T], repeats: int = 3) -> tuple[float, T]:
    """Median seconds of several calls after a first one that is not counted, and the last result."""
    found = work()
    seconds = []
    for _ in range(repeats):
        synchronize()
        started = time.perf_counter()
        found = work()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[repeats // 2], found


@cache
def hardware_of(device: torch.device) -> Hardware:
    """A device by its data sheet, with the memory that torch sees; a CPU as `hone plan` measures it.

    The speed of a device without a known data sheet, or of a part of one, is timed here.
    """
    if not is_accelerator(device):
        return find_hardware(THIS)
    module = module_of(device)
    properties = module.get_device_properties(module.current_device())
    found = named_device(properties.name) or measured_hardware(device, properties.name)
    return replace(found, memory_bytes=properties.total_memory, host_bytes=memory_limit_bytes())


def has_data_sheet(device: torch.device) -> bool:
    """Whether `hone plan` knows the device: a CPU it measures itself."""
    return not is_accelerator(device) or named_device(hardware_of(device).name) is not None


def peak_figure(part: str, setting: PartSetting) -> Figure:
    """What the MFUs of a part are shares of."""
    found = hardware_of(setting.device)
    sheet = f"data sheet of {found.name}" if setting.is_gpu else "measured by a matrix product"
    note = sheet if has_data_sheet(setting.device) else f"no data sheet of {found.name}: measured by a matrix product"
    return Figure(part, "peak_tflops", found.flops(2 if setting.precision == "bfloat16" else 4) / 1e12, note=note)


PRODUCT_ROWS, COPIED_BYTES, LINK = 8192, 1 << 30, 25e9
"""Of the square matrices and of the copy that are timed; bytes per second to other devices: a guess, not used here."""


def measured_hardware(
    device: torch.device, name: str, *, rows: int = PRODUCT_ROWS, copied_bytes: int = COPIED_BYTES
) -> Hardware:
    """One device as it is measured; its memory and the host's are 0.

    Args:
        rows: of the square matrices.
        copied_bytes: of the copy, which is read and written.
    """

    def flops(dtype: torch.dtype) -> float:
        matrix = torch.randn(rows, rows, device=device, dtype=dtype)
        product = torch.empty_like(matrix)
        seconds, _ = timed(lambda: [torch.mm(matrix, matrix, out=product) for _ in range(10)])
        return 10 * 2 * rows**3 / seconds

    bfloat16 = devices_here("auto").bfloat16
    source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s, _ = timed(lambda: target.copy_(source))
    return Hardware(
        name=name,
        kind="gpu",
        devices=1,
        memory_bytes=0,
        bandwidth=2 * copied_bytes / copy_s,
        bf16_flops=flops(torch.bfloat16 if bfloat16 else torch.float16),
        fp32_flops=flops(torch.float32),
        link=LINK,
        host_link=LINK,
        per_node=1,
        host_bytes=0,
        bfloat16=bfloat16,
    )


def within_memory(part: str, case: str, figures: Iterator[Figure], *, fits: bool) -> Iterator[Figure]:
    """Figures of a case, and where memory runs out one that says so. What torch keeps is released at the end.

    Args:
        fits: whether the plan says that there is room. Where it does not, the case counts as left out.
    """
    try:
        yield from figures
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        yield Figure(part, "out_of_memory" if fits else "left_out", 1.0, case, first_line(error))
    give_back_memory()


@dataclass(frozen=True, slots=True)
class UpdateFigures:
    """One way of training on the same samples."""

    logprobs_T: Tensor
    """On the CPU, by the first weights."""
    grad_norm: float
    seconds: float
    """Of a later update."""
    peak_bytes: int = 0
    """Most of tensors while it trained; 0 on a CPU, and where it was not measured."""


def measured_update(trainer: PolicyTrainer, batch: Batch) -> UpdateFigures:
    """What a new trainer makes of a batch as if it had been sampled from its own weights: every ratio is 1."""
    algorithm, logprobs_T = make_algorithm(), trainer.logprobs(batch).cpu()
    batch = replace(batch, sampler_logprobs_T=logprobs_T)
    forget_peak()
    norm = update(trainer, batch, algorithm)["train/grad_norm"]
    seconds, _ = timed(lambda: update(trainer, batch, algorithm))
    return UpdateFigures(logprobs_T, norm, seconds, peak_bytes())
