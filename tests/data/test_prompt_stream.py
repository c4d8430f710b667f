import hashlib
import itertools
import json

import pytest

from hone.config.derived import section_of
from hone.config.run import DataSection, ModelSection, SftSection
from hone.data.chat import load_tokenizer
from hone.data.order import epoch_order
from hone.data.prompts import load_prompts, load_sft_rows
from hone.data.sources import source_labels
from hone.errors import DataError

USER, ASSISTANT = {"role": "user", "content": "how many"}, {"role": "assistant", "content": "four"}


@pytest.fixture
def load(tmp_path, words):
    """Prompts of a file, with the settings given."""

    def load(name, *, seed=0, tokenizer=words, **data):
        return load_prompts(DataSection(train=name, **data), tokenizer, tmp_path, seed=seed)

    return load


def texts(stream):
    return [prompt.text for prompt in stream.rows()]


def take(stream, start, count):
    return list(itertools.islice(stream.starting_at(start), count))


def test_a_prompt_has_text_tokens_answer_and_all_columns_but_its_own(write_rows, load, words):
    name = write_rows({"q": "one plus one", "a": "2", "level": 3})
    (prompt,) = load(name, prompt_column="q", answer_column="a").rows()
    assert (prompt.text, prompt.answer, prompt.columns) == ("one plus one", "2", {"a": "2", "level": 3})
    assert list(prompt.token_ids) == words.encode_prompts(["one plus one"], rendered=False)[0]


def test_a_template_is_filled_in_one_pass(write_rows, load):
    name = write_rows({"q": "what is {a}?", "a": "{q}", "n": 7})
    stream = load(name, prompt_column="q", template="Q{n}: {prompt} {q} {{q}} {} {a\nA:")
    assert texts(stream) == ["Q7: what is {a}? what is {a}? {q} {} {a\nA:"]


def test_dotted_names_reach_into_columns(write_rows, load, model_directory):
    inner = {"ground_truth": "4", "by.hand": {"id": "r7"}, "turns": [USER]}
    name = write_rows({"prompt": "how many", "reward_model": inner, "a.b": "flat", "a": {"b": "nested"}})
    dotted = {"answer_column": "reward_model.ground_truth", "id_column": "reward_model.by.hand.id"}
    (prompt,) = load(name, **dotted, template="{a.b} {reward_model.ground_truth} {{a.b}}: {prompt}").rows()
    assert (prompt.id, prompt.answer, prompt.text) == ("r7", "4", "flat 4 {a.b}: how many"), "a whole name comes first"
    tokenizer = load_tokenizer(ModelSection(path=str(model_directory)), model_directory)
    (prompt,) = load(name, chat=True, prompt_column="reward_model.turns", tokenizer=tokenizer).rows()
    assert prompt.messages == (USER,)
    with pytest.raises(DataError, match=r"jsonl:1 reward_model.truth: no such column; the row has .*Did you mean rew"):
        load(name, answer_column="reward_model.truth")


def test_a_template_may_do_without_the_prompt_column(write_rows, load):
    assert texts(load(write_rows({"q": "one"}, {"q": "two"}), template="Q: {q}")) == ["Q: one", "Q: two"]


def test_a_template_without_a_column_is_refused(write_rows, load):
    with pytest.raises(DataError, match="names no column"):
        load(write_rows({"prompt": "a"}), template="Q: {}")


def test_chat_takes_text_or_messages_and_puts_the_system_message_first(write_rows, load, model_directory):
    name = write_rows(
        {"prompt": "how many"},
        {"prompt": [{"role": r, "content": c} for r, c in (("user", "four"), ("assistant", "left"), ("user", "how"))]},
        {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "four"}]},
    )
    tokenizer = load_tokenizer(ModelSection(path="model"), model_directory.parent)
    assert texts(load(name, tokenizer=tokenizer, chat=True, system="be brief")) == [
        "<|system|>be brief<eos><|user|>how many<eos><|assistant|>",
        "<|system|>be brief<eos><|user|>four<eos><|assistant|>left<eos><|user|>how<eos><|assistant|>",
        "<|system|>own<eos><|user|>four<eos><|assistant|>",
    ]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], r"must be text or a list of \{role, content\} messages"),
        (3, r"got int; must be text or a list"),
        ([{"content": "x"}], r"message 1 is no \{role, content\} object"),
        ([{"role": "user", "content": None}], "message 1 has no content; must be text or a list of parts"),
        ([{"role": "tool", "content": "x"}], "the chat template refuses it: no tools here"),
        ([USER, ASSISTANT], "the last message is the assistant's, .* Set data.last_turn=answer to take it off"),
    ],
)
def test_bad_messages_are_named(write_rows, load, model_directory, prompt, problem):
    tokenizer = load_tokenizer(ModelSection(path="model"), model_directory.parent)
    with pytest.raises(DataError, match=f"rows.jsonl:1 prompt: .*{problem}"):
        load(write_rows({"prompt": prompt}), tokenizer=tokenizer, chat=True)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for _ in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_chat_template_that_raises_anything_is_a_problem_of_its_row(
    write_rows, load, model_directory, template, problem
):
    tokenizer = load_tokenizer(ModelSection(path="model"), model_directory.parent)
    tokenizer.hf.chat_template = template
    with pytest.raises(DataError, match=f"rows.jsonl:1 prompt: the chat template refuses it: {problem}"):
        load(write_rows({"prompt": "how many"}), tokenizer=tokenizer, chat=True)


