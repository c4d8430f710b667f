"""The layering of src/hone, as a rule: a package imports only from those above it, also when it imports lazily."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hone

SOURCES = Path(hone.__file__).parent
LAYERS = (
    ("types", "errors", "runtime"),
    ("config", "observe"),
    ("algo", "data", "model", "plan"),
    ("memory",),
    ("rollout", "reward", "train"),
    ("weights", "services"),
    ("cluster",),
    ("loop", "serve"),
    ("run",),
    ("assemble",),
    ("cli", "api"),
    ("__main__", "tools"),
)
"""A part may import from lines above its own, and from itself. Parts on one line never import each other."""
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
LIGHT = ("config", "observe", "plan", "cli", "api")
HEAVY = ("torch", "transformers", "ray", "vllm", "datasets", "pandas", "pyarrow", "tensorboard", "wandb")


def part_of(path: Path) -> str:
    first = path.relative_to(SOURCES).parts[0]
    return first.removesuffix(".py")


def imported_parts(source: str) -> Iterator[str]:
    """Parts of hone that a file imports anywhere in it: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "hone" and rest and not rest.startswith("__"):
                yield rest.partition(".")[0]


def breaches(part: str, source: str) -> list[str]:
    return [other for other in imported_parts(source) if other != part and LEVEL.get(other, 99) >= LEVEL[part]]


FILES = [path for path in sorted(SOURCES.rglob("*.py")) if path != SOURCES / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_imports_only_from_layers_above(path):
    part = part_of(path)
    assert part in LEVEL, f"{part} has no layer: give it one here and in docs/architecture.md"
    assert breaches(part, path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("part", "source", "found"),
    [
        ("algo", "from hone.config.run import RunConfig\nimport hone.types\nfrom hone.algo.kl import k3", []),
        ("algo", "from hone import errors, __version__", []),
        ("algo", "from hone.data.pack import plan", ["data"]),
        ("config", "def f():\n    from hone import assemble", ["assemble"]),
        ("observe", "if TYPE_CHECKING:\n    from hone.config.run import X", ["config"]),
        ("types", "import hone.errors", ["errors"]),
        ("loop", "from hone.unheard_of import x", ["unheard_of"]),
    ],
)
def test_the_rule_can_fail(part, source, found):
    assert breaches(part, source) == found


def test_light_parts_import_nothing_heavy():
    """In a process of its own: every module of the light parts, then what is in sys.modules."""
    modules = [
        ".".join(("hone", *path.relative_to(SOURCES).with_suffix("").parts)).removesuffix(".__init__")
        for path in FILES
        if part_of(path) in LIGHT and path.name != "__main__.py"
    ]
    assert "hone.cli.main" in modules
    program = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["check", "no_such_file.yaml"], ["explain", "RUN", "run.steps"]]
)
def test_help_explain_and_a_config_error_need_nothing_heavy(arguments, tmp_path):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "model: {path: a/b}\ndata: {train: a/b, answer_column: a}\nreward: {components: [{use: exact}]}\n"
    )
    arguments = [str(run_file) if word == "RUN" else word for word in arguments]
    program = (
        f"import sys\nfrom hone.cli.main import main\ncode = main({arguments!r})\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if "check" in arguments else 0), done.stderr
    assert not set(done.stderr.split()) & set(HEAVY)
