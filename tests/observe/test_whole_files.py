import pytest

from hone.observe.whole import write_whole


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "second" * 10_000 + "\ud800")
    assert path.read_text() == "first"
    write_whole(path, "third")
    assert path.read_text() == "third" and list(tmp_path.iterdir()) == [path]
