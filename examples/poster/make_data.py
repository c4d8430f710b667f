"""Make the example's tasks and its tokenizers: sft, train and test.jsonl.gz, tokenizer/ and tokenizer-pictures/, beside
this file.

    python make_data.py

A row has a brief ("hero: BIG SALE; FREE ENTRY; BOOK NOW"), the ground truth as JSON with its canvas, the SFT response:
the same layers, without spaces; and a reference picture, in which each layer of the ground truth is a box in the colour
of its type. The posters of the SFT rows are sloppier than the ground truths of train and test, so that something is
left for the reward to teach.

The tokenizer has one token for each piece of such a JSON text, each number and each word, so that a poster of four
layers takes about 60 tokens, not 350. Every other printable character is a token as well: the policy can write
anything, and much of it is not a poster. tokenizer-pictures/ has tokens for pictures besides, a chat template, and the
settings of a picture processor.
"""

import base64
import gzip
import io
import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hone_poster.tasks import COMPOSITIONS, WORDS, make_task

CANVAS = (100, 140)
SLOPPY, TIDY = 6, 1
"""How far boxes stand from their composition, in hundredths of the canvas: in SFT rows, and in ground truths."""
ROWS = {"sft": 1500, "train": 1500, "test": 100}
FRAGMENTS = (
    '{"layers":[', ',{"type":"', '{"type":"', '","x":', ',"y":', ',"width":', ',"height":', ',"text":"', '"}', "]}",
    ": ", "; ", "\n",
)  # fmt: skip
COLOURS = {
    "image": "#4c78a8", "logo": "#72b7b2", "title": "#e45756", "subtitle": "#f58518", "body": "#54a24b",
    "button": "#b279a2",
}  # fmt: skip
MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
TEMPLATE = """{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}{{ "\\n" }}"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 10,
    "merge_size": 2,
    "min_pixels": 400,
    "max_pixels": 14000,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""The canvas has 5 x 7 tokens."""


def rows(split: str) -> list[dict[str, str]]:
    seed = list(ROWS).index(split)
    jitter = SLOPPY if split == "sft" else TIDY
    tasks = [make_task(seed, number, canvas=CANVAS, styled=False, jitter=jitter) for number in range(ROWS[split])]
    return [
        {
            "prompt": task.brief,
            "poster": json.dumps(task.poster, separators=(",", ":")),
            "response": json.dumps({"layers": task.poster["layers"]}, separators=(",", ":")),
            "reference": reference(task.poster["layers"]),
        }
        for task in tasks
    ]


def reference(layers: Sequence[Mapping[str, Any]]) -> str:
    """A data URL of the layers' boxes."""
    image = Image.new("RGB", CANVAS, "white")
    draw = ImageDraw.Draw(image)
    for layer in layers:
        left, top = layer["x"], layer["y"]
        draw.rectangle((left, top, left + layer["width"] - 1, top + layer["height"] - 1), fill=COLOURS[layer["type"]])
    file = io.BytesIO()
    image.quantize(8).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def tokenizer() -> PreTrainedTokenizerFast:
    kinds = {kind for slots in COMPOSITIONS.values() for kind, *_ in slots}
    words = {word for texts in WORDS["latin"].values() for text in texts for word in text.split()}
    numbers = {str(number) for number in range(max(CANVAS) + 1)}
    pieces = sorted({*FRAGMENTS, *COMPOSITIONS, *kinds, *words, *numbers}, key=lambda piece: (-len(piece), piece))
    characters = [c for c in string.printable[:95] if c not in pieces]
    vocabulary = {piece: number for number, piece in enumerate(["<pad>", "<eos>", *pieces, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    longest_first = "|".join("".join("\\" + c if not c.isalnum() else c for c in piece) for piece in pieces)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first + r"|[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def main(folder: Path) -> None:
    for split in ROWS:
        lines = [json.dumps(row) + "\n" for row in rows(split)]
        (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
        print(f"{split}.jsonl.gz: {len(lines)} rows")
    made = tokenizer()
    made.save_pretrained(folder / "tokenizer")
    print(f"tokenizer: {len(made)} tokens")
    made.add_special_tokens({"additional_special_tokens": MARKS})
    made.chat_template = TEMPLATE
    made.save_pretrained(folder / "tokenizer-pictures")
    settings = json.dumps(PROCESSOR, indent=2) + "\n"
    (folder / "tokenizer-pictures" / "preprocessor_config.json").write_text(settings, encoding="utf-8")
    print(f"tokenizer-pictures: {len(made)} tokens, picture token {made.convert_tokens_to_ids(MARKS[1])}")


if __name__ == "__main__":
    main(Path(__file__).parent)
