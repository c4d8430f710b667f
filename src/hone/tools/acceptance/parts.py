"""Parts of the acceptance run: what is computed, with models that are made here, and which figures come of it.

python -m hone.tools.acceptance.parts PART LINES.jsonl [--tiny]
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hone.algo.algorithm import Algorithm
from hone.assemble.job import set_up_arithmetic
from hone.config.engine import EngineSection
from hone.config.run import AlgorithmSection, OptimizerSection, RunConfig, RunSection
from hone.data.chat import character_tokenizer
from hone.data.pack import collate
from hone.devices import devices_here, is_accelerator, module_of, synchronize, torch_kind
from hone.memory.gauges import GIB, MIB
from hone.memory.record import comparison
from hone.model.base import CausalModel
from hone.model.hf import TransformersModel
from hone.model.layout import Layout
from hone.model.load import init_model, save_hf
from hone.model.recompute import Checkpointing
from hone.plan import time as roofline
from hone.plan.efficiency import MeasuredRates, remember_rates
from hone.plan.hardware import Hardware, find_hardware
from hone.plan.planner import Plan, plan
from hone.plan.presets import named_config
from hone.rollout.engine import Request, Sampling
from hone.rollout.vllm import VllmEngine
from hone.rollout.vllm_args import VllmPlace
from hone.tools.acceptance.figures import Figure
from hone.train.learner import Passes
from hone.train.policy import PolicyTrainer
from hone.types import Batch, Group, Picture, Prompt

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
SEEING = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "text_config": {
        **{name: TINY[name] for name in ("vocab_size", "intermediate_size", "num_hidden_layers")},
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 128,
        "num_heads": 2,
        "intermediate_size": 128,
        "out_hidden_size": 128,
        "fullatt_block_indexes": [1],
    },
}
"""Heads of 64, which vLLM has kernels for everywhere."""
SEEING_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
STEPS = 4
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
RUN_TIMEOUT_S = 420.0


@dataclass(frozen=True, slots=True)
class PartSetting:
    """Where a part runs, and in which sizes."""

    device: torch.device
    tiny: bool

    @property
    def is_gpu(self) -> bool:
        return is_accelerator(self.device)

    @property
    def lengths(self) -> Sequence[int]:
        return (48, 96) if self.tiny else LENGTHS

    @property
    def budget(self) -> int:
        return 256 if self.tiny else BUDGET


# ---- what the parts share


def shape_of(size: str) -> Mapping[str, Any]:
    """A shipped architecture of Qwen3, as the keys of a config.json."""
    return named_config(f"Qwen/Qwen3-{size.upper()}", Path(), key="model.path")


def random_batch(lengths: Sequence[int], prompts: int, *, vocab: int, prompt_tokens: int) -> Batch:
    """A batch of samples of these lengths, divided over so many prompts in turn, with advantages; by a fixed seed."""
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


def make_trainer(model: CausalModel, precision: Any, budget: int) -> PolicyTrainer:
    """A policy's trainer of one process."""
    passes = Passes(precision=precision, tokens_per_microbatch=budget, logprob_chunk_tokens=1024, temperature=1.0)
    return PolicyTrainer(model, passes, optimizer=OptimizerSection(lr=1e-6), total_optimizer_steps=1000)


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


# ---- parts


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


