"""The pages in docs/reference/coming-from/, from the tables of `hone import` and the public commands of the corpora.

`python tests/dialects/coming_from.py` writes them; test_coming_from.py compares them.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from foreign_commands import CORPORA, TOOLS_OF_CORPORA, commands, is_rl

from hone.dialects.foreign import ForeignRun, known_versions
from hone.dialects.translate import dialects, find_row
from hone.dialects.verdict import ForeignJob, Row
from hone.runtime.files import write_whole
from hone.tools.foreign_names import TITLES

FOLDER = Path(__file__).parents[2] / "docs" / "reference" / "coming-from"
MOST = 40
INTRO = """\
# Coming from {title}

What the keys of your script become: the {most} most used keys, what is automatic or only placement here, and what is
missing. `hone import FILE --to run.yaml` applies this table to a script of yours, and says of each of its keys what
became of it ([coming-from.md](../../coming-from.md)). Defaults are known for {versions}.
`*` stands for any word, `**` for any end.{counts}
This page is written by `tests/dialects/coming_from.py`."""
COUNTS = " Counts are of the public commands in `tests/dialects/corpora`."


def used(tool: str) -> tuple[int, Counter[str]]:
    """Number of RL commands of the corpus, and how many of them name a key, by its name in the table."""
    dialect = dialects()[tool]
    job = ForeignJob(ForeignRun(tool, "", ()), {}, dialect.aliases)
    if tool in TOOLS_OF_CORPORA:
        found = [command for command in commands(tool) if is_rl(tool, command["module"])]
    elif tool == "prime-rl":
        found = [json.loads(line) for line in (CORPORA / "primerl.jsonl").read_text("utf-8").splitlines()]
    else:
        return 0, Counter(dict.fromkeys(dialect.rows, 1))
    names = Counter(name for command in found for name in {job.name(key) for key, _ in command["keys"]})
    return len(found), names


def becomes(row: Row) -> str:
    if row.kind in ("mapped", "placement") and row.to:
        ours = ", ".join(f"`{key}`" for key in row.to)
        return f"{ours}: {row.note}" if row.note else ours
    missing = "missing: " if row.kind == "refused" else "yours to name: " if row.kind == "hole" else ""
    return f"{missing}{row.note or 'placement and memory'}"


def most_used(tool: str) -> Iterator[str]:
    total, names = used(tool)
    rows = dialects()[tool].rows
    known = [(name, count) for name, count in names.most_common() if find_row(rows, name)]
    known.sort(key=lambda item: (-item[1], item[0]))
    yield "| Key | Used by | Here |" if total else "| Key | Here |"
    yield "|---|---|---|" if total else "|---|---|"
    for name, count in known[:MOST]:
        row = find_row(rows, name)
        assert row is not None
        cells = [f"`{name}`", *([f"{round(100 * count / total)} %"] if total else []), becomes(row)]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def by_reason(tool: str, *kinds: str) -> Iterator[str]:
    """Keys that share a reason, one line each."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, row in dialects()[tool].rows.items():
        if row.kind in kinds and not (row.to and row.kind == "placement"):
            reasons[row.note or "placement and memory"].append(name)
    for why, names in reasons.items():
        yield f"- {', '.join(f'`{name}`' for name in names)}: {why}"


def page(tool: str) -> str:
    """Text of one tool's page."""
    versions = known_versions(tool)
    span = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
    counts = COUNTS if used(tool)[0] else ""
    lines = [INTRO.format(title=TITLES[tool], most=MOST, versions=span, counts=counts), ""]
    lines += ["## Most used keys", "", *most_used(tool)]
    for heading, kinds in (("Automatic in Hone", ("automatic", "placement")), ("Missing", ("refused", "hole"))):
        found = list(by_reason(tool, *kinds))
        lines += ["", f"## {heading}", "", *found] if found else []
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Text of each page by its file's name."""
    return {f"{tool}.md": page(tool) for tool in TITLES}


if __name__ == "__main__":
    for name, text in pages().items():
        write_whole(FOLDER / name, text)
