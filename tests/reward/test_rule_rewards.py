"""Rewards by rule: tables of what each pays for, by hand, and fuzz."""

import asyncio
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_search import examples

from hone.config.rewards import BUILTIN_REWARDS
from hone.errors import ConfigError
from hone.reward.resolve import Unusable, load, resolve
from hone.reward.signature import check_scores, declared_range
from hone.types import Fault, Group, Prompt, Sample, VersionSpan


def group(*texts: str, answer: object = "4", columns=None, num_tokens=None, mask=None, finish="stop") -> Group:
    def sample(index: int, text: str) -> Sample:
        n = len(text) if num_tokens is None else num_tokens
        return Sample("p", index, (5,) * n, (-0.5,) * n, (VersionSpan(0, n),), finish, text, loss_mask=mask)

    samples = tuple(sample(i, text) for i, text in enumerate(texts))
    return Group(Prompt("p", 0, "2+2=", (6, 10), answer=answer, columns=columns or {}), samples)


def scores(use, scored, tmp_path, **args):
    """Checked as the run checks them, in this process: nothing here hangs."""
    function = load(resolve(use, tmp_path), args)
    return check_scores(function(scored, **args), scored, declared_range(function))


def values(use, scored, tmp_path, **args):
    return [score.value for score in scores(use, scored, tmp_path, **args)]


def test_every_rule_declares_its_range(tmp_path):
    needs = {"regex": {"pattern": "a"}, "json_schema": {"schema": {}}, "length": {"max_tokens": 2, "buffer_tokens": 1}}
    for name in (name for name, row in BUILTIN_REWARDS.items() if row.runs != "stateful"):
        declared = declared_range(load(resolve(name, tmp_path), needs.get(name, {})))
        assert declared.minimum is not None and declared.maximum is not None, name


# ---- format

GOOD = "<think>two and two</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        (GOOD, 1),
        (f"  {GOOD}\n", 1),
        ("<think>a</think><answer>4</answer>", 1),
        (GOOD + " so it is 4", 0),
        ("Well. " + GOOD, 0),
        (GOOD.replace("\n", " and "), 0),
        (GOOD + GOOD, 0),
        ("<answer>4</answer><think>a</think>", 0),
        ("<think>a<answer>4</answer></think>", 0),
        ("<think>a</think><answer>4", 0),
        ("<think></think><answer>4</answer>", 0),
        ("<think>a</think><answer> \n</answer>", 0),
        ("<think>I write <answer> next</think><answer>4</answer>", 0),
        (f"```\n{GOOD}\n```", 0),
        (f"`{GOOD}`", 0),
        (f'"{GOOD}"', 0),
        ("> " + GOOD.replace("\n", "\n> "), 0),
        ("<THINK>a</THINK><ANSWER>4</ANSWER>", 0),
        ("<think>" * 9 + GOOD, 0),
        ("<think>\u200b\u2060</think><answer>4</answer>", 0),
        ("<think>a</think><answer>\ufeff \u3164</answer>", 0),
        ("<think>\U000e0041\u00ad\ufe0f</think><answer>4</answer>", 0),
        ("<think>…</think><answer>√\u200b</answer>", 1),
        ("", 0),
    ],
)
def test_format(text, paid, tmp_path):
    assert values("format", group(text), tmp_path) == [paid]


def test_format_with_tags_of_one_s_own(tmp_path):
    assert values("format", group("<a>1</a> <b>2</b> <c>3</c>"), tmp_path, tags=["a", "b", "c"]) == [1.0]
    opened = group("two and two</think><answer>4</answer>", GOOD)
    assert values("format", opened, tmp_path, opened=True) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        (r"<think>a</think><answer>It is \boxed{4}</answer>", 1),
        ("<think>a</think><answer>4</answer>", -0.5),
        (r"<think>\boxed{4}</think><answer>4</answer>", -0.5),
        (r"<think>\boxed{4}</think><answer>\boxed{4}</answer>", -0.5),
        (r"<think>a</think><answer>\boxed{4} or \boxed{5}</answer>", -0.5),
        (r"\boxed{4}", -0.5),
        (r"<think>a</think><answer>\boxed{4</answer>", -0.5),
        (r"<think>a</think><answer>\boxed{\frac{1}{2}</answer>", -0.5),
        (r"<think>a</think><answer>\boxed{\frac{1}{2}}</answer>", 1),
        (r"<think>a</think><answer>\boxed{\{1, 2\}}</answer>", 1),
        (r"<think>a</think><answer>\boxed{ }</answer>", -0.5),
    ],
)
def test_strict_format(text, paid, tmp_path):
    assert values("strict_format", group(text), tmp_path) == [paid]


