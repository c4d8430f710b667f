"""Values of Hydra overrides and command-line flags as plain data: numbers, truth values, lists, mappings."""

from __future__ import annotations

from typing import Any

from hone.config.yaml_tree import read_yaml, scalar


def plain_value(text: str) -> Any:
    """A value as Hydra and YAML read it; text that is neither stays text."""
    stripped = text.strip()
    while len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        inner = stripped[1:-1]
        if stripped[0] in inner:
            break
        stripped = inner.strip()
        if not stripped.startswith(("[", "{")):
            return _scalar(stripped)
    if stripped.startswith(("[", "{")):
        return _collection(stripped)
    return _scalar(stripped)


def _scalar(text: str) -> Any:
    return None if text in ("null", "None", "none", "~", "") else scalar(text)


def _collection(text: str) -> Any:
    node, problems = read_yaml(text, "value", first_line=None)
    if problems or node is None:
        inner = text.strip("[]")
        return [_scalar(part.strip().strip("'\"")) for part in inner.split(",") if part.strip()]
    return node.plain()


def flattened(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested mappings under dotted names; an empty mapping is a leaf."""
    if isinstance(tree, dict) and tree:
        return [
            leaf for name, child in tree.items() for leaf in flattened(child, f"{path}.{name}" if path else str(name))
        ]
    return [(path, tree)]
