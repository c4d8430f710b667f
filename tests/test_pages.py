"""Prose of the project: every link of every page resolves, pages are found from the index, no quaint words."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
QUAINT = re.compile(
    r"(?<!there\s)(?<!there\s\s)\b("
    + "|".join(
        words.replace(" ", r"\s+")
        for words in (
            r"(is|was|are|were) told",
            r"goes on|go on (with|from)",
            r"nobody|somebody|anybody|everybody|whoever|whyever",
            r"mend(s|ed)?|for ever|referee|beneath",
            # From here on, phrases that Hone once had.
            r"theirs was lost|the trainer is late|has anything to do|that die are started again",
            r"of the same settings that runs|finished or dropped, then|who sleeps|made without memory",
            r"failure has interrupted|news waits|as the loop sees|what it began|when it runs out|who gets what",
            r"what is said|said once|threw \w+ away|fell asleep|falls silent|listened to|in this life",
            r"by the hundred|beyond all numbers|here is none|and that is said|of its own accord",
            r"(is|are) no (json|http|sandbox|alarm|poster|picture|number|tensor|policy)s?",
        )
    )
    + r")\b",
    re.IGNORECASE,
)
"""A reader of this field has to translate these: say logged or reported, continues, no process, forever, base."""


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Relative links, as written."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text("utf-8")))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"


def test_every_page_is_linked_from_the_index():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    assert {page for page in PAGES if page != index} <= linked
    assert "docs/index.md" in links(ROOT / "README.md")


def test_links_and_headings_are_really_read(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# It does, or not\n[a](b.md#c) `[d](e)` [f](https://g)\n```\n# h [i](j)\n```\n")
    assert links(page) == ["b.md#c"] and anchors(page) == {"it-does-or-not"}


def quaint(text: str) -> list[str]:
    """Lines with one of the words, also as a part of a name; a phrase may be broken over two lines of a comment."""
    joined = re.sub(r"\s*\n\s*(?:#\s+)?", " \n", text).replace("_", " ")
    return [f"{joined[: found.start()].count(chr(10)) + 1}: {found[0]}" for found in QUAINT.finditer(joined)]


def test_words_are_those_of_the_field():
    folders = [ROOT / name for name in ("src", "examples", "benchmarks")]
    sources = [path for folder in folders for kind in ("py", "yaml") for path in folder.rglob(f"*.{kind}")]
    found = [(str(path), line) for path in [*PAGES, *sources] for line in quaint(path.read_text("utf-8"))]
    assert found == []


def test_a_quaint_line_is_found():
    assert quaint("fine\n# The run goes\n# on, and Nobody waits") == ["2: goes \non", "3: Nobody"]
    assert quaint("`test_a.py::test_it_costs_nobody_else`, and there\nis no alarm") == ["1: nobody"]
    assert quaint("which is no alarm") == ["1: is no alarm"]


def test_the_chinese_readme_has_the_code_of_the_english_one():
    english, chinese = (
        re.findall(r"^```.*?^```", (ROOT / name).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for name in ("README.md", "README.zh-CN.md")
    )
    assert len(english) >= 10 and chinese == english


def test_the_files_of_the_architecture_exist():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page))
    assert (
        len(named) > 30
        and [name for name in named if not any((ROOT / at / name).exists() for at in ("", "src/hone"))] == []
    )


def test_functions_of_the_two_walks_are_in_the_files_beside_them():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    walks = page.partition("## Two walks through the code")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in walks.splitlines() if line.startswith("| `")]
    named = 0
    for files, happens in rows:
        texts = [(ROOT / "src/hone" / file).read_text("utf-8") for file in re.findall(r"`([\w/]+\.py)`", files)]
        for function in re.findall(r"`([a-z_]+)`", happens):
            assert any(re.search(rf"def {function}\b", text) for text in texts), f"{files}: {function}"
            named += 1
    assert len(rows) > 20 and named > 10
