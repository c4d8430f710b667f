"""Preference rows: read as the reward model reads later, and refused with file, line and column when they are wrong."""

import pytest

from hone.config.run import DataSection, ModelSection, PreferenceSection
from hone.data.chat import load_tokenizer
from hone.data.pairs import load_pairs
from hone.errors import DataError


@pytest.fixture
def load(tmp_path, digits):
    def load(name, *, tokenizer=digits, part="train", max_tokens=100, rm=None, **data):
        section = DataSection(train=name, **data)
        return load_pairs(
            section, PreferenceSection(**(rm or {})), tokenizer, tmp_path, max_tokens=max_tokens, part=part
        )

    return load


def test_a_pair_is_two_texts_with_their_end(write_rows, load):
    pairs = load(write_rows({"prompt": "1+1=", "chosen": "2", "rejected": 11}))
    assert pairs[:] == [((3, 12, 3, 16, 4, 1), (3, 12, 3, 16, 3, 3, 1), 0.0)]
    assert (pairs.report.read, pairs.report.kept) == (1, 1)


def test_columns_template_and_margin_are_the_run_files(write_rows, load):
    name = write_rows({"a": "1", "good": "2", "bad": "3", "by": 0.5})
    rm = {"chosen_column": "good", "rejected_column": "bad", "margin_column": "by"}
    (pair,) = load(name, rm=rm, template="{a}+{a}=")
    assert pair == ((3, 12, 3, 16, 4, 1), (3, 12, 3, 16, 5, 1), 0.5)


def test_chats_go_through_the_template_in_all_their_forms(write_rows, load, model_directory):
    tokenizer = load_tokenizer(ModelSection(path="model"), model_directory.parent)
    user, good, bad = (
        {"role": "user", "content": "how many"},
        {"role": "assistant", "content": "four"},
        {"role": "assistant", "content": "left"},
    )
    name = write_rows(
        {"prompt": "how many", "chosen": "four", "rejected": "left"},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"prompt": "how many", "chosen": [user, good], "rejected": [user, bad]},
    )
    pairs = load(name, tokenizer=tokenizer, chat=True)
    decoded = tokenizer.hf.decode(pairs[0].chosen)
    assert decoded == "<|user|>how many<eos><|assistant|>four<eos>"
    assert pairs[0] == pairs[1] == pairs[2]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "1=", "rejected": "2"}, "rows.jsonl:1 chosen: no such column; the row has prompt, rejected"),
        ({"prompt": "1=", "chosen": "2"}, "rows.jsonl:1 rejected: no such column"),
        ({"prompt": "1=", "chosen": None, "rejected": "2"}, "rows.jsonl:1 chosen: got null"),
        (
            {"prompt": "1=", "chosen": "2", "rejected": "2"},
            "rejected: is the same as chosen: such a pair prefers nothing",
        ),
        ({"prompt": "1=", "chosen": ["2"], "rejected": "2"}, "chosen: got list; must be text or a number"),
        ({"prompt": "1=", "chosen": "x", "rejected": "2"}, "chosen: character 'x'"),
        ({"prompt": "1=", "chosen": "2<eos>", "rejected": "2"}, "chosen: character '<'"),
        (
            '{"prompt": "1=", "chosen": "2", "rejected": "3", "by": NaN}',
            "rows.jsonl:1: malformed JSON: NaN is not JSON",
        ),
        ({"prompt": "1=", "chosen": "2", "rejected": "3", "by": "1"}, "by: got str; must be a number"),
        ({"prompt": "1=", "chosen": "2", "rejected": "3", "by": True}, "by: got bool; must be a number"),
        ({"prompt": "1=", "chosen": "2", "rejected": "3", "by": -1}, "by: got -1; must be a finite number, at least 0"),
        ({"prompt": "1=", "chosen": "2", "rejected": "3", "by": 1e999}, "must be a finite number|Infinity is not JSON"),
        ({"prompt": "1=", "chosen": "2", "rejected": "3"}, "by: no such column"),
    ],
)
def test_a_bad_row_is_named_or_skipped(write_rows, load, row, problem):
    good = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "by": 0}
    name = write_rows(row, good)
    rm = {"margin_column": "by"}
    with pytest.raises(DataError, match=problem):
        load(name, rm=rm)
    pairs = load(name, rm=rm, max_bad_rows=100)
    assert len(pairs) == 1 and pairs.report.bad == 1


def test_a_margin_of_nan_in_parquet_is_a_bad_row(tmp_path, load):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"prompt": ["1="], "chosen": ["2"], "rejected": ["3"], "by": [float("nan")]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet row 1 by: got nan; must be a finite number"):
        load("a.parquet", rm={"margin_column": "by"})


def test_long_pairs_are_dropped_and_counted(write_rows, load):
    name = write_rows(
        {"prompt": "1=", "chosen": "2", "rejected": "333333"}, {"prompt": "1=", "chosen": "2", "rejected": "3"}
    )
    pairs = load(name, max_tokens=4)
    assert len(pairs) == 1 and "1 dropped, longer than 4 tokens (longest: 9)" in str(pairs.report)
    with pytest.raises(DataError, match="No row is left"):
        load(name, max_tokens=2)


def test_held_out_pairs_need_a_source(write_rows, load):
    name = write_rows({"prompt": "1=", "chosen": "2", "rejected": "3"})
    with pytest.raises(DataError, match=r"data\.eval: not set"):
        load(name, part="eval")
    assert len(load(name, part="eval", eval=name)) == 1
