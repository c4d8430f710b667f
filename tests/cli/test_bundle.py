"""The bundle for machines without a network: what is in it, and a fresh environment that has nothing else."""

import os
import subprocess
import sys
import tarfile
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hone.tools.bundle import INSTALL, LEFT_OUT, THERE, light_packages, make_bundle, requirement_lines

ROOT = Path(__file__).parents[2]
RUN = """
stages: [rl]
run: {dir: runs/first, steps: 1, device: cpu}
model: {init: {model_type: llama, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
  num_key_value_heads: 2, max_position_embeddings: 64}, characters: "0123456789+= "}
data: {train: rows.jsonl, answer_column: answer, max_prompt_tokens: 16}
reward: {components: [{use: exact}]}
rollout: {group_size: 2, max_response_tokens: 4}
train: {prompts_per_step: 2}
"""


def test_a_bundle_holds_what_torch_and_transformers_do_not_bring():
    light = light_packages()
    assert light[0] == "hone-rl" and {"pydantic", "ruamel-yaml", "pydantic-core", "fastapi", "starlette"} <= set(light)
    assert not set(light) & {*THERE, *LEFT_OUT, "numpy", "safetensors", "tokenizers", "vllm", "ray"}
    assert [line for line in requirement_lines() if line.startswith("pydantic>")] == ["pydantic>=2.11"]


def with_torch_alone(folder: Path) -> Path:
    """Python of a new environment that has torch, Transformers and what they need of this one's, and nothing else."""
    venv.create(folder, with_pip=True, symlinks=True)
    here = Path(metadata.distribution("torch").locate_file("")).resolve()
    there = next((folder / "lib").glob("python*/site-packages"))
    pending, seen = [*THERE], set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (there / top).exists():
                (there / top).symlink_to(here / top)
        required = map(Requirement, found.requires or ())
        pending += [one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    return folder / "bin" / "python"


@pytest.mark.slow("asks pip for wheels, and makes an environment")
def test_a_machine_with_torch_and_transformers_gets_a_hone_that_trains(tmp_path):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        made = make_bundle(tmp_path / "dist", [version], checkout=ROOT)
    except SystemExit as error:
        pytest.skip(f"no package index here: {error}")
    with tarfile.open(made) as archive:
        archive.extractall(tmp_path, filter="data")
    python = with_torch_alone(tmp_path / "fresh")
    fresh = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run([python, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=fresh)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    probe = "import importlib.util as u; print([n for n in ('hone', 'pydantic_core', 'scipy') if u.find_spec(n)])"
    assert "hone" not in run("-c", probe), "the environment must not have it yet"
    run("-m", *INSTALL.format(folder=f"hone-bundle-{metadata.version('hone-rl')}").split())
    assert "scipy" not in run("-c", probe), "nor what the bundle leaves out"
    (tmp_path / "run.yaml").write_text(RUN)
    rows = [f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(3) for b in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    run("-m", "hone", "train", "run.yaml")
    assert (tmp_path / "runs/first/hf/model.safetensors").is_file()
    run("-m", "hone.tools.acceptance", "--tiny", "--parts", "devices,publishing")
    lines = (tmp_path / "runs/gpu/acceptance.jsonl").read_text()
    assert "Ray is not installed" in lines, "what `make gpu` runs in a checkout"
    assert list((tmp_path / "runs/first").rglob("events.out.tfevents*")), "TensorBoard's files need no grpcio"
