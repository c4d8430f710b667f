"""Write GSM8K's arithmetic in a form whose rules a model of a million parameters can learn: the quickstart's rows.

    python make_data.py [FOLDER_OF_ARITHMETIC] [OUTPUT_FOLDER]        default: ../gsm8k-arithmetic, beside this file

Numbers have a fixed width and begin with their least significant digit: `48/2=` to `24` becomes `8400/2000=` to
`42000`. A digit of a sum then depends on digits at fixed places and on the carry before it.

train.jsonl begins with 32,000 rows for the supervised stage: variations of the expressions of GSM8K's train set with
other numbers, all different, so that there are rules to learn instead of a table. Then come, for GRPO, the 8,045
different expressions of the train set itself; no supervised row asks one of these. No row of either stage asks one of
the 967 expressions of test.jsonl that are not `seen`.

GSM8K is (c) OpenAI, MIT licence, in LICENSE beside this file.
"""

import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

SUPERVISED = 32_000
OPERAND_DIGITS, RESULT_DIGITS = 4, 5


def value(expression: str) -> Fraction | None:
    """Of numbers joined by + - * /; None for a division by zero."""
    first, *rest = re.findall(r"\d+|[-+*/]", expression)
    total, term = Fraction(0), Fraction(first)
    for sign, number in zip(rest[::2], map(int, rest[1::2]), strict=True):
        if sign in "+-":
            total, term = total + term, Fraction(number if sign == "+" else -number)
        elif sign == "*":
            term *= number
        elif number == 0:
            return None
        else:
            term /= number
    return total + term


def variations(expressions: Sequence[str], numbers: random.Random) -> Iterator[tuple[str, str]]:
    """(prompt, answer) of expressions like these, about as frequent, in which some numbers are others of the same form:
    as many digits, as many zeros at the end. Results are whole, not negative, of at most five digits."""

    def another(found: re.Match[str]) -> str:
        number = found[0]
        head = number.rstrip("0")
        if not head or numbers.random() < 0.5:
            return number
        return str(numbers.randrange(10 ** (len(head) - 1), 10 ** len(head))) + number[len(head) :]

    while True:
        expression = numbers.choice(expressions)
        for _ in range(30):
            changed = re.sub(r"\d+", another, expression)
            result = value(changed)
            if result is not None and result.denominator == 1 and 0 <= result < 10**RESULT_DIGITS:
                yield changed, str(result)
                break


def reversed_row(expression: str, result: str) -> dict[str, str]:
    prompt = re.sub(r"\d+", lambda number: number[0].zfill(OPERAND_DIGITS)[::-1], expression)
    return {"prompt": prompt, "answer": result.zfill(RESULT_DIGITS)[::-1]}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path.name}: {len(rows)} rows")


def main(arithmetic: Path, output: Path) -> None:
    train, test = (
        [json.loads(line) for line in (arithmetic / name).read_text("utf-8").splitlines()]
        for name in ("train.jsonl", "test.jsonl")
    )
    asked = [(row["prompt"], row["answer"]) for row in train]
    others = {*dict(asked), *(row["prompt"] for row in test)}
    varied: dict[str, str] = {}
    for expression, result in variations([expression for expression, _ in asked], random.Random(0)):
        if expression not in others:
            varied[expression] = result
        if len(varied) == SUPERVISED:
            break
    pairs = [*varied.items(), *dict(asked).items()]
    write_rows(output / "train.jsonl", [reversed_row(*pair) for pair in pairs])
    rows = [reversed_row(row["prompt"], row["answer"]) | {"seen": row["seen"]} for row in test]
    write_rows(output / "test.jsonl", rows)


if __name__ == "__main__":
    here = Path(__file__).parent
    folders = [Path(argument) for argument in sys.argv[1:]]
    main(*(folders + [here.parent / "gsm8k-arithmetic", here][len(folders) :]))