# ---- choice


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("The answer is B.", "B"),
        ("Answer: B", "B"),
        ("ANSWER: **B**", "B"),
        ("The correct answer is (B) Paris", "B"),
        ("The correct option is: B", "B"),
        ("Final answer: $\\text{B}$", "B"),
        ("Final: A", "A"),
        ("The answer depends on pH. Final: A", "A"),
        ("the answer d follows. Answer: A", "A"),
        ("The answer is A because it is hot", None),
        ("The answer is A good question", None),
        ("The answer is A, because it is hot", "A"),
        ("First I thought the answer is A. The answer is C", "C"),
        ("B", "B"),
        ("(B)", "B"),
        ("so it must be\n**B.**", "B"),
        ("so it must be\nB) Paris", "B"),
        ("Both A and B are wrong", None),
        ("I would say that C is right", None),
        ("The answer is E", None),
        ("The answer is b", None),
        ("The answer is AB", None),
        ("The answer is A-B", None),
        ("The answer is B's", None),
        (r"\boxed{C}", "C"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{A} no \boxed{C}", "C"),
        (r"\boxed{A or C}", None),
        (r"\boxed{4}", None),
        ("<answer>D</answer>", "D"),
        ("<answer>The answer is D</answer> although A", "D"),
        ("<answer>A, B, C, D</answer>", None),
        (r"<answer>\boxed{B} for all A</answer>", "B"),
        ("<think>The answer is A</think>The answer is B", "B"),
        ("<think>The answer is A</think>", None),
        ("<think>The answer is A", None),
        ("", None),
    ],
)
def test_choice(text, chosen, tmp_path):
    for letter in "ABCD":
        (score,) = scores("choice", group(text, answer=letter), tmp_path)
        assert score.value == float(letter == chosen)
        assert (score.fault is Fault.MODEL) == (chosen is None)


@pytest.mark.parametrize("gold", ["B", "(B)", "b) ", " B. ", 1])
def test_how_rows_give_the_right_option(gold, tmp_path):
    found = values("choice", group("Answer: B", "Answer: A", answer=gold), tmp_path)
    assert found == ([None, None] if gold == "b) " else [1.0, 0.0])


def test_options_must_exist(tmp_path):
    three = {"options": ["red", "green", "blue"]}
    chosen = group("Answer: C", "Answer: D", answer="C", columns=three)
    assert values("choice", chosen, tmp_path, options_column="options") == [1.0, 0.0]
    named = group("Answer: E", answer="E", columns={"options": {"A": "x", "E": "y"}})
    assert values("choice", named, tmp_path, options_column="options", letters="ABCDE") == [1.0]
    for columns, answer in (
        (three, "D"),
        ({}, "A"),
        ({"options": "red"}, "A"),
        ({"options": {"AB": 1}}, "A"),
        ({"options": list("abcdef")}, "A"),
    ):
        (bad,) = scores(
            "choice", group("Answer: A", answer=answer, columns=columns), tmp_path, options_column="options"
        )
        assert bad.fault is Fault.DATA


# ---- length and repetition


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (500, -1.0)]
)
def test_soft_overlong_punishment_by_hand(num_tokens, penalty, tmp_path):
    found = values("length", group("x", num_tokens=max(1, num_tokens)), tmp_path, max_tokens=100, buffer_tokens=20)
    assert found == [pytest.approx(penalty)]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(50, 0.0), (45, -0.5), (55, -0.5), (40, -1.0), (60, -1.0), (500, -1.0)]
)
def test_target_length_by_hand(num_tokens, penalty, tmp_path):
    found = values("length", group("x", num_tokens=num_tokens), tmp_path, target_tokens=50, tolerance_tokens=10)
    assert found == [pytest.approx(penalty)]


def test_length_counts_what_the_policy_wrote_and_tells_what_was_cut(tmp_path):
    own = (True,) * 40 + (False,) * 60
    scored = group("x", num_tokens=100, mask=own, finish="length")
    (score,) = scores("length", scored, tmp_path, max_tokens=50, buffer_tokens=20)
    assert score.value == pytest.approx(-0.5)
    assert score.metrics == {"truncated": 1.0}


def test_a_length_that_is_not_known_is_no_length(tmp_path):
    (score,) = scores("length", group("some text", num_tokens=0), tmp_path, max_tokens=50, buffer_tokens=20)
    assert score.fault is Fault.INFRA


