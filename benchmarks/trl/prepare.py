"""Make the starting point that both sides load: a model directory, warmed up by SFT with plain PyTorch.

    python benchmarks/trl/prepare.py --case 0.8M --folder runs/trl/0.8M

Uses nothing of TRL or Hone, so that neither side has the home advantage.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from cases import CASES, CHARACTERS, Case, problem, solution
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

ROWS_PER_STEP = 256
PAD, EOS = "<pad>", "<eos>"


def character_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")


def rows(case: Case, tokenizer: PreTrainedTokenizerFast, chance: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, length) token ids and labels, padded on the right; labels are -100 on prompts and padding."""
    ids, labels = [], []
    for _ in range(ROWS_PER_STEP):
        prompt, answer = problem(chance)
        prompt_ids = tokenizer.encode(prompt)
        end = [] if case.noisy else [tokenizer.eos_token_id]
        response_ids = tokenizer.encode(solution(answer, case, chance)) + end
        ids.append(torch.tensor(prompt_ids + response_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + response_ids))
    ids_BL = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return ids_BL, pad_sequence(labels, batch_first=True, padding_value=-100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    case = CASES[options.case]
    torch.set_num_threads(1)  # the same bits wherever it is made
    torch.manual_seed(0)
    chance = random.Random("warm-up")

    tokenizer = character_tokenizer()
    architecture = dict(case.architecture())
    config = AutoConfig.for_model(
        architecture.pop("model_type"),
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **architecture,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(case.supervised_steps):
        ids, labels = rows(case, tokenizer, chance)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == case.supervised_steps - 1:
            print(f"warm-up {options.case} step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
