"""A calculator as a tool: the policy writes `<48/2>`, reads `=24;`, and gives its answer in the next turn.

The environment also judges the answer, so the run file needs no other reward. Own parser, no eval: whatever the policy
writes between the brackets is either arithmetic with whole and decimal numbers, or answered with `=?;`.
"""

import re
from fractions import Fraction

from hone.rollout.env import Episode, Observation

TOKENS = re.compile(r"\d+(?:\.\d+)?|[-+*/]")
MAX_CHARACTERS = 64


class Calculator:
    """One sample's calculator. A turn that ends in `>` is a call, any other one is the answer."""

    def __init__(self, episode: Episode) -> None:
        self.answer = str(episode.prompt.answer)
        self.used = False

    def step(self, turn: str) -> Observation:
        if not turn.endswith(">"):
            return Observation(None, reward=float(turn.strip() == self.answer))
        value = calculate(turn[:-1].rpartition("<")[2])
        metrics = {"tool_used": float(not self.used), "tool_errors": float(value is None)}
        self.used = True
        return Observation(f"={'?' if value is None else written(value)};", metrics=metrics)


def calculate(expression: str) -> Fraction | None:
    """The exact value of numbers joined by + - * /, products before sums; None for anything else."""
    tokens = TOKENS.findall(expression[:MAX_CHARACTERS])
    numbers, operators = tokens[::2], tokens[1::2]
    if "".join(tokens) != expression or len(numbers) != len(operators) + 1:
        return None
    if not all(number[0].isdigit() for number in numbers) or any(op not in "+-*/" for op in operators):
        return None
    total, term = Fraction(0), Fraction(numbers[0])
    for operator, number in zip(operators, map(Fraction, numbers[1:]), strict=True):
        if operator == "/" and number == 0:
            return None
        if operator in "*/":
            term = term * number if operator == "*" else term / number
        else:
            total, term = total + term, number if operator == "+" else -number
    return total + term


def written(value: Fraction) -> str:
    """A whole number as such, any other one with two decimals."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.2f}"
