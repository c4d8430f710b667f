"""The picture of a poster: the same bytes everywhere, text where it belongs, and what cannot be seen is known."""

import hashlib
import inspect
import json
import os
import subprocess
import sys
import textwrap

import pytest
from PIL import Image

from hone_poster import fonts, render_png
from hone_poster.parse import Poster
from hone_poster.parse import PosterLayer as Layer
from hone_poster.render import TextFacts, contrast_ratio, load_picture, render
from hone_poster.tasks import make_task
from hone_poster.typeset import LINE_HEIGHT, typeset

WHITE, RED = (255, 255, 255), (255, 0, 0)


def canvas(*layers: Layer) -> Poster:
    return Poster(1000, 1000, layers)


def facts(*layers: Layer) -> TextFacts:
    """What is known of the first text."""
    return render(canvas(*layers), 512).texts[0]


def words(text: str = "SALE", **keys: object) -> Layer:
    return Layer(**{"kind": "title", "x": 100, "y": 100, "width": 800, "height": 200, "text": text} | keys)


def box(fill: tuple[int, int, int], **keys: object) -> Layer:
    return Layer(**{"kind": "shape", "x": 0, "y": 0, "width": 1000, "height": 1000, "fill": fill} | keys)


def test_the_same_poster_has_the_same_bytes_in_every_process():
    def digest() -> str:
        tasks = [make_task(3, number, script=script) for number in range(3) for script in ("latin", "cjk")]
        return hashlib.sha256(b"".join(render_png(json.dumps(t.poster), t.poster) for t in tasks)).hexdigest()

    program = (
        "import hashlib, json\nfrom hone_poster import render_png\n"
        "from hone_poster.tasks import make_task\n" + textwrap.dedent(inspect.getsource(digest)) + "print(digest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == digest()


@pytest.mark.parametrize(("size", "drawn"), [((900, 1200), (384, 512)), ((1e6, 1), (512, 1)), ((3, 5), (307, 512))])
def test_the_longer_side_is_as_asked_for_whatever_the_canvas(size, drawn):
    assert render(Poster(*size, (words(),)), 512).image.size == drawn


def test_the_fonts_are_the_ones_this_version_was_made_with():
    for name, digest in fonts.SHA256.items():
        assert hashlib.sha256((fonts.FOLDER / name).read_bytes()).hexdigest() == digest
        assert (fonts.FOLDER / name).with_suffix(".LICENSE").is_file()


@pytest.mark.parametrize(("characters", "face"), [("Aé€Жα1", 0), ("海報あア한！。", 1), ("\uffff", 0)])
def test_each_character_comes_from_the_font_that_has_it(characters, face):
    assert {fonts.face_of(character) for character in characters} == {face}


@pytest.mark.parametrize("text", ["SALE", "夏日大促 SALE 한국", "a\nb", "x" * 300, "字" * 300])
def test_text_without_a_size_fills_its_box_and_stays_in_it(text):
    block = typeset(words(text), 1.0)
    left, top, right, bottom = block.box
    assert left >= 100 - 1e-6 and right <= 900 + 1e-6
    assert top >= 100 - 1e-6 and bottom <= 300 + 1e-6
    assert block.fit == 1.0


def test_lines_break_at_spaces_and_between_wide_characters():
    assert [run.text for run in typeset(words("one two three", width=260, font_size=60), 1.0).runs] == [
        "one two",
        "three",
    ]
    assert [run.text for run in typeset(words("夏日大促海報", width=130, font_size=60), 1.0).runs] == [
        "夏日",
        "大促",
        "海報",
    ]
    assert [run.text for run in typeset(words("WWWW", width=130, font_size=60), 1.0).runs] == ["WW", "WW"]


def test_lines_that_do_not_fit_are_left_out_and_counted():
    block = typeset(words("aa bb cc dd", width=100, height=2 * LINE_HEIGHT * 60, font_size=60), 1.0)
    assert [run.text for run in block.runs] == ["aa", "bb"]
    assert block.fit == 0.5
    assert typeset(words(font_size=400), 1.0).fit == 0.0


def test_text_keeps_off_the_sides_of_a_box_with_a_colour():
    left, _, right, _ = typeset(words("x" * 40), 1.0, padded=True).box
    assert left >= 100 + 0.15 * 200 and right <= 900 - 0.15 * 200


def test_alignment_moves_a_line_in_its_box():
    lefts = [typeset(words(font_size=60, align=align), 1.0).box[0] for align in ("left", "center", "right")]
    width = sum(map(fonts.advance, "SALE")) * 60
    assert lefts == [pytest.approx(100), pytest.approx(500 - width / 2), pytest.approx(900 - width)]


def test_what_is_drawn_is_where_it_should_be():
    image = render(canvas(box(RED, x=250, y=250, width=500, height=500)), 512).image
    assert image.getpixel((127, 256)) == WHITE
    assert image.getpixel((128, 256)) == image.getpixel((383, 256)) == RED
    assert image.getpixel((384, 256)) == WHITE


def test_half_opaque_is_half_way():
    assert render(canvas(box((255, 55, 55), opacity=0.5)), 512).image.getpixel((9, 9)) == (255, 155, 155)


def test_text_without_a_colour_takes_the_one_that_stands_out():
    dark, light = facts(box((20, 20, 20)), words()), facts(box((240, 240, 240)), words())
    assert dark.contrast > 10 and light.contrast > 10


def test_contrast_is_that_of_the_web_guidelines():
    assert contrast_ratio((0, 0, 0), WHITE) == pytest.approx(21)
    assert contrast_ratio((119, 119, 119), WHITE) == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize(
    ("change", "visible"),
    [
        ({}, 1.0),
        ({"color": WHITE}, 0.0),
        ({"color": (230, 230, 230)}, 0.0),
        ({"opacity": 0.0}, 0.0),
        ({"x": 1200}, 0.0),
        ({"x": 800}, 0.5),
        ({"y": 800}, 0.5),
        ({"font_size": 0.0}, 0.0),
        ({"font_size": 5.0}, 0.5),
        ({"x": 0, "y": 0, "width": 9000, "height": 9000, "font_size": 5000.0}, 0.0),
    ],
)
def test_a_text_is_as_visible_as_it_is_drawn(change, visible):
    """One wide character in the middle of a square: half the square off the canvas is half the character."""
    assert facts(words(**{"text": "海", "width": 400, "height": 400} | change)).visible == pytest.approx(
        visible, abs=0.03
    )


def test_what_is_drawn_later_hides_a_text():
    text = words("海", x=100, y=100, width=400, height=400)
    assert facts(text, box(RED, x=0, y=0, width=300, height=1000)).visible == pytest.approx(0.5, abs=0.01)
    assert facts(text, Layer("image", 0, 0, 1000, 1000)).visible == 0.0
    assert facts(text, box(RED, opacity=0.3)).visible == 1.0
    assert facts(text, words("海", x=100, y=100, width=400, height=400)).visible == 0.0
    assert facts(box(RED), text).visible == 1.0


def test_over_a_picture_of_unknown_colours_contrast_says_nothing():
    placeholder_gray = (203, 213, 225)
    assert facts(Layer("image", 0, 0, 1000, 1000), words(color=placeholder_gray)).visible == 1.0
    assert facts(box(placeholder_gray), words(color=placeholder_gray)).visible == 0.0


def test_pictures_come_from_their_folder_by_handle_and_from_nowhere_else(tmp_path):
    root = tmp_path / "pictures"
    root.mkdir()
    Image.new("RGB", (4, 4), RED).save(root / "red.png")
    Image.new("RGB", (4, 4), RED).save(tmp_path / "outside.png")
    (root / "fake.png").write_text("no picture")
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    assert load_picture(root, "red.png") is not None
    for name in (
        "../outside.png",
        str(tmp_path / "outside.png"),
        "fake.png",
        "none.png",
        "link.png",
        ".",
        "\0",
        "x" * 999,
    ):
        assert load_picture(root, name) is None

    def corner(handle: str, **keys: object) -> object:
        layer = Layer("image", 0, 0, 1000, 1000, image=handle)
        return render(canvas(layer), 512, images={"7": "red.png"}, **keys).image.getpixel((200, 300))

    assert corner("7", image_root=root) == RED
    assert corner("7") != RED
    assert corner("red.png", image_root=root) != RED


def test_only_the_part_of_a_picture_that_shows_is_scaled(tmp_path):
    two = Image.new("RGB", (200, 100), RED)
    two.paste((0, 0, 255), (100, 0, 200, 100))
    two.save(tmp_path / "two.png")

    def drawn(**box: float) -> Image.Image:
        layer = Layer("image", **({"x": 0, "y": 0, "width": 1000, "height": 1000} | box), image="7")
        return render(canvas(layer), 512, images={"7": "two.png"}, image_root=tmp_path).image

    whole, moved = drawn(), drawn(x=-500)
    assert (whole.getpixel((100, 9)), whole.getpixel((400, 9))) == (RED, (0, 0, 255))
    assert (moved.getpixel((100, 9)), moved.getpixel((400, 9))) == ((0, 0, 255), WHITE)
    huge = drawn(x=-1e6 + 250, y=-1e6 + 500, width=1e6, height=1e6)  # 512,000 pixels square, were it scaled whole
    assert (huge.getpixel((100, 100)), huge.getpixel((200, 100))) == ((0, 0, 255), WHITE)
    assert drawn(x=999.9, width=1e-3, height=1e6).size == (512, 512)
