"""Unit tests of a row, and comparison of a program's results with the expected ones, outside the sandbox.

Forms of a row's tests, each an object or the same as a JSON string:

    [{"stdin": "3 4\\n", "stdout": "7\\n"}, ...]                     also "input" and "output"
    [{"call": "add", "args": [3, 4], "expected": 7}, ...]           "kwargs" too; "fn_name" and "output" are taken
    {"inputs": ["3 4\\n"], "outputs": ["7\\n"]}                      APPS, TACO, PRIME
    {"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}          the same, of a function
    ["assert add(3, 4) == 7", ...]                                  MBPP; both sides literal

Texts are equal if their lines are, ignoring trailing white space and empty lines at the end; values if they are equal
in Python, with tuples as lists. A number that the row writes with a decimal point is compared with a tolerance,
absolute or relative; integers exactly.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.reward.sandbox.base import Call, Input, ProgramEnding, ProgramRun, Stdin

_DECIMAL = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
MAX_TESTS = 10_000


class BadTests(ValueError):
    """The row's tests cannot be used. A data fault."""


@dataclass(frozen=True, slots=True)
class UnitTest:
    """An input and its expected output, which never enters a sandbox."""

    given: Input
    expected: Any
    """Text for `Stdin`, plain data for `Call`."""

    def passed_by(self, run: ProgramRun, tolerance: float) -> bool:
        """Whether a run finished with the expected output."""
        if run.ending is not ProgramEnding.FINISHED:
            return False
        if isinstance(self.given, Stdin):
            return same_text(self.expected, run.output.decode("utf-8", "replace"), tolerance)
        try:
            return same_value(self.expected, json.loads(run.output), tolerance)
        except (ValueError, RecursionError, OverflowError):  # nested or longer than any expected value
            return False


def read_tests(tests: Any) -> tuple[UnitTest, ...]:
    """The tests of a row, in one of the forms above.

    Raises:
        BadTests: none of the forms, or no test at all.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise BadTests(f"the tests are text that is not JSON: {error}") from error
    if isinstance(tests, Mapping) and "inputs" in tests:
        found = _columns(tests)
    elif isinstance(tests, Sequence):
        found = tuple(_row(test, number) for number, test in enumerate(tests, 1))
    else:
        raise BadTests(f"the tests are {type(tests).__name__}, not a list or an object with `inputs` and `outputs`")
    if not 0 < len(found) <= MAX_TESTS:
        raise BadTests(f"{len(found)} tests; at least one and at most {MAX_TESTS} are needed")
    return found


def _columns(tests: Mapping[str, Any]) -> tuple[UnitTest, ...]:
    inputs, outputs, function = tests["inputs"], tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise BadTests("`inputs` and `outputs` are not lists of one length")
    pairs = list(zip(inputs, outputs, strict=True))
    if function is None:
        return tuple(UnitTest(Stdin(_text(given)), _text(expected)) for given, expected in pairs)
    return tuple(UnitTest(Call(str(function), _arguments(given)), _value(expected)) for given, expected in pairs)


def _row(test: Any, number: int) -> UnitTest:
    if isinstance(test, str):
        return _assertion(test)
    if not isinstance(test, Mapping):
        raise BadTests(f"test {number} is {type(test).__name__}, not an object")
    function = test.get("call", test.get("fn_name"))
    if function is None:
        given, expected = test.get("stdin", test.get("input")), test.get("stdout", test.get("output"))
        if given is None or expected is None:
            raise BadTests(f"test {number} has neither `stdin` and `stdout` nor `call` and `expected`")
        return UnitTest(Stdin(_text(given)), _text(expected))
    if "expected" not in test and "output" not in test:
        raise BadTests(f"test {number} calls {function} but has no `expected`")
    args, kwargs = _arguments(test.get("args", test.get("input", ()))), test.get("kwargs", {})
    if not isinstance(kwargs, Mapping):
        raise BadTests(f"test {number}: `kwargs` is {type(kwargs).__name__}, not an object")
    return UnitTest(Call(str(function), args, dict(kwargs)), _value(test.get("expected", test.get("output"))))


def _assertion(line: str) -> UnitTest:
    """`assert f(args) == value`, both sides literal: anything else would have to run where the program can see it."""
    try:
        (statement,) = ast.parse(line.strip()).body
        assert isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)
        (compared,) = statement.test.comparators
        call = statement.test.left
        assert isinstance(call, ast.Call) and isinstance(statement.test.ops[0], ast.Eq)
        args = tuple(_value(ast.literal_eval(arg)) for arg in call.args)
        kwargs = {str(word.arg): _value(ast.literal_eval(word.value)) for word in call.keywords}
        return UnitTest(Call(ast.unparse(call.func), args, kwargs), _value(ast.literal_eval(compared)))
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError) as error:
        raise BadTests(f"not of the form `assert f(literals) == literal`: {line[:80]!r}") from error


def _text(value: Any) -> str:
    """A text, a list of lines joined, or a number as it is printed."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return "\n".join(map(_text, value))
    if isinstance(value, int | float):
        return str(value)
    raise BadTests(f"{type(value).__name__} cannot be used as standard input or output")


def _arguments(given: Any) -> tuple[Any, ...]:
    """A list of arguments; or text with one JSON value to a line (LiveCodeBench)."""
    if isinstance(given, str):
        try:
            return tuple(json.loads(line) for line in given.splitlines() if line.strip())
        except (ValueError, RecursionError) as error:
            raise BadTests(f"arguments are text that is not JSON by the line: {given[:80]!r}") from error
    if not isinstance(given, Sequence):
        raise BadTests(f"arguments are {type(given).__name__}, not a list")
    return tuple(_value(argument) for argument in given)


def _value(value: Any) -> Any:
    """Plain data in the form in which a sandbox returns it: JSON."""
    try:
        return json.loads(json.dumps(value, default=_plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadTests(f"not plain data: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not plain data")


def same_text(expected: str, got: str, tolerance: float) -> bool:
    """Whether two outputs are equal up to white space around lines, empty lines at the end, rounding of decimals."""
    expected_lines, got_lines = expected.rstrip().split("\n"), got.rstrip().split("\n")
    if len(expected_lines) != len(got_lines):
        return False
    return all(_same_line(e.strip(), g.strip(), tolerance) for e, g in zip(expected_lines, got_lines, strict=True))


def _same_line(expected: str, got: str, tolerance: float) -> bool:
    if expected == got:
        return True
    expected_words, got_words = expected.split(), got.split()
    if len(expected_words) != len(got_words):
        return False
    return all(
        e == g or (_DECIMAL.fullmatch(e) and _FLOAT.fullmatch(g) and _close(float(e), float(g), tolerance))
        for e, g in zip(expected_words, got_words, strict=True)
    )


def same_value(expected: Any, got: Any, tolerance: float) -> bool:
    """Whether two pieces of plain data are equal, decimals within the tolerance."""
    if isinstance(expected, float):
        return isinstance(got, int | float) and _close(expected, float(got), tolerance)
    if isinstance(expected, list):
        return (
            isinstance(got, list)
            and len(got) == len(expected)
            and all(same_value(e, g, tolerance) for e, g in zip(expected, got, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(same_value(value, got[name], tolerance) for name, value in expected.items())
        )
    return type(got) in (int, float, bool, str, type(None)) and expected == got


def _close(expected: float, got: float, tolerance: float) -> bool:
    return math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance)
