"""What the jobs of `trl_jobs/` run on, the same wherever it is made: a model of numbers that a formula gives, and rows.

Used by record_trl_jobs.py beside TRL and by test_trl_jobs.py beside Hone, so it imports neither.
"""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

JOBS = Path(__file__).parent / "trl_jobs"
RECORDED = Path(__file__).parent / "trl_jobs.json"
CHARACTERS = "0123456789+="
ROWS = 40
"""20 steps of 4 prompts go through them twice."""
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def write_setting(folder: Path) -> None:
    """`model/`, `sums.jsonl` and the jobs' own files."""
    shutil.copytree(JOBS, folder, dirs_exist_ok=True)
    rows = [
        {"prompt": [{"role": "user", "content": f"{a % 7 + 1}+{a // 7}="}], "answer": str(a % 7 + 1 + a // 7)}
        for a in range(ROWS)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    tokenizer = save_tokenizer(folder / "model")
    # Without pad_token_id: Transformers keeps the gradient of that token's inputs at 0, and here it may be sampled.
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SHAPE)
    model = AutoModelForCausalLM.from_config(config)
    set_weights(model)
    model.save_pretrained(folder / "model")


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """One token per character, and a chat template that says nothing but what was said."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return tokenizer


def set_weights(model: torch.nn.Module) -> None:
    """Give every weight a number by its place: no generator's stream, which a version of torch may change."""
    for number, (_, weight) in enumerate(sorted(model.named_parameters())):
        if weight.dim() == 1:
            continue  # norms, which are 1
        place = torch.arange(weight.numel(), dtype=torch.float64)
        values = torch.sin(place * 12.9898 + number * 78.233) * 43758.5453
        weight.data = (0.4 * (values - values.floor() - 0.5)).reshape(weight.shape).to(weight.dtype)


def summary(named: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Of each weight its sum, its norm, and its product with a wave: as few numbers as show whether it moved alike."""
    found = {}
    for name, weight in sorted(named.items()):
        values = weight.detach().double().flatten()
        wave = torch.cos(torch.arange(len(values), dtype=torch.float64))
        found[name] = [float(values.sum()), float(values.norm()), float(values @ wave)]
    return found