@pytest.mark.parametrize(
    ("text", "args", "penalty"),
    [
        ("a b c d", {}, 0.0),
        ("a b c a b c", {}, -0.25),  # abc bca cab abc: 3 different of 4
        ("A b c a B c", {}, -0.25),
        ("a " * 100, {}, -97 / 98),
        ("a b a b", {"ngram": 2}, -1 / 3),  # ab ba ab
        ("a b", {}, 0.0),
        ("", {}, 0.0),
        ("哈哈哈哈", {"unit": "characters", "ngram": 2}, -2 / 3),
        ("哈 哈 哈 哈", {"unit": "characters", "ngram": 2}, -2 / 3),
    ],
)
def test_repetition_by_hand(text, args, penalty, tmp_path):
    assert values("repetition", group(text), tmp_path, **args) == [pytest.approx(penalty)]


# ---- regex and JSON schema


@pytest.mark.parametrize(
    ("text", "args", "paid"),
    [
        ("total 4 apples", {"pattern": r"\d+"}, 1),
        ("no number", {"pattern": r"\d+"}, 0),
        ("total 4", {"pattern": r"\d+", "match": "whole"}, 0),
        (" 4\n", {"pattern": r"\d+", "match": "whole"}, 1),
        ("TOTAL", {"pattern": "(?i)total"}, 1),
        ("<think>5</think>none", {"pattern": r"\d", "where": "after_reasoning"}, 0),
        ("total: 4", {"pattern": r"total: (?P<answer>\d+)"}, 1),
        ("total: 5", {"pattern": r"total: (?P<answer>\d+)"}, 0),
        ("total: 5, total: 4", {"pattern": r"total: (?P<answer>\d+)"}, 1),
        ("total: 4, total: 5", {"pattern": r"total: (?P<answer>\d+)"}, 0),
        ("total: ", {"pattern": r"total: (?P<answer>\d+)?"}, 0),
    ],
)
def test_regex(text, args, paid, tmp_path):
    assert values("regex", group(text), tmp_path, **args) == [paid]


def test_a_pattern_with_an_answer_needs_one_in_the_row(tmp_path):
    (score,) = scores("regex", group("4", answer=None), tmp_path, pattern="(?P<answer>4)")
    assert score.fault is Fault.DATA


PERSON = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("text", "paid", "detail"),
    [
        ('{"age": 3}', 1, ""),
        ('<think>{"age": -1}</think>{"age": 3}', 1, ""),
        ('```json\n{"age": 3}\n```', 1, ""),
        ('\n```\n{"age": 3}```\n', 1, ""),
        ('{"age": -3}', 0, "$.age: -3 is less than the minimum of 0"),
        ('{"age": "3"}', 0, "$.age: '3' is not of type 'integer'"),
        ("{}", 0, "$: 'age' is a required property"),
        ('Here it is: {"age": 3}', 0, "not JSON: "),
        ('```json\n{"age": 3}\n``` and ```json\n{}\n```', 0, "not JSON: "),
        ('{"age": NaN}', 0, "not JSON: NaN is not JSON"),
        ('{"age": 1e999}', 0, "not JSON: 1e999 is out of range"),
        ('{"age": 3, "tall": -1e999}', 0, "not JSON: -1e999 is out of range"),
        ('````json\n{"age": 3}\n````', 1, ""),
        ('   ```{json}\n   {"age": 3}\n   ```', 1, ""),
        ('{"age": 3, "age": 4}', 0, "not JSON: a key is duplicated"),
        ('{"age": 3', 0, "not JSON: "),
        ("[" * 100_000, 0, "not JSON: "),
        ("", 0, "not JSON: "),
    ],
)
def test_json_schema(text, paid, detail, tmp_path):
    (score,) = scores("json_schema", group(text), tmp_path, schema=PERSON)
    assert score.value == paid
    assert score.detail.startswith(detail)
    assert (score.fault is Fault.MODEL) == detail.startswith("not JSON")


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date-time", "2024-02-29T23:59:60Z", "2024-02-30T10:00:00Z"),
        ("date-time", "2024-02-29t10:00:00.5+02:00", "2024-02-29T10:00:00"),
        ("time", "10:00:00Z", "25:00:00Z"),
        ("email", "a@b.c", "a at b"),
        ("ipv4", "127.0.0.1", "127.0.0.256"),
        ("ipv6", "::1", "::1::"),
        ("uuid", "12345678-1234-1234-1234-123456789abc", "12345678"),
        ("uri", "https://a.b/c?d=%20#e", "a b"),
        ("hostname", "a-b.example", "-a.example"),
        ("regex", "a+", "a("),
    ],
)
def test_formats_are_asserted(form, good, bad, tmp_path):
    told = group(f'"{good}"', f'"{bad}"', "3")
    assert values("json_schema", told, tmp_path, schema={"format": form}) == [1.0, 0.0, 1.0]


