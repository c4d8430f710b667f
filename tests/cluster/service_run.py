"""Not a test: a tiny run whose reward is asked of a service, and the function that the service scores by."""

from __future__ import annotations

import json
from pathlib import Path

RUN = """
run: {{dir: {folder}/run, steps: {steps}, threads: 1, device: cpu}}
model:
  characters: "0123456789+="
  init: {{model_type: qwen3, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
         head_dim: 8, intermediate_size: 64, max_position_embeddings: 32, tie_word_embeddings: true}}
data: {{train: sums.jsonl, answer_column: answer, max_prompt_tokens: 8}}
reward: {{components: [{reward}]}}
services: {{reward_server: {{{service}}}}}
rollout: {{group_size: 4, max_response_tokens: 4}}
train: {{prompts_per_step: 4, tokens_per_microbatch: 256, optimizer: {{lr: 1e-3}}}}
checkpoint: {{every: {save_every}}}
observe: {{console: {console}, tensorboard: false, trace: false}}
"""

SERVED = "{use: service, name: sums, args: {service: reward_server}}"

FUNCTION = '''
"""How much of a response is of the answer's characters: many values, and slow enough to be killed in the middle."""
import time
from pathlib import Path

CALLS = Path(__file__).with_name("calls")

def digits(group):
    with CALLS.open("a") as calls:
        calls.write("x")
    time.sleep(0.02)
    return [sum(c in group.prompt.answer + "+" for c in s.text) / 8 for s in group.samples]
'''


def write_run(folder: Path, *, service: str, reward: str = SERVED, steps: int = 6, **settings) -> Path:
    """Write data, the reward and the run file; returns the run file."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "digits.py").write_text(FUNCTION)
    (folder / "rewards.yaml").write_text("reward: {components: [{use: 'digits.py:digits'}]}\n")
    run_file = folder / "tiny.yaml"
    defaults = {"save_every": 1, "console": "quiet"}
    run_file.write_text(RUN.format(folder=folder, service=service, reward=reward, steps=steps, **(defaults | settings)))
    return run_file
