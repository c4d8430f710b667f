"""Parts on arithmetic: devices, numbers against float64, updates in a fixed order, attention, fused kernels."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from hone.devices import devices_here, module_of, synchronize, torch_kind
from hone.model.kernels import use_fused_kernels, uses_fused_kernels
from hone.model.logprobs import token_logprobs
from hone.sizes import GIB, MIB
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
    random_model,
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
    shape = setting.shape(layers=DETERMINISTIC_LAYERS)
    dtype = setting.precision
    length = setting.lengths[1]
    samples, algorithm = max(2, setting.budget // length), make_algorithm()
    batch = random_batch([length] * samples, max(1, samples // 8), vocab=shape["vocab_size"], prompt_tokens=PROMPT)

    def trained(is_on: bool) -> tuple[float, str]:
        """Seconds of a later update, and a hash of the weights after the first."""
        model = random_model(shape, setting.device)
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
    """Kernels, or a CPU's operators, of one update by a model of `layers` layers."""
    shape = {**(TINY if setting.tiny else SMALL), "num_hidden_layers": layers}
    model = random_model(shape, setting.device)
    trainer = make_trainer(model, "bfloat16" if setting.is_gpu else "float32", 10**9)
    algorithm = make_algorithm()
    update(trainer, batch, algorithm)
    if setting.is_gpu:
        return watched(lambda: update(trainer, batch, algorithm)).kernels
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        update(trainer, batch, algorithm)
    return sum(event.count for event in recorded.key_averages() if event.key.startswith("aten::"))


PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What a new trainer makes of a batch, in float64 on the CPU."""

    hidden_UH: Tensor
    logprobs_T: Tensor
    grad_norm: float
    gradient: Tensor
    """Of every weight, clipped."""
    moved: Tensor
    """Of every weight: how far one optimizer step moved it."""


def numbers(setting: PartSetting) -> Iterator[Figure]:
    """Each shape of a microbatch, in each precision, with the same weights."""
    shape = TINY if setting.tiny else SMALL
    for case, batch in layout_shapes(setting, shape["vocab_size"]).items():
        exact = computed(shape, batch, torch.float64, "float64", torch.device("cpu"))
        for precision in PRECISIONS:
            found = computed(shape, batch, torch.float32, precision, setting.device)
            for name, error in errors_of(found, exact).items():
                yield Figure("numbers", f"{name}_{precision}", error, case)


def layout_shapes(setting: PartSetting, vocab: int) -> Mapping[str, Batch]:
    """Five ways in which samples share prompts: each has attention of another shape."""
    longest = 24 if setting.tiny else 300

    def batch(lengths: Sequence[int], prompts: int, prompt_tokens: int = 16) -> Batch:
        return random_batch(lengths, prompts, vocab=vocab, prompt_tokens=prompt_tokens)

    return {
        "ragged groups": batch([max(1, longest * (n + 1) // 12) for n in range(12)], 3),
        "one group": batch([longest] * 8, 1),
        "a prompt for each sample": batch([longest] * 4, 4),
        "one long sample": batch([8 * longest], 1),
        "long prompt, short samples": batch([1, 2, 3, longest // 4], 1, prompt_tokens=4 * longest),
    }


def computed(
    shape: Mapping[str, Any], batch: Batch, dtype: torch.dtype, precision: str, device: torch.device
) -> UpdateOutcome:
    """One pass without gradient and one optimizer step."""
    model = random_model(shape, device, dtype=dtype)
    trainer = make_trainer(model, precision, 10**6)
    with torch.no_grad():
        hidden_UH = model.hidden(laid_out(batch, device))
    logprobs_T, before = trainer.logprobs(batch), flat(dict(trainer.master_weights()))
    norm = update(trainer, batch, make_algorithm())["train/grad_norm"]
    tensors, _ = trainer.state()
    # The first average of Adam that starts from zero is the gradient, scaled alike for all weights.
    averages = {name: tensor for name, tensor in tensors.items() if name.startswith("exp_avg/")}
    return UpdateOutcome(
        hidden_UH.double().cpu(),
        logprobs_T.double().cpu(),
        norm,
        flat(averages) / (1 - trainer.optimizer.settings.betas[0]),
        flat(dict(trainer.master_weights())) - before,
    )


def flat(tensors: Mapping[str, Any]) -> Tensor:
    """All numbers of named tensors, in the order of the names, as float64 on the CPU."""
    return torch.cat([tensors[name].detach().double().cpu().flatten() for name in sorted(tensors)])


def errors_of(found: UpdateOutcome, exact: UpdateOutcome) -> dict[str, float]:
    """What each figure says of two outcomes, without the precision in its name."""
    return {
        "hidden_error": apart(found.hidden_UH, exact.hidden_UH),
        "logprob_error": float((found.logprobs_T - exact.logprobs_T).abs().mean()),
        "grad_norm_error": abs(found.grad_norm - exact.grad_norm) / exact.grad_norm,
        "grad_error": apart(found.gradient, exact.gradient),
        "step_error": apart(found.moved, exact.moved),
    }


def apart(found: Tensor, exact: Tensor) -> float:
    """Length of the difference over that of the exact numbers."""
    return float((found - exact).norm() / exact.norm())


CHUNK_TOKENS = 1024
LAYERS = 8
"""Of Qwen3-0.6B's: activations of a microbatch then fit next to anything."""


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """One way of computing the same."""

    logprobs_T: Tensor
    grad_norm: float
    first_s: float
    """First pass without gradient and first update."""
    update_s: float
    logits_s: float
    new_graphs: int
    """Compiled for other lengths than the first."""


