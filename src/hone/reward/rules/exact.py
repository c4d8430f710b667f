"""`exact` and `gsm8k`: 1 when the response, or the number after its last `####`, equals the answer; else 0."""

from __future__ import annotations

import re
from decimal import Decimal

from hone.reward.signature import reward
from hone.types import Fault, Group, Score

_NUMBER = re.compile(r"\s*([-+]?)\s*\$?\s*([-+]?)(\d[\d,]*(?:\.\d+)?|\.\d+)")


@reward(minimum=0.0, maximum=1.0)
def exact(group: Group) -> list[float | Score]:
    """1 when the response is the answer, white space around both ignored; else 0."""
    if group.prompt.answer is None:
        return [Score(None, Fault.DATA, "the row has no answer")] * len(group.samples)
    answer = str(group.prompt.answer).strip()
    return [1.0 if sample.text.strip() == answer else 0.0 for sample in group.samples]


@reward(minimum=0.0, maximum=1.0)
def gsm8k(group: Group) -> list[float | Score]:
    """1 when the number after the last `####` of the response equals the answer's; else 0.

    The answer is a number, or a solution that ends in `#### number`. `1,234`, `$1234` and `1234.00` are one number.
    """
    answer = str(group.prompt.answer)
    gold = final_number(answer if "####" in answer else f"#### {answer}")
    if gold is None:
        return [Score(None, Fault.DATA, f"no number in the answer {answer[-40:]!r}")] * len(group.samples)
    return [1.0 if final_number(sample.text) == gold else 0.0 for sample in group.samples]


def final_number(text: str) -> Decimal | None:
    """The number right after the last `####`, exactly; None when there is none."""
    _, marker, end = text.rpartition("####")
    match = _NUMBER.match(end) if marker else None
    if match is None or (match[1] and match[2]):
        return None
    return Decimal(match[1] + match[2] + match[3].replace(",", ""))
