"""Pictures of rows: where they stand in the tokens, in which size, and how broken ones are named."""

import base64
import json

import numpy as np
import pytest
from pictures import LETTERS, MARKS, TEMPLATE, TILE_MARKS, TILE_TEMPLATE, save_picture
from PIL import Image

from hone.config.run import DataSection, SftSection
from hone.data import pictures
from hone.data.chat import Tokenizer, character_tokenizer
from hone.data.picture_processors import CLIP_MEAN, PictureProcessor
from hone.data.pictures import decoded
from hone.data.prompts import load_prompts, load_sft_rows
from hone.data.sft_chat import load_chat_rows
from hone.errors import DataError
from hone.runtime.bounded_cache import BoundedCache

PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessorFast", "min_pixels": 784, "max_pixels": 784 * 64}


def tokenizer_of(processor=PROCESSOR) -> Tokenizer:
    hf = character_tokenizer(LETTERS)
    hf.add_special_tokens({"additional_special_tokens": MARKS})
    hf.chat_template = TEMPLATE
    return Tokenizer(hf, processor={"preprocessor_config.json": json.dumps(processor)} if processor else {})


def load(tmp_path, rows, *, processor=PROCESSOR, **data):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(train="rows.jsonl", chat=True, order="source", **{"image_columns": ("image",), **data})
    return load_prompts(section, tokenizer_of(processor), tmp_path, seed=0).rows()


@pytest.fixture(autouse=True)
def files(tmp_path):
    save_picture(tmp_path / "a.png", 1, width=84, height=56)
    save_picture(tmp_path / "b.png", 2, width=30, height=29)


def test_pictures_stand_in_front_of_the_question(tmp_path):
    (prompt,) = load(tmp_path, [{"prompt": "how many?", "image": ["a.png", "b.png"]}])
    first, second = prompt.pictures
    assert (first.rows, first.columns, second.rows, second.columns) == (2, 3, 1, 1)
    marks = tokenizer_of().hf.convert_tokens_to_ids(MARKS)
    expected = [marks[0], *[marks[1]] * 6, marks[2], marks[0], marks[1], marks[2]]
    assert list(prompt.token_ids[: len(expected)]) == expected and (first.start, second.start) == (1, 9)
    assert first.read().shape == (56, 84, 3) and second.read().shape == (28, 28, 3)
    assert first.mean == CLIP_MEAN and "image" not in prompt.columns
    assert prompt.text.endswith("how many?=") and prompt.text.count(MARKS[1]) == 2


def test_marks_in_the_text_say_where(tmp_path):
    content = [{"type": "text", "text": "x"}, {"type": "image", "image": "b.png"}, {"type": "text", "text": "y"}]
    encoded = base64.b64encode((tmp_path / "b.png").read_bytes()).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    rows = [
        {"prompt": "x<image>y", "image": "b.png"},
        {"prompt": [{"role": "user", "content": content}], "image": []},
        {"prompt": [{"role": "user", "content": [content[0], url, content[2]]}], "image": []},
        {"prompt": [{"role": "user", "content": [content[0], {"type": "image"}, content[2]]}], "image": ["b.png"]},
    ]
    prompts = load(tmp_path, rows)
    assert len({tuple(prompt.token_ids) for prompt in prompts}) == 1 and len({p.pictures for p in prompts}) == 1
    assert len({prompt.id for prompt in prompts}) == 4


def test_prompts_with_other_pictures_have_other_ids(tmp_path):
    rows = [{"prompt": "how many?", "image": name} for name in ("a.png", "b.png", "a.png")]
    ids = [prompt.id for prompt in load(tmp_path, rows)]
    assert len(set(ids)) == 3 and ids[2] == f"{ids[0]}#2"


