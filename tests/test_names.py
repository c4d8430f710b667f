"""Every name of a class or type alias means one thing in the whole of src; a leading underscore makes no other name."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"


def names_of(source: str) -> Iterator[tuple[str, int]]:
    """Classes, and assignments at the top of a module to names like theirs (capitalised, not in capitals); lines."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), node.lineno
    statements = list(tree.body)
    while statements:
        node = statements.pop()
        match node:
            case ast.If() | ast.Try():
                statements += [*node.body, *node.orelse]
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                name = name.lstrip("_")
                if name[:1].isupper() and not name.isupper():
                    yield name, node.lineno


def test_a_class_name_means_one_thing():
    places = defaultdict(list)
    for path in sorted(SOURCES.rglob("*.py")):
        for name, line in names_of(path.read_text("utf-8")):
            places[name].append(f"{path.relative_to(SOURCES)}:{line}")
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_aliases_are_seen():
    source = """
Rows = list[int]
_Row: TypeAlias = tuple[int, ...]
if TYPE_CHECKING:
    from numpy import ndarray
    Array = ndarray
LIMIT, T = 3, TypeVar("T")
def f():
    Local = int
    class Inner: ...
"""
    assert sorted(name for name, _ in names_of(source)) == ["Array", "Inner", "Row", "Rows"]
