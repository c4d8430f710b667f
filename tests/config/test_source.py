import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.config.yaml_tree import MAX_DEPTH, read_yaml, scalar


def parse(text: str):
    node, problems = read_yaml(text, "a.yaml")
    assert problems == []
    assert node is not None
    return node.plain()


def complaint(text: str) -> str:
    _, problems = read_yaml(text, "a.yaml")
    return str(problems[0])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("-1.5e+3", -1500.0), ("+3", 3),
        ("0x1F", 31), ("0o17", 15),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("1_000", "1_000"), ("0:100", "0:100"),
        ("1e", "1e"), ("e5", "e5"), ("2024-01-01", "2024-01-01"), (".", "."), ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text, value):
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_infinities_and_nan_are_numbers_for_the_schema_to_refuse():
    assert scalar("-.inf") == -math.inf
    assert math.isnan(scalar(".nan"))


def test_quotes_make_text():
    assert parse("a: '1'\nb: \"true\"\nc: 'null'\n") == {"a": "1", "b": "true", "c": "null"}


def test_every_value_knows_its_line():
    node, _ = read_yaml("a:\n  b: 1\n\n  c:\n    - 2\n    - 3\n", "a.yaml")
    assert node is not None
    lines = {path: node.find(path).where.line for path in ("a", "a.b", "a.c", "a.c.0", "a.c.1")}  # type: ignore[union-attr]
    assert lines == {"a": 1, "a.b": 2, "a.c": 4, "a.c.0": 5, "a.c.1": 6}


def test_leaves_take_a_plain_list_as_one_value_and_look_into_a_list_of_mappings():
    node, _ = read_yaml("a: [1, [2]]\nb: [{c: 1}, {d: {}}]\n", "a.yaml")
    assert node is not None
    assert {path: leaf.plain() for path, leaf in node.leaves()} == {"a": [1, [2]], "b.0.c": 1, "b.1.d": {}}


def test_anchors_and_aliases():
    assert parse("a: &x {b: 1}\nc: *x\n") == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb:\n\tc: 2\n", "a.yaml:3  is indented with a tab; YAML indents with spaces"),
        (f"a: {2**63}\nb: {2**63 - 1}\n", "a.yaml:1  an integer must be from -2^63 to 2^63 - 1"),
        ("a: 1\na: 2\n", "a.yaml:2  a is written twice (first on line 1); keep one"),
        ("a: b: c\n", "a.yaml:1  is not valid YAML: a second `:` on the line"),
        ("a: [1\n", "a.yaml:2  is not valid YAML: expected ',' or ']'"),
        ("a: 1\n---\nb: 2\n", "a.yaml:2  holds a second document"),
        ("a: !!str 1\n", "a.yaml:1  YAML tags are not used in run files"),
        ("1: a\n", "a.yaml:1  a key must be text (got 1)"),
        ("a: *b\n", "a.yaml:1  *b names an anchor that is not defined above it"),
        ("a: &a [*a]\n", "a.yaml:1  *a names an anchor that is not defined above it"),
        ("a: 1\nb: \x00\n", "a.yaml:2  holds a character that text files do not have"),
        ('a: "\\ud800"\n', "a.yaml:1  holds half a character"),
        ("a: " + "[" * (MAX_DEPTH + 2), "a.yaml:1  is nested more than"),
    ],
)
def test_what_is_refused_says_where_and_why(text, said):
    assert complaint(text).startswith(said)


def test_aliases_cannot_grow_without_bound():
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "holds more than" in complaint("\n".join(lines))


def has_lines_of(text):
    """A tree or problems, each with a line of the text."""
    node, problems = read_yaml(text, "a.yaml")
    places = [problem.where for problem in problems] + [leaf.where for _, leaf in (node.leaves() if node else ())]
    return all(place.source == "a.yaml" and 1 <= place.line <= len(text) + 1 for place in places)


@given(st.text())
def test_any_text_gives_a_tree_or_problems(text):
    assert has_lines_of(text)


@given(st.text(alphabet="ab:-[]{}&*!|>'\"#%@`,?~ \n\t01.\\", max_size=60))
def test_any_yaml_like_text_gives_a_tree_or_problems(text):
    assert has_lines_of(text)
