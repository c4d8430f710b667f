"""examples/cluster/slurm.sbatch, run as it is: Slurm's commands are stand-ins that start everything on this machine."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "cluster" / "slurm.sbatch"
DEADLINE_S = 330
"""More than the run waits for what it needs: it says then what that was."""
SCONTROL = """#!/bin/bash
[[ $1 == requeue ]] && echo "$2" > requeued
for ((node = 0; node < SLURM_NNODES; node++)); do echo localhost; done
"""
SRUN = """#!/bin/bash
# Runs the command once for each of --nodes=N; ends them with itself.
echo "$@" >> srun.log
while [[ $1 == --* ]]; do
    [[ $1 == --nodes=* ]] && nodes=${1#*=}
    shift
done
trap 'kill $(jobs -pr) 2> /dev/null; wait; exit 143' TERM
for ((node = 0; node < nodes; node++)); do "$@" & done
wait
"""
RUN = """
stages: [rl]
run: {steps: 2, device: cpu}
model:
  characters: "0123456789+= "
  init: {model_type: qwen3, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1,
         head_dim: 16, intermediate_size: 64, max_position_embeddings: 64}
data: {train: rows.jsonl, answer_column: answer, max_prompt_tokens: 8}
reward: {components: [{use: exact}]}
rollout: {group_size: 4, max_response_tokens: 4}
train: {prompts_per_step: 4}
observe: {console: plain}
cluster:
  backend: ray
  start_timeout_s: 240
  pools:
    train: {devices: 2, roles: [policy]}
    sample: {devices: 2, roles: [rollout]}
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_raylets_train_and_nothing_is_left(tmp_path_factory):
    folder, short = tmp_path_factory.mktemp("slurm"), Path(f"/tmp/hone-slurm-{os.getpid()}")  # Ray's sockets need it
    short.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "run.yaml").write_text(RUN)
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(8)))
    slurm = {"NNODES": "2", "CPUS_PER_TASK": "2", "JOB_ID": "7", "JOB_NODELIST": "node[0-1]"}
    environment = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
    environment |= {
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "RAY_PORT": str(free_port()),
        "RAY_TMPDIR": str(short),
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", str(SCRIPT), "run.yaml", "run.dir=out"]
    with open(folder / "job.log", "w+") as log:
        job = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(DEADLINE_S)
            said = (folder / "job.log").read_text()
            assert job.returncode == 0, f"exit code {job.returncode} (None: too late)\n{said[-3000:]}{ray_logs(short)}"
            assert said.count("Ray runtime started") == 2, "two raylets stand for two machines"
            starts = (folder / "srun.log").read_text().splitlines()
            assert len(starts) == 2 and "--head" in starts[0] and "--address=localhost:" in starts[1]
            steps = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
            assert steps[-1]["step"] == 2
            assert not list(folder.glob(".ray-token*")), "the token goes with the job"
            assert left_behind(short) == {}
        finally:
            for number in left_behind(short):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            job.kill()
            job.wait()
            shutil.rmtree(short, ignore_errors=True)


def ray_logs(folder: Path) -> str:
    """The ends of what Ray's processes wrote."""
    logs = sorted(folder.glob("ray/session_2*/logs/*.*"))
    return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-1000:]}" for log in logs if log.is_file())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def left_behind(folder: Path) -> dict[int, str]:
    """Processes of the job, which have the folder in their environment: number and command line."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = str(folder).encode() in (process / "environ").read_bytes()
            command = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if ours and command:
            found[int(process.name)] = command
    return found


def test_the_script_is_sound_and_its_page_shows_it():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], timeout=30, check=False).returncode == 0
    page = (ROOT / "docs" / "slurm.md").read_text("utf-8")
    for option in re.findall(r"^#SBATCH (--[\w-]+)", SCRIPT.read_text("utf-8"), flags=re.M):
        assert f"`{option}`" in page, option
