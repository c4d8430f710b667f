"""The pages of other tools' keys are what the tables of `hone import` say today."""

import pytest
from coming_from import FOLDER, MOST, TITLES, page, pages

from hone.dialects.translate import dialects


def test_the_committed_pages_are_current():
    committed = {path.name: path.read_text("utf-8") for path in FOLDER.iterdir()}
    assert committed == pages(), "run `python tests/dialects/coming_from.py` and commit"


@pytest.mark.parametrize("tool", TITLES)
def test_every_tool_has_its_most_used_keys(tool):
    assert list(TITLES) == list(dialects())
    rows = [line for line in page(tool).splitlines() if line.startswith("| `")]
    assert len(rows) == MOST or tool == "nanochat"
