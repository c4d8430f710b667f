"""A run small enough for tests that train for real: two-digit sums, a model of ten thousand parameters."""

import json
from pathlib import Path

RUN = """
stages: [sft, rl]
run: {{dir: {folder}/run, steps: {steps}, threads: 1, device: cpu}}
model:
  characters: "0123456789+="
  init: {{model_type: qwen3, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
         head_dim: 8, intermediate_size: 64, max_position_embeddings: 32, tie_word_embeddings: true}}
data: {{train: sums.jsonl, eval: sums.jsonl, eval_rows: "0:20", answer_column: answer, max_prompt_tokens: 8}}
reward: {{components: [{{use: exact}}]}}
rollout: {{group_size: 4, max_response_tokens: 4}}
train: {{prompts_per_step: 8, tokens_per_microbatch: 256, optimizer: {{lr: 1e-3}}}}
sft: {{epochs: 0.5, rows_per_step: 16, optimizer: {{lr: 3e-3}}}}
algorithm: {{kl_loss_coef: 0.01}}
eval: {{every: 4}}
checkpoint: {{every: {save_every}}}
observe: {{console: quiet, tensorboard: false, trace: false}}
"""

TIMINGS = ("time", "memory/", "rollout/tokens_per_s", "rollout/samples_per_s", "sft/tokens_per_s")


def write_run(folder: Path, *, steps: int = 8, save_every: int = 1) -> Path:
    """Write data and run file; returns the run file."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_file = folder / "tiny.yaml"
    run_file.write_text(RUN.format(folder=folder, steps=steps, save_every=save_every))
    return run_file


def metrics_of(folder: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock or the machine."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMINGS)} for line in lines]


def weights_of(folder: Path) -> bytes:
    return (folder / "run" / "hf" / "model.safetensors").read_bytes()
