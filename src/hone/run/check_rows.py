"""What `hone check` reports on rows: prompts, their sources and steps, SFT rows, preference pairs, the template."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from hone.config.derived import longest_tokens
from hone.config.run import DataSection, RunConfig
from hone.data.chat import Tokenizer, thinks, with_template_args
from hone.data.lazy import SampleSize
from hone.data.pairs import load_pairs
from hone.data.prompts import PromptStream, load_prompts, seen_frac
from hone.data.sources import DataPart
from hone.errors import DataError
from hone.loop.supervised import sft_rows
from hone.run.report import CheckReport
from hone.types import Prompt

PREVIEWS = 2
SEEN_MOST = 0.9
"""Share of evaluation prompts that training has too, above which accuracy says little of other prompts."""
THINKING_TOKENS = 4096
"""Responses of models that think are seldom shorter."""


def check_prompts(
    config: RunConfig, folder: Path, tokenizer: Tokenizer, sample: SampleSize, findings: CheckReport
) -> list[PromptStream]:
    """The prompts that training and evaluation would load; shows the first few."""
    reads: dict[DataPart, bool] = {
        "train": "rl" in config.stages or (config.sft.messages_column is None and "reward_model" not in config.stages),
        "eval": config.data.eval is not None and "reward_model" not in config.stages,
    }
    streams: list[PromptStream] = []
    for part in filter(reads.__getitem__, reads):
        try:
            stream = load_prompts(config.data, tokenizer, folder, seed=config.seed, part=part, sample=sample)
        except DataError as error:
            findings.problems.append(str(error))
            continue
        streams.append(stream)
        prompts = stream.rows()
        findings.lines.append(f"{part}: {stream.report}")
        lengths = prompts.tokens
        findings.figures[f"{part} rows"] = stream.report.of or len(prompts)
        findings.figures[f"{part} prompt tokens, mean"] = float(lengths.mean())
        findings.figures[f"{part} prompt tokens, 95th percentile"] = float(np.percentile(lengths, 95))
        findings.figures[f"{part} prompt tokens, longest"] = int(lengths.max())
        if stream.report.of is not None:
            findings.not_checked.append(f"{part}: {stream.report.of - stream.report.read:,} rows outside of the sample")
        if part == "train":
            findings.lines += mixture(config, stream)
            findings.lines += [preview(prompt, tokenizer) for prompt in prompts[:PREVIEWS]]
            if "rl" in config.stages:
                check_template(config.data, config.rollout.max_response_tokens, prompts[0], tokenizer, findings)
            if "rl" in config.stages:
                check_steps(stream, config.train.prompts_per_step, findings)
    if len(streams) == 2 and (seen := seen_frac(streams[1].rows(), streams[0].rows())):
        findings.lines.append(f"eval: {seen:.0%} of its prompts are training prompts too")
        if seen > SEEN_MOST:
            findings.warnings.append(
                f"data.eval: {seen:.0%} of its prompts are training prompts too, so accuracy says little of others. "
                "Evaluate on rows that training does not have"
            )
    return streams


def mixture(config: RunConfig, stream: PromptStream) -> list[str]:
    """A line for each source of several: its rows, its share of the prompts, and how often the run goes through it."""
    rows, lines = stream.rows(), list[str]()
    if len(rows.sources) < 2 or "rl" not in config.stages:
        return []
    is_sample = stream.report.of is not None
    sizes = rows.source_rows if is_sample else [source.stop - source.start for source in rows.sources]
    steps, per_step = config.run.steps, config.train.prompts_per_step
    if config.run.epochs is not None:
        used = sum(size for size, share in zip(sizes, stream.order.shares, strict=True) if share)
        steps = math.ceil(config.run.epochs * used / per_step)
    for source, size, share in zip(rows.sources, sizes, stream.order.shares, strict=True):
        if not share:
            lines.append(f"  {source.name}: {size:,} rows, not used (weight 0)")
            continue
        epochs = f"{steps * per_step * share / size:.3g} epochs in {steps:,} steps" if size else "no epoch"
        lines.append(f"  {source.name}: {size:,} rows, {share:.1%} of the prompts, {epochs}")
    return lines


def check_steps(stream: PromptStream, prompts_per_step: int, findings: CheckReport) -> None:
    """Whether a step holds the same prompt twice: as the same row, or as rows that ask the same."""
    if stream.report.of is not None:  # what the steps of the run hold is not known
        return
    if len(stream) < prompts_per_step:
        findings.problems.append(
            f"train.prompts_per_step: {prompts_per_step} prompts per step, but there are only {len(stream)}, so every "
            f"step would hold the same prompts several times. Nearest: {len(stream)}"
        )
        return
    num_steps, rows = len(stream) // prompts_per_step, stream.rows()
    order = stream.order.at(0, num_steps * prompts_per_step).reshape(num_steps, prompts_per_step)
    content = rows.content[order]
    sorted_content = np.sort(content, axis=1)
    twice = np.flatnonzero((sorted_content[:, 1:] == sorted_content[:, :-1]).any(axis=1))
    if len(twice):
        firsts: dict[int, int] = {}
        step = zip(content[twice[0]].tolist(), order[twice[0]].tolist(), strict=True)
        second, first = next((place, found) for key, place in step if (found := firsts.setdefault(key, place)) != place)
        findings.warnings.append(
            f"data.train: {len(twice)} of the {num_steps} steps of the first epoch hold the same prompt more than "
            f"once, such as step {twice[0] + 1}: {rows.where(first)} and {rows.where(second)}. Leave repeated rows out"
        )


def check_other_rows(
    config: RunConfig, folder: Path, tokenizer: Tokenizer, sample: SampleSize, findings: CheckReport
) -> None:
    """SFT rows and preference pairs."""
    try:
        if "sft" in config.stages:
            rows = sft_rows(config, tokenizer, folder, sample=sample)
            findings.lines.append(f"sft: {rows.report}")
            findings.lines.append(
                f"  trains on {tokenizer.decode(rows[0].response.tolist())!r}, {len(rows[0].response)} tokens with EOS"
            )
        if "reward_model" in config.stages:
            for part in ("train", "eval"):
                longest = longest_tokens(config)
                pairs = load_pairs(
                    config.data, config.rm, tokenizer, folder, max_tokens=longest, part=part, sample=sample
                )
                findings.lines.append(f"pairs to {'learn from' if part == 'train' else 'measure on'}: {pairs.report}")
            findings.lines.append(f"  prefers {tokenizer.decode(pairs[0].chosen)!r}")
            findings.lines.append(f"  to      {tokenizer.decode(pairs[0].rejected)!r}, by {pairs[0].margin:g}")
    except DataError as error:
        findings.problems.append(str(error))


def preview(prompt: Prompt, tokenizer: Tokenizer) -> str:
    """A prompt as the model reads it, special tokens included, and as tokens; a picture's token is written once, with
    the number of times that it stands there."""
    ids, pieces, done = prompt.token_ids.tolist(), list[str](), 0
    for picture in prompt.pictures:
        pieces += [tokenizer.spell(ids[done : picture.start + 1]), f"x{picture.num_tokens}"]
        done = picture.start + picture.num_tokens
    text = "".join([*pieces, tokenizer.spell(ids[done:])])
    text = text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]}"
    first = ", ".join(map(str, ids[:12])) + (", ..." if len(ids) > 12 else "")
    seen = f", {sum(p.num_tokens for p in prompt.pictures)} of them of {len(prompt.pictures)} pictures"
    return f"  {text!r} -> {len(ids)} tokens{seen if prompt.pictures else ''}: {first}"


def check_template(
    data: DataSection, max_response_tokens: int, prompt: Prompt, tokenizer: Tokenizer, findings: CheckReport
) -> None:
    """Arguments that the chat template does not use; whether responses will be cut within the model's reasoning."""
    template = str(tokenizer.hf.chat_template)
    written = with_template_args("", data.template_args)
    for name in data.template_args:
        if not re.search(rf"\b{re.escape(name)}\b", template.removeprefix(written)):
            findings.warnings.append(f"data.template_args: the chat template does not use {name}. Remove or correct it")
    if data.chat and max_response_tokens < THINKING_TOKENS and thinks(tokenizer.hf.chat_template, prompt.text):
        findings.warnings.append(
            f"rollout.max_response_tokens: {max_response_tokens}, but the chat template lets the model think before it "
            "answers, which takes thousands of tokens: most responses would be cut before an answer. Set it to "
            f"{THINKING_TOKENS} or more, or turn it off (Qwen3: data.template_args.enable_thinking=false)"
        )
