"""Rewards that an installed package registers, and hone_poster as the proof that a domain needs nothing of the core."""

import ast
import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hone
import hone_poster
from hone.config.load import load_config
from hone.config.rewards import BUILTIN_REWARDS, registered_rewards
from hone.config.run import RewardComponent
from hone.errors import ConfigError
from hone.reward.fingerprint import code_files
from hone.reward.resolve import picture_of_responses

PUBLIC = ("hone.reward", "hone.reward.openai")
PLUGIN = """
from dataclasses import dataclass
from hone.reward import reward
from plugin_of_tests.words import count

@dataclass
class Settings:
    limit: int = 3
    def __post_init__(self):
        if self.limit < 1:
            raise ValueError("limit must be positive")

def draw(text, answer, settings):
    return f"{text} {answer} {settings.limit}".encode()

@reward(minimum=0, maximum=1, settings=Settings, picture=draw)
def short(group, settings):
    return [float(count(sample.text) <= settings.limit) for sample in group.samples]
"""
ARGUMENTS = [
    "model={init: {model_type: qwen3, max_position_embeddings: 4096}, characters: ab}",
    "data={train: rows.jsonl}",
    "reward.components=[{use: short_words, args: {limit: 2}}]",
]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package as pip leaves it; gone from this process afterwards."""
    package, metadata = tmp_path / "site/plugin_of_tests", tmp_path / "site/plugin_of_tests-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text(PLUGIN)
    (package / "words.py").write_text("def count(text):\n    return len(text.split())\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-tests\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[hone.reward]\nshort_words = plugin_of_tests:short\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "run.yaml").write_text("{}\n")
    yield package
    for name in [name for name in sys.modules if name.startswith("plugin_of_tests")]:
        del sys.modules[name]


def test_its_name_is_known_and_nothing_imports_it_before_a_run_uses_it(installed, tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom hone.config.load import load_config\n"
        f"print(load_config(Path('run.yaml'), {ARGUMENTS!r}).config.reward.components[0].use)\n"
        "print(*sorted({'plugin_of_tests', 'hone_poster', 'torch', 'numpy'} & set(sys.modules)))"
    )
    path = {"PYTHONPATH": f"{tmp_path / 'site'}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=path, capture_output=True, text=True)
    assert done.stdout.split() == ["short_words"], done.stderr
    with pytest.raises(ConfigError, match="Did you mean short_words"):
        load_config(tmp_path / "run.yaml", [*ARGUMENTS[:2], "reward.components=[{use: short_wrods}]"])


def test_it_scores_in_a_worker_with_its_settings(installed, make_rewards, make_group):
    async def scored(**args):
        async with make_rewards({"use": "short_words", "args": args}) as rewards:
            return await rewards.score(make_group("one", "one two three"))

    assert asyncio.run(scored(limit=2)).rewards == (1.0, 0.0)
    with pytest.raises(ConfigError, match="limit must be positive"):
        asyncio.run(scored(limit=0))
    with pytest.raises(ConfigError, match="Did you mean 'limit'"):
        asyncio.run(scored(limt=2))


def test_it_draws_its_responses_for_the_report(installed):
    draw = picture_of_responses([RewardComponent(use="exact"), RewardComponent(use="short_words", args={"limit": 2})])
    assert draw is not None and draw("one", "answer") == b"one answer 2"
    (installed / "__init__.py").write_text("1 / 0")
    sys.modules.pop("plugin_of_tests")
    with pytest.raises(ConfigError, match=r"reward.components.0.use: .*ZeroDivisionError"):
        picture_of_responses([RewardComponent(use="short_words")])


def test_every_file_of_its_package_is_in_the_fingerprint(installed, tmp_path):
    found = {path.name for path in code_files(["short_words", "exact"], tmp_path)}
    assert found == {"__init__.py", "words.py"}
    posters = set(code_files(["poster"], tmp_path))
    assert {path for path in Path(hone_poster.__file__).parent.rglob("*.[pt][yt]*") if path.suffix != ".pyc"} <= posters


def test_no_file_of_the_core_names_posters():
    files = [path for path in Path(hone.__file__).parent.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) > 300
    assert [path for path in files if b"poster" in path.read_bytes().lower()] == []


def test_posters_use_the_public_reward_interface_alone():
    assert registered_rewards()["poster"] == "hone_poster:poster"
    public = {f"{module}.{name}" for module in PUBLIC for name in importlib.import_module(module).__all__}
    imported = set()
    for path in Path(hone_poster.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    of_hone = {name for name in imported if name.partition(".")[0] == "hone"}
    assert of_hone and of_hone <= public


def test_every_row_of_the_table_is_there_and_public_names_exist():
    for row in BUILTIN_REWARDS.values():
        module, _, name = row.path.partition(":")
        found = getattr(importlib.import_module(module), name)
        assert hasattr(found, "from_args") == (row.runs == "stateful")
        assert (row.gold is None) or not row.scores_form
