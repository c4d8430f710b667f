"""Demonstrations for the warm-up: `sft.jsonl`.

    python make_data.py

Two thirds are arithmetic from ../gsm8k-arithmetic/train.jsonl with the answer alone, as without a
calculator. One third is arithmetic at random with the calculator, as two SFT rows: the call, and the answer
after the calculator has spoken. What the calculator says stands in a prompt, so it is not a training target. Like that
the policy can use the tool, and mostly does not.
"""

import json
import random
from pathlib import Path

from calculator import calculate, written

WITHOUT_TOOL = 4000
WITH_TOOL = 2000


def random_expression(chance: random.Random) -> str:
    """Two or three numbers of one to four digits whose value is a whole number, as in the data."""
    while True:
        numbers = [str(chance.randrange(1, 10 ** chance.randint(1, 4))) for _ in range(chance.choice((2, 2, 3)))]
        expression = numbers[0] + "".join(chance.choice("+-*/") + number for number in numbers[1:])
        value = calculate(expression)
        if value is not None and value.denominator == 1 and 0 <= value < 100_000:
            return expression


def with_tool(expression: str) -> list[dict[str, str]]:
    """The two turns of one demonstration."""
    value = calculate(expression)
    assert value is not None
    prompt, call = f"{expression}=", f"<{expression}>"
    return [
        {"prompt": prompt, "answer": call},
        {"prompt": f"{prompt}{call}={written(value)};", "answer": written(value)},
    ]


def main() -> None:
    here, chance = Path(__file__).parent, random.Random(0)
    with open(here.parent / "gsm8k-arithmetic" / "train.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(WITHOUT_TOOL), strict=False)]
    for _ in range(WITH_TOOL):
        rows += with_tool(random_expression(chance))
    (here / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"sft.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
