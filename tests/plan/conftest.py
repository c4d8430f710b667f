"""A run file to plan, and ways to make one."""

import os

import pytest

from hone.config.load import load_config

RUN = """
model: {path: Qwen/Qwen3-8B}
data: {train: a/b, answer_column: answer}
run: {precision: bfloat16}
reward: {components: [{use: exact}]}
"""


@pytest.fixture(scope="session")
def configured(tmp_path_factory: pytest.TempPathFactory):
    """A function: overrides -> RunConfig of Qwen3-8B in bfloat16."""
    file = tmp_path_factory.mktemp("plan") / "run.yaml"
    file.write_text(RUN)

    def config(*overrides: str):
        return load_config(file, overrides).config

    return config


@pytest.fixture(scope="module")
def vllm_program(tmp_path_factory):
    """A program named vllm on the PATH: judges on several GPUs need one. Returns its folder."""
    program = tmp_path_factory.mktemp("bin") / "vllm"
    program.touch(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        yield program.parent
