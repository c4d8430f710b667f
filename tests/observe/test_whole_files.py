from pathlib import Path

import pytest

from hone.runtime.files import write_whole


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "second" * 10_000 + "\ud800")
    assert path.read_text() == "first"
    write_whole(path, "third")
    assert path.read_text() == "third" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_the_error_of_a_full_disk_names_the_file(tmp_path):
    (tmp_path / "a.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*a\.json'"):
        write_whole(tmp_path / "a.json", "{}")