def test_the_last_turn_can_be_the_answer(write_rows, load, model_directory, tmp_path):
    tokenizer = load_tokenizer(ModelSection(path="model"), model_directory.parent)
    name = write_rows({"messages": [USER, ASSISTANT], "short": 4})
    chat = {"prompt_column": "messages", "chat": True, "last_turn": "answer"}
    (prompt,) = load(name, tokenizer=tokenizer, **chat).rows()
    assert (prompt.text, prompt.answer, prompt.messages) == ("<|user|>how many<eos><|assistant|>", "four", (USER,))
    (prompt,) = load(name, tokenizer=tokenizer, answer_column="short", **chat).rows()
    assert (prompt.text, prompt.answer) == ("<|user|>how many<eos><|assistant|>", 4)
    rows = load_sft_rows(DataSection(train=name, **chat), SftSection(), tokenizer, tmp_path)
    assert tokenizer.decode(rows[0].response) == "four"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [([USER], "of role user; data.last_turn=answer needs the assistant's"), ([ASSISTANT], "there is no prompt")],
)
def test_a_conversation_without_an_answer_is_named(write_rows, load, model_directory, messages, problem):
    tokenizer = load_tokenizer(ModelSection(path="model"), model_directory.parent)
    with pytest.raises(DataError, match=f"rows.jsonl:1 prompt: .*{problem}"):
        load(write_rows({"prompt": messages}), tokenizer=tokenizer, chat=True, last_turn="answer")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"prompt": "b", "answer"', "rows.jsonl:2: malformed JSON at character 25"),
        ({"promt": "b", "answer": "1"}, "rows.jsonl:2 prompt: no such column; the row has promt, answer. Did you mean"),
        ({"prompt": "b"}, "rows.jsonl:2 answer: no such column; the row has prompt"),
        ({"prompt": "b", "answer": None}, "rows.jsonl:2 answer: got null"),
        ({"prompt": 3, "answer": "1"}, "rows.jsonl:2 prompt: got int; must be text"),
        ({"prompt": "", "answer": "1"}, "rows.jsonl:2 prompt: the prompt is empty"),
        ({"prompt": "ß", "answer": "1"}, r"rows.jsonl:2 prompt: character 'ß' \(U\+00DF\) is not in model.characters"),
        ({"prompt": "\ud800", "answer": "1"}, r"rows.jsonl:2 prompt: character .* \(U\+D800\) is not in"),
    ],
)
def test_a_bad_row_names_file_line_and_field_or_is_skipped(write_rows, load, row, problem):
    name = write_rows({"prompt": "a", "answer": "1"}, row, {"prompt": "c", "answer": "1"})
    with pytest.raises(DataError, match=problem):
        load(name, answer_column="answer")
    stream = load(name, answer_column="answer", max_bad_rows=100)
    assert texts(stream) == ["a", "c"]
    assert (stream.report.read, stream.report.kept, stream.report.bad) == (3, 2, 1)
    assert "1 malformed rows skipped (first: rows.jsonl:2" in str(stream.report)


def test_a_lone_surrogate_is_a_bad_row_for_every_tokenizer(write_rows, load, model_directory):
    tokenizer = load_tokenizer(ModelSection(path="model"), model_directory.parent)
    with pytest.raises(DataError, match=r"U\+D800\) is not in Unicode text"):
        load(write_rows({"prompt": "a \ud800"}), tokenizer=tokenizer)


