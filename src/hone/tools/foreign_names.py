"""Generator of `config/foreign_names.json`: other tools' keys with our counterparts, from the tables of `hone import`.

Run as `python -m hone.tools.foreign_names`; a test compares the committed file with what this makes.
"""

from __future__ import annotations

import json
from pathlib import Path

from hone.config import schema
from hone.dialects.translate import dialects, find_row
from hone.runtime.files import write_whole

FILE = Path(schema.__file__).parent / "foreign_names.json"
TITLES = {
    "verl": "verl",
    "openrlhf": "OpenRLHF",
    "trl": "TRL",
    "mindspeed": "MindSpeed-RL",
    "prime-rl": "prime-rl",
    "nanochat": "nanochat",
}


def foreign_names_text() -> str:
    """The file: one line per key; keys of ours and patterns are left out."""
    found: dict[str, str] = {}
    for tool, dialect in dialects().items():
        for name in (*dialect.rows, *dialect.aliases):
            row = find_row(dialect.rows, dialect.aliases.get(name, name))
            if "*" in name or name.startswith("--") or row is None or name in found:
                continue
            if name in schema.all_keys() or name in schema.all_sections():
                continue
            what = f"is {' and '.join(row.to)}" if row.to else f"needs no key: {row.note}" if row.note else "has no key"
            found[name] = f"{TITLES[tool]}'s {name} {what}"
    return json.dumps(found, indent=0, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    write_whole(FILE, foreign_names_text())
