"""Merging of files and command-line settings into one tree: `extends:`, presets, overrides.

The one exception: a command-line value for a text key is taken as it stands, because the shell took its quotes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os.path import exists, isdir, isfile  # unlike Path's, False for text that cannot be a path
from pathlib import Path

from hone.config import schema
from hone.config.messages import show
from hone.config.yaml_tree import COMMAND_LINE, Node, Problem, Where, read_yaml, scalar
from hone.errors import nearest

PRESETS = Path(__file__).parent / "presets"
MAX_FILE_BYTES = 4 << 20


def preset_names() -> list[str]:
    """What `extends:` may name: `algorithm/dapo` and so on."""
    return sorted(path.relative_to(PRESETS).with_suffix("").as_posix() for path in PRESETS.glob("*/*.yaml"))


@dataclass
class Stack:
    """Reads a file and everything it extends, depth first."""

    folder: Path
    """The run file's, where the relative paths of the tree start."""
    layers: list[Node] = field(default_factory=list)
    """Each file's own keys, weakest first."""
    problems: list[Problem] = field(default_factory=list)
    _open: list[Path] = field(default_factory=list)

    def read(self, path: Path, source: str, asked_by: Where | None) -> Node | None:
        """The merged tree of a file and what it extends; None if the file itself cannot be used."""
        identity = path.resolve()
        if identity in self._open:
            chain = " -> ".join(file.name for file in [*self._open, identity])
            return self._refuse(asked_by or Where(source), "extends", f"extends itself: {chain}")
        text = self._text(path, source, asked_by)
        if text is None:
            return None
        root, problems = read_yaml(text, source)
        self.problems += problems
        if root is None:
            return (
                None if problems else self._refuse(Where(source, 1), "", "is empty; it needs at least model and data")
            )
        self._open.append(identity)
        merged = self.take(root, path)
        self._open.pop()
        return merged

    def take(self, root: Node, path: Path) -> Node | None:
        """A tree merged with what it extends; `path` is the file that it stands for. None if it cannot be used."""
        if not isinstance(root.value, dict):
            return self._refuse(root.where, "", "must be sections of `key: value` lines, such as `model:`")
        own = _without_empty_sections(Node({k: v for k, v in root.value.items() if k != "extends"}, root.where))
        if PRESETS not in path.parents:
            own = _rebased(own, path.parent, self.folder)
        merged = Node({}, root.where)
        extends = root.value.get("extends", Node(None, root.where))
        entries = extends.value if isinstance(extends.value, list) else [extends] if extends.value is not None else []
        for entry in entries:
            if not isinstance(entry.value, str):
                got = show(entry.plain())
                self._refuse(entry.where, "extends", f"must be the name of a preset or a file (got {got})")
        for name in (entry for entry in entries if isinstance(entry.value, str)):
            below = self._extend(name, path)
            merged = merge(merged, below) if below else merged
        self.layers.append(own)
        return merge(merged, own)

    def _extend(self, name: Node, asking_file: Path) -> Node | None:
        if name.value in preset_names():
            return self.read(PRESETS / f"{name.value}.yaml", f"preset {name.value}", name.where)
        path = asking_file.parent / Path(name.value).expanduser()
        if not name.value.endswith((".yaml", ".yml")) and not isfile(path):
            close = nearest(name.value, preset_names(), cutoff=50)
            hint = f"Did you mean {close}?" if close else f"Presets: {', '.join(preset_names())}"
            return self._refuse(name.where, "extends", f"no preset and no file is called {name.value!r}. {hint}")
        shown = os.path.relpath(path)  # as a person would type it from here
        return self.read(path, shown if not shown.startswith("..") else str(path), name.where)

    def _text(self, path: Path, source: str, asked_by: Where | None) -> str | None:
        here, subject = (asked_by, f"{source} ") if asked_by else (Where(source), "")
        key = "extends" if asked_by else ""
        try:
            if path.is_dir():
                return self._refuse(here, key, f"{subject}is a directory; name the run file in it, such as run.yaml")
            raw = path.read_bytes()
        except FileNotFoundError:
            beside = [file.name for file in path.parent.glob("*.y*ml")] if isdir(path.parent) else []
            close = nearest(path.name, beside)
            hint = f" Did you mean {path.with_name(close)}?" if close else ""
            return self._refuse(here, key, f"{subject}does not exist.{hint}")
        except (OSError, ValueError) as error:
            return self._refuse(here, key, f"{subject}cannot be read: {getattr(error, 'strerror', None) or error}")
        if len(raw) > MAX_FILE_BYTES:
            return self._refuse(here, key, f"{subject}has {len(raw)} bytes; a run file has at most {MAX_FILE_BYTES}")
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            return self._refuse(Where(source, line), "", "is not UTF-8 text; save it as UTF-8")

    def _refuse(self, where: Where, key: str, message: str) -> None:
        self.problems.append(Problem(where, key, message))