def test_skipping_is_bounded(write_rows, load):
    name = write_rows({"prompt": "a"}, *["broken"] * 3)
    assert len(load(name, max_bad_rows=3)) == 1
    with pytest.raises(DataError, match=r"3 malformed rows .* more than data.max_bad_rows \(2\)") as error:
        load(name, max_bad_rows=2)
    assert "rows.jsonl:2: malformed JSON" in str(error.value)


def test_long_prompts_are_dropped_and_reported(write_rows, load):
    stream = load(write_rows({"prompt": "abc"}, {"prompt": "abcdefgh"}, {"prompt": "abcd"}), max_prompt_tokens=4)
    assert texts(stream) == ["abc", "abcd"]
    assert str(stream.report) == "rows.jsonl: 2 of 3 rows; 1 dropped, longer than 4 tokens (longest: 8)"


def test_nothing_left_is_an_error(write_rows, load):
    with pytest.raises(DataError, match=r"No row is left: raise data.max_prompt_tokens"):
        load(write_rows({"prompt": "abc"}), max_prompt_tokens=2)
    with pytest.raises(DataError, match="holds no rows"):
        load(write_rows())
    with pytest.raises(DataError, match="holds no rows"):
        load(write_rows({"prompt": "abc"}), train_rows="5:9")


def test_ids_come_from_the_column_or_the_content(write_rows, load):
    rows = [{"prompt": "a", "answer": "1", "key": 7}, {"prompt": "b", "answer": "1", "key": "x"}]
    by_column = load(write_rows(*rows), answer_column="answer", id_column="key").rows()
    assert [prompt.id for prompt in by_column] == ["7", "x"]
    by_content = [p.id for p in load(write_rows(*rows), answer_column="answer").rows()]
    reversed_rows = load(write_rows(*reversed(rows)), answer_column="answer", template="Q: {prompt}").rows()
    assert [p.id for p in reversed_rows] == by_content[::-1]  # neither place nor template matters
    assert by_content == ["e1a44f2d627e53a5", "f20cbed271f70e5c"]  # on every machine, for ever


def test_equal_rows_get_numbered_ids(write_rows, load):
    first, second, third = (p.id for p in load(write_rows(*[{"prompt": "a"}] * 3)).rows())
    assert (second, third) == (f"{first}#2", f"{first}#3")


def test_rows_that_share_an_id_are_an_error(write_rows, load):
    name = write_rows({"prompt": "a", "key": 7}, {"prompt": "b", "key": "x"}, {"prompt": "c", "key": "7"})
    with pytest.raises(DataError, match=r"rows.jsonl:3 key: '7' is also the id of rows.jsonl:1; ids must be unique"):
        load(name, id_column="key")
    assert texts(load(name, id_column="key", max_bad_rows=100)) == ["a", "b"]


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own(write_rows, load):
    stream = load(write_rows(*({"prompt": c} for c in "abcdefgh")))
    epochs = [take(stream, 8 * epoch, 8) for epoch in range(3)]
    orders = ["".join(prompt.text for prompt in epoch) for epoch in epochs]
    assert [sorted(order) for order in orders] == [list("abcdefgh")] * 3
    assert len(set(orders)) == 3
    assert [prompt.index for epoch in epochs for prompt in epoch] == list(range(24))


def test_the_stream_resumes_from_one_integer(write_rows, load):
    name = write_rows(*({"prompt": c} for c in "abcdefgh"))
    whole = take(load(name), 0, 30)
    for start in (0, 5, 8, 13, 24):
        assert take(load(name), start, 30 - start) == whole[start:]


def test_the_order_is_a_function_of_seed_and_epoch(write_rows, load):
    name = write_rows(*({"prompt": c} for c in "abcdefgh"))
    assert take(load(name, seed=1), 0, 8) == take(load(name, seed=1), 0, 8)
    assert take(load(name, seed=1), 0, 8) != take(load(name, seed=2), 0, 8)


