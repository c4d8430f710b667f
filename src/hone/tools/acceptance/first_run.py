"""The part that is a user's first run: `examples/gsm8k` with a model of random weights, on the backend and with the
engine that `auto` stands for here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import count, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hone.data.chat import EOS, PAD
from hone.devices import give_back_memory
from hone.model.load import save_hf
from hone.tools.acceptance.figures import Figure
from hone.tools.acceptance.runs import (
    REWARDS,
    SCATTERED,
    TRAIN,
    figures_of_steps,
    last_line,
    memory_over_plan,
    metrics_of,
)
from hone.tools.acceptance.setting import RUN_TIMEOUT_S, PartSetting, has_data_sheet, random_model

STEPS = 3
EXAMPLE: Mapping[str, Mapping[str, Any]] = {
    "data": {"max_prompt_tokens": 512},
    "rollout": {"group_size": 8, "max_response_tokens": 512, "max_concurrent_samples": 256},
    "train": {"prompts_per_step": 64, "optimizer": {"lr": 1e-6, "warmup_steps": 5}},
}
"""What `examples/gsm8k/run.yaml` says of sizes; a test compares them."""
TINY_EXAMPLE: Mapping[str, Mapping[str, Any]] = {
    "data": {"max_prompt_tokens": 128},
    "rollout": {"group_size": 4, "max_response_tokens": 8},
    "train": {"prompts_per_step": 4, "optimizer": {"lr": 1e-6}},
}
QUESTION = "Ann sold {a} clips in April, and half as many and {b} more in May. How many has she sold altogether?"
FIRST_CHARACTER, SURROGATES = 0x20, range(0xD800, 0xE000)


def gsm8k(setting: PartSetting) -> Iterator[Figure]:
    """Three updates with the example's sizes: speed, MFU, and the step's seconds against the plan."""
    with TemporaryDirectory(prefix="hone-gpu-") as name:
        folder, example = Path(name), TINY_EXAMPLE if setting.tiny else EXAMPLE
        write_files(folder, setting, example)
        with (folder / "log").open("w") as log:
            code = subprocess.run(TRAIN, cwd=folder, stdout=log, stderr=log, timeout=RUN_TIMEOUT_S).returncode
        lines = metrics_of(folder)
        steps = max((line["step"] for line in lines), default=0) if code == 0 else 0
        yield Figure("gsm8k", "example_steps", steps, note=last_line(folder / "log") if code else "")
        if code:
            return
        samples = example["train"]["prompts_per_step"] * example["rollout"]["group_size"]
        yield from figures_of_steps("gsm8k", lines, samples)
        if not has_data_sheet(setting.device):
            yield Figure("gsm8k", "left_out", 1.0, "step_over_plan", "hone plan does not know the device")
            return
        lengths = [found for line in lines if (found := line.get("rollout/response_tokens_mean")) is not None]
        planned = planned_step(folder, sum(lengths) / len(lengths))
        use = "cluster.engines.use: "  # in the notes on what `auto` stands for
        engines = [note.removeprefix(use).partition(";")[0] for note in planned["notes"] if note.startswith(use)]
        chosen = f"{planned['topology']['backend']}, {engines[0] if engines else 'hone'}"
        seconds = [line["time/step_s"] for line in lines if "time/step_s" in line][1:]
        measured_s, planned_s = min(seconds), planned["time"]["step_s"]
        note = f"{measured_s:.3g} of {planned_s:.3g} s"
        yield Figure("gsm8k", "step_over_plan", measured_s / planned_s, chosen, note)
        if found := [line["train/mfu"] for line in lines if "train/mfu" in line]:
            yield Figure("gsm8k", "example_mfu", max(found), chosen)
        if setting.is_gpu and planned["topology"]["backend"] == "local":
            yield from memory_over_plan("gsm8k", folder, chosen)


def write_files(folder: Path, setting: PartSetting, example: Mapping[str, Mapping[str, Any]]) -> None:
    """A model's directory, rows, a reward that differs from sample to sample, and the run file."""
    model = random_model(setting.shape(), setting.device, dtype=torch.bfloat16)
    save_hf(folder / "model", model.hf_config, model.named_weights(), tokenizer_of(model.vocab_size), eos_ids=(1,))
    del model
    give_back_memory()
    pairs = product(range(20), range(20))
    rows = ({"question": QUESTION.format(a=a, b=b), "answer": f"{a + a // 2 + b}"} for a, b in pairs)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    run_file = {
        "extends": "algorithm/dr_grpo",
        "run": {"dir": "out", "steps": STEPS, **({} if setting.is_gpu else {"device": "cpu"})},
        "model": {"path": "model"},
        **example,
        "data": {"train": "rows.jsonl", "prompt_column": "question", "answer_column": "answer", **example["data"]},
        "reward": SCATTERED,
        "observe": {"console": "quiet", "tensorboard": False, "trace": False},
    }
    (folder / "run.yaml").write_text(json.dumps(run_file))


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """A token for each of `size` characters, less the two special ones: every token that a random model samples is
    text."""
    codes = (code for code in count(FIRST_CHARACTER) if code not in SURROGATES)
    words = [PAD, EOS, *map(chr, islice(codes, size - 2))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)


def planned_step(folder: Path, mean_tokens: float) -> Mapping[str, Any]:
    """What `hone plan` says of the run here."""
    words = [sys.executable, "-m", "hone.cli.main", "plan", "run.yaml", "--json"]
    words += ["--mean-response-tokens", f"{mean_tokens:.1f}"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if done.returncode not in (0, 4):  # 4: it does not fit, which the run did
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)
