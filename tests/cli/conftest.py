from pathlib import Path

import pytest


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        "extends: [algorithm/dapo, model/qwen3-1m]\n"
        'model: {characters: "0123456789+="}\n'
        "data: {train: train.jsonl, answer_column: answer, max_prompt_tokens: 16}\n"
        "rollout:\n"
        "  group_size: 16\n"
        "  max_response_tokens: 64\n"
        "reward: {components: [{use: exact}]}\n"
    )
    return path
