"""vLLM on a CPU as seen from `benchmarks/generation.py`: its environment, its process, one call per round. No torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
VENV = ROOT / ".venv-vllm"


def make_environment() -> None:
    """vLLM's own virtual environment, the one of its tests (2.5 GB), unless it is there."""
    subprocess.run(["make", "--no-print-directory", ".venv-vllm/.installed"], cwd=ROOT, check=True)


class VllmProcess:
    """One vLLM with one model, up until the end of the `with` block; its messages go to `log`."""

    def __init__(self, model: Path, *, dtype: str, threads: int, log: Path) -> None:
        self._log = log
        command = [VENV / "bin" / "python", FOLDER / "run_vllm.py", "--model", model, "--dtype", dtype]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(part) for part in [*command, "--threads", threads]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> VllmProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # its loop ends
        self._process.wait()

    def generate(self, work: dict[str, Any]) -> dict[str, Any]:
        """`run_vllm.generate` over there. Exits with the end of its log when it died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"vLLM ended, see {self._log}:\n{self._log.read_text()[-3000:]}")
        return json.loads(answer)
