"""Figures of the acceptance run, what is expected of them, and the page that shows them. Without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is expected of a figure; without a bound it is only reported."""

    unit: str
    least: float | None = None
    most: float | None = None
    on_cpu: bool = False
    """Expected on a CPU with tiny shapes too; else only on an accelerator."""

    def holds(self, value: float, *, is_gpu: bool) -> bool | None:
        """None where nothing is expected."""
        if (self.least is None and self.most is None) or not (is_gpu or self.on_cpu):
            return None
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        bounds = [f"at least {self.least:g}"] if self.least is not None else []
        bounds += [f"at most {self.most:g}"] if self.most is not None else []
        return ", ".join(bounds)


EXPECTED: Mapping[str, Expectation] = {
    "finished": Expectation("", least=1, on_cpu=True),
    "seconds": Expectation("s"),
    "left_out": Expectation(""),
    "out_of_memory": Expectation("", most=0, on_cpu=True),
    "total_s": Expectation("s", most=2400),
    "known_device": Expectation("", least=1),
    "listed_minus_seen": Expectation("devices", least=0, most=0),
    "device_memory": Expectation("GiB"),
    "has_bfloat16": Expectation(""),
    "has_vllm": Expectation(""),
    "hidden_error_float32": Expectation("relative", most=1e-2, on_cpu=True),
    "hidden_error_bfloat16": Expectation("relative", most=5e-2, on_cpu=True),
    "logprob_error_float32": Expectation("nats, mean", most=5e-3, on_cpu=True),
    "logprob_error_bfloat16": Expectation("nats, mean", most=5e-2, on_cpu=True),
    "grad_norm_error_float32": Expectation("relative", most=2e-2, on_cpu=True),
    "grad_norm_error_bfloat16": Expectation("relative", most=0.1, on_cpu=True),
    "grad_error_float32": Expectation("relative", most=2e-2, on_cpu=True),
    "grad_error_bfloat16": Expectation("relative", most=0.1, on_cpu=True),
    "step_error_float32": Expectation("relative", most=0.2, on_cpu=True),
    "step_error_bfloat16": Expectation("relative", most=0.5, on_cpu=True),
    "deterministic_update": Expectation("", least=1, on_cpu=True),
    "deterministic_ratio": Expectation("ratio", most=2),
    "layout_ms": Expectation("ms of the host", most=100),
    "layout_mib": Expectation("MiB", most=64),
    "operators_per_layer": Expectation("operators", most=120),
    "kernels_compiled": Expectation("", least=1),
    "kernels_compile_s": Expectation("s"),
    "kernels_update_ratio": Expectation("ratio", most=0.95),
    "kernels_logits_ratio": Expectation("ratio", most=0.8),
    "kernels_logprob_difference": Expectation("nats, mean", most=5e-2, on_cpu=True),
    "kernels_grad_difference": Expectation("relative", most=2e-2, on_cpu=True),
    "kernels_new_lengths": Expectation("compilations", most=0, on_cpu=True),
    "peak_tflops": Expectation("10^12 operations/s"),
    "logprob_tokens_per_s": Expectation("tokens/s"),
    "logprob_mfu": Expectation("of the peak", least=0.40),
    "update_tokens_per_s": Expectation("tokens/s"),
    "update_mfu": Expectation("of the peak", least=0.40),
    "peak_over_plan": Expectation("ratio", least=0.9, most=1.1),
    "syncs_per_update": Expectation("synchronisations"),
    "syncs_per_microbatch": Expectation("synchronisations", most=0),
    "kernels_per_microbatch": Expectation("kernels"),
    "host_ms_per_microbatch": Expectation("ms"),
    "update_busy": Expectation("of the time", least=0.8),
    "mode_tokens_per_s": Expectation("tokens/s"),
    "mode_mfu": Expectation("of the peak"),
    "mode_peak_gib": Expectation("GiB"),
    "mode_time_ratio": Expectation("ratio", most=1.45),
    "mode_memory_ratio": Expectation("ratio", most=1),
    "mode_logprob_difference": Expectation("nats, mean", most=1e-3, on_cpu=True),
    "mode_grad_difference": Expectation("relative", most=1e-3, on_cpu=True),
    "mode_kernels_ratio": Expectation("ratio", most=1),
    "mode_kernels_memory": Expectation("ratio", most=1.05),
    "transformers_tokens_per_s": Expectation("tokens/s"),
    "transformers_speedup": Expectation("ratio", least=1),
    "transformers_logprob_difference": Expectation("nats, mean", most=5e-2, on_cpu=True),
    "transformers_grad_difference": Expectation("relative", most=5e-2, on_cpu=True),
    "class_logprob_error": Expectation("nats, mean", most=5e-2, on_cpu=True),
    "class_grad_norm_error": Expectation("relative", most=0.1, on_cpu=True),
    "class_tokens_per_s": Expectation("tokens/s"),
    "class_rows_ratio": Expectation("ratio", least=1.5),
    "class_memory_ratio": Expectation("ratio", most=0.9),
    "class_compiled_ratio": Expectation("ratio", most=1),
    "class_compiled_difference": Expectation("relative", most=2e-2, on_cpu=True),
    "decode_tokens_per_s": Expectation("tokens/s"),
    "decode_step_ms": Expectation("ms"),
    "decode_busy": Expectation("of the time"),
    "decode_host_frac": Expectation("of the time"),
    "syncs_per_step": Expectation("synchronisations", most=1),
    "graph_speedup": Expectation("ratio", least=2),
    "graphs_recorded": Expectation("graphs", least=1, on_cpu=True),
    "graph_gib": Expectation("GiB", most=2),
    "same_samples": Expectation("of all", least=1, on_cpu=True),
    "engine_tokens_per_s": Expectation("tokens/s"),
    "engine_step_ms": Expectation("ms"),
    "engine_ratio": Expectation("ratio", least=0.2),
    "export_gib_per_s": Expectation("GiB/s"),
    "export_device_gib": Expectation("GiB beyond the weights", most=2.5),
    "held_versions": Expectation("of all", least=1, on_cpu=True),
    "transport_s": Expectation("s"),
    "transport_gib_per_s": Expectation("GiB/s"),
    "transport_over_ray": Expectation("ratio", most=0.5),
    "fingerprint_s": Expectation("s"),
    "sleep_s": Expectation("s"),
    "asleep_gib": Expectation("GiB", most=4),
    "reload_s": Expectation("s"),
    "moved_over_least": Expectation("ratio", most=1.05, on_cpu=True),
    "divided_logprob_difference": Expectation("nats, mean", most=5e-2, on_cpu=True),
    "divided_grad_difference": Expectation("relative", most=5e-2, on_cpu=True),
    "divided_speedup": Expectation("ratio", least=1.2),
    "gate_gap": Expectation("nats, mean", most=0.03, on_cpu=True),
    "example_steps": Expectation("updates", least=3, on_cpu=True),
    "example_mfu": Expectation("of the peak", least=0.40),
    "step_over_plan": Expectation("ratio", least=0.5, most=2),
    "trained_frac": Expectation("of all samples", least=0.5, on_cpu=True),
    "steps": Expectation("updates", least=6, on_cpu=True),
    "resumed_steps": Expectation("updates", least=6, on_cpu=True),
    "resumed_same": Expectation("", least=1, on_cpu=True),
    "engines_first": Expectation("", least=1, on_cpu=True),
    "exported": Expectation("", least=1, on_cpu=True),
    "memory_over_plan": Expectation("ratio, worst phase", most=1.1),
    "publish_s": Expectation("s a step"),
    "step_s": Expectation("s a step"),
    "step_tokens_per_s": Expectation("response tokens/s"),
}
"""Every figure by its name. The bounds are targets: the design's, on H100-class hardware."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number."""

    part: str
    name: str
    value: float
    case: str = ""
    """Shape, model or engine."""
    note: str = ""

    def as_dict(self, *, is_gpu: bool) -> dict[str, Any]:
        """A JSON line."""
        bounds = EXPECTED[self.name]
        return {
            "part": self.part,
            "figure": self.name,
            "case": self.case,
            "value": self.value,
            "unit": bounds.unit,
            "expected": str(bounds) if bounds.holds(self.value, is_gpu=is_gpu) is not None else "",
            "holds": bounds.holds(self.value, is_gpu=is_gpu),
            "note": self.note,
        }


