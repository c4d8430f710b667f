"""examples/cluster/slurm.sbatch, run as it is: Slurm's commands are stand-ins that start everything on this machine."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from raylets import free_port, left_behind, ray_logs, rays_folder, write_run

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


@pytest.mark.slow("starts two raylets, and a run on them")
@pytest.mark.timeout(400)
def test_two_raylets_train_and_nothing_is_left(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    write_run(folder)
    slurm = {"NNODES": "2", "CPUS_PER_TASK": "2", "JOB_ID": "7", "JOB_NODELIST": "node[0-1]"}
    environment = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
    environment |= {
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "RAY_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", str(SCRIPT), "run.yaml", "run.dir=out"]
    with rays_folder() as short, open(folder / "job.log", "w+") as log:
        environment["RAY_TMPDIR"] = str(short)
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
            job.kill()
            job.wait()


def test_the_script_is_sound_and_its_page_shows_it():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], timeout=30, check=False).returncode == 0
    page = (ROOT / "docs" / "jobs.md").read_text("utf-8")
    for option in re.findall(r"^#SBATCH (--[\w-]+)", SCRIPT.read_text("utf-8"), flags=re.M):
        assert f"`{option}`" in page, option
