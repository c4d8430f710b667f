"""Memory of a run: gauges, the out-of-memory ladder and what it may change, and the record of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hone.config.cluster import ClusterSection
from hone.config.derived import longest_tokens, samples_per_update
from hone.config.load import Loaded
from hone.config.render import resolved_yaml
from hone.config.run import Checkpointing, RunConfig
from hone.config.topology import topology_of
from hone.config.yaml_tree import Where
from hone.devices import ASCEND, is_accelerator, torch_kind
from hone.errors import ConfigError, DataError, MemoryExhausted
from hone.memory import calibration
from hone.memory.gauges import Busy, DeviceGauge, HostGauge, Meter, nvml_reader, ran_out_of_memory
from hone.memory.ladder import Ladder, Predict
from hone.memory.record import Expected, Record, comparison, table
from hone.memory.rungs import CHUNK, PREFILL, RECOMPUTE, ROWS, TOKENS, Knob
from hone.observe.observer import Observer
from hone.plan.hardware import Hardware, memory_limit_bytes
from hone.plan.inputs import changed, resolve, value_of, with_value
from hone.plan.ledger import Ledger
from hone.plan.page import timeline
from hone.plan.planner import plan_inputs
from hone.plan.workload import workload_of
from hone.rollout.local import LocalEngine
from hone.run.folder import RunFolder
from hone.runtime.files import write_whole
from hone.sizes import GIB
from hone.train.agreement import SharedLadder
from hone.train.fsdp_ranks import FsdpRanks
from hone.train.learner import Passes
from hone.train.pairs import PairTrainer
from hone.train.ranks import Ranks
from hone.train.roles import Roles

KEYS = (TOKENS, CHUNK, RECOMPUTE, ROWS, PREFILL)
LEAST_CHUNK = 64
"""Tokens whose logits exist at one time; fewer save nothing worth the time."""


class RunMemory:
    """A run's ladder, and its record in the run's folder: memory.json, memory.svg and run.yaml.

    Args:
        observer: receives every change and the metrics of every line.
    """

    def __init__(self, loaded: Loaded, folder: RunFolder, observer: Observer, device: torch.device) -> None:
        self._loaded, self._folder, self._observer = loaded, folder, observer
        config = loaded.config
        budget = config.plan.memory_budget_gib
        budget_bytes = None if budget is None else int(budget * GIB)
        is_gpu = is_accelerator(device)
        gauge = DeviceGauge(device, budget_bytes) if is_gpu else HostGauge(memory_limit_bytes())
        reader = nvml_reader() if device.type == "cuda" else None
        self._device = calibration.device_key(gauge.kind)
        self._has_limit = is_gpu or budget is not None
        self._what = gauge.what
        earlier = Record.read(folder.path) if folder.resumed else None
        self.ladder = Ladder(
            Meter(gauge),
            settings={key: value_of(config, key) for key in KEYS},
            budget_bytes=budget_bytes,
            autotune=config.plan.autotune,
            say=observer.say,
            changed=self.write,
            earlier=earlier.changes if earlier else (),
            busy=Busy(reader) if reader else None,
        )
        self.predict = self._predictor() if "rl" in config.stages else None
        """The plan of the RL stage as a function of the rungs' settings; None for a model that no plan knows."""
        observer.watch(self.ladder.metrics)
        self.write()

    def write(self) -> None:
        """Bring memory.json, memory.svg and run.yaml up to date."""
        ladder = self.ladder
        expected = {
            stage: {phase: Expected.of(moment) for phase, moment in phases.items()}
            for stage, phases in ladder.predicted.items()
        }
        self.record = Record(
            device=self._device,
            what=self._what,
            limit_bytes=ladder.limit_bytes,
            has_limit=self._has_limit,
            expected=expected,
            measured=ladder.measured,
            changes=tuple(ladder.changes),
        )
        try:
            self.record.write(self._folder.path)
            if self.predict is not None:
                picture = timeline(self.predict(ladder.settings), f"{ladder.meter.gauge.what}, as planned")
                write_whole(self._folder.path / "memory.svg", picture)
            if ladder.changes:
                origins = {change.key: Where(change.origin) for change in ladder.changes}
                config = self._loaded.config
                for key in origins:
                    config = with_value(config, key.split("."), ladder.settings[key])
                title = f"Resolved from {self._loaded.run_file}, and changed while it ran"
                text = resolved_yaml(config, lambda path: origins.get(path) or self._loaded.where(path), title=title)
                write_whole(self._folder.run_yaml, text)
        except OSError as error:  # a record less, and no reason to end
            self._observer.warn(f"memory.json, memory.svg and run.yaml cannot be written: {error.strerror}")

    def _predictor(self) -> Predict | None:
        loaded, ladder = self._loaded, self.ladder
        gauge = ladder.meter.gauge
        hardware = one_device(gauge.kind, ladder.limit_bytes)
        try:
            workload = workload_of(loaded.config)
            # without cluster and services: the ladder is of this process alone
            alone = loaded.config.model_copy(update={"cluster": ClusterSection(), "services": {}})
            inputs = resolve(alone, hardware, workload, loaded.run_file.parent)
            plan_inputs(inputs)
        except DataError:
            return None

        def predict(settings: Any) -> Ledger:
            ledger = plan_inputs(changed(inputs, settings)).ledgers[0]
            if gauge.kind != "gpu":
                return ledger
            # As torch's allocator sees it, which knows of no CUDA context.
            moments = (
                replace(moment, terms=tuple(term for term in moment.terms if term.name != "CUDA context"))
                for moment in ledger.moments
            )
            return replace(ledger, moments=tuple(moments))

        return predict

    def report(self) -> None:
        """Report measured against planned memory at the end of a run, and record it for later plans."""
        self.ladder.metrics()  # what came after the last line
        self.write()
        _, found = comparison(self._folder.path)
        for line in table(found, self.record):
            self._observer.say(line)
        planned = {row.phase: (row.expected.bytes, row.measured_bytes) for row in found if row.expected}
        calibration.remember(self._device, planned)


