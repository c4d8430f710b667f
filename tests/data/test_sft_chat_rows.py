"""SFT on conversations: loss on the assistant's turns and their ends, on nothing else, however it is found out."""

import pytest

from hone.config.run import DataSection, ModelSection, SftSection
from hone.data.chat import load_tokenizer
from hone.data.sft_chat import load_chat_rows, segments_of
from hone.errors import DataError

OPENING = "{% if add_generation_prompt %}a:{% endif %}"
PLAIN = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>\n{% endfor %}" + OPENING
MARKED = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TALK = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "+3="},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "0"},
]


@pytest.fixture
def make_tokenizer(tmp_path):
    def make(template):
        (tmp_path / "template.jinja").write_text(template)
        model = ModelSection(characters="0123456789+-*/=:usa\n", chat_template="template.jinja")
        return load_tokenizer(model, tmp_path)

    return make


@pytest.fixture
def load(tmp_path, write_rows):
    def load(tokenizer, *rows, max_tokens=100, **data):
        section = DataSection(train=write_rows(*rows), **data)
        return load_chat_rows(section, SftSection(messages_column="talk"), tokenizer, tmp_path, max_tokens=max_tokens)

    return load


def shown(tokenizer, row):
    """The conversation with what is trained on in brackets."""
    text = tokenizer.hf.decode(row.prompt)
    for token, wanted in zip(row.response, row.loss_mask, strict=True):
        piece = tokenizer.hf.decode([token])
        text += f"[{piece}]" if wanted else piece
    return text


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_the_assistants_turns_carry_loss(make_tokenizer, load, template):
    tokenizer = make_tokenizer(template)
    (row,) = rows = load(tokenizer, {"talk": TALK})
    assert shown(tokenizer, row) == "u:1+1=<eos>\na:[2][<eos>]\nu:+3=<eos>\na:[5][<eos>]"
    assert rows.report.kept == 1


def test_marks_win_over_what_rendering_would_say(make_tokenizer):
    half = MARKED.replace("{% generation %}{{ m.content }}", "{{ m.content[:1] }}{% generation %}{{ m.content[1:] }}")
    segments = segments_of(make_tokenizer(half), [TALK[0], {"role": "assistant", "content": "24"}])
    assert segments == [("u:1+1=<eos>\na:2", False), ("4<eos>", True)]


def test_a_system_message_of_the_run_file_is_put_in_front(make_tokenizer, load):
    tokenizer = make_tokenizer(PLAIN)
    (row,) = load(tokenizer, {"talk": TALK[:2]}, chat=True, system="+")
    assert shown(tokenizer, row) == "s:+<eos>\nu:1+1=<eos>\na:[2][<eos>]"


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_way_out(make_tokenizer, load):
    forgetful = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '' }}")
    with pytest.raises(DataError, match=r"rewrites what stands before message 2.*generation.*model\.chat_template"):
        load(make_tokenizer(forgetful), {"talk": TALK})
    opens_otherwise = PLAIN.replace("a:{% endif %}", "aa:{% endif %}")
    with pytest.raises(DataError, match="rewrites what stands before message 2"):
        load(make_tokenizer(opens_otherwise), {"talk": TALK})


def test_a_turn_that_does_not_end_is_refused(make_tokenizer, load):
    endless = PLAIN.replace("<eos>", "")
    with pytest.raises(DataError, match=r"ends the assistant's turn '2\\n' without an EOS token \(<eos>\)"):
        load(make_tokenizer(endless), {"talk": TALK})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"other": 1}, "rows.jsonl:1 talk: no such column"),
        ({"talk": []}, "rows.jsonl:1 talk: got list; must be text or a list"),
        ({"talk": [{"content": "1"}]}, r"rows.jsonl:1 talk: message 1 is no \{role, content\} object"),
        ({"talk": TALK[:1]}, "rows.jsonl:1 talk: has no message of the assistant's"),
        ({"talk": [TALK[0], {"role": "assistant", "content": "?"}]}, r"rows.jsonl:1 talk: character '\?'"),
    ],
)
def test_a_bad_row_is_named_or_skipped(make_tokenizer, load, row, problem):
    tokenizer = make_tokenizer(PLAIN)
    with pytest.raises(DataError, match=problem):
        load(tokenizer, row, {"talk": TALK})
    rows = load(tokenizer, row, {"talk": TALK}, max_bad_rows=100)
    assert len(rows) == 1 and rows.report.bad == 1


def test_long_conversations_are_dropped_and_counted(make_tokenizer, load):
    rows = load(make_tokenizer(PLAIN), {"talk": TALK}, {"talk": TALK[:2]}, max_tokens=15)
    assert len(rows) == 1 and rows.report.too_long == 1


def test_without_a_template_there_is_nothing_to_render_with(digits, load):
    with pytest.raises(DataError, match=r"the tokenizer has no chat template. Name one in model.chat_template"):
        load(digits, {"talk": TALK})


def test_a_template_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"model.chat_template: nothing.jinja cannot be read"):
        load_tokenizer(ModelSection(characters="01", chat_template="nothing.jinja"), tmp_path)
