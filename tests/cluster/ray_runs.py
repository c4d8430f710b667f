"""Not a test: a tiny run with something to learn from its first step, and runs of the real command line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

RUN = """
stages: [rl]
seed: 3
run: {dir: run, steps: 3, threads: 1, device: cpu}
model:
  characters: "0123456789+="
  init: {model_type: qwen3, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
         head_dim: 8, intermediate_size: 64, max_position_embeddings: 32, tie_word_embeddings: true}
data: {train: sums.jsonl, eval: sums.jsonl, eval_rows: "0:20", answer_column: answer, max_prompt_tokens: 8}
reward: {components: [{use: "reward.py:even"}]}
rollout: {group_size: 8, max_response_tokens: 6}
train: {prompts_per_step: 8, tokens_per_microbatch: 256, optimizer: {lr: 1e-3}}
algorithm: {kl_loss_coef: 0.01}
checkpoint: {every: 2}
observe: {console: plain, tensorboard: false, trace: false}
"""

REWARD = '''
from hone.reward import reward


@reward(minimum=0.0, maximum=6.0)
def even(group):
    """Even digits."""
    return [float(sum(c in "02468" for c in sample.text)) for sample in group.samples]
'''


def write_run(folder: Path) -> Path:
    """Write data, reward and run file; returns the run file."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(20) for b in range(10)]
    (folder / "sums.jsonl").write_text("".join(rows))
    (folder / "reward.py").write_text(REWARD)
    run_file = folder / "tiny.yaml"
    run_file.write_text(RUN)
    return run_file


END_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: whatever ends the test ends its runs
if os.getppid() == int(sys.argv[1]):  # else it ended before the line above
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Life:
    """`hone train` in a process of its own, and all that it starts."""

    def __init__(self, run_file: Path, *arguments: str) -> None:
        self.log = run_file.with_suffix(".log")
        hone = ["-m", "hone.cli.main", "train", str(run_file), *arguments]
        command = [sys.executable, "-c", END_WITH_PARENT, str(os.getpid()), *hone]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=run_file.parent,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._started: dict[int, psutil.Process] = {}

    def until(self, holds, within_s=240.0):
        """Wait until `holds()`. A process that ends before, or is not so far in time, is killed."""
        deadline = time.monotonic() + within_s
        while not (answer := holds()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"not within {within_s} s:\n{self.text()}")
            self.look()
            time.sleep(0.1)
        return answer

    def look(self):
        """Remember what has been started so far."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._started.setdefault(process.pid, process)
        except psutil.NoSuchProcess:  # it ended meanwhile
            pass

    def started(self, word: str) -> list[psutil.Process]:
        """What was started and is called so; Ray names a process after what it does."""
        return [process for process in self._started.values() if word in _words(process)]

    def text(self) -> str:
        return self.log.read_text()

    def end(self, number: signal.Signals | None = None, within_s: float = 240.0) -> int:
        """Wait for the end, after a signal if one is given; the exit code. SIGKILL is for `hone` alone, others for its
        whole process group, as from a terminal."""
        self.look()
        if number == signal.SIGKILL:
            self.process.kill()
        elif number is not None:
            os.killpg(self.process.pid, number)
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"not at its end within {within_s} s:\n{self.text()}") from None

    def nothing_is_left(self, within_s: float = 30.0) -> bool:
        """Whether all that was started ends in time; who is dead but not buried counts as ended."""
        deadline = time.monotonic() + within_s
        while any(_lives(process) for process in self._started.values()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
