"""Not a test: `make test-pythons` runs it under each Python. Every module without torch, and verbs that need none.

Only the light dependencies are installed there, so it costs seconds and not the gigabytes of torch.
"""

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path

from hone.cli.main import main

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "gsm8k-arithmetic" / "run.yaml")


def said(*arguments: str, code: int = 0) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        found = main(arguments)
    assert found == code, f"hone {' '.join(arguments)}: exit code {found}\n{out.getvalue()}"
    return out.getvalue()


for part in ("config", "observe", "dialects", "plan", "cli", "api"):
    for path in sorted([*ROOT.glob(f"src/hone/{part}/*.py"), *ROOT.glob(f"src/hone/{part}.py")]):
        importlib.import_module(".".join(("hone", *path.relative_to(ROOT / "src" / "hone").with_suffix("").parts)))
for path in ROOT.glob("src/hone/**/*.py"):
    compile(path.read_text("utf-8"), path, "exec")
verbs = ["train", "check", "explain", "plan", "eval", "eval-judge", "export", "up", "status", "stop", "serve"]
assert all("Usage" in said(verb, "--help") for verb in verbs)
assert "group_size" in said("explain", EXAMPLE, "rollout.group_size")
assert json.loads(said("explain", EXAMPLE, "train", "--json"))["values"]
assert "Did you mean rollout.group_size" in said("check", EXAMPLE, "rollout.grop_size=4", code=2)
assert "GiB" in said("plan", EXAMPLE, "--hardware", "8xH100-80G")
assert "torch" not in sys.modules
print(f"{sys.version.split()[0]}: every light module and verb")
