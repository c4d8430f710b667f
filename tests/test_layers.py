"""The layering of src/hone: packages import only from layers above, files import in no circle, lazily or not."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hone

SOURCES = Path(hone.__file__).parent
LAYERS = (
    ("experts",),
    ("types", "errors", "sizes", "ragged", "runtime"),
    ("doctor", "devices"),
    ("config",),
    ("observe",),
    ("algo", "data", "dialects", "model", "plan"),
    ("memory",),
    ("rollout", "reward", "train"),
    ("weights", "services"),
    ("cluster",),
    ("loop", "serve"),
    ("run",),
    ("assemble", "ui"),
    ("cli", "api"),
    ("__main__", "tools"),
)
"""A part may import from lines above its own, and from itself. Parts on one line never import each other."""
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
LIGHT = ("config", "dialects", "doctor", "observe", "plan", "cli", "api")
HEAVY = ("torch", "transformers", "ray", "vllm", "datasets", "pandas", "pyarrow", "tensorboard", "wandb")


def part_of(path: Path) -> str:
    first = path.relative_to(SOURCES).parts[0]
    return first.removesuffix(".py")


def imported_names(source: str) -> Iterator[str]:
    """Modules of hone, and names in them, that a file imports anywhere: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("hone.") and "__" not in name)


def imported_parts(source: str) -> Iterator[str]:
    yield from (name.split(".")[1] for name in imported_names(source))


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
        ("config", "if TYPE_CHECKING:\n    from hone.observe.trace import X", ["observe"]),
        ("types", "import hone.errors", ["errors"]),
        ("loop", "from hone.unheard_of import x", ["unheard_of"]),
    ],
)
def test_the_rule_can_fail(part, source, found):
    assert breaches(part, source) == found


def test_every_part_exists():
    assert set(LEVEL) == {part_of(path) for path in FILES}


def module_of(path: Path) -> str:
    return ".".join(("hone", *path.relative_to(SOURCES).with_suffix("").parts)).removesuffix(".__init__")


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Modules, by name, that import each other around a circle."""
    imports = {
        module: {found if found in sources else found.rpartition(".")[0] for found in imported_names(source)} - {module}
        for module, source in sources.items()
    }
    while leaves := [module for module, others in imports.items() if not others & imports.keys()]:
        for module in leaves:
            del imports[module]
    while roots := imports.keys() - set().union(*imports.values()):
        for module in roots:
            del imports[module]
    return [sorted(imports)] if imports else []


def test_files_import_in_no_circle():
    """Of the package itself nothing counts: it is there before any of its modules."""
    assert circles({module_of(path): path.read_text("utf-8") for path in FILES}) == []


def test_circles_are_found():
    sources = {
        "types": "from hone.errors import x",
        "errors": "def f():\n    import hone.algo.loss",
        "algo.loss": "if TYPE_CHECKING:\n    from hone import types",
        "api": "from hone.types import y",
        "assemble": "import hone.loop",
        "loop": "import torch",
    }
    found = circles({f"{hone.__name__}.{module}": source for module, source in sources.items()})
    assert found == [["hone.algo.loss", "hone.errors", "hone.types"]]


def test_light_parts_import_nothing_heavy():
    """In a process of its own: every module of the light parts, then what is in sys.modules."""
    modules = [module_of(path) for path in FILES if part_of(path) in LIGHT and path.name != "__main__.py"]
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
