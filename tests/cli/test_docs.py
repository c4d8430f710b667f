from pathlib import Path

import pytest

from hone.config import schema
from hone.observe.metrics import METRICS
from hone.tools import docs

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", docs.pages())
def test_committed_pages_are_current(name):
    assert (FOLDER / name).read_text("utf-8") == docs.pages()[name], "run `make docs` and commit"


def test_every_key_and_metric_is_on_its_page():
    config, metrics = docs.config_page(), docs.metrics_page()
    for key in schema.all_keys().values():
        assert f"| `{key.name}` | " in config
        assert f"## `{key.section}`" in config or not key.section
    for name in METRICS:
        assert f"| `{name}` | " in metrics


def test_main_writes_the_pages(tmp_path, capsys):
    assert docs.main(tmp_path / "docs") == 0
    assert {path.name for path in (tmp_path / "docs").iterdir()} == set(docs.pages())
