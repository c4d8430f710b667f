"""The configuration tree as a whole: documented, small, and read by something."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hone
from hone.cli.explain import DERIVED
from hone.config import schema
from hone.config.messages import OTHER_NAMES
from hone.config.run import SftSection, TrainSection
from hone.config.source import OF_A_SOURCE, SourceSection

SOURCES = Path(hone.__file__).parent
NOT_READERS = {"config", "cli"}
"""These walk all keys alike, or only check them; reading a key means acting on it."""


def test_there_are_about_200_keys_each_with_a_meaning():
    keys = schema.all_keys()
    sections = schema.all_sections()
    distinct = {(sections[key.section].__name__ if key.section else "", key.name) for key in keys.values()}
    distinct -= {("SourceSection", name) for name in OF_A_SOURCE}
    assert len(distinct) <= 235, "one optimizer is to be learnt, however many sections have it; and keys of rows once"
    for key in keys.values():
        assert key.meaning.endswith("."), key.path
        assert key.kind != "a mapping" or key.name in ("init", "override", "args", "template_args", "engine", "env")


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("rollout.group_size", "a whole number, at least 1"),
        ("rollout.top_p", "a number, above 0 and at most 1"),
        ("run.precision", "one of auto, float32, bfloat16"),
        ("model.path", "text or null"),
        ("model.init", "a mapping or null"),
        ("train.optimizer.betas", "a list of 2 numbers"),
        ("stages", "a list, each one of sft, reward_model, rl, not empty"),
        ("train.samples_per_optimizer_step", "a whole number or null, at least 1"),
    ],
)
def test_types_in_words(path, rule):
    assert schema.all_keys()[path].rule == rule


def test_paths_find_their_keys():
    assert schema.find_key("reward.components.3.weight") is schema.all_keys()["reward.components.*.weight"]
    assert schema.find_key("services.judge.port") is schema.all_keys()["services.*.port"]
    assert schema.find_key("services.judge.command.0") is schema.all_keys()["services.*.command"]
    assert schema.find_key("model.init.hidden_size") is schema.all_keys()["model.init"]
    assert schema.find_key("model.nothing") is None


def test_names_from_elsewhere_and_derived_quantities_name_real_keys():
    assert set(OTHER_NAMES.values()) <= set(schema.all_keys())
    assert {key for derived in DERIVED for key in derived.keys} <= set(schema.all_keys())


def test_every_key_is_read_by_something():
    """An attribute of the section's name, or of something annotated with or assigned from it."""
    unread = set(_read_as()) - set().union(*(_reads(path) for path in _reader_files()))
    assert not unread, f"keys that nothing outside config/ and cli/ reads: {sorted(unread)}"


def _reader_files() -> Iterator[Path]:
    for path in SOURCES.rglob("*.py"):
        if path.relative_to(SOURCES).parts[0] not in NOT_READERS:
            yield path
    yield SOURCES / "config" / "derived.py"  # its functions are called by build and stand for the keys they read
    yield SOURCES / "config" / "topology.py"  # so does the placement that it derives, with what weights go through
    yield SOURCES / "config" / "automatic.py"  # what a run, a check and a plan start from
    yield SOURCES / "config" / "engine.py"  # and an engine's arguments
    yield SOURCES / "config" / "rules" / "engines.py"
    yield SOURCES / "config" / "load.py"  # run_dir


def _read_as() -> Iterator[tuple[str, str]]:
    """(section class, key) of every key, sections that hold sections aside."""
    for section in set(schema.all_sections().values()):
        for name in section.model_fields:
            is_read_by_name = section is SourceSection and name in OF_A_SOURCE  # in derived.section_of
            if f"{section.__name__}.{name}" not in _SECTION_FIELDS and not is_read_by_name:
                yield section.__name__, name


_CLASS_BY_NAME = {path.rpartition(".")[2]: section.__name__ for path, section in schema.all_sections().items() if path}
_CLASS_BY_NAME |= {"config": "RunConfig", "component": "RewardComponent", "service": "ServiceSection"}
_CLASS_BY_NAME |= {"source": "SourceSection"}
_CLASS_BY_NAME.pop("*", None)
_SECTION_FIELDS = {
    f"{section.__name__}.{name}"
    for path, section in schema.all_sections().items()
    for name in section.model_fields
    if schema.is_section(f"{path}.{name}" if path else name)
}


def _reads(path: Path) -> set[tuple[str, str]]:
    """(section class, key) that a file reads."""
    tree = ast.parse(path.read_bytes())
    known = dict(_CLASS_BY_NAME)
    classes = {section.__name__: section.__name__ for section in schema.all_sections().values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            annotation = ast.unparse(node.annotation)
            named = next((section for name, section in classes.items() if name in annotation), None)
            target = node.arg if isinstance(node, ast.arg) else _last_name(node.target)
            if named and target:
                known[target] = named
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target, value in _pairs(node):
                section = known.get(_last_name(value) or "")
                if section and (name := _last_name(target)):
                    known[name] = section
        if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple):  # over the items of a mapping of sections
            mapping = getattr(getattr(node.iter, "func", None), "value", None)
            section = known.get(_last_name(mapping) or "")
            if section and (name := _last_name(node.target.elts[-1])):
                known[name] = section
    fields = {section.__name__: section.model_fields for section in schema.all_sections().values()}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (section := known.get(_last_name(node.value) or "")):
            found.add((section, node.attr))
            if node.attr == "model_dump":  # handed on whole, to vLLM by its own names
                found |= {(section, name) for name in fields[section]}
    return found


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _last_name(node: ast.expr) -> str | None:
    """`config` of `config`, `rollout` of `self.config.rollout`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def test_the_reading_test_can_fail(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        "def f(settings: RolloutSection, config):\n"
        "    rollout, x = config.rollout, 1\n"
        "    return settings.group_size, rollout.top_k, config.eval.every, config.train.optimizer.lr, other.seed\n"
    )
    assert _reads(file) >= {("RolloutSection", "group_size"), ("RolloutSection", "top_k"), ("EvalSection", "every")}
    assert ("OptimizerSection", "lr") in _reads(file)
    assert ("RunConfig", "seed") not in _reads(file)
    assert ("RolloutSection", "top_p") not in _reads(file)


def test_a_section_inside_another_has_the_defaults_that_it_has_there():
    assert schema.find_key("sft.optimizer.lr").default == SftSection().optimizer.lr == 1e-5  # type: ignore[union-attr]
    assert schema.find_key("train.optimizer.lr").default == TrainSection(prompts_per_step=1).optimizer.lr == 1e-6  # type: ignore[union-attr]