def test_sizes_are_those_of_transformers_processor(tmp_path):
    """The bytes of the resized picture, and the number of tokens; the settings bound both."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    for seed, (width, height) in enumerate([(20, 20), (84, 56), (500, 90), (33, 301), (612, 640)]):
        save_picture(tmp_path / "c.png", seed, width=width, height=height)
        (prompt,) = load(tmp_path, [{"prompt": "a", "image": "c.png"}])
        own = prompt.pictures[0]
        assert (own.rows * 28, own.columns * 28) == smart_resize(height, width, 28, 784, 784 * 64)
        processor = Qwen2VLImageProcessorPil(min_pixels=784, max_pixels=784 * 64)
        image = Image.open(tmp_path / "c.png")
        theirs = processor(images=[image], do_rescale=False, do_normalize=False)["pixel_values"]
        rgb = own.read().reshape(own.rows, 2, 14, own.columns, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        assert (theirs.reshape(*rgb.shape[:5], 2, 14, 14)[:, :, :, :, :, 1] == rgb).all()
        (smaller,) = load(tmp_path, [{"prompt": "a", "image": "c.png"}], max_image_pixels=784 * 4)
        assert smaller.pictures[0].num_tokens <= 4 or smaller.pictures[0].columns == 1  # as Qwen's rule has it


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": "no.png"}, r"rows.jsonl:1 image: picture 1: .*no.png cannot be read: No such file"),
        ({"image": ["a.png", "broken.png"]}, r"rows.jsonl:1 image: picture 2: is not a picture that can be decoded"),
        ({"image": "https://example.org/a.png"}, r"is a URL; nothing is fetched"),
        ({"image": "../a.png"}, r"is outside of"),
        ({"image": "data:image/png;base64,!"}, r"data URL must be"),
        ({"image": 3}, r"got int; must be a path"),
        ({"image": "long.png"}, r"the longer side may be 200 times"),
        ({"prompt": "a<image>", "image": ["a.png", "b.png"]}, r"1 of 2 pictures have no place"),
        (
            {"prompt": "a<image><image>", "image": "a.png"},
            r"more places for pictures than data.image_columns give \(1\)",
        ),
        ({"prompt": "a<|image_pad|>", "image": "a.png"}, r"1 pictures, but the rendered prompt has .* 2 times"),
    ],
)
def test_broken_pictures_are_named(tmp_path, row, message):
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:200])
    save_picture(tmp_path / "long.png", 0, width=402, height=2)
    with pytest.raises(DataError, match=message):
        load(tmp_path, [{"prompt": "a", **row}])


def test_a_model_of_another_family_is_refused(tmp_path):
    rows = [{"prompt": "a", "image": "a.png"}]
    with pytest.raises(DataError, match=r"the model has no preprocessor_config\.json; those of Qwen2-VL"):
        load(tmp_path, rows, processor=None)
    with pytest.raises(DataError, match="the model's processor is Gemma3ImageProcessor"):
        load(tmp_path, rows, processor={"image_processor_type": "Gemma3ImageProcessor"})


def test_a_file_that_changes_during_a_run_ends_it(tmp_path):
    (prompt,) = load(tmp_path, [{"prompt": "a", "image": "a.png"}])
    save_picture(tmp_path / "a.png", 9, width=84, height=56)
    with pytest.raises(DataError, match=r"a.png: could be read when prompts were loaded, and now has changed"):
        prompt.pictures[0].read()


def test_a_picture_is_decoded_once(tmp_path, monkeypatch):
    """By a process that has room for its pixels; without room, once for its size and once each time it is used."""
    decodings = []
    monkeypatch.setattr(pictures, "decoded", lambda content: decodings.append(content) or decoded(content))
    monkeypatch.setattr(pictures, "_pixels", kept := BoundedCache(112 * 56 * 3, lambda pixels: pixels.nbytes))
    save_picture(tmp_path / "c.png", 101, width=100, height=65)
    save_picture(tmp_path / "d.png", 102, width=100, height=65)
    for _ in range(2):
        first, again, second = load(tmp_path, [{"prompt": "a", "image": f"{name}.png"} for name in "ccd"])
        assert (first.pictures[0].read() == again.pictures[0].read()).all()
    assert len(decodings) == 2
    before = first.pictures[0].read()
    assert (second.pictures[0].read() != before).any() and len(decodings) == 3  # there is room for one of them
    assert (first.pictures[0].read() == before).all() and len(decodings) == 4 and kept.size == before.nbytes
    assert not before.flags.writeable
    other = first.pictures[0].read(resample="nearest")
    assert other.shape == before.shape and (other != before).any()


def test_supervised_rows_have_the_prompts_pictures(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "image": "a.png", "answer": "6"}))
    data = DataSection(train="rows.jsonl", chat=True, image_columns=("image",), answer_column="answer")
    (row,) = load_sft_rows(data, SftSection(), tokenizer_of(), tmp_path)
    assert row.pictures[0].num_tokens == 6 and len(row.prompt) == 6 + 2 + 2


TALKS = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content }}<eos>{%- endgeneration -%}
{%- elif m.content is string -%}{{ m.content }}=
{%- else -%}
{%- for part in m.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}=
{%- endif -%}
{%- endfor -%}"""


def load_talks(tmp_path, *rows, **data):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tokenizer_of()
    tokenizer.hf.chat_template = TALKS
    section = DataSection(train="rows.jsonl", chat=True, **{"image_columns": ("image",), **data})
    return load_chat_rows(section, SftSection(messages_column="talk"), tokenizer, tmp_path, max_tokens=40), tokenizer


