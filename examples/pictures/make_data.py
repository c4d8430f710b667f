"""Pictures to count in: `train.jsonl.gz`, `test.jsonl.gz` and the tokenizer.

    python make_data.py

A picture is a grid of 3 x 3 cells of 8 x 8 pixels, some of them empty, the others with a square, a disc or a cross in
one of three colours. A row asks how many shapes have a colour. Pictures are data URLs, a few hundred bytes each. Test
pictures are never in train.
"""

import base64
import gzip
import io
import json
import random
from pathlib import Path

from PIL import Image

from hone.data.chat import character_tokenizer

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
SIDE, CELLS = 8, 3
SHAPES = {
    "square": lambda x, y: 1 <= x <= 6 and 1 <= y <= 6,
    "disc": lambda x, y: (x - 3.5) ** 2 + (y - 3.5) ** 2 <= 10,
    "cross": lambda x, y: x in (3, 4) or y in (3, 4),
}
PICTURES = {"train": 1200, "test": 200}
MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
TEMPLATE = """{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "min_pixels": 64,
    "max_pixels": 4096,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def drawn(chance: random.Random) -> list[str | None]:
    """The colours of the cells, from left to right and top to bottom; None: empty."""
    return [chance.choice([None, *COLOURS]) for _ in range(CELLS**2)]


def picture(cells: list[str | None], chance: random.Random) -> str:
    """A data URL."""
    image = Image.new("RGB", (CELLS * SIDE, CELLS * SIDE), (255, 255, 255))
    for number, colour in enumerate(cells):
        shape = SHAPES[chance.choice(list(SHAPES))]
        top, left = (place * SIDE for place in divmod(number, CELLS))
        for x in range(SIDE):
            for y in range(SIDE):
                if colour is not None and shape(x, y):
                    image.putpixel((left + x, top + y), COLOURS[colour])
    file = io.BytesIO()
    image.quantize(8).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def main(folder: Path = Path(__file__).parent) -> None:
    chance, seen = random.Random(0), set[tuple[str | None, ...]]()
    for part, count in PICTURES.items():
        rows: list[dict[str, str]] = []
        while len(rows) < count * len(COLOURS):
            cells = drawn(chance)
            if tuple(cells) in seen:
                continue
            seen.add(tuple(cells))
            image = picture(cells, chance)
            rows += [{"prompt": f"{c}?", "image": image, "answer": str(cells.count(c))} for c in COLOURS]
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"{part}.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
        print(f"{part}.jsonl.gz: {len(rows)} rows")
    tokenizer = character_tokenizer("0123456789?" + "".join(sorted(set("".join(COLOURS)))))
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "tokenizer" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    print(f"tokenizer: {len(tokenizer)} tokens, picture token {tokenizer.convert_tokens_to_ids(MARKS[1])}")


if __name__ == "__main__":
    main()
