"""Not a test: a run for a Ray that somebody else starts, and what is left of such a Ray."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

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


def write_run(folder: Path) -> None:
    """Write run.yaml and its data."""
    (folder / "run.yaml").write_text(RUN)
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(8)))


@contextlib.contextmanager
def rays_folder() -> Iterator[Path]:
    """For RAY_TMPDIR, with a name that is short enough for sockets. At the end whoever still knows it is killed."""
    short = Path(f"/tmp/hone-raylets-{os.getpid()}")
    short.mkdir()
    try:
        yield short
    finally:
        for number in left_behind(short):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        shutil.rmtree(short, ignore_errors=True)


def ray_logs(folder: Path) -> str:
    """The ends of what Ray's processes wrote."""
    logs = sorted(folder.glob("ray/session_2*/logs/*.*"))
    return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-1000:]}" for log in logs if log.is_file())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def until_open(port: int, head: subprocess.Popen[bytes], log: Path, within_s: float = 120.0) -> None:
    """Wait until Ray's head listens."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert head.poll() is None and time.monotonic() < deadline, f"no head: {log.read_text()[-2000:]}"
            time.sleep(0.2)


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
