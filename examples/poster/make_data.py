"""Make the example's tasks and its tokenizer: sft, train and test.jsonl.gz, and tokenizer/, beside this file.

    python make_data.py

A row has a brief ("hero: BIG SALE; FREE ENTRY; BOOK NOW"), the ground truth as JSON with its canvas, and the response
to imitate: the same layers, without spaces. The posters to imitate are sloppier than the ground truths of train and
test, so that there is something left for the reward to teach.

The tokenizer has one token for each piece of such a JSON text, each number and each word, so that a poster of four
layers takes about 60 tokens, not 350. Every other printable character is a token as well: the policy can write
anything, and much of it is no poster.
"""

import gzip
import json
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hone_poster.tasks import COMPOSITIONS, WORDS, make_task

CANVAS = (100, 140)
SLOPPY, TIDY = 6, 1
"""How far boxes stand from their composition, in hundredths of the canvas: to imitate, and as ground truth."""
ROWS = {"sft": 1500, "train": 1500, "test": 100}
FRAGMENTS = (
    '{"layers":[', ',{"type":"', '{"type":"', '","x":', ',"y":', ',"width":', ',"height":', ',"text":"', '"}', "]}",
    ": ", "; ", "\n",
)  # fmt: skip


def rows(split: str) -> list[dict[str, str]]:
    seed = list(ROWS).index(split)
    jitter = SLOPPY if split == "sft" else TIDY
    tasks = [make_task(seed, number, canvas=CANVAS, styled=False, jitter=jitter) for number in range(ROWS[split])]
    return [
        {
            "prompt": task.brief,
            "poster": json.dumps(task.poster, separators=(",", ":")),
            "response": json.dumps({"layers": task.poster["layers"]}, separators=(",", ":")),
        }
        for task in tasks
    ]


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


if __name__ == "__main__":
    main(Path(__file__).parent)
