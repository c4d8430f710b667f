"""Conversations of several turns about a running total.

    python make_data.py [OUTPUT_FOLDER]        default: beside this file

The user names a number and then adds digits to it ("7", "+5", "+9"); the assistant always says the total so far
("7", "12", "21"). Only the assistant's turns are worth training on. talks.jsonl has 2000 of them, test.jsonl 100 that
stop before the last answer, as prompts of messages with that answer.
"""

import json
import random
import sys
from pathlib import Path

TALKS, TESTS, MAX_TURNS = 2000, 100, 4


def talk(rng: random.Random) -> list[dict[str, str]]:
    messages, total = [], 0
    for turn in range(rng.randint(2, MAX_TURNS)):
        number = rng.randint(0, 9)
        total += number
        messages.append({"role": "user", "content": f"+{number}" if turn else str(number)})
        messages.append({"role": "assistant", "content": str(total)})
    return messages


def main(output: Path) -> None:
    rng = random.Random(0)
    talks = [{"messages": talk(rng)} for _ in range(TALKS)]
    seen = {json.dumps(row["messages"]) for row in talks}
    tests = []
    while len(tests) < TESTS:
        messages = talk(rng)
        if json.dumps(messages) not in seen:
            tests.append({"prompt": messages[:-1], "answer": messages[-1]["content"]})
    for name, rows in (("talks", talks), ("test", tests)):
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
