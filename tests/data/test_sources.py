import gzip

import pyarrow
import pyarrow.parquet
import pytest

from hone.config.source import SourceSection
from hone.data.cache import DataCache
from hone.data.rows import open_rows
from hone.data.sources import BadRow, DataSource, SourceRow, parse_slice, read_rows
from hone.errors import DataError


def values_of(rows):
    return [row.values for row in rows]


def values_cut(folder, rows, path="a.jsonl"):
    opened = open_rows(DataSource((SourceSection(path=path),), "train", rows), folder, DataCache())
    return values_of(opened.read(range(len(opened))))


def test_jsonl_rows_carry_file_and_line_and_blank_lines_are_none(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n  \n{"x": "ü"}')
    assert list(read_rows("a.jsonl", tmp_path)) == [
        SourceRow("a.jsonl:1", {"x": 1}),
        SourceRow("a.jsonl:4", {"x": "ü"}),
    ]


def test_gzipped_jsonl_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf{"x": 1}\n'))
    assert list(read_rows("a.jsonl.gz", tmp_path)) == [SourceRow("a.jsonl.gz:1", {"x": 1})]


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
    assert (first, last) == (SourceRow("a.jsonl:1", {"x": 1}), SourceRow("a.jsonl:3", {"x": 2}))


def test_parquet_rows(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"q": ["a", "b"], "n": [1, None]}), tmp_path / "a.parquet")
    assert list(read_rows("a.parquet", tmp_path)) == [
        SourceRow("a.parquet row 1", {"q": "a", "n": 1}),
        SourceRow("a.parquet row 2", {"q": "b", "n": None}),
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
    assert [values["x"] for values in values_cut(tmp_path, rows)] == expected


@pytest.mark.parametrize("rows", ["5", "a:b", "1:2:3", ""])
def test_other_ranges_are_refused(rows):
    with pytest.raises(DataError, match="write start:stop as in Python"):
        parse_slice(rows)


def test_only_what_is_asked_for_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n' + "broken\n" * 3)
    assert values_cut(tmp_path, "0:2") == [{"x": 1}, {"x": 2}]


def test_a_missing_file_is_named_with_those_beside_it(tmp_path):
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError, match=r"trian.jsonl: not found at .*Data files there: train.jsonl"):
        list(read_rows("trian.jsonl", tmp_path))


def test_an_unknown_kind_is_named(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"a.txt: unknown kind. Use one of .jsonl, .jsonl.gz, .json"):
        list(read_rows("a.txt", tmp_path))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_a_torn_file_is_an_error_of_the_data(tmp_path, name):
    whole = gzip.compress(b'{"x": 1}\n' * 100) if name.endswith("gz") else b"PAR1 and then nothing"
    (tmp_path / name).write_bytes(whole[:-9])
    with pytest.raises(DataError, match=name):
        list(read_rows(name, tmp_path))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
def test_a_gzip_file_that_is_damaged_within_is_an_error_of_the_data(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"")[:10] + b"\xff" * 100)  # a header, then no block of DEFLATE
    with pytest.raises(DataError, match=f"{name}: cannot be read to its end: .*invalid block type"):
        list(read_rows(name, tmp_path))


def odd_table():
    """Rows whose values Arrow holds and Python cannot, but for the last."""
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, pyarrow.array([b"\xff", b"b", b"c"]).buffers())
    when = pyarrow.array([0, 10**12, 0], pyarrow.timestamp("s"))
    return pyarrow.table({"q": text, "when": when})


def test_a_value_of_a_parquet_file_that_python_cannot_hold_makes_its_row_a_bad_one(tmp_path):
    pyarrow.parquet.write_table(odd_table(), tmp_path / "a.parquet")
    first, second, third = read_rows("a.parquet", tmp_path)
    assert first.where == "a.parquet row 1" and first.problem.startswith("column q cannot be read: 'utf-8' codec")
    assert second == BadRow("a.parquet row 2", "column when cannot be read: date value out of range")
    assert third.values["q"] == "c"


def test_a_parquet_file_that_names_a_column_twice_is_refused(tmp_path):
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array(["c"])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, ["q", "a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: names columns twice: a. Rename or remove one"):
        list(read_rows("a.parquet", tmp_path))


