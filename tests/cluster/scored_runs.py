"""Not a test: the tiny run of `ray_runs.py` with a judge and a reward model of random weights, whose scores differ."""

from pathlib import Path

import torch
from ray_runs import write_run

from hone.data.chat import character_tokenizer
from hone.model.heads import ScalarModel, reward_config
from hone.model.load import init_model, save_hf

SIZES = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}

ASK = """
def ask(question, response, reference=None, columns=None):
    return f"{question}{response}"


def mark(text, question=None, response=None):
    return 1.0 + sum(c in "02468" for c in text)
"""

REWARDS = """
services: {grm: {policy: judge}}
reward:
  components:
    - {use: "reward.py:even", weight: 0.1}
    - use: judge
      args:
        service: grm
        response_length: 6
        sampling_config: {temperature: 0}
        data_processor_config: {path: ask.py, preprocess_fn_name: ask, postprocess_fn_name: mark}
        deadline_s: 120
    - {use: reward_model, args: {path: rm}}
"""


def write_scored_run(folder: Path) -> Path:
    """Write data, models and run file; returns the run file. Its policy learns in three steps."""
    run_file = write_run(folder)
    text = run_file.read_text()
    plain = 'reward: {components: [{use: "reward.py:even"}]}\n'
    assert plain in text
    run_file.write_text(text.replace(plain, REWARDS))
    (folder / "ask.py").write_text(ASK)
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    judge = init_model(SIZES, vocab_size=len(tokenizer), seed=0, dtype=torch.float32, device="cpu")
    body = init_model(SIZES, vocab_size=len(tokenizer), seed=1, dtype=torch.float32, device="cpu")
    save_hf(folder / "judge", judge.hf_config, judge.named_weights(), tokenizer)
    torch.manual_seed(0)
    scalar = ScalarModel(body)
    with torch.no_grad():
        for weight in (p for p in scalar.parameters() if p.dim() == 2):
            weight.copy_(torch.randn(weight.shape) * 0.3)
    config = reward_config(scalar.hf_config, pad_id=None, form="text")
    save_hf(folder / "rm", config, scalar.named_weights(), tokenizer)
    return run_file
