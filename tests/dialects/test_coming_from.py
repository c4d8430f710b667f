"""The page of other tools' keys is what the tables of `hone import` say today."""

from coming_from import MOST, PAGE, TITLES, page

from hone.dialects.tables import dialects


def test_the_committed_page_is_current():
    assert PAGE.read_text("utf-8") == page(), "run `python tests/dialects/coming_from.py` and commit"


def test_every_tool_has_its_most_used_keys():
    assert list(TITLES) == list(dialects())
    for part in page().split("\n## ")[1:]:
        rows = [line for line in part.partition("###")[0].splitlines() if line.startswith("| `")]
        assert len(rows) == MOST or "nanochat" in part
