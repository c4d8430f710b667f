"""A right run file to spoil: every test changes the one thing that it is about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.config.load import Loaded, load_config
from hone.errors import ConfigError

RIGHT: dict[str, Any] = {
    "model.init": "{model_type: qwen3, max_position_embeddings: 4096}",
    "model.characters": '"0123456789+="',
    "data.train": "train.jsonl",
    "data.answer_column": "answer",
    "reward.components": "[{use: exact}]",
}
"""Keys of a run file that loads without a problem, as YAML text."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


@pytest.fixture
def load(folder: Path) -> Callable[..., Loaded]:
    """`load(**changes)` with `section__key="yaml text"`; None leaves a key out."""

    def load_changed(*overrides: str, **changes: str | None) -> Loaded:
        keys = RIGHT | {name.replace("__", "."): text for name, text in changes.items()}
        sections: dict[str, list[str]] = {}
        for path, text in keys.items():
            if text is not None:
                section, _, name = path.rpartition(".")
                sections.setdefault(section, []).append(f"{name}: {text}")
        lines = sections.pop("", [])
        for section, entries in sections.items():
            names = section.split(".")
            lines += [f"{'  ' * depth}{name}:" for depth, name in enumerate(names)] if len(names) == 1 else []
            if len(names) == 1:
                lines += [f"  {entry}" for entry in entries]
            else:
                lines.append(f"{names[0]}: {{{names[1]}: {{{', '.join(entries)}}}}}")
        run_file = folder / "run.yaml"
        run_file.write_text("\n".join(lines) + "\n")
        return load_config(run_file, overrides)

    return load_changed


@pytest.fixture
def problems_of(load: Callable[..., Loaded]) -> Callable[..., list[str]]:
    """The problems of a changed run file, without where they are: `section.key: message`."""

    def problems(*overrides: str, **changes: str | None) -> list[str]:
        try:
            load(*overrides, **changes)
        except ConfigError as error:
            return [problem.partition("  ")[2].strip() for problem in error.problems]
        return []

    return problems