def test_the_order_is_the_same_on_every_machine():
    mask = 2**64 - 1

    def splitmix64(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    key = int.from_bytes(hashlib.blake2b(b"7:3", digest_size=8).digest(), "little")
    hashes = [splitmix64((key + (row + 1) * 0x9E3779B97F4A7C15) & mask) for row in range(100)]
    assert list(epoch_order(100, seed=7, epoch=3)) == sorted(range(100), key=hashes.__getitem__)


def test_orders_are_spread_evenly():
    firsts = [epoch_order(4, seed=seed, epoch=0)[0] for seed in range(2000)]
    assert all(430 < firsts.count(place) < 570 for place in range(4))  # 500 expected, standard deviation 19


def test_unshuffled_is_the_order_of_the_file(write_rows, load):
    stream = load(write_rows(*({"prompt": c} for c in "dacb")), order="source")
    assert [prompt.text for prompt in take(stream, 2, 5)] == ["c", "b", "d", "a", "c"]


def test_sources_keep_their_names_and_have_the_shares_of_their_weights(write_rows, tmp_path, load):
    (tmp_path / "more").mkdir()
    write_rows(*({"prompt": c} for c in "ab"), name="few.jsonl")
    write_rows(*({"prompt": c} for c in "cdefgh"), name="more/many.jsonl")
    stream = load(({"path": "few.jsonl", "weight": 3}, {"path": "more/many.jsonl", "weight": 1}), order="source")
    texts = [(prompt.text, prompt.source) for prompt in take(stream, 0, 8)]
    assert [text for text, source in texts if source == "many.jsonl"] == ["c", "d"]
    assert [text for text, source in texts if source == "few.jsonl"] == ["a", "b"] * 3
    plain = load(("few.jsonl", "more/many.jsonl"), order="source")
    assert [prompt.text for prompt in take(plain, 0, 8)] == [*"abcdefgh"]
    assert {prompt.source for prompt in load("few.jsonl").rows()} == {""}, "one source needs no name"


def test_a_source_has_columns_and_a_template_of_its_own(write_rows, load, tmp_path, words):
    write_rows({"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2"}, name="plain.jsonl")
    write_rows({"q": "three", "id": "x", "about": {"a": "3"}}, name="own.jsonl")
    own = {
        "path": "own.jsonl",
        "prompt_column": "q",
        "answer_column": "about.a",
        "id_column": "id",
        "template": "Q {q}",
    }
    sources, settings = ["plain.jsonl", own, "plain.jsonl"], {"answer_column": "answer", "order": "source"}
    found = [(p.id, p.text, p.answer, p.source) for p in load(sources, **settings).rows()]
    (first, second) = (p.id for p in load("plain.jsonl", **settings).rows())
    assert found == [
        (first, "one", "1", "plain.jsonl"), (second, "two", "2", "plain.jsonl"), ("x", "Q three", "3", "own.jsonl"),
        (f"{first}#2", "one", "1", "plain.jsonl"), (f"{second}#2", "two", "2", "plain.jsonl"),
    ]  # fmt: skip
    data = DataSection(train=sources, **settings)
    sft_rows = load_sft_rows(data, SftSection(), words, tmp_path)
    assert [words.hf.decode(row.response, skip_special_tokens=True) for row in sft_rows] == ["1", "2", "3", "1", "2"]
    with pytest.raises(DataError, match=r"own.jsonl:1 missing: no such column"):
        load([*sources[:1], own | {"answer_column": "missing"}], **settings)
    with pytest.raises(DataError, match=r"'x' is also the id of own.jsonl:1; ids must be unique"):
        load([own, own, "plain.jsonl"], **settings)


@pytest.mark.parametrize(
    ("of_data", "of_source", "template", "chat", "system"),
    [
        ({"template": "A {prompt}"}, {"chat": True, "system": "hi"}, None, True, "hi"),
        ({"chat": True, "system": "hi"}, {"template": "B {prompt}"}, "B {prompt}", False, None),
        ({"chat": True, "system": "hi"}, {"chat": False}, None, False, None),
        ({"chat": True, "system": "hi"}, {"prompt_column": "q"}, None, True, "hi"),
        ({"template": "A {prompt}"}, {"template": "B {prompt}"}, "B {prompt}", False, None),
    ],
)
def test_template_and_chat_of_a_source_replace_each_other(of_data, of_source, template, chat, system):
    data = DataSection(train=[{"path": "a.jsonl", **of_source}], **of_data)
    own = section_of(data, data.train[0])
    assert (own.template, own.chat, own.system) == (template, chat, system)


def test_sources_that_end_alike_get_different_names():
    def labels(*sources):
        return source_labels(DataSection(train=sources).train)

    assert labels("a/train.jsonl", "b/train.jsonl") == ("a_train.jsonl", "b_train.jsonl")
    assert labels("a/x.jsonl", "a/x.jsonl", "o/gsm8k:main") == ("x.jsonl", "x.jsonl", "gsm8k:main")
    assert labels({"path": "a/x.jsonl", "name": "a/easy"}, "a/x.jsonl") == ("a_easy", "x.jsonl")


def test_a_slice_may_leave_out_a_source(write_rows, load):
    write_rows(*({"prompt": c} for c in "ab"), name="one.jsonl")
    write_rows(*({"prompt": c} for c in "cd"), name="two.jsonl")
    names = ("one.jsonl", "two.jsonl")
    assert [tuple(source) for source in load(names, train_rows="1:3").rows().sources] == [
        ("one.jsonl", 0, 1), ("two.jsonl", 1, 2)
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"no row of two.jsonl is left"):
        load([{"path": name, "weight": 1} for name in names], train_rows=":2")


def test_a_curriculum_sorts_by_a_column(write_rows, load):
    name = write_rows(*({"prompt": c, "about": {"level": n}} for c, n in zip("abcd", (3, "1.5", -2, 2), strict=True)))
    up, down = (load(name, order=order, order_column="about.level") for order in ("ascending", "descending"))
    assert [prompt.text for prompt in take(up, 0, 5)] == [*"cbdac"]
    assert [prompt.text for prompt in take(down, 0, 4)] == [*"adbc"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("hard", "got 'hard'; rows are sorted by it"),
        (True, "got True"),
        ([1], r"got \[1\]"),
        (None, "no such|empty|null"),
    ],
)
def test_a_row_that_cannot_be_sorted_is_named(write_rows, load, value, said):
    name = write_rows({"prompt": "a", "level": 1}, {"prompt": "b", "level": value})
    settings = {"order": "ascending", "order_column": "level"}
    with pytest.raises(DataError, match=rf"{name}:2 level: .*({said})"):
        load(name, **settings)
    assert [prompt.text for prompt in load(name, **settings, max_bad_rows=100).rows()] == ["a"]