ARRAY = '[\n  {"x": 1},\n  {"x":\n    "ü"}, 7\n]\n'


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_json_array_has_a_row_for_each_object_named_by_its_first_line(tmp_path, name):
    data = ARRAY.encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    first, second, bad = read_rows(name, tmp_path)
    assert (first, second) == (SourceRow(f"{name}:2", {"x": 1}), SourceRow(f"{name}:3", {"x": "ü"}))
    assert bad == BadRow(f"{name}:4", 'got a number; each entry must be an object such as {"prompt": "..."}')
    (tmp_path / "none.json").write_text(" [ ]\n")
    assert list(read_rows("none.json", tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"x": 1},\n{"x": }]', "a.json:2: malformed JSON at line 2, character 7: Expecting value"),
        ('[{"x": 1},\n{"x": NaN}]', "a.json:2: malformed JSON: NaN is not JSON"),
        ('[{"x": 1}\n{"x": 2}]', "a.json:2: got something else than , or ] after an entry"),
        ('[{"x": 1}', "a.json:1: got something else than , or ] after an entry"),
        ('[{"x": 1},', "a.json:1: malformed JSON"),
        ('\n{"x": 1}\n{"x": 2}\n', r"a.json:2: the file does not begin with \[.*name it .jsonl"),
        ('[{"x": 1}]\n[]', "a.json:2: there is more behind the array"),
        ("", "a.json:1: the file does not begin"),
    ],
)
def test_an_array_that_is_none_is_an_error_with_its_line(tmp_path, text, said):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=said):
        list(read_rows("a.json", tmp_path))


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_csv_file_has_text_under_its_header_and_rows_named_by_their_first_line(tmp_path, name):
    data = 'x,y\r\n1,"two\r\nlines, ""quoted"""\r\n\r\nü,\r\nonly one\r\n'.encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert list(read_rows(name, tmp_path)) == [
        SourceRow(f"{name}:2", {"x": "1", "y": 'two\r\nlines, "quoted"'}),
        SourceRow(f"{name}:5", {"x": "ü", "y": ""}),
        BadRow(f"{name}:6", "has 1 values; the header names 2 columns"),
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "a.csv:1: the header must name every column"),
        (b"x,,y\n", "a.csv:1: the header must name every column, and each once; got x, , y"),
        (b"x,x\n1,2\n", "a.csv:1: the header must name every column, and each once; got x, x"),
        (b'x\n"open\n', "a.csv:.: malformed CSV"),
        (b"x\n\xff\n", "a.csv: cannot be read to its end: .* can't decode"),
    ],
)
def test_a_csv_file_that_is_none(tmp_path, data, said):
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(DataError, match=said):
        list(read_rows("a.csv", tmp_path))


def test_a_long_text_fits_into_csv(tmp_path):
    (tmp_path / "a.csv").write_text("x\n" + "y" * 200_000 + "\n")
    assert [len(row.values["x"]) for row in read_rows("a.csv", tmp_path)] == [200_000]


def test_a_pattern_has_the_rows_of_its_files_sorted_each_named_by_its_own(tmp_path, monkeypatch):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "train-2.jsonl").write_text('{"x": 3}\nbroken\n')
    (tmp_path / "parts" / "train-1.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    (tmp_path / "parts" / "test-1.jsonl").write_text('{"x": 9}\n')
    *rows, bad = read_rows("parts/train-*.jsonl", tmp_path)
    assert rows == [
        SourceRow("parts/train-1.jsonl:1", {"x": 1}),
        SourceRow("parts/train-1.jsonl:2", {"x": 2}),
        SourceRow("parts/train-2.jsonl:1", {"x": 3}),
    ]
    assert bad.where == "parts/train-2.jsonl:2"
    assert values_cut(tmp_path, "1:3", "parts/train-?.jsonl") == [{"x": 2}, {"x": 3}]
    absolute = str(tmp_path / "parts" / "train-[1].jsonl")
    assert values_of(read_rows(absolute, tmp_path / "elsewhere")) == [{"x": 1}, {"x": 2}]
    with pytest.raises(DataError, match="no file matches this pattern"):
        list(read_rows("parts/eval-*.jsonl", tmp_path))
    (tmp_path / "a[1].jsonl").write_text('{"x": 5}\n')
    assert values_of(read_rows("a[1].jsonl", tmp_path)) == [{"x": 5}], "a name that looks like a pattern"


def test_a_folder_of_save_to_disk_with_splits_and_without(tmp_path):
    datasets = pytest.importorskip("datasets")
    both = {name: datasets.Dataset.from_list([{"x": name, "inner": {"y": 1}}]) for name in ("train", "test")}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    both["test"].save_to_disk(tmp_path / "one")
    assert list(read_rows("both", tmp_path, split="test")) == [
        SourceRow("both test row 1", {"x": "test", "inner": {"y": 1}})
    ]
    assert list(read_rows("one", tmp_path)) == [SourceRow("one row 1", {"x": "test", "inner": {"y": 1}})]
    with pytest.raises(DataError, match="both: has no split 'eval'; it has train, test"):
        list(read_rows("both", tmp_path, split="eval"))


def test_a_directory_is_loaded_as_a_hugging_face_dataset(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"q": ["a", "b"]}), tmp_path / "set" / "train.parquet")
    assert list(read_rows("set", tmp_path))[1:] == [SourceRow("set train row 2", {"q": "b"})]
    with pytest.raises(DataError, match=r"set: .*split 'test'"):
        list(read_rows("set", tmp_path, split="test"))


def test_a_name_that_is_nowhere_is_an_error_of_the_data(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="nobody/nothing: neither a file nor a Hugging Face dataset"):
        list(read_rows("nobody/nothing", tmp_path))
