"""What a tiny judge learns from: prompts exactly as the `judge` reward sends them, and the marks they deserve.

    python make_data.py [OUTPUT_FOLDER]        default: beside this file

Answers are those of GSM8K's arithmetic. A judge that says \\boxed{10} when both are the same and \\boxed{1} when not is
gamed by whatever it has never seen: wrong answers are therefore near the right one (a character changed, left out,
added), or right for another question, or, as a policy at the start of its training writes, anything at all.
"""

import gzip
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from compare import WIDTH, construct_inputs

SUMS = Path(__file__).parent / "../gsm8k-arithmetic/train.jsonl"
ROWS = 24_000
DIGITS, CHARACTERS = "0123456789", "0123456789+-*/="


def wrong_answer(right: str, others: list[str], rng: random.Random) -> str:
    """Anything but the right one."""
    while True:
        place = rng.randrange(len(right))
        wrong = rng.choice(
            [
                right[:place] + rng.choice(CHARACTERS) + right[place + 1 :],
                right[:place] + rng.choice(DIGITS) + right[place + 1 :],
                right[:place] + right[place + 1 :],
                right[:place] + rng.choice(CHARACTERS) + right[place:],
                right + "".join(rng.choices(CHARACTERS, k=rng.randint(1, 4))),
                "".join(rng.choices(CHARACTERS, k=rng.randint(1, 4))) + right,
                rng.choice(others),
                "".join(rng.choices(CHARACTERS, k=rng.randint(0, WIDTH))),
                "".join(rng.choices(DIGITS, k=len(right))),
            ]
        )[:WIDTH]
        if wrong != right:
            return wrong


def main(output: Path) -> None:
    rng = random.Random(0)
    answers = [json.loads(line)["answer"] for line in SUMS.read_text("utf-8").splitlines()]
    rows = []
    for right in rng.choices(answers, k=ROWS):
        is_right = rng.random() < 0.4
        prompt = construct_inputs("", right if is_right else wrong_answer(right, answers, rng), right)
        rows.append({"prompt": prompt, "mark": f"\\boxed{{{10 if is_right else 1}}}"})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (output / "judge.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"judge.jsonl.gz: {len(rows)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
