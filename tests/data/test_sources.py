import gzip

import pyarrow
import pyarrow.parquet
import pytest

from hone.data.sources import BadRow, Row, parse_slice, read_rows
from hone.errors import DataError


def values_of(rows):
    return [row.values for row in rows]


def test_jsonl_rows_carry_file_and_line_and_blank_lines_are_none(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n  \n{"x": "ü"}')
    assert list(read_rows("a.jsonl", tmp_path)) == [Row("a.jsonl:1", {"x": 1}), Row("a.jsonl:4", {"x": "ü"})]


def test_gzipped_jsonl_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf{"x": 1}\n'))
    assert list(read_rows("a.jsonl.gz", tmp_path)) == [Row("a.jsonl.gz:1", {"x": 1})]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"x": 1', "malformed JSON at character 8: Expecting ',' delimiter"),
        (b'{"x": NaN}', "malformed JSON: NaN is not JSON"),
        (b'["x"]', 'got a list; each line must be an object such as {"prompt": "..."}'),
        (b"3", 'got a number; each line must be an object such as {"prompt": "..."}'),
        (b'{"x": "\xff"}', "not UTF-8: byte 0xff at byte 8 of the line"),
        (b"[" * 100_000, "malformed JSON: maximum recursion depth exceeded"),
    ],
)
def test_a_bad_line_is_named_and_the_next_one_still_read(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_bytes(b'{"x": 1}\n' + line + b'\n{"x": 2}\n')
    first, bad, last = read_rows("a.jsonl", tmp_path)
    assert isinstance(bad, BadRow)
    assert bad.where == "a.jsonl:2"
    assert bad.problem.startswith(problem)
    assert (first, last) == (Row("a.jsonl:1", {"x": 1}), Row("a.jsonl:3", {"x": 2}))


def test_parquet_rows(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"q": ["a", "b"], "n": [1, None]}), tmp_path / "a.parquet")
    assert list(read_rows("a.parquet", tmp_path)) == [
        Row("a.parquet row 1", {"q": "a", "n": 1}),
        Row("a.parquet row 2", {"q": "b", "n": None}),
    ]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (None, [0, 1, 2, 3, 4]),
        ("1:3", [1, 2]),
        (":2", [0, 1]),
        ("3:", [3, 4]),
        ("-2:", [3, 4]),
        (":-4", [0]),
        ("9:", []),
    ],
)
def test_rows_are_cut_as_in_python(tmp_path, rows, expected):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"x": {i}}}\n' for i in range(5)))
    assert [values["x"] for values in values_of(read_rows("a.jsonl", tmp_path, rows=rows))] == expected


@pytest.mark.parametrize("rows", ["5", "a:b", "1:2:3", ""])
def test_other_ranges_are_refused(rows):
    with pytest.raises(DataError, match="write start:stop as in Python"):
        parse_slice(rows)


def test_only_what_is_asked_for_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n' + "broken\n" * 3)
    assert values_of(read_rows("a.jsonl", tmp_path, rows="0:2")) == [{"x": 1}, {"x": 2}]


def test_a_missing_file_is_named_with_those_beside_it(tmp_path):
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError, match=r"trian.jsonl: not found at .*Data files there: train.jsonl"):
        list(read_rows("trian.jsonl", tmp_path))


def test_an_unknown_kind_is_named(tmp_path):
    (tmp_path / "a.csv").touch()
    with pytest.raises(DataError, match=r"a.csv: unknown kind. Use one of .jsonl, .jsonl.gz, .parquet"):
        list(read_rows("a.csv", tmp_path))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_a_torn_file_is_an_error_of_the_data(tmp_path, name):
    whole = gzip.compress(b'{"x": 1}\n' * 100) if name.endswith("gz") else b"PAR1 and then nothing"
    (tmp_path / name).write_bytes(whole[:-9])
    with pytest.raises(DataError, match=name):
        list(read_rows(name, tmp_path))


def test_a_directory_is_loaded_as_a_hugging_face_dataset(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"q": ["a", "b"]}), tmp_path / "set" / "train.parquet")
    assert list(read_rows("set", tmp_path, rows="1:")) == [Row("set train row 2", {"q": "b"})]
    with pytest.raises(DataError, match=r"set: .*split 'test'"):
        list(read_rows("set", tmp_path, split="test"))


def test_a_name_that_is_nowhere_is_an_error_of_the_data(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="nobody/nothing: neither a file nor a Hugging Face dataset"):
        list(read_rows("nobody/nothing", tmp_path))