def test_a_row_s_own_schema(tmp_path):
    for schema in (PERSON, '{"required": ["age"]}'):
        own = group('{"age": 3}', "{}", columns={"schema": schema})
        assert values("json_schema", own, tmp_path, column="schema") == [1.0, 0.0]
    for schema in (None, "{", 7, {"type": "no such type"}):
        (bad,) = scores("json_schema", group("{}", columns={"schema": schema}), tmp_path, column="schema")
        assert bad.fault is Fault.DATA


def test_a_schema_may_refer_to_itself_and_fetches_nothing(tmp_path):
    tree = {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"}
    assert values("json_schema", group("[[], [[]]]", "[[3]]"), tmp_path, schema=tree) == [1.0, 0.0]
    (away,) = scores("json_schema", group("{}"), tmp_path, schema={"$ref": "http://127.0.0.1:9/schema.json"})
    assert away.fault is Fault.DATA and "refers to what is not in it" in away.detail


@pytest.mark.slow("computes until its limit")
def test_what_backtracks_without_end_costs_its_response_the_minimum(make_rewards):
    async def run():
        component = {"use": "regex", "args": {"pattern": "(a+)+b"}, "timeout_s": 1.0}
        async with make_rewards(component, max_unscored_frac=1.0) as rewards:
            return await rewards.score(group("aab", "a" * 60, "aaaab"))

    scored = asyncio.run(run())
    assert scored.rewards == (1.0, 0.0, 1.0)
    assert scored.scores["regex"][1].fault is Fault.MODEL


# ---- verl's rewards of data sources


@pytest.mark.parametrize(
    ("text", "math_dapo", "geo3k"),
    [
        ("<think>2 + 2</think>So.\nAnswer: 4", 1.0, 0.0),
        ("Answer: 5\nanswer : **$4.0$**\n", 1.0, 0.0),
        (r"Answer: $\boxed{\frac{8}{2}}$", 1.0, 0.9),
        ("Answer: 4\nAnswer: 5", -1.0, 0.0),
        (r"<think>Answer: 4</think> \boxed{4}", -1.0, 1.0),
        (r"<think>x</think> \boxed{5}", -1.0, 0.1),
        (r"\boxed{4}", -1.0, 0.9),
        (r"<think>\boxed{4}</think>", -1.0, 0.0),
        ("<think>Answer: 4", -1.0, 0.0),
        ("", -1.0, 0.0),
    ],
)
def test_verl_s_rewards_of_data_sources(text, math_dapo, geo3k, tmp_path):
    assert values("math_dapo", group(text), tmp_path) == [math_dapo]
    assert values("geo3k", group(text), tmp_path) == [pytest.approx(geo3k)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"<think>It is 5.</think>So \boxed{4}", 1.0),
        (r"The answer is \boxed{\frac{8}{2}}. Done", 1.0),
        ("Adding gives four. The answer is 4.", 1.0),
        ("**Answer:** 3 + 1 = 4", 1.0),
        ("The answers are $4$. I am sure", 1.0),
        ("4 is the answer", 1.0),
        ("We get x = 4", 1.0),
        (r"\boxed{4}. The answer is 5", 0.0),
        (r"<think>\boxed{4}", 0.0),
        ("The answer is 5. Not 4", 0.0),
        ("4 and then more words", 0.0),
        ("", 0.0),
    ],
)
def test_prime_math_also_finds_an_answer_in_words(text, value, tmp_path):
    assert values("prime_math", group(text), tmp_path) == [value]


# ---- MindSpeed's names

RIGHT = r"<think>Step 1: add</think><answer>\boxed{4}</answer>"


@pytest.mark.parametrize(
    ("text", "acc", "base_acc", "step"),
    [
        (RIGHT, 1.0, 1.0, 1 / 3),
        (RIGHT.replace("{4}", "{5}"), -0.5, 0.0, 1 / 3),
        (r"\boxed{4}", 1.0, 0.0, 0.0),
        ("#### 4", -1.0, 0.0, 0.0),
        ("First, we add. Next, we look.\n- done\n- really", -1.0, 0.0, 1.0),
        (r"\boxed{", -1.0, 0.0, 0.0),
        (r"\boxed{}", -0.5, 0.0, 0.0),
    ],
)
def test_mindspeed_s_verifiers(text, acc, base_acc, step, tmp_path):
    assert values("acc", group(text), tmp_path) == [acc]
    assert values("base_acc", group(text), tmp_path) == [base_acc]
    assert values("step", group(text), tmp_path) == [pytest.approx(step)]


