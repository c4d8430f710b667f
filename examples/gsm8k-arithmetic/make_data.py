"""Take the arithmetic out of GSM8K's worked solutions: `<<48/2=24>>` becomes {"prompt": "48/2=", "answer": "24"}.

    python make_data.py [FOLDER_OF_GSM8K] [OUTPUT_FOLDER]        default: ../gsm8k, beside this file

What counts as an expression, a choice of this example: two or three whole numbers of one to four digits joined by
+ - * /, without brackets, signs or decimals, whose stated result is a whole number, not negative, of at most five
digits. Every occurrence counts, so frequent sums are frequent in the data. That gives 20,038 rows from train
and 3,566 from test; 967 of the latter ask what no train row asks (`"seen": false`), and stand first in test.jsonl:
`data.eval_rows=0:967` evaluates on those alone. All stated results are right (tests/data/test_example_data.py).

GSM8K is (c) OpenAI, MIT licence, in LICENSE beside this file.
"""

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

EXPRESSION = re.compile(r"<<(\d{1,4}(?:[-+*/]\d{1,4}){1,2}=)(\d{1,5})>>")


def expressions(gsm8k_file: Path) -> Iterator[tuple[str, str]]:
    """(prompt, answer) of every expression in the worked solutions, in the order of the file."""
    with gzip.open(gsm8k_file, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield from EXPRESSION.findall(json.loads(line)["answer"])


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path.name}: {len(rows)} rows")


def main(gsm8k: Path, output: Path) -> None:
    train = list(expressions(gsm8k / "train.jsonl.gz"))
    test = list(expressions(gsm8k / "test.jsonl.gz"))
    asked = {prompt for prompt, _ in train}
    test.sort(key=lambda row: row[0] in asked)  # stable: the order of the file within unseen and within seen
    write_rows(output / "train.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in train])
    rows = [{"prompt": prompt, "answer": answer, "seen": prompt in asked} for prompt, answer in test]
    write_rows(output / "test.jsonl", rows)
    print(f"never seen in train: {sum(not row['seen'] for row in rows)}")


if __name__ == "__main__":
    here = Path(__file__).parent
    folders = [Path(argument) for argument in sys.argv[1:]]
    main(*(folders + [here.parent / "gsm8k", here][len(folders) :]))
