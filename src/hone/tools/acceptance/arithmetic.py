"""Parts on arithmetic: the devices, updates in a fixed order, layouts and operators of attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hone.devices import devices_here, module_of, torch_kind
from hone.memory.gauges import GIB, MIB
from hone.model.load import init_model
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.setting import (
    PROMPT,
    SMALL,
    TINY,
    PartSetting,
    laid_out,
    make_algorithm,
    make_trainer,
    random_batch,
    shape_of,
    timed,
    update,
)
from hone.tools.acceptance.usage import watched
from hone.train.fixed_sums import prepare_fixed_sums
from hone.types import Batch

DETERMINISTIC_LAYERS = 8


def devices(setting: PartSetting) -> Iterator[Figure]:
    """What torch and the driver say of the machine."""
    kind, here = torch_kind(), devices_here("auto")
    note = f"torch {torch.__version__}, {kind.vendor if kind else 'no accelerator'}"
    yield Figure("devices", "known_device", float(kind is not None), note=note)
    if kind is not None:
        module = module_of(setting.device)
        yield Figure("devices", "listed_minus_seen", here.per_node - torch.accelerator.device_count())
        properties = module.get_device_properties(module.current_device())
        yield Figure("devices", "device_memory", properties.total_memory / GIB, note=properties.name)
    yield Figure("devices", "has_bfloat16", float(here.bfloat16))
    yield Figure("devices", "has_vllm", float(importlib.util.find_spec("vllm") is not None))


def deterministic(setting: PartSetting) -> Iterator[Figure]:
    """Whether updates with `run.deterministic` end in the same bits, and how much longer they take."""
    prepare_fixed_sums()
    shape = TINY if setting.tiny else {**shape_of("0.6b"), "num_hidden_layers": DETERMINISTIC_LAYERS}
    dtype = "bfloat16" if setting.is_gpu and devices_here("auto").bfloat16 else "float32"
    length = setting.lengths[1]
    samples, algorithm = max(2, setting.budget // length), make_algorithm()
    batch = random_batch([length] * samples, max(1, samples // 8), vocab=shape["vocab_size"], prompt_tokens=PROMPT)

    def trained(is_on: bool) -> tuple[float, str]:
        """Seconds of a later update, and a hash of the weights after the first."""
        model = init_model(shape, vocab_size=None, seed=0, dtype=torch.float32, device=setting.device)
        trainer = make_trainer(model, dtype, setting.budget + PROMPT, deterministic=is_on)
        update(trainer, batch, algorithm)
        fingerprint = trainer.fingerprint()
        return timed(lambda: update(trainer, batch, algorithm))[0], fingerprint

    fixed, plain = [trained(True) for _ in range(3)], trained(False)
    case = f"{samples} x {length} tokens, {dtype}"
    yield Figure("deterministic", "deterministic_update", float(len({hashed for _, hashed in fixed}) == 1), case)
    yield Figure("deterministic", "deterministic_ratio", min(seconds for seconds, _ in fixed) / plain[0], case)


def attention(setting: PartSetting) -> Iterator[Figure]:
    """Host time and bytes of a microbatch's layout, and operators of one layer, forward and backward."""
    for length in setting.lengths:
        samples = max(1, setting.budget // length)
        batch = random_batch([length] * samples, max(1, samples // 8), vocab=512, prompt_tokens=PROMPT)
        seconds, layout = timed(lambda batch=batch: laid_out(batch, setting.device))
        case = f"{samples} x {length} tokens"
        yield Figure("attention", "layout_ms", 1000 * seconds, case)
        yield Figure("attention", "layout_mib", tensor_bytes(layout) / MIB, case)
    length = setting.lengths[1]
    samples = max(1, setting.budget // length)
    batch = random_batch([length] * samples, max(1, samples // 8), vocab=512, prompt_tokens=PROMPT)
    few, more = (operators(setting, layers, batch) for layers in (2, 4))
    note = "kernels" if setting.is_gpu else "operators of the CPU"
    yield Figure("attention", "operators_per_layer", (more - few) / 2, f"{samples} x {length} tokens", note)


def tensor_bytes(value: Any, seen: set[int] | None = None) -> int:
    """Bytes of all tensors and arrays in an object, each once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(tensor_bytes(one, seen) for one in value.values())
    if isinstance(value, list | tuple):
        return sum(tensor_bytes(one, seen) for one in value)
    slots = getattr(type(value), "__slots__", ())
    held = {name: getattr(value, name, None) for name in slots} if slots else getattr(value, "__dict__", {})
    return sum(tensor_bytes(one, seen) for one in held.values())


def operators(setting: PartSetting, layers: int, batch: Batch) -> int:
    """Kernels, or a CPU's operators, of one update by a model of so many layers."""
    shape = {**(TINY if setting.tiny else SMALL), "num_hidden_layers": layers}
    model = init_model(shape, vocab_size=None, seed=0, dtype=torch.float32, device=setting.device)
    trainer = make_trainer(model, "bfloat16" if setting.is_gpu else "float32", 10**9)
    algorithm = make_algorithm()
    update(trainer, batch, algorithm)
    if setting.is_gpu:
        return watched(lambda: update(trainer, batch, algorithm)).kernels
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        update(trainer, batch, algorithm)
    return sum(event.count for event in recorded.key_averages() if event.key.startswith("aten::"))