def test_mindspeed_s_names_with_weights(make_rewards):
    async def run():
        components = [{"use": "acc", "weight": 1.0}, {"use": "strict_format", "weight": 0.5}, {"use": "step"}]
        async with make_rewards(*components) as rewards:
            return await rewards.score(group(RIGHT, r"\boxed{5}"))

    assert asyncio.run(run()).rewards == (pytest.approx(1.0 + 0.5 + 1 / 3), -0.75)


@pytest.mark.slow("waits for time-outs")
def test_a_stalling_answer_never_earns_more_than_a_wrong_one(make_rewards):
    async def run():
        async with make_rewards({"use": "acc", "timeout_s": 1.5}, max_unscored_frac=1.0) as rewards:
            return await rewards.score(group(r"\boxed{9^{9^9}}", r"\boxed{5}"))

    stalled, wrong = asyncio.run(run()).rewards
    assert (stalled, wrong) == (-1.0, -0.5)


# ---- arguments


@pytest.mark.parametrize(
    ("use", "args", "problem"),
    [
        ("math", {"tolerance": 1}, "does not fit args"),
        ("format", {"tagz": ["a"]}, "Did you mean 'tags'"),
        ("format", {"tags": ["<think>"]}, "without the angle brackets"),
        ("format", {"tags": ["a", "a"]}, "different names"),
        ("format", {"tags": []}, "tags: "),
        ("choice", {"letters": "AA"}, "must be different letters or digits"),
        ("choice", {"letters": "A"}, "at least 2 characters"),
        ("length", {}, "give max_tokens and buffer_tokens, or target_tokens and tolerance_tokens"),
        ("length", {"max_tokens": 10, "target_tokens": 5}, "give max_tokens"),
        ("length", {"max_tokens": 10, "buffer_tokens": 20}, "at most max_tokens"),
        ("length", {"max_tokens": 10, "buffer_tokens": 0}, "buffer_tokens: "),
        ("repetition", {"ngram": 0}, "ngram: "),
        ("repetition", {"unit": "tokens"}, "'words' or 'characters'"),
        ("regex", {}, "missing a required argument: 'pattern'"),
        ("regex", {"pattern": "("}, "no pattern: missing"),
        ("json_schema", {}, "give one of schema and column"),
        ("json_schema", {"schema": {}, "column": "c"}, "give one of schema and column"),
        ("json_schema", {"schema": {"type": "no such type"}}, "not a JSON Schema"),
    ],
)
def test_arguments_that_make_no_sense_are_problems_of_the_run_file(use, args, problem, tmp_path):
    with pytest.raises(Unusable, match=problem):
        load(resolve(use, tmp_path), args)


def test_and_come_before_the_run_also_from_the_pool(make_rewards):
    async def run():
        async with make_rewards({"use": "regex", "args": {"pattern": "("}}):
            pass

    with pytest.raises(ConfigError, match=r"reward\.components\.0\.use: args of regex: pattern: .*no pattern"):
        asyncio.run(run())


# ---- whatever a policy writes

PIECES = (
    *("<think>", "</think>", "<answer>", "</answer>", r"\boxed{", "Answer: ", "Final", "option", "is", "####", "```"),
    *'AB(){}[]",:3\n \ud800\x00',
    *("**", '"age"'),
)
TEXT = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
LINEAR = {
    "format": {},
    "strict_format": {},
    "choice": {},
    "repetition": {},
    "step": {},
    "length": {"max_tokens": 100, "buffer_tokens": 50},
    "regex": {"pattern": r"(?s)<answer>(?P<answer>[^<]*)</answer>"},
    "json_schema": {"schema": PERSON},
}


@examples(100)
@given(text=TEXT, use=st.sampled_from(sorted(LINEAR)))
def test_any_text_has_a_finite_score_in_range(text, use, tmp_path_factory):
    (score,) = scores(use, group(text, answer="A"), tmp_path_factory.getbasetemp(), **LINEAR[use])
    assert score.value is not None and math.isfinite(score.value) and -1.0 <= score.value <= 1.0


@pytest.mark.parametrize("use", sorted(LINEAR))
@pytest.mark.parametrize(
    "piece", ["<think>", "</answer>", r"\boxed{", "answer ", "Answer: (((( ", "A ", "[", "a b ", "\n- "]
)
def test_long_texts_take_time_in_proportion(use, piece, tmp_path):
    text = piece * (200_000 // len(piece))
    started = time.process_time()
    scores(use, group(text, answer="A", num_tokens=10), tmp_path, **LINEAR[use])
    assert time.process_time() - started < 3.0  # what is quadratic takes minutes
