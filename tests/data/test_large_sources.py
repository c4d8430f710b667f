"""Sources that are memory-mapped and cached: the same prompts as from memory, and what a broken cache leads to."""

import gzip
import hashlib
import itertools
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from pictures import LETTERS, MARKS, TEMPLATE, save_picture

from hone.config.run import DataSection, ModelSection, PreferenceSection, SftSection
from hone.data import cache, lazy, rows
from hone.data.cache import DataCache
from hone.data.chat import Tokenizer, character_tokenizer, load_tokenizer
from hone.data.lazy import repeats
from hone.data.pairs import load_pairs
from hone.data.prompts import load_prompts, load_sft_rows
from hone.data.report import LoadProgress
from hone.data.sft_chat import load_chat_rows
from hone.errors import DataError

CACHE = DataCache(small_bytes=0)
"""Small sources are kept in it too."""
ROWS = [{"prompt": f"{n % 23}+{n}=", "answer": str(n % 23 + n)} for n in range(40)]
ROWS += [ROWS[3], ROWS[3], {"prompt": "1" * 60, "answer": "2"}, ROWS[5]]
ORDER_AT_E5086A7 = "7559691f5a0963472c1e71c2840b24990fb921c85b042de3855b9365e0eff8dd"
"""Of ids, positions, texts, tokens and answers of two epochs of ROWS with seed 7, made with the code of e5086a7."""


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The folder of a cache for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hone" / "data"


@pytest.fixture
def said():
    """Warnings that loading has shown. A slow machine shows progress too."""
    return []


@pytest.fixture
def load(tmp_path, digits, said):
    def say(line):
        if line.startswith("warning"):
            said.append(line)

    def load(name="rows.jsonl", *, seed=0, tokenizer=digits, small_bytes=0, **data):
        settings = {"answer_column": "answer", "max_prompt_tokens": 50, **data}
        cache = DataCache(say, small_bytes=small_bytes)
        return load_prompts(DataSection(train=name, **settings), tokenizer, tmp_path, seed=seed, cache=cache)

    return load


