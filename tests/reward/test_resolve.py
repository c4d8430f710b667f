import pytest

from hone.errors import ConfigError
from hone.reward.resolve import Unusable, load, resolve
from hone.reward.rules.exact import exact

SOURCE = """
from dataclasses import dataclass

@dataclass
class Settings:
    limit: int = 3

def shorter(group, *, limit=3):
    return [float(len(sample.text) < limit) for sample in group.samples]

LIMIT = 3
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path


def test_builtin_names(tmp_path):
    assert load(resolve("exact", tmp_path), {}) is exact


def test_file_and_function(folder, make_group):
    function = load(resolve("mine.py:shorter", folder), {"limit": 2})
    assert function(make_group("a", "bbb"), limit=2) == [1.0, 0.0]


def test_module_and_function(tmp_path):
    assert load(resolve("hone.reward.rules.exact:exact", tmp_path), {}) is exact


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("exakt", "Did you mean 'exact'?"),
        ("mine.py", "your own: package.module:function or file.py:function"),
        ("mnie.py:shorter", "Did you mean 'mine.py'?"),
        ("mine.py:shortr", "Did you mean 'shorter'?"),
        ("mine.py:LIMIT", "is int, not a function"),
        ("no_such_module_here:f", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_had_says_why(folder, use, message):
    with pytest.raises(Unusable, match=message.replace("?", r"\?")):
        load(resolve(use, folder), {})


def test_arguments_must_fit(folder):
    with pytest.raises(Unusable, match=r"limt.*Did you mean 'limit'\?"):
        load(resolve("mine.py:shorter", folder), {"limt": 2})


def test_a_file_that_raises_while_imported(folder):
    (folder / "mine.py").write_text("1 / 0")
    with pytest.raises(Unusable, match="cannot be imported: ZeroDivisionError: division by zero"):
        load(resolve("mine.py:f", folder), {})


def test_all_problems_of_all_components_come_at_once(make_rewards):
    with pytest.raises(ConfigError) as error:
        make_rewards({"use": "exakt"}, {"use": "exact"}, {"use": "exact"}, {"use": "gone.py:f"})
    assert [problem.partition(":")[0] for problem in error.value.problems] == [
        "reward.components.0.use",
        "reward.components.2.name",
        "reward.components.3.use",
    ]


def test_no_weighted_component_is_refused(make_rewards):
    with pytest.raises(ConfigError, match="nothing to maximise"):
        make_rewards({"use": "exact", "weight": 0.0})