def numbers(setting: PartSetting) -> Iterator[Figure]:
    """Logprobs and the gradient's norm against float64 on the CPU, same weights, ragged samples of three prompts."""
    shape = TINY if setting.tiny else SMALL
    longest = 24 if setting.tiny else 300
    lengths = [max(1, longest * (n + 1) // 12) for n in range(12)]
    batch = random_batch(lengths, 3, vocab=shape["vocab_size"], prompt_tokens=16)

    def computed(dtype: torch.dtype, precision: str, device: torch.device) -> tuple[Tensor, float]:
        model = init_model(shape, vocab_size=None, seed=0, dtype=dtype, device=device)
        trainer = make_trainer(model, precision, 4096)
        logprobs_T = trainer.logprobs(batch).double().cpu()
        return logprobs_T, update(trainer, batch, make_algorithm())["train/grad_norm"]

    exact_T, exact_norm = computed(torch.float64, "float64", torch.device("cpu"))
    for precision in ("float32", "bfloat16"):
        logprobs_T, norm = computed(torch.float32, precision, setting.device)
        yield Figure("numbers", f"logprob_error_{precision}", float((logprobs_T - exact_T).abs().mean()))
        yield Figure("numbers", f"grad_norm_error_{precision}", abs(norm - exact_norm) / exact_norm)


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


def laid_out(batch: Batch, device: torch.device) -> Layout:
    """The layout of a batch as one microbatch."""
    columns = (batch.prompt_S.numpy(), batch.length_S.numpy(), batch.token_ids_T.numpy())
    return Layout.from_flat(batch.prompts, *columns, device)


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
    activities = [ProfilerActivity.CUDA] if setting.is_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as watched:
        update(trainer, batch, algorithm)
        synchronize()
    is_counted = (lambda name: True) if setting.is_gpu else (lambda name: name.startswith("aten::"))
    return sum(event.count for event in watched.key_averages() if is_counted(event.key))


def trainer_part(size: str) -> Callable[[PartSetting], Iterator[Figure]]:
    """The part that times one model's passes at every length, and remembers what share of the peak they reach."""

    def part(setting: PartSetting) -> Iterator[Figure]:
        name = f"trainer-{size}"
        shape = TINY if setting.tiny else shape_of(size)
        dtype = "bfloat16" if setting.is_gpu and devices_here("auto").bfloat16 else "float32"
        model = init_model(shape, vocab_size=None, seed=0, dtype=torch.float32, device=setting.device)
        found: list[MeasuredRates] = []
        trainer, algorithm = make_trainer(model, dtype, setting.budget), make_algorithm()
        for length in setting.lengths:
            trainer.passes.tokens_per_microbatch = max(setting.budget, length + PROMPT)
            yield from trainer_at(name, setting, trainer, algorithm, shape, length, dtype, found)
        if setting.is_gpu:
            print(f"efficiencies of {len(found)} shapes are in {remember_rates(found)}")

    return part


def trainer_at(
    name: str,
    setting: PartSetting,
    trainer: PolicyTrainer,
    algorithm: Algorithm,
    shape: Mapping[str, Any],
    length: int,
    dtype: str,
    found: list[MeasuredRates],
) -> Iterator[Figure]:
    """Figures of one length: two microbatches' worth of samples in groups of up to eight."""
    samples = max(2, 2 * setting.budget // length)
    prompts, response = max(1, samples // 8), max(length - PROMPT, 1)
    batch = random_batch([response] * samples, prompts, vocab=shape["vocab_size"], prompt_tokens=PROMPT)
    sizes = (prompts, samples // prompts, response, trainer.passes.tokens_per_microbatch)
    plans: dict[Checkpointing, Plan] = {mode: plan_of(setting, name, sizes, dtype, mode) for mode in CHECKPOINTING}
    fitting: list[Checkpointing] = [mode for mode, one in plans.items() if one.verdict.level != "does not fit"]
    mode: Checkpointing = fitting[0] if fitting else "full"
    planned, trainer.model.checkpointing = plans[mode], mode
    tokens, logit_tokens = prompts * PROMPT + samples * response, samples * response
    architecture, hardware = planned.inputs.architecture, planned.inputs.hardware
    learner = roofline.LearnerTime(
        architecture=architecture,
        devices=1,
        checkpointing=mode,
        bytes_each=2 if dtype == "bfloat16" else 4,
        trained_parameters=architecture.total_parameters,
        microbatches=1,
    )
    flops = roofline.pass_flops(learner, tokens, planned.inputs.workload.lengths, logit_tokens)
    peak = hardware.flops(learner.bytes_each)
    case = f"{samples} x {length} tokens, {dtype}"
    forward_s, _ = timed(lambda: trainer.logprobs(batch))
    yield Figure(name, "logprob_tokens_per_s", tokens / forward_s, case)
    yield Figure(name, "logprob_mfu", flops / forward_s / peak, case)
    if not fitting:
        print(f"{name}, {case}: no update, the plan does not fit")
        return
    case = f"{case}, checkpointing {mode}"
    if setting.is_gpu:
        module_of(setting.device).reset_peak_memory_stats()
    update_s, metrics = timed(lambda: update(trainer, batch, algorithm))
    yield Figure(name, "update_tokens_per_s", tokens / update_s, case)
    yield Figure(name, "update_mfu", 3 * flops / update_s / peak, case)
    if not setting.is_gpu:
        return
    measured = module_of(setting.device).max_memory_allocated()
    phases = {moment.phase: moment for moment in planned.ledgers[0].phase_peaks()}
    expected = sum(term.bytes for term in phases["update"].terms if term.name != "CUDA context")
    yield Figure(name, "peak_over_plan", measured / expected, case, f"{measured / GIB:.1f} of {expected / GIB:.1f} GiB")
    syncs = synchronizations(lambda: update(trainer, batch, algorithm))
    yield Figure(name, "syncs_per_microbatch", syncs / max(metrics["train/microbatches"], 1), case)
    seconds = (forward_s, update_s, metrics["train/microbatches"] * roofline.GPU.microbatch_overhead_s)
    found.append(rates_of(learner, hardware, length, flops, logit_tokens, seconds))


def rates_of(
    learner: roofline.LearnerTime,
    hardware: Hardware,
    length: int,
    flops: float,
    logit_tokens: int,
    seconds: tuple[float, float, float],
) -> MeasuredRates:
    """The shares of the peak with which the plan's formulas give the seconds that were measured.

    Args:
        flops: of one forward pass.
        seconds: of a pass without gradients, of an update, and what the plan adds to that for its microbatches.
    """
    forward_s, update_s, overhead_s = seconds
    architecture, peak = learner.architecture, hardware.flops(learner.bytes_each)
    again = roofline.recomputed_frac(learner) * flops
    again += 2 * architecture.vocab * architecture.hidden * logit_tokens
    arithmetic = update_s - overhead_s - roofline.optimizer_s(learner, hardware, roofline.GPU)
    return MeasuredRates(
        device=hardware.name,
        parameters=architecture.total_parameters,
        tokens=length,
        bytes_each=learner.bytes_each,
        training_flops=min((3 * flops + again) / max(arithmetic, update_s / 10) / peak, 1.0),
        forward_flops=min(flops / forward_s / peak, 1.0),
    )


def plan_of(setting: PartSetting, name: str, sizes: tuple[int, int, int, int], dtype: str, mode: Checkpointing) -> Plan:
    """The plan of such an update on this machine; sizes: prompts, group, response tokens, tokens per microbatch."""
    prompts, group, response, budget = sizes
    size = name.removeprefix("trainer-").upper()
    model = {"init": dict(TINY), "characters": "0123456789"} if setting.tiny else {"path": f"Qwen/Qwen3-{size}"}
    config = RunConfig.model_validate(
        {
            "model": model,
            "data": {"train": "rows.jsonl", "max_prompt_tokens": PROMPT},
            "reward": {"components": [{"use": "exact"}]},
            "run": {"precision": dtype},
            "cluster": {"backend": "local"},
            "rollout": {"group_size": max(group, 1), "max_response_tokens": response, "max_concurrent_samples": 1},
            "train": {
                "prompts_per_step": prompts,
                "tokens_per_microbatch": budget,
                "activation_checkpointing": mode,
            },
        }
    )
    return plan(
        config,
        find_hardware("this"),
        mean_prompt_tokens=float(PROMPT),
        mean_response_tokens=float(response),
    )


def synchronizations(work: Callable[[], object]) -> int:
    """How often the host waits for the GPU meanwhile."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def export(setting: PartSetting) -> Iterator[Figure]:
    """Writing the weights: how fast, and how much of the device it takes."""
    shape = TINY if setting.tiny else shape_of("0.6b")
    model = init_model(shape, vocab_size=None, seed=0, dtype=torch.float32, device=setting.device)
    trainer = make_trainer(model, "float32", 1024)
    with TemporaryDirectory(prefix="hone-gpu-") as folder:
        before = module_of(setting.device).memory_allocated() if setting.is_gpu else 0
        if setting.is_gpu:
            module_of(setting.device).reset_peak_memory_stats()
        started = time.perf_counter()
        trainer.write_weights(Path(folder), torch.bfloat16)
        seconds = time.perf_counter() - started
        written = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    yield Figure("export", "export_gib_per_s", written / GIB / seconds)
    if setting.is_gpu:
        taken = module_of(setting.device).max_memory_allocated() - before
        yield Figure("export", "export_device_gib", taken / GIB)


# ---- whole runs


def run(setting: PartSetting) -> Iterator[Figure]:
    """`hone train` in one process: the gate, memory against the plan, a kill and a resumption, the export."""
    yield from whole_run("run", setting, {"backend": "local"})


def cluster(setting: PartSetting) -> Iterator[Figure]:
    """The same on Ray with trainer and engines on one device, for Hone's engine and for vLLM where it is installed."""
    if importlib.util.find_spec("ray") is None:
        yield Figure("cluster", "has_vllm", 0.0, note="Ray is not installed: nothing was run")
        return
    uses = ["hone", "vllm"] if importlib.util.find_spec("vllm") and setting.is_gpu else ["hone"]
    for use in uses:
        pools = {} if setting.is_gpu else {"pools": {"all": {"devices": 1, "roles": ["policy", "rollout"]}}}
        yield from whole_run("cluster", setting, {"backend": "ray", "engines": {"use": use}, **pools}, case=use)


def pictures(setting: PartSetting) -> Iterator[Figure]:
    """Prompts with 0, 1 and 3 pictures in vLLM, against the trainer's logprobs of the same samples."""
    if importlib.util.find_spec("vllm") is None:
        yield Figure("pictures", "has_vllm", 0.0, note="vLLM is not installed: nothing was run")
        return
    precision = "bfloat16" if setting.is_gpu and devices_here("auto").bfloat16 else "float32"
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        model = saved_seeing_model(Path(name), setting.device)
        trainer = make_trainer(model, precision, 4096)
        place = VllmPlace(
            Path(name),
            precision,
            longest_tokens=1024,
            max_concurrent=64,
            prefill_tokens=4096,
            picture_pixels=(28 * 28, 28 * 28 * 256),
        )
        groups = asyncio.run(seen_by_vllm(place, seeing_prompts(model)))
        batch = collate([group.scored({}, (0.0,) * len(group.samples)) for group in groups])
        gaps_T = (trainer.logprobs(batch).cpu() - batch.sampler_logprobs_T).abs()
        lengths = [sum(len(sample.token_ids) for sample in group.samples) for group in groups]
        for group, gaps in zip(groups, gaps_T.split(lengths), strict=True):
            case = f"{len(group.prompt.pictures)} pictures, vllm, {precision}"
            yield Figure("pictures", "gate_gap", float(gaps.mean()), case)


def saved_seeing_model(folder: Path, device: torch.device) -> TransformersModel:
    """A random vision-language model, and its directory with what vLLM reads beside the weights."""
    tokenizer = character_tokenizer("0123456789")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SEEING_MARKS)})
    ids = [tokenizer.convert_tokens_to_ids(mark) for mark in SEEING_MARKS]
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    keys = {**SEEING, **dict(zip(names, ids, strict=True))}
    model = init_model(keys, vocab_size=None, seed=0, dtype=torch.float32, device=device)
    assert isinstance(model, TransformersModel)
    for _, weight in model.named_weights():
        if weight.dim() > 1:  # so large that a picture changes what comes next
            weight.normal_(0.0, weight[0].numel() ** -0.5)
    processor = {"preprocessor_config.json": json.dumps({"image_processor_type": "Qwen2VLImageProcessor"})}
    save_hf(folder, model.hf_config, model.named_weights(), tokenizer, eos_ids=(), processor=processor)
    return model


def seeing_prompts(model: TransformersModel) -> list[Prompt]:
    """With 0, 1 and 3 pictures of noise of different sizes."""
    assert model.vision is not None
    keys: Any = model.hf_config
    found, side = [], model.vision.tower.side
    for index, sizes in enumerate(([], [(4, 6)], [(2, 3), (8, 5), (1, 7)])):
        ids, placed = [1, 2, 3 + index], list[Picture]()
        for rows, columns in sizes:
            read = partial(noise, rows * side, columns * side)
            start, digest = len(ids) + 1, f"noise {rows} {columns}"
            placed.append(Picture(digest, start, rows, columns, (0.5,) * 3, (0.25,) * 3, read))
            ids += [keys.vision_start_token_id, *[keys.image_token_id] * rows * columns, keys.vision_end_token_id]
        found.append(Prompt(str(index), index, "", np.array([*ids, 4, 5], np.int32), pictures=tuple(placed)))
    return found


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng([height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


async def seen_by_vllm(place: VllmPlace, prompts: Sequence[Prompt]) -> list[Group]:
    """A group of vLLM's samples of each prompt."""
    engine = await VllmEngine.start(
        place, EngineSection(), decode=str, eos_ids=(), timeout_s=120.0, start_timeout_s=RUN_TIMEOUT_S
    )
    sampling = Sampling(16, 1.0, top_k=0, top_p=1.0, min_p=0.0, stop=(), stop_token_ids=())
    requests = [Request(prompt, 4, sampling, seed=0, stream="train") for prompt in prompts]
    try:
        samples = await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
    return [Group(prompt, own) for prompt, own in zip(prompts, samples, strict=True)]


def whole_run(part: str, setting: PartSetting, section: Mapping[str, Any], case: str = "") -> Iterator[Figure]:
    """A run that is killed and resumed, in a folder of its own."""
    shape = TINY if setting.tiny else shape_of("0.6b")
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        folder = Path(name)
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (folder / "run.yaml").write_text(json.dumps(run_file(setting, shape, section)))
        code, log = train(folder, kill_after=STEPS // 2)
        lines = metrics_of(folder)
        yield Figure(part, "steps", max((line["step"] for line in lines), default=0) if code == 0 else 0, case, log)
        if code:
            return
        yield Figure(part, "resumed_steps", lines[-1]["step"], case)
        yield Figure(part, "exported", float((folder / "out/hf/config.json").is_file()), case)
        gaps = [line["gate/logprob_gap"] for line in lines if "gate/logprob_gap" in line]
        yield Figure(part, "gate_gap", gaps[0] if gaps else float("inf"), case)
        publish = [line["time/publish_s"] for line in lines if "time/publish_s" in line]
        steps = [line["time/step_s"] for line in lines if "time/step_s" in line]
        means = [line["rollout/response_tokens_mean"] for line in lines if "rollout/response_tokens_mean" in line]
        if publish:
            yield Figure(part, "publish_s", sorted(publish)[len(publish) // 2], case)
        if steps:
            yield Figure(part, "step_s", sorted(steps)[len(steps) // 2], case)
        if steps and means:
            tokens = 8 * (4 if setting.tiny else 32) * sum(means) / len(means)
            yield Figure(part, "step_tokens_per_s", tokens / sorted(steps)[len(steps) // 2], case)
        if setting.is_gpu and section["backend"] == "local":
            _, rows_found = comparison(folder / "out")
            ratios = {row.phase: row.measured_bytes / row.expected.bytes for row in rows_found if row.expected}
            worst = max(ratios, key=lambda phase: ratios[phase])
            yield Figure(part, "memory_over_plan", ratios[worst], case, worst)


def run_file(setting: PartSetting, shape: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """A run of a random model on sums."""
    return {
        "extends": "algorithm/dr_grpo",
        "run": {"dir": "out", "steps": STEPS, **({} if setting.is_gpu else {"device": "cpu"})},
        "model": {"init": dict(shape), "characters": "0123456789+= "},
        "data": {"train": "rows.jsonl", "answer_column": "answer", "max_prompt_tokens": 16},
        "reward": {"components": [{"use": "exact"}]},
        "rollout": {"group_size": 8, "max_response_tokens": 8 if setting.tiny else 512},
        "train": {"prompts_per_step": 4 if setting.tiny else 32, "optimizer": {"lr": 1e-6}},
        "checkpoint": {"every": 1},
        "observe": {"console": "quiet", "tensorboard": False, "trace": False},
        "cluster": dict(section),
    }


def train(folder: Path, *, kill_after: int) -> tuple[int, str]:
    """`hone train`, killed after so many updates and then resumed. Returns exit code and last line of the log."""
    command = [sys.executable, "-m", "hone.cli.main", "train", "run.yaml"]
    with (folder / "log").open("w") as log:
        first = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while first.poll() is None and time.monotonic() < deadline:
            if len([line for line in metrics_of(folder) if "time/step_s" in line]) >= kill_after:
                break
            time.sleep(0.05)
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
        code = first.wait()
        if code == -signal.SIGKILL:
            left = max(deadline - time.monotonic(), 1)
            code = subprocess.run([*command, "--resume"], cwd=folder, stdout=log, stderr=log, timeout=left).returncode
    said = (folder / "log").read_text("utf-8", "replace").strip().splitlines()
    return code, said[-1][:200] if code and said else ""


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of a run's metrics."""
    file = folder / "out" / "metrics.jsonl"
    text = file.read_text("utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


PARTS: Mapping[str, Callable[[PartSetting], Iterator[Figure]]] = {
    "devices": devices,
    "numbers": numbers,
    "attention": attention,
    "trainer-0.6b": trainer_part("0.6b"),
    "trainer-1.7b": trainer_part("1.7b"),
    "trainer-4b": trainer_part("4b"),
    "export": export,
    "run": run,
    "cluster": cluster,
    "pictures": pictures,
}


def main(arguments: Sequence[str]) -> None:
    """Run one part, and append each figure as soon as it is there."""
    part, lines, *flags = arguments
    setting = PartSetting(set_up_arithmetic(RunSection()), tiny="--tiny" in flags)
    with Path(lines).open("a", encoding="utf-8", buffering=1) as file:
        for figure in PARTS[part](setting):
            file.write(json.dumps(figure.as_dict(is_gpu=setting.is_gpu)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