def write(tmp_path, name, found=ROWS):
    path = tmp_path / name
    lines = "".join(json.dumps(row) + "\n" for row in found)
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), path, row_group_size=7)
    elif ".json" in name and ".jsonl" not in name:
        path.write_text(json.dumps(found, indent=1))
    elif ".csv" in name:
        path.write_text("prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in found))
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return name


def all_of(stream):
    """What a stream has: its report, prompts in both orders, and their places."""
    prompts = list(stream.rows())
    return (
        stream.report, prompts, list(itertools.islice(stream.starting_at(17), 2 * len(stream))),
        [stream.rows().where(place) for place in range(len(stream))], stream.rows().tokens.tolist(),
    )  # fmt: skip


def no_row_is_read(monkeypatch):
    def refuse(*args):
        raise AssertionError("read again")

    for module, name in ((rows, "text_rows"), (rows, "parquet_batches"), (lazy, "_index")):
        monkeypatch.setattr(module, name, refuse)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.csv", "rows.parquet"])
def test_a_cached_source_has_the_same_prompts_and_is_read_once(tmp_path, load, said, cached, monkeypatch, name):
    write(tmp_path, name)
    in_memory = all_of(load(name, small_bytes=1 << 30))
    assert not cached.exists()
    assert all_of(load(name)) == in_memory and len(in_memory[1]) == 43 and in_memory[0].too_long == 1
    no_row_is_read(monkeypatch)
    assert all_of(load(name)) == in_memory
    assert not said


def test_without_pyarrow_the_rows_stay_in_memory(tmp_path, load, cached, monkeypatch):
    expected = all_of(load(write(tmp_path, "rows.jsonl")))
    other = tmp_path / "other"
    monkeypatch.setenv("XDG_CACHE_HOME", str(other))
    monkeypatch.setattr(rows, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert all_of(load()) == expected and not other.exists()


def test_a_dataset_of_hugging_face_is_indexed_once(tmp_path, load, cached, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "set")
    write(tmp_path, "rows.jsonl")
    first = all_of(load("set"))
    assert [p.id for p in first[1]] == [p.id for p in load().rows()] and first[3][40] == "set row 41"
    no_row_is_read(monkeypatch)
    assert all_of(load("set")) == first


def test_a_seed_gives_the_prompts_that_it_gave_when_all_were_in_memory(tmp_path, load, cached):
    write(tmp_path, "rows.jsonl")
    hashed = hashlib.sha256()
    for prompt in itertools.islice(load(seed=7).starting_at(0), 86):
        hashed.update(repr((prompt.id, prompt.index, prompt.text, prompt.token_ids.tolist(), prompt.answer)).encode())
    assert hashed.hexdigest() == ORDER_AT_E5086A7


def test_a_changed_file_is_noticed(tmp_path, load, said, cached):
    write(tmp_path, "rows.jsonl")
    before = load().rows()[0]
    write(tmp_path, "rows.jsonl", [{"prompt": "2+2=", "answer": "4"}, *ROWS])
    assert load().rows()[0].text == "2+2=" and load().rows()[1].text == before.text
    assert not said


def test_a_run_keeps_the_rows_that_it_has_started_with(tmp_path, load, cached):
    write(tmp_path, "rows.jsonl")
    stream, expected = load(), all_of(load())
    (tmp_path / "rows.jsonl").write_text("")
    assert all_of(stream) == expected


@pytest.mark.parametrize(
    ("key", "value", "length"),
    [
        ("max_prompt_tokens", 5, 23),
        ("template", "{prompt}{answer}", 43),
        ("id_column", "prompt", 40),
        ("order", "source", 43),
        ("order_column", "answer", 43),
    ],
)
def test_settings_decide_whether_an_index_still_holds(tmp_path, load, cached, monkeypatch, key, value, length):
    write(tmp_path, "rows.jsonl")
    load(max_bad_rows=100)
    if key == "order":
        no_row_is_read(monkeypatch)
    assert len(load(max_bad_rows=100, **{key: value})) == length
    assert len(list(cached.glob("*.json"))) == (2 if key == "order" else 3), "one of rows, the others indices"


def test_a_sample_has_rows_of_each_source_and_is_not_kept(tmp_path, digits, cached, monkeypatch):
    sources = (write(tmp_path, "many.jsonl", ROWS[:40]), write(tmp_path, "few.jsonl", ROWS[:3]))
    data = DataSection(train=[{"path": name, "weight": 1} for name in sources], answer_column="answer")
    stream = load_prompts(data, digits, tmp_path, seed=0, sample=lazy.SampleSize(20, of_each=2), cache=CACHE)
    assert [stream.rows().where(place) for place in (0, 1, 17)] == ["many.jsonl:1", "many.jsonl:3", "many.jsonl:38"]
    assert [stream.rows().where(place) for place in (18, 19)] == ["few.jsonl:1", "few.jsonl:2"]
    assert (stream.report.read, stream.report.of, stream.rows().source_rows) == (20, 43, [40, 3])
    assert "20 of 20 rows, a sample of the 43 there are" in str(stream.report)
    whole = load_prompts(data, digits, tmp_path, seed=0, cache=CACHE)
    assert (len(whole.rows()), whole.report.of) == (43, None)
    no_row_is_read(monkeypatch)
    again = load_prompts(data, digits, tmp_path, seed=0, sample=lazy.SampleSize(20, of_each=2), cache=CACHE)
    assert (len(again.rows()), again.report) == (43, whole.report), "what is known of all rows is used"


def test_the_digest_of_an_unchanged_file_is_kept_and_a_changed_file_is_hashed_again(tmp_path, cached, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"one")

    def digest_in_another_process(settled_s=-1.0):
        return DataCache(print, noted_bytes=0, settled_s=settled_s).digest(path)

    digest_in_another_process(settled_s=2.0)
    assert not list(cached.glob("*.digest")), "changed a moment ago: it may change again at the same time"
    assert digest_in_another_process() == hashlib.sha256(b"one").hexdigest()
    with monkeypatch.context() as noted:
        noted.setattr(cache, "_chunks", None)
        assert digest_in_another_process() == hashlib.sha256(b"one").hexdigest()
    modified = path.stat().st_mtime_ns
    path.write_bytes(b"two")
    os.utime(path, ns=(modified, modified))
    assert digest_in_another_process() == hashlib.sha256(b"two").hexdigest(), "of the same size and time"
    for note in cached.glob("*.digest"):
        note.write_text("broken")
    assert digest_in_another_process() == hashlib.sha256(b"two").hexdigest()


def test_an_index_is_of_the_columns_of_each_source(tmp_path, digits, cached, monkeypatch):
    names = write(tmp_path, "many.jsonl", ROWS[:40]), write(tmp_path, "few.jsonl", ROWS[:3])

    def load(**own):
        data = DataSection(train=[names[0], {"path": names[1], **own}], answer_column="answer")
        stream = load_prompts(data, digits, tmp_path, seed=0, cache=CACHE)
        return [(p.text, p.answer, p.source) for p in stream.rows()]

    first = load(template="{prompt}{answer}")
    assert first[40:] == [(f"{row['prompt']}{row['answer']}", row["answer"], "few.jsonl") for row in ROWS[:3]]
    assert load()[40:] != first[40:]
    no_row_is_read(monkeypatch)
    assert load(template="{prompt}{answer}") == first


def test_another_tokenizer_needs_another_index(tmp_path, load, cached):
    write(tmp_path, "rows.jsonl")
    other = load_tokenizer(ModelSection(characters="=+9876543210"), tmp_path)
    assert load().rows()[0].token_ids.tolist() != load(tokenizer=other).rows()[0].token_ids.tolist()


def spoil_arrow(folder):
    for path in folder.glob("*.arrow"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def cut_arrow(folder):
    for path in folder.glob("*.arrow"):
        os.truncate(path, path.stat().st_size // 2)


def cut_json(folder):
    for path in folder.glob("*.json"):
        os.truncate(path, 7)


def lose_arrow(folder):
    for path in folder.glob("*.arrow"):
        path.unlink()


def test_a_copied_entry_is_compared_with_its_checksum(tmp_path, load, said, cached, monkeypatch):
    write(tmp_path, "rows.jsonl")
    expected = all_of(load())
    for path in cached.glob("*.arrow"):
        os.utime(path)
    no_row_is_read(monkeypatch)
    assert all_of(load()) == expected and not said


@pytest.mark.parametrize("spoil", [spoil_arrow, cut_arrow, cut_json, lose_arrow])
def test_a_broken_entry_is_named_and_rebuilt(tmp_path, load, said, cached, spoil):
    write(tmp_path, "rows.jsonl")
    expected = all_of(load())
    spoil(cached)
    assert all_of(load()) == expected
    assert len(said) == 2 and all("is broken" in line and "rebuilt" in line for line in said)
    assert all_of(load()) == expected and len(said) == 2
    assert len(list(cached.iterdir())) == 4, "nothing is left of the broken ones"


def test_a_writer_that_fails_leaves_nothing(cached):
    def fail(sink):
        sink.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DataCache(print).save("k", fail)
    assert not list(cached.iterdir()) and DataCache(print).find("k") is None


def test_a_cache_that_cannot_be_written_is_said_and_nothing_else_changes(tmp_path, load, said, cached, monkeypatch):
    write(tmp_path, "rows.jsonl")
    expected = all_of(load())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert all_of(load()) == expected
    assert len(said) == 2 and "cannot be written" in said[0]


def test_entries_unused_for_a_month_are_removed(tmp_path, load, cached):
    write(tmp_path, "rows.jsonl")
    load()
    old = time.time() - 31 * 24 * 3600
    for path in cached.iterdir():
        os.utime(path, (old, old))
    load()  # uses them, so that they are new again
    write(tmp_path, "rows.jsonl", ROWS[:9])
    load()
    assert len(list(cached.iterdir())) == 8
    for path in cached.iterdir():
        os.utime(path, (old, old))
    write(tmp_path, "rows.jsonl", ROWS[:8])
    load()
    assert len(list(cached.iterdir())) == 4


def test_only_the_rows_asked_for_are_stored(tmp_path, load, cached):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:9]) + "broken\n" * 5)
    stream = load(train_rows="2:9")
    assert [p.text for p in stream.rows()] == [row["prompt"] for row in ROWS[2:9]]
    assert stream.rows().where(0) == "rows.jsonl:3"
    assert [p.text for p in load(train_rows="2:-5").rows()] == [row["prompt"] for row in ROWS[2:9]]
    with pytest.raises(DataError, match=r"rows.jsonl:10: malformed JSON"):
        load(train_rows="5:")


def test_several_sources_are_one_after_the_other(tmp_path, load, cached):
    names = tuple(write(tmp_path, f"{n}.jsonl", ROWS[5 * n : 5 * n + 5]) for n in range(3))
    stream = load(names, train_rows="3:12", order="source")
    assert [p.text for p in stream.rows()] == [row["prompt"] for row in ROWS[3:12]]
    assert [stream.rows().where(place) for place in (0, 2, 8)] == ["0.jsonl:4", "1.jsonl:1", "2.jsonl:2"]
    assert [p.text for p in stream.rows()[-2:]] == [row["prompt"] for row in ROWS[10:12]]
    assert stream.rows()[-1] == stream.rows()[8]
    with pytest.raises(IndexError):
        stream.rows()[9]


def test_a_source_of_many_files_raises_the_limit_of_open_files(tmp_path, load, cached, monkeypatch):
    names = tuple(write(tmp_path, f"{n}.jsonl", ROWS[n : n + 1]) for n in range(30))
    raised = []
    monkeypatch.setattr(rows.resource, "getrlimit", lambda kind: (520, 4096))
    monkeypatch.setattr(rows.resource, "setrlimit", lambda kind, limits: raised.append(limits))
    assert len(load(names)) == 30 and raised == [(542, 4096)]
    monkeypatch.setattr(rows.resource, "getrlimit", lambda kind: (520, 530))
    with pytest.raises(DataError, match="a source of 30 files, and a process may open 530"):
        load(names)


def test_an_entry_that_several_write_at_once_is_whole(cached, said):
    def write_slowly(sink):
        time.sleep(0.02)
        table = pyarrow.table({"x": list(range(1000))})
        with pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return {"rows": 1000}

    shared = DataCache(said.append)
    with ThreadPoolExecutor(8) as threads:
        entries = list(threads.map(lambda _: shared.save("k", write_slowly), range(8)))
    found = shared.find("k")
    assert found is not None and not said
    assert {entry.batches.read_all().num_rows for entry in [*entries, found]} == {1000}


def test_errors_name_file_and_line_in_every_start(tmp_path, load, cached):
    write(tmp_path, "rows.jsonl", [*ROWS, {"prompt": "x", "answer": "1"}])
    for _ in range(2):
        with pytest.raises(DataError, match=r"rows.jsonl:45 prompt: character 'x'"):
            load()
        report = load(max_bad_rows=100).report
        assert report.bad == 1 and report.first_bad[0].startswith("rows.jsonl:45 prompt: character 'x'")


def test_rows_with_pictures_are_looked_at_in_every_start(tmp_path, cached):
    hf = character_tokenizer(LETTERS)
    hf.add_special_tokens({"additional_special_tokens": MARKS})
    hf.chat_template = TEMPLATE
    keys = {"image_processor_type": "Qwen2VLImageProcessorFast", "min_pixels": 784, "max_pixels": 784 * 64}
    tokenizer = Tokenizer(hf, processor={"preprocessor_config.json": json.dumps(keys)})
    save_picture(tmp_path / "a.png", 1, width=84, height=56)
    write(tmp_path, "rows.jsonl", [{"prompt": "how many?", "image": "a.png"}])
    data = DataSection(train="rows.jsonl", chat=True, image_columns=("image",))
    first = load_prompts(data, tokenizer, tmp_path, seed=0, cache=CACHE)
    before = first.rows()[0]
    save_picture(tmp_path / "a.png", 2, width=84, height=56)
    after = load_prompts(data, tokenizer, tmp_path, seed=0, cache=CACHE).rows()[0]
    assert after.id != before.id and after.pictures != before.pictures
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: could be read when the data were loaded, and now is read differently"
    ):
        first.rows()[0]
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"rows.jsonl:1: could be read .*, and now image: picture 1: .*No such file"):
        first.rows()[0]


