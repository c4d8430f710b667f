"""Synthetic preferences about arithmetic: of two answers to a sum, the right one is preferred to a wrong one.

    python make_data.py [OUTPUT_FOLDER]        default: beside this file

Questions are all sums of two digits. Of the wrong answers two thirds are other sums' answers and one third is anything
that fits into four characters: a reward model that never saw nonsense would soon be shown nonsense that it likes.
pairs.jsonl has 21 pairs of each question, held_out.jsonl 3 with other wrong answers; sums.jsonl has the
questions with their answers, for the policy.
"""

import json
import random
import sys
from pathlib import Path

HELD_OUT_PAIRS, OTHER_SUMS, NONSENSE = 3, 16, 8
CHARACTERS = "0123456789+="


def wrong_answers(right: int, rng: random.Random) -> list[str]:
    """Different from each other and from the right one, in random order."""
    wrong = [str(n) for n in rng.sample([n for n in range(19) if n != right], OTHER_SUMS)]
    while len(wrong) < OTHER_SUMS + NONSENSE:
        text = "".join(rng.choices(CHARACTERS, k=rng.randint(0, 4)))
        if text not in (str(right), *wrong):
            wrong.append(text)
    rng.shuffle(wrong)
    return wrong


def main(output: Path) -> None:
    rng = random.Random(0)
    sums, pairs, held_out = [], [], []
    for a in range(10):
        for b in range(10):
            prompt, right = f"{a}+{b}=", a + b
            wrong = wrong_answers(right, rng)
            rows = [{"prompt": prompt, "chosen": str(right), "rejected": text} for text in wrong]
            sums.append({"prompt": prompt, "answer": str(right)})
            held_out += rows[:HELD_OUT_PAIRS]
            pairs += rows[HELD_OUT_PAIRS:]
    rng.shuffle(sums)
    for name, rows in (("sums", sums), ("pairs", pairs), ("held_out", held_out)):
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