def test_evaluation_data_is_never_shuffled(write_rows, tmp_path, words):
    name = write_rows(*({"prompt": c} for c in "dacb"))
    data = DataSection(train=name, eval=name, eval_rows="1:")
    stream = load_prompts(data, words, tmp_path, seed=0, part="eval")
    assert [prompt.text for prompt in take(stream, 0, 3)] == ["a", "c", "b"]
    with pytest.raises(DataError, match=r"data.eval: not set"):
        load_prompts(DataSection(train=name), words, tmp_path, seed=0, part="eval")


def test_sft_rows_are_prompt_and_response_with_its_end(write_rows, tmp_path, digits):
    name = write_rows({"prompt": "1+1=", "answer": "2"}, {"prompt": "9*9=", "answer": 81})
    data = DataSection(train=name, answer_column="answer")
    rows = load_sft_rows(data, SftSection(), digits, tmp_path)
    assert [tuple(map(list, row[:2])) for row in rows] == [([3, 12, 3, 16], [4, 1]), ([11, 14, 11, 16], [10, 3, 1])]
    assert rows.report.kept == 2


def test_sft_rows_may_come_from_elsewhere(write_rows, tmp_path, digits):
    name = write_rows({"prompt": "1=", "worked": "1"}, {"prompt": "2=", "worked": "2"}, {"prompt": "3=", "worked": "3"})
    sft = SftSection(data=name, rows="1:", response_column="worked")
    rows = load_sft_rows(DataSection(train="unused.jsonl"), sft, digits, tmp_path)
    assert [tuple(map(list, row[:2])) for row in rows] == [([4, 16], [4, 1]), ([5, 16], [5, 1])]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "1=", "answer": "x"}, "rows.jsonl:1 answer: character 'x'"),
        ({"prompt": "1=", "answer": ["1"]}, "rows.jsonl:1 answer: got list; must be text or a number"),
    ],
)
def test_a_bad_sft_row_is_named(write_rows, tmp_path, digits, row, problem):
    data = DataSection(train=write_rows(row), answer_column="answer")
    with pytest.raises(DataError, match=problem):
        load_sft_rows(data, SftSection(), digits, tmp_path)


def test_sft_needs_a_response_column(write_rows, tmp_path, digits):
    with pytest.raises(DataError, match="which column has the responses"):
        load_sft_rows(DataSection(train=write_rows({"prompt": "1="})), SftSection(), digits, tmp_path)


def test_columns_that_are_no_json_still_make_ids(tmp_path, load):
    import datetime

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"prompt": ["a"], "answer": [datetime.date(2026, 1, 2)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (prompt,) = load("a.parquet", answer_column="answer").rows()
    assert prompt.answer == datetime.date(2026, 1, 2)
    assert json.dumps(prompt.id)