def test_the_time_in_a_template_is_that_of_the_start(tmp_path, digits, cached):
    hf = character_tokenizer("0123456789+-=:")
    hf.chat_template = "{{ strftime_now('%H:%M:%S:%f') }}={{ messages[0].content }}"
    write(tmp_path, "rows.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    data = DataSection(train="rows.jsonl", chat=True)
    streams = [load_prompts(data, Tokenizer(hf), tmp_path, seed=0, cache=CACHE) for _ in range(2)]
    texts = [[prompt.text for prompt in itertools.islice(stream.starting_at(0), 3)] for stream in streams]
    times = [{text.split("=")[0] for text in own} for own in texts]
    assert [len(own) for own in times] == [1, 1] and times[0] != times[1]


def test_supervised_rows_conversations_and_pairs_are_indexed_too(tmp_path, digits, cached, monkeypatch):
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    found = [{**row, "talk": talk, "chosen": row["answer"], "rejected": "0"} for row in ROWS[1:9]]
    write(tmp_path, "rows.jsonl", found)
    hf = character_tokenizer("0123456789+-=")
    hf.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    data, folder, sft = DataSection(train="rows.jsonl", answer_column="answer"), tmp_path, SftSection()
    chats = SftSection(messages_column="talk")

    def everything():
        sft_rows = load_sft_rows(data, sft, digits, folder, cache=CACHE)
        talks = load_chat_rows(data, chats, Tokenizer(hf), folder, max_tokens=99, cache=CACHE)
        pairs = load_pairs(data, PreferenceSection(), digits, folder, max_tokens=99, cache=CACHE)
        return [[[list(side) for side in item[:2]] for item in part] for part in (sft_rows, talks, pairs)]

    first = everything()
    assert [len(part) for part in first] == [8, 8, 8]
    assert first[0][0] == [[3, 12, 3, 16], [4, 1]], "1+1= and 2, its end"
    no_row_is_read(monkeypatch)
    assert everything() == first


@pytest.mark.parametrize("source", ["part-*.jsonl", "set"])
def test_the_hash_of_the_rows_is_found_once_for_each_content(tmp_path, cached, monkeypatch, source):
    datasets = pytest.importorskip("datasets")

    def make(found):
        for number in range(2):
            write(tmp_path, f"part-{number}.jsonl", found[20 * number : 20 * number + 20])
        datasets.Dataset.from_list(found[:40]).save_to_disk(tmp_path / "set")

    def digest():
        return rows.rows_digest(source, tmp_path, split="train", cache=CACHE)

    expected = []
    for found in (ROWS, ROWS[1:41]):
        expected.append(hashlib.sha256("".join(json.dumps(row, sort_keys=True) for row in found[:40]).encode()))
        make(found)
        assert digest() == expected[-1].hexdigest()
    monkeypatch.setattr(rows, "read_rows", None)
    assert digest() == expected[1].hexdigest()
    make(ROWS)
    assert digest() == expected[0].hexdigest()


def test_repeats_count_up():
    rng = np.random.default_rng(0)
    for size in (0, 1, 5, 300):
        ids = rng.integers(0, 40, size).astype(np.uint64)
        seen, expected = Counter(), []
        for value in ids.tolist():
            seen[value] += 1
            expected.append(seen[value])
        assert repeats(ids).tolist() == expected


def test_progress_is_shown_after_two_seconds_and_then_every_ten(monkeypatch):
    now, lines = [100.0], []
    monkeypatch.setattr("hone.data.report.time.monotonic", lambda: now[0])
    progress = LoadProgress("reading a.jsonl", lines.append, total=2000)
    for second in range(24):
        now[0] = 100.0 + second
        progress.at(50 * second)
    assert lines == [
        "reading a.jsonl: 100 of 2,000 rows (5%), 2 s",
        "reading a.jsonl: 600 of 2,000 rows (30%), 12 s",
        "reading a.jsonl: 1,100 of 2,000 rows (55%), 22 s",
    ]