def test_conversations_have_pictures_in_front_of_the_first_answer(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "6"}]
    more = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "7"}]
    image = {"type": "image", "image": "b.png"}
    parts = [{"role": "user", "content": [image, {"type": "text", "text": "a"}]}, talk[1]]
    rows, tokenizer = load_talks(
        tmp_path,
        {"talk": [*talk, *more], "image": ["a.png", "b.png"]},
        {"talk": [{"role": "user", "content": "a<image>"}, talk[1]], "image": "a.png"},
        {"talk": parts},
        {"talk": talk},
        {"talk": talk, "image": "b.png"},
    )
    marks = tokenizer.hf.convert_tokens_to_ids(MARKS)
    assert [[(p.start, p.num_tokens) for p in row.pictures] for row in rows] == [
        [(1, 6), (9, 1)], [(2, 6)], [(1, 1)], [], [(1, 1)],
    ]  # fmt: skip
    first = rows[0]
    assert list(first.prompt[:11]) == [marks[0], *[marks[1]] * 6, marks[2], marks[0], marks[1], marks[2]]
    spelled = [
        tokenizer.spell([token]) for token, wanted in zip(first.response, first.loss_mask, strict=True) if wanted
    ]
    assert spelled == ["6", "<eos>", "7", "<eos>"]
    assert (rows[2].prompt == rows[4].prompt).all()
    assert len(load_talks(tmp_path, {"talk": parts}, {"talk": talk, "image": "a.png"}, image_columns=())[0]) == 2


@pytest.mark.parametrize(
    ("talk", "image", "message"),
    [
        (["a", "6", "b<image>", "7"], "a.png", "rows.jsonl:1 talk: message 3 has a picture, and an answer stands"),
        (["a", "6<image>"], "a.png", "rows.jsonl:1 talk: message 2 has a picture, and an answer stands"),
        (["a<image><image>", "6"], "a.png", "rows.jsonl:1 talk: has more places for pictures"),
        (["a", "6"], "no.png", "rows.jsonl:1 image: picture 1: .* cannot be read"),
        (["a<|image_pad|>", "6"], "a.png", "rows.jsonl:1 talk: 1 pictures, but the rendered prompt has .* 2 times"),
        (["a", "6"], ["a.png"] * 7, "No row is left"),
    ],
)
def test_pictures_that_a_conversation_cannot_have_are_named(tmp_path, talk, image, message):
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, talk, strict=False)]
    with pytest.raises(DataError, match=message):
        load_talks(tmp_path, {"talk": messages, "image": image})


TILES = {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 28, "width": 28}, "max_patches": 6}
TILE_FILES = {
    "preprocessor_config.json": json.dumps(TILES),
    "processor_config.json": json.dumps({"image_seq_length": 4, "processor_class": "InternVLProcessor"}),
}


def test_tiles_are_those_of_transformers_processor(tmp_path):
    """InternVL: grids, the bytes of their tiles, and what bounds them."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    processor = PictureProcessor.of(TILE_FILES, most_pixels=28 * 28 * 7)
    theirs = GotOcr2ImageProcessorPil(size=TILES["size"], max_patches=6, crop_to_patches=True)
    sizes = [(28, 28), (20, 60), (61, 20), (90, 60), (56, 84), (13, 200), (57, 57), (40, 40), (100, 33), (112, 28)]
    for seed, (width, height) in enumerate(sizes):
        save_picture(tmp_path / "c.png", seed, width=width, height=height)
        own = processor.picture(tmp_path / "c.png")
        tiles = theirs(images=[Image.open(tmp_path / "c.png")], do_rescale=False, do_normalize=False)["pixel_values"]
        assert (own.rows, own.columns) == (2 * len(tiles), 2)
        assert (own.read() == np.stack(tiles).transpose(0, 2, 3, 1).reshape(-1, 28, 3)).all()
        assert max(own.read(within=10).shape[:2]) == 10
        for most in (1, 3, 4):
            bounded = PictureProcessor.of(TILE_FILES, most_pixels=28 * 28 * most).picture(tmp_path / "c.png")
            assert bounded.rows // 2 <= most
    with pytest.raises(DataError, match="cannot be divided into a square grid of tokens"):
        PictureProcessor.of({"preprocessor_config.json": TILE_FILES["preprocessor_config.json"]}, most_pixels=10**6)


def test_tokens_around_those_of_a_picture(tmp_path):
    hf = character_tokenizer(LETTERS)
    hf.add_special_tokens({"additional_special_tokens": TILE_MARKS})
    hf.chat_template = TILE_TEMPLATE
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x<image>y", "image": "b.png"}))
    section = DataSection(train="rows.jsonl", chat=True, image_columns=("image",))
    tokenizer = Tokenizer(hf, processor=TILE_FILES)
    (prompt,) = load_prompts(section, tokenizer, tmp_path, seed=0).rows()
    x, before, mark, after, y = (hf.convert_tokens_to_ids(name) for name in ("x", *TILE_MARKS, "y"))
    size = prompt.pictures[0].num_tokens
    assert list(prompt.token_ids[:-1]) == [x, before, *[mark] * size, after, y] and prompt.pictures[0].start == 2
    with pytest.raises(DataError, match="the tokenizer has no <IMG_CONTEXT>"):
        _ = Tokenizer(character_tokenizer(LETTERS), processor=TILE_FILES).picture_tokens


def test_a_processor_in_the_new_form_is_read():
    files = {"processor_config.json": json.dumps({"image_processor": {**PROCESSOR, "patch_size": 16}})}
    processor = PictureProcessor.of(files, most_pixels=10**6)
    assert processor.side == 32 and processor.size(64, 96) == (2, 3)
