"""What comes before and after a sandbox: the program in a response, the tests of a row, the comparison."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.reward.code import NoProgram, last_program
from hone.reward.sandbox.base import Call, ProgramEnding, ProgramRun, Stdin
from hone.reward.sandbox.unit_tests import BadTests, UnitTest, read_tests, same_text, same_value

RESPONSES = [
    ("```python\nprint(1)\n```", "print(1)"),
    ("```\nprint(1)\n```", "print(1)"),
    ("```py\nprint(1)\n```\nIt prints\n```text\n1\n```", "print(1)"),
    ("```python\nfirst\n```\nbetter:\n```Python3\nsecond\n```\ndone", "second"),
    ("<think>\n```python\nmaybe\n```\n</think>\n```python\nsure\n```", "sure"),
    ("a </think> b </think>\n```\nlast\n```", "last"),
    ("~~~python\nx = '```'\n~~~", "x = '```'"),
    ("````python\n```\ninner\n```\n````", "```\ninner\n```"),
    ("  ```python title=a.py\n  x\n  ```", "x"),
    ("   ```python\n   if x:\n       y\n z\n   ```", "if x:\n    y\nz"),
    ("1. So:\n\n   ```python\n   x\n   ```\n", "x"),
    ("10. So:\n    ```python\n    x\n    ```", "x"),
    ("- ```python\n  x\n  ```", "x"),
    ("- a list\n\nand then\n```python\nx\n```", "x"),
    ("```python\ns = '''\n    ```\n'''\n```", "s = '''\n    ```\n'''"),
    ("```{python}\nx\n```", "x"),
    ("```{.python .numberLines}\nx\n```", "x"),
    ("```{python, echo=FALSE}\nx\n```", "x"),
    ("```python3.11\nx\n```", "x"),
    ("```python:a.py\nx\n```", "x"),
    ("```python\r\nx\r\n```\r\n", "x\r"),
    ("```python\n```", ""),
]
NO_PROGRAM = [
    ("The answer is 7.", "no code block"),
    ("```cpp\nint main() {}\n```", "no code block"),
    ("```python-repl\n>>> 1\n```", "no code block"),
    ("```pycon\n>>> 1\n```", "no code block"),
    ("    ```python\n    x\n    ```", "no code block"),
    ("<think>\n```python\nprint(1)\n```", "its reasoning is not closed"),
    ("```python\nprint(1)\n```</think>", "no code block"),
    ("```python\nprint(1)\n```\n```python\nprint(", "its last code block is not closed"),
    ("", "no code block"),
]


@pytest.mark.parametrize(("response", "program"), RESPONSES)
def test_the_program_is_the_last_python_block_after_the_reasoning(response, program):
    assert last_program(response) == program


@pytest.mark.parametrize(("response", "why"), NO_PROGRAM)
def test_a_response_without_a_program_says_why(response, why):
    with pytest.raises(NoProgram, match=why):
        last_program(response)


@given(st.text(alphabet="`~\n py</think>x", max_size=200))
def test_any_text_has_a_program_or_a_reason(text):
    try:
        assert isinstance(last_program(text), str)
    except NoProgram as error:
        assert str(error)


ADD = (UnitTest(Stdin("3 4\n"), "7\n"),)
CALL = (UnitTest(Call("add", (3, 4)), 7),)


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ([{"stdin": "3 4\n", "stdout": "7\n"}], ADD),
        ([{"input": "3 4\n", "output": "7\n"}], ADD),
        ({"inputs": ["3 4\n"], "outputs": ["7\n"]}, ADD),
        ('{"inputs": ["3 4\\n"], "outputs": ["7\\n"]}', ADD),
        ({"inputs": [["3 4", ""]], "outputs": ["7\n"]}, ADD),
        ([{"call": "add", "args": [3, 4], "expected": 7}], CALL),
        ([{"fn_name": "add", "input": "3\n4", "output": 7}], CALL),
        ({"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}, CALL),
        (["assert add(3, 4) == 7"], CALL),
        ([{"call": "f", "kwargs": {"a": 1}, "expected": None}], (UnitTest(Call("f", (), {"a": 1}), None),)),
        (["assert f((1, 2), k={3}) == (4, 'x')"], (UnitTest(Call("f", ([1, 2],), {"k": [3]}), [4, "x"]),)),
        ([{"stdin": "", "stdout": 7}], (UnitTest(Stdin(""), "7"),)),
    ],
)
def test_tests_are_read_in_every_form(tests, expected):
    assert read_tests(tests) == expected


@pytest.mark.parametrize(
    "tests",
    [
        None,
        7,
        "not json",
        "[" * 100_000,
        [],
        {},
        {"inputs": ["1"], "outputs": []},
        {"inputs": ["1"]},
        {"inputs": "1", "outputs": None},
        [{"stdin": "1"}],
        [{"stdout": "1"}],
        [{"call": "f", "args": [1]}],
        [{"call": "f", "args": 1, "expected": 1}],
        [{"call": "f", "kwargs": [1], "expected": 1}],
        [{"call": "f", "args": [float("nan")], "expected": 1}],
        [{"stdin": {}, "stdout": "1"}],
        ["assert f(x) == 1"],
        ["assert f(1)"],
        ["assert f(1) == g(2)"],
        ["import os"],
        [7],
    ],
)
def test_tests_that_cannot_be_used_are_refused(tests):
    with pytest.raises(BadTests):
        read_tests(tests)


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("7\n", "7", True),
        ("7", " 7 \r\n\n\n", True),
        ("1\n2", "1 2", False),
        ("a b", "a  b", True),
        ("7", "7.0", False),
        ("7", "8", False),
        ("0.333333", "0.3333333333", True),
        ("0.333333", "0.334", False),
        ("0.5", "1e-1", False),
        ("1e3", "1000", True),
        ("1000000007", "1000000008", False),
        ("0.5", "nan", False),
        ("YES", "yes", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_text_is_compared_by_lines_and_decimals_by_value(expected, got, same):
    assert same_text(expected, got, 1e-6) is same


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (7, 7, True),
        (7, 7.0, True),
        (7, 8, False),
        (True, True, True),
        (0.1 + 0.2, 0.3, True),
        (0.3, 0.31, False),
        (0.3, "0.3", False),
        (0.3, None, False),
        ([1, [2, "x"]], [1, [2, "x"]], True),
        ([1, 2], [1], False),
        ([1], 1, False),
        ({"a": 0.5}, {"a": 0.5}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, None, True),
        (None, 0, False),
        ("", None, False),
    ],
)
def test_values_are_compared_as_python_does(expected, got, same):
    assert same_value(expected, got, 1e-6) is same


@pytest.mark.parametrize("output", [b"", b"7 8", b"[" * 50_000, b"\xff", b"9" * 5000, b"{", b"NaN"])
def test_output_that_is_no_value_passes_nothing(output):
    test = UnitTest(Call("f"), 7.5)
    assert not test.passed_by(ProgramRun(ProgramEnding.FINISHED, output), 1e-6)


def test_a_huge_whole_number_is_not_a_decimal():
    assert not UnitTest(Call("f"), 7.5).passed_by(ProgramRun(ProgramEnding.FINISHED, b"1" + b"0" * 400), 1e-6)


@pytest.mark.parametrize("ending", [ending for ending in ProgramEnding if ending is not ProgramEnding.FINISHED])
def test_the_right_output_of_a_run_that_ended_badly_passes_nothing(ending):
    assert UnitTest(Stdin(""), "7").passed_by(ProgramRun(ProgramEnding.FINISHED, b"7"), 0)
    assert not UnitTest(Stdin(""), "7").passed_by(ProgramRun(ending, b"7"), 0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(json_values)
def test_every_value_is_the_same_as_itself_after_its_way_out(value):
    assert UnitTest(Call("f"), value).passed_by(
        ProgramRun(ProgramEnding.FINISHED, json.dumps(value).encode() + b"\n"), 0
    )


@given(json_values)
def test_rows_are_read_or_refused(value):
    try:
        assert all(isinstance(test, UnitTest) for test in read_tests(value))
    except BadTests as error:
        assert str(error)
