"""A run file to plan, and ways to make one."""

from pathlib import Path

import pytest

from hone.config.load import load_config

RUN = """
model: {path: Qwen/Qwen3-8B}
data: {train: a/b, answer_column: answer}
run: {precision: bfloat16}
reward: {components: [{use: exact}]}
"""


@pytest.fixture
def configured(tmp_path: Path):
    """A function: overrides -> RunConfig of Qwen3-8B in bfloat16."""
    file = tmp_path / "run.yaml"
    file.write_text(RUN)

    def config(*overrides: str):
        return load_config(file, overrides).config

    return config