def page(lines: Iterable[Mapping[str, Any]], title: str) -> str:
    """One Markdown page: what was missed first, then every figure by part."""
    rows = list(lines)
    missed = [row for row in rows if row["holds"] is False]
    met = sum(row["holds"] is True for row in rows)
    verdict = f"{len(missed)} of {met + len(missed)} expectations missed" if missed else f"all {met} expectations met"
    text = [f"# {title}", "", f"{verdict}. [What each figure means](gpu-acceptance.md) is in Hone's documentation.", ""]
    if missed:
        text += ["## Missed", "", *_table(missed), ""]
    for part in dict.fromkeys(row["part"] for row in rows):
        text += [f"## {part}", "", *_table([row for row in rows if row["part"] == part]), ""]
    return "\n".join(text)


def _table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    marks = {True: "yes", False: "**no**", None: ""}
    lines = ["| figure | case | value | expected | met | |", "|---|---|---|---|---|---|"]
    for row in rows:
        value = f"{row['value']:.4g} {row['unit']}".strip()
        cells = (row["figure"], row["case"], value, row["expected"], marks[row["holds"]], row["note"])
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return lines


def append(path: Path, figures: Iterable[Figure], *, is_gpu: bool) -> None:
    """Write each figure into a JSON lines file as soon as it is there."""
    with path.open("a", encoding="utf-8", buffering=1) as file:
        for figure in figures:
            file.write(json.dumps(figure.as_dict(is_gpu=is_gpu)) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Figures of a JSON lines file; none if it is not there."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