def exhausted(error: BaseException) -> MemoryExhausted | None:
    """Message for memory that ran out outside every measured phase; None for a failure of another kind."""
    if not ran_out_of_memory(error):
        return None
    return MemoryExhausted(f"out of memory outside of any phase that could do with less: {error}")


def one_device(kind: Any, memory_bytes: int) -> Hardware:
    """This device for a memory plan; its speed is not needed."""
    is_npu = kind == "gpu" and torch_kind() is ASCEND
    return Hardware(
        name=f"{ASCEND.vendor} {ASCEND.resource}" if is_npu else "this GPU" if kind == "gpu" else "this process",
        kind=kind,
        devices=1,
        memory_bytes=memory_bytes,
        bandwidth=1e11,
        bf16_flops=1e12,
        fp32_flops=1e12,
        link=1e10,
        host_link=1e10,
        per_node=1,
        host_bytes=memory_limit_bytes(),
    )


# ---- a rank of a cluster


def rank_ladder(loaded: Loaded, folder: Path, device: torch.device, ranks: Ranks) -> Ladder:
    """The ladder of a trainer's rank, from the settings that the run has come to; the run's own adopts its changes."""
    gauge = DeviceGauge(device) if is_accelerator(device) else HostGauge(memory_limit_bytes())
    earlier = Record.read(folder)
    options = {
        "settings": {key: value_of(loaded.config, key) for key in KEYS},
        "earlier": earlier.changes if earlier else (),
    }
    if isinstance(ranks, FsdpRanks):
        timeout_s = loaded.config.cluster.call_timeout_s
        return SharedLadder(Meter(gauge), ranks.mesh.collectives, ranks.reset, timeout_s=timeout_s, **options)
    return Ladder(Meter(gauge), **options)


def rank_predictor(loaded: Loaded, ladder: Ladder) -> Predict | None:
    """The plan of a device that trains, as a function of the rungs' settings; None for a run that no plan knows."""
    try:
        devices = topology_of(loaded.config).num_devices
        hardware = replace(one_device(ladder.meter.gauge.kind, ladder.limit_bytes), devices=devices, per_node=devices)
        inputs = resolve(loaded.config, hardware, workload_of(loaded.config), loaded.run_file.parent)
        plan_inputs(inputs)
    except (DataError, ConfigError, KeyError):
        return None

    def predict(settings: Any) -> Ledger:
        ledgers = plan_inputs(changed(inputs, settings)).ledgers
        return next((one for one in ledgers if any(m.phase == "update" for m in one.moments)), ledgers[0])

    return predict


# ---- what may be changed


def trainer_knobs(trainer: Roles, config: RunConfig, *, most_tokens: int | None = None) -> list[Knob]:
    """Settings of policy and critic that the ladder may lower. `most_tokens`: a larger budget would change nothing."""
    passes = trainer.passes

    def chunk(value: int) -> None:
        passes.logprob_chunk_tokens = value

    def recompute(value: Checkpointing) -> None:
        for model in trainer.trained:
            model.checkpointing = value

    def in_use() -> int:
        return passes.largest_microbatch

    return [
        Knob(TOKENS, partial(set_tokens, passes), lowest=longest_tokens(config), highest=most_tokens, in_use=in_use),
        Knob(CHUNK, chunk, lowest=LEAST_CHUNK, in_use=in_use),
        Knob(RECOMPUTE, recompute),
    ]


def set_tokens(passes: Passes, value: int) -> None:
    passes.tokens_per_microbatch = value


def pair_knobs(trainer: PairTrainer, config: RunConfig) -> list[Knob]:
    """Settings of a reward model's trainer that the ladder may lower; its microbatches hold whole pairs."""

    def recompute(value: Checkpointing) -> None:
        trainer.model.body.checkpointing = value

    tokens = partial(set_tokens, trainer.passes)
    return [Knob(TOKENS, tokens, lowest=2 * longest_tokens(config)), Knob(RECOMPUTE, recompute)]


def engine_knobs(engine: LocalEngine, config: RunConfig) -> list[Knob]:
    """Settings of the embedded engine that the ladder may lower."""
    in_flight = samples_per_update(config) * (config.rollout.max_staleness + 1)
    limit: Callable[..., None] = engine.limit
    return [
        Knob(ROWS, lambda value: limit(max_concurrent=value), highest=in_flight, in_use=lambda: engine.num_rows),
        Knob(PREFILL, lambda value: limit(prefill_tokens=value), lowest=config.data.max_prompt_tokens),
    ]