def kernels(setting: PartSetting) -> Iterator[Figure]:
    """An update and the passes over logits with fused kernels and without, same weights and samples."""
    shape, length = setting.shape(layers=LAYERS), setting.lengths[0]
    samples = setting.budget // length
    case = f"{samples} x {length} tokens, {setting.precision}"
    try:
        use_fused_kernels(setting.device.type)
        is_compiled = uses_fused_kernels(setting.device)
        yield Figure("kernels", "kernels_compiled", float(is_compiled))
        if not is_compiled:
            return
        fused = measured(setting, shape, length, samples)
        use_fused_kernels(None)
        plain = measured(setting, shape, length, samples)
    finally:
        use_fused_kernels(None)
    yield Figure("kernels", "kernels_compile_s", fused.first_s - plain.first_s, case)
    yield Figure("kernels", "kernels_update_ratio", fused.update_s / plain.update_s, case)
    yield Figure("kernels", "kernels_logits_ratio", fused.logits_s / plain.logits_s, case)
    apart = float((fused.logprobs_T - plain.logprobs_T).abs().mean())
    yield Figure("kernels", "kernels_logprob_difference", apart, case)
    yield Figure("kernels", "kernels_grad_difference", abs(fused.grad_norm / plain.grad_norm - 1), case)
    yield Figure("kernels", "kernels_new_lengths", fused.new_graphs, case)


def measured(setting: PartSetting, shape: Mapping[str, Any], length: int, samples: int) -> KernelFigures:
    """Numbers and seconds with kernels as they are set now."""
    dtype, prompt = setting.precision, min(PROMPT, length // 3)

    def of_length(tokens: int) -> Batch:
        vocab = shape["vocab_size"]
        return random_batch([tokens] * samples, max(1, samples // 8), vocab=vocab, prompt_tokens=prompt)

    model = random_model(shape, setting.device)
    trainer, algorithm, batch = make_trainer(model, dtype, setting.budget), make_algorithm(), of_length(length - prompt)
    started = time.perf_counter()
    logprobs_T = trainer.logprobs(batch).double().cpu()
    grad_norm = update(trainer, batch, algorithm)["train/grad_norm"]
    synchronize()
    first_s = time.perf_counter() - started
    before = counters["stats"]["unique_graphs"]
    for tokens in (length // 2, length - prompt - 1):
        update(trainer, of_length(tokens), algorithm)
    new_graphs = counters["stats"]["unique_graphs"] - before
    update_s, _ = timed(lambda: update(trainer, batch, algorithm))
    logits_s, _ = timed(logits_pass(setting.device, getattr(torch, dtype), shape))
    return KernelFigures(logprobs_T, grad_norm, first_s, update_s, logits_s, new_graphs)


def logits_pass(device: torch.device, dtype: torch.dtype, shape: Mapping[str, Any]) -> Callable[[], object]:
    """What makes logprobs of two chunks of random tokens, forward and backward, matrix products included."""
    generator = torch.Generator(device).manual_seed(0)
    hidden, vocab, tokens = shape["hidden_size"], shape["vocab_size"], 2 * CHUNK_TOKENS
    states, weight = (
        torch.randn(rows, hidden, generator=generator, device=device).to(dtype).requires_grad_()
        for rows in (tokens, vocab)
    )
    target = torch.randint(vocab, (tokens,), generator=generator, device=device)

    def work() -> object:
        logprobs, _ = token_logprobs(states, weight, target, temperature=hidden**0.5, chunk_tokens=CHUNK_TOKENS)
        return torch.autograd.grad(logprobs.sum(), (states, weight))

    return work
