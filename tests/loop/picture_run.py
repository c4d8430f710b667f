"""A run with pictures in prompts that is small enough to be trained for real."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pictures import save_picture, save_seeing_model

RUN = """
stages: [sft, rl]
run: {{dir: {folder}/run, steps: 3, threads: 1, device: cpu}}
model: {{path: {folder}/model}}
data: {{train: rows.jsonl, eval: rows.jsonl, answer_column: answer, chat: true, image_columns: [images],
  max_prompt_tokens: 64}}
sft: {{epochs: 1, rows_per_step: 4}}
reward: {{components: [{{use: "rewards.py:length"}}]}}
rollout: {{group_size: 2, max_response_tokens: 4}}
train: {{prompts_per_step: 4, tokens_per_microbatch: 256, optimizer: {{lr: 1e-3}}}}
checkpoint: {{every: 1}}
observe: {{console: quiet, tensorboard: false, trace: false}}
"""
REWARD = """
def length(group):
    assert len(group.prompt.pictures) == group.prompt.columns["count"]
    return [float(s.text == group.prompt.answer) + 0.1 * len(s.token_ids) for s in group.samples]
"""


def write_run(
    folder: Path, *, settings: str = "", model_type: str = "qwen2_5_vl", sizes: Mapping[str, Any] | None = None
) -> Path:
    """Eight rows with 0, 1 and 2 pictures, a tiny model and a reward; returns the run file."""
    folder.mkdir(exist_ok=True)
    save_seeing_model(folder / "model", model_type, sizes=sizes)
    rows = []
    for i in range(8):
        save_picture(folder / f"{i}.png", i, 30 + 20 * i, 60)
        images = [f"{i}.png", f"{(i + 1) % 8}.png"][: i % 3]
        rows.append({"prompt": f"how many {i}?", "answer": str(i % 3), "images": images, "count": len(images)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "run.yaml").write_text(RUN.format(folder=folder) + settings)
    return folder / "run.yaml"