def merge(below: Node, above: Node) -> Node:
    """Mappings merge key by key; anything else is replaced by the layer above."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    merged = dict(below.value)
    for name, node in above.value.items():
        merged[name] = merge(merged[name], node) if name in merged else node
    return Node(merged, above.where)


_FILE = re.compile(r"^\.\.?(/|$)|\.((jsonl?|csv)(\.gz)?|parquet|ya?ml|py|jinja2?)$")
"""What is meant as a file or directory even where there is none, so that errors look in the right place."""


def _rebased(node: Node, there: Path, here: Path, path: str = "") -> Node:
    """The tree of a file in folder `there`, with relative paths that start at `here` instead."""
    if there.resolve() == here.resolve():
        return node
    if isinstance(node.value, dict):
        calls_users_code = ":" in str(node.value["use"].value) if "use" in node.value else False
        children = {
            name: child
            if calls_users_code and name == "args"
            else _rebased(child, there, here, f"{path}.{name}" if path else name)
            for name, child in node.value.items()
        }
        return Node(children, node.where)
    if isinstance(node.value, list):
        children = [_rebased(child, there, here, f"{path}.{number}") for number, child in enumerate(node.value)]
        return Node(children, node.where)
    if isinstance(node.value, str) and schema.may_name_a_file(path):
        return Node(_moved(node.value, there, here, path), node.where)
    return node


def _moved(text: str, there: Path, here: Path, path: str) -> str:
    """`file.py:name` moves with its file; a name of the hub, a built-in reward or a program on the PATH stays."""
    file, colon, name = text.rpartition(":")
    if not file.endswith(".py"):
        file, colon, name = text, "", ""
    is_bare = "/" not in file and path.endswith((".use", ".command.0"))
    if file.startswith(("/", "~", "-")) or (is_bare and not colon):
        return text
    if not (_FILE.search(file) or exists(there / file)):
        return text
    return os.path.relpath(there.resolve() / file, here.resolve()) + colon + name


def _without_empty_sections(node: Node, path: str = "") -> Node:
    """`train:` with every key under it commented out is null in YAML, and sets nothing."""
    if not isinstance(node.value, dict):
        return node
    kept = {}
    for name, child in node.value.items():
        child_path = f"{path}.{name}" if path else name
        if schema.is_section(child_path) or child_path in schema.section_maps():
            if child.value is None:
                continue
            child = _without_empty_sections(child, child_path)
        kept[name] = child
    return Node(kept, node.where)


def override(tree: Node, text: str) -> tuple[Node, str] | Problem:
    """The tree with one command-line setting applied, and the path that was set."""
    path, equals, raw = text.partition("=")
    parts = path.split(".")
    if not equals or not all(part and part == part.strip() for part in parts):
        return Problem(COMMAND_LINE, "", f"{show(text)} is not `section.key=value`")
    if (pointed := re.sub(r"\[(\d+)\]", r".\1", path)) != path:
        return Problem(COMMAND_LINE, path, f"a place in a list is written with a point: {pointed}")
    if parts[0] == "extends":
        return Problem(COMMAND_LINE, "extends", "is set in the run file, not on the command line")
    key = schema.find_key(path)
    verbatim = key is not None and key.path == schema.generic(path) and key.is_text
    if verbatim and raw[:1] not in ("'", '"') and scalar(raw) is not None:
        value = Node(raw, COMMAND_LINE)  # the shell took the quotes away that would have made it text
    else:
        parsed, problems = read_yaml(raw, COMMAND_LINE.source, first_line=None)
        if problems:
            return replace(problems[0], key=path)
        value = parsed or Node(None, COMMAND_LINE)
    changed = _set(tree, parts, value, path)
    return changed if isinstance(changed, Problem) else (changed, path)


def _set(node: Node, parts: Sequence[str], value: Node, path: str) -> Node | Problem:
    if not parts:
        return merge(node, value)
    name, *rest = parts
    node = _in_long_form(node, ".".join(path.split(".")[: -len(parts)]))
    if isinstance(node.value, list):
        if not name.isdecimal() or int(name) >= len(node.value):
            entries = f"entries 0 to {len(node.value) - 1}" if node.value else "no entries"
            return Problem(COMMAND_LINE, path, f"the list has {entries}, and no entry {name!r}")
        changed = _set(node.value[int(name)], rest, value, path)
        if isinstance(changed, Problem):
            return changed
        items = list(node.value)
        items[int(name)] = changed
        return Node(items, node.where)
    children = dict(node.value) if isinstance(node.value, dict) else {}
    changed = _set(children.get(name, Node(None, COMMAND_LINE)), rest, value, path)
    if isinstance(changed, Problem):
        return changed
    children[name] = changed
    return Node(children, node.where)


def _in_long_form(node: Node, path: str) -> Node:
    """Text that is short for a section, or for a list of one, as these: keys in it can be set then."""
    inner = schema.all_sections().get(schema.generic(path if not schema.is_section_list(path) else f"{path}.0"))
    if not isinstance(node.value, str) or inner is None or not inner.short_key:
        return node
    return Node([node] if schema.is_section_list(path) else {inner.short_key: node}, node.where)
