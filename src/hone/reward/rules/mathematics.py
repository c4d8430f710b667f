r"""`math`: 1 when the response's final answer equals the row's, as mathematics; else 0.

The answer is the last balanced `\boxed{}` after the reasoning, else what follows `####`; the row's is a value, or a
solution that ends in one of these. Both are parsed and compared by math-verify, with its time-outs off: an alarm cannot
interrupt C code and a thread cannot be stopped, so a comparison that does not end is stopped by the worker pool, which
kills the process. The response then gets the minimum; if the row's own answer is the cause, it is a fault of the data.

Other notations are converted to LaTeX first (`as_latex`). Decimals are compared as exact fractions, and if these are
not equal, to six digits.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import (
    Basic,
    Equality,
    Expr,
    Float,
    I,
    Integer,
    MatrixBase,
    Rational,
    UnevaluatedExpr,
    Union,
    preorder_traversal,
)
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Boolean

from hone.reward.rules.answer import after_hashes, final_answer, last_boxed
from hone.reward.signature import all_faulty, reward
from hone.runtime.user_code import describe
from hone.types import Fault, Group, Score

MAX_ANSWER_CHARACTERS = 1000
"""Longer final answers are none: nothing worth comparing is that long."""
_AS_LATEX = (LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0),)
_TEXT = re.compile(r"\s*\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}\s*")
_WORD = re.compile(r"[^\W\d_]{4}")
_NOT_WORDS = re.compile(r"[\\^_={}<>+*/$|]|\d")
_PERCENT = re.compile(r"([^%]*?)\s*\\?%")
_LISTED = re.compile(r"(\\\{|[(\[]).*,.*(\\\}|[)\]])", re.DOTALL)
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\bor\b|\\lor\b|\\vee\b")
_DECIMAL = re.compile(r"\.\d")
_PLUS_MINUS = r"\pm"
_SYMPY_RAISES = (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError)
"""Over formulas that make no sense."""
_DIGITS = 6
_PRECISION = 50
"""Digits to which formulas are compared: what differs from 10^-50 on is equal."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off, which is intended


class UnreadableMath(ValueError):
    """An answer that cannot be compared."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as mathematics and as words."""

    parsed: list[Any]
    """Readings of it, in fractions."""
    words: str | None
    """Of an answer that is words, not a formula: how it reads, for comparing as text."""
    is_percent: bool = False
    """What was read stands before a percent sign."""
    has_decimals: bool = False
    is_set: bool | None = None
    """Whether braces are around it, or other brackets; None for what is not a list in brackets."""

    @property
    def value(self) -> list[Any]:
        """The readings with the percent sign counted."""
        return [part / 100 if isinstance(part, Expr) and self.is_percent else part for part in self.parsed]


@reward(minimum=0.0, maximum=1.0, overrun=Fault.MODEL)
def math(group: Group) -> list[Score] | tuple[Score, ...]:
    """1 for the right result, 0 for a wrong one or none."""
    return score_against_gold(group, score_response)


def score_against_gold(group: Group, score: Callable[[str, Answer], Score]) -> list[Score] | tuple[Score, ...]:
    """`score` of each response and the row's answer; one that cannot be read is a fault of the data."""
    try:
        gold = gold_answer(group.prompt.answer)
    except UnreadableMath as error:
        return all_faulty(len(group.samples), f"the row's answer: {error}", Fault.DATA)
    return [score(sample.text, gold) for sample in group.samples]


def score_response(text: str, gold: Answer) -> Score:
    """1 or 0, with the reason if there was nothing to compare."""
    found = final_answer(text)
    if found is None:
        return Score(0.0, Fault.MODEL, "no \\boxed{} and no ####")
    return score_final(found, gold)


def score_final(found: str, gold: Answer) -> Score:
    """Like `score_response`, of a final answer."""
    try:
        return Score(float(equal(gold, read(found))))
    except _SYMPY_RAISES as error:
        return Score(0.0, Fault.MODEL, str(error) if isinstance(error, UnreadableMath) else describe(error))


def gold_answer(answer: Any) -> Answer:
    """The row's answer. Raises UnreadableMath for none; does not return for one that no answer can be compared with."""
    if answer is None or isinstance(answer, bool) or not str(answer).strip():
        raise UnreadableMath(f"{answer!r} is none")
    return _gold(str(answer))


@lru_cache(maxsize=4096)
def _gold(text: str) -> Answer:
    boxed = last_boxed(text)
    try:
        gold = read(boxed if boxed is not None else after_hashes(text) or text)
        equal(gold, read("0"))  # an answer that cannot be compared with this in time cannot be compared at all
    except UnreadableMath:
        raise
    except _SYMPY_RAISES as error:
        raise UnreadableMath(describe(error)) from error
    return gold


def read(text: str) -> Answer:
    """One answer. Raises UnreadableMath."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise UnreadableMath(f"an answer of {len(text)} characters; at most {MAX_ANSWER_CHARACTERS} are read")
    text = as_latex(text)
    percent, listed = _PERCENT.fullmatch(text), _LISTED.fullmatch(text)
    formula = percent[1] if percent else text
    parsed = _either(formula) or _parsed(formula)
    words = _words(text)
    if percent:
        parsed = [part for part in parsed if not isinstance(part, str)]
    if words is None and all(isinstance(part, str) for part in parsed):
        raise UnreadableMath(f"cannot be read as mathematics: {text[:60]!r}")
    return Answer(
        parsed=_map(parsed, _exact),
        words=words,
        is_percent=percent is not None,
        has_decimals=_DECIMAL.search(text) is not None,
        is_set=listed[1] == "\\{" if listed else None,
    )


def _parsed(formula: str) -> list[Any]:
    parts = parse(f"\\boxed{{{formula}}}", extraction_config=_AS_LATEX, parsing_timeout=0)
    if formula.count(_PLUS_MINUS) == 1 and all(isinstance(part, str) for part in parts):
        return _parsed(f"{formula.replace(_PLUS_MINUS, '+')},{formula.replace(_PLUS_MINUS, '-')}")
    return [part.xreplace(dict.fromkeys(part.free_symbols, I)) if _has_only_i(part) else part for part in parts]


def _has_only_i(part: Any) -> bool:
    """Whether the only variable is `i`, which then is the imaginary unit."""
    return isinstance(part, Basic) and not isinstance(part, Boolean) and [str(v) for v in part.free_symbols] == ["i"]


def _either(formula: str) -> list[Any]:
    """`x<1 or x>2` as a set; empty if not all parts are inequalities."""
    parts = [_parsed(part) for part in _OR.split(formula)]
    if len(parts) < 2 or not all(part and isinstance(part[0], Relational | And) for part in parts):
        return []
    if any(isinstance(part[0], Equality) for part in parts) or len({v for p in parts for v in p[0].free_symbols}) != 1:
        return []
    return [Union(*(part[0].as_set() for part in parts))]


def equal(gold: Answer, found: Answer) -> bool:
    """Whether an answer is the gold one. Words are compared as words, without regard to case."""
    if gold.words is not None and found.words is not None:
        return gold.words == found.words
    if gold.is_set is not None and found.is_set is not None and gold.is_set != found.is_set:
        return False
    pairs = [(gold.value, found.value)]
    if gold.is_percent != found.is_percent:
        percentage = (gold if gold.is_percent else found).parsed
        number = percentage[0] if percentage else None
        if isinstance(number, Expr) and number.is_real is True and bool(abs(number) >= 1):
            pairs.append((gold.parsed, found.parsed))  # 50 is 50%, but 0.5 is not 0.5%
    if gold.has_decimals or found.has_decimals:
        pairs += [(_map(g, _rounded), _map(f, _rounded)) for g, f in pairs]
    return any(
        verify(g, f, numeric_precision=_PRECISION, allow_set_relation_comp=True, timeout_seconds=0) for g, f in pairs
    )


def _map(parts: list[Any], change: Callable[[Expr], Expr]) -> list[Any]:
    """The readings with every number of theirs changed, a number being as much of a formula as has no variable."""
    return [_changed(part, change) for part in parts]


def _changed(part: Any, change: Callable[[Expr], Expr]) -> Any:
    if isinstance(part, MatrixBase):
        return part.applyfunc(lambda element: _changed(element, change))
    if not isinstance(part, Basic):
        return part
    changed = {number: new for number in _numbers(part) if (new := change(number)) != number}
    return part.xreplace(changed) if changed else part  # an untouched formula keeps the order of its factors


def _numbers(part: Basic) -> Iterator[Expr]:
    walk = preorder_traversal(part)
    for node in walk:
        if isinstance(node, Expr) and node.is_number:
            walk.skip()
            if not node.has(UnevaluatedExpr):  # a percentage, which is compared as such
                yield node


def _exact(number: Expr) -> Expr:
    """Decimals as exact fractions, and constant expressions evaluated."""
    return number.xreplace({decimal: Rational(str(decimal)) for decimal in number.atoms(Float)}).doit()


def _rounded(number: Expr) -> Expr:
    """Rounded to six decimals, or six significant digits below 1; no fraction becomes an integer."""
    if isinstance(number, Integer) or not number.is_real or not number.is_finite:
        return number
    text = str(number.evalf(_PRECISION))
    scale = 10 ** (_DIGITS - min(0, Decimal(text).adjusted() + 1))
    rounded = Rational(round(Rational(text) * scale), scale)
    return number if isinstance(rounded, Integer) else rounded


def _words(text: str) -> str | None:
    """`text` in a form to compare if it is words: four letters in a row, no formula, in `\\text{}` perhaps."""
    marked = _TEXT.fullmatch(text)
    plain = marked[1] if marked else text
    if _NOT_WORDS.search(plain) or not _WORD.search(plain):
        return None
    return " ".join(plain.casefold().split())


_NARROW = {0xFF01 + place: 0x21 + place for place in range(94)}
_SIGNS = _NARROW | {
    ord(sign): latex
    for signs, latex in {
        "\u00a0\u2009\u202f": r"\ ",
        "\u200b\u2060\ufeff€£¥": "",
        "\u2044": "/",
        "−‐‑–": "-",
        "×": r"\times ",
        "·⋅∙": r"\cdot ",
        "÷": r"\div ",
        "±": r"\pm ",
        "∓": r"\mp ",
        "≤⩽": r"\le ",
        "≥⩾": r"\ge ",
        "≠": r"\neq ",
        "≈": r"\approx ",
        "∞": r"\infty ",
        "π": r"\pi ",
        "°": r"^\circ ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "ℤ": r"\mathbb{Z}",
        "ℕ": r"\mathbb{N}",
        "ℚ": r"\mathbb{Q}",
        "ℂ": r"\mathbb{C}",
        "α": r"\alpha ",
        "β": r"\beta ",
        "γ": r"\gamma ",
        "δ": r"\delta ",
        "θ": r"\theta ",
        "λ": r"\lambda ",
        "μ": r"\mu ",
        "φ": r"\phi ",
        "ω": r"\omega ",
    }.items()
    for sign in signs
}
_SAME = ((r"\varnothing", r"\emptyset"), (r"\langle", "("), (r"\rangle", ")"), (r"\!", ""), (r"\displaystyle", ""))
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z])|(?=\{))")
_APPROXIMATELY = re.compile(r"\s*(?:\\approx|\\sim|=)(?![A-Za-z])\s*")
_TINY_SPACE = r"(?:\\[,;: ]|~|\{,\}|\{\\,\})"
_THOUSANDS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_TINY_SPACE}\d{{3}})+(?![\d])")
_SPACED_THOUSANDS = re.compile(r"([+-]?\d{1,3}(?: \d{3})+)(\.\d+)?")
_SPACES = re.compile(rf"{_TINY_SPACE}| ")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|(\d+)\.\((\d+)\)")
_AND_SO_ON = re.compile(r"(\.\d*?)(\d)\2\2+(?:\.{3}|…|\\l?dots)")
_AS_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*\d[^{}]*)\}")
_DISPLAYED = re.compile(r"\\\[(.*)\\\]|\*\*(.*)\*\*|(.*)\\\\", re.DOTALL)
_SET_OF_ALL = re.compile(r"\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid\b|\\colon\b|[:|])(.*)\\\}", re.DOTALL)
_SIZE = re.compile(r"\\(?:left|right)(?=[()\[\]|]|\\[{}|])")
_EMPTY = re.compile(r"\\\{\s*\\\}")
_BLACKBOARD = re.compile(r"\\mathbb\s*([A-Z])")
_UNIT = re.compile(r"(?<=\d)(?:\s|\\[ ,])+(?:[kcm]m|in|ft|yd)\s*\^\s*(?:\{[23]\}|[23])$")
_TEMPERATURE = re.compile(r"(\\circ\s*\}?)\s*(?:[CF]|\\(?:text|mathrm)\{\s*[CF]\s*\})$")
_BARE_SET = re.compile(r"\{([^{}]*,[^{}]*)\}")
_CASES = re.compile(r"\\begin\{cases\}([^&]*?)\\end\{cases\}")
_MIXED = re.compile(r"([+-]?)\s*(\d+)(?:\s|\\ |\\,)+(\d+)\s*/\s*(\d+)")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)[eE]([+-]?)(\d{1,3})", re.ASCII)
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)")
_DEGREE = r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)"
_DEGREES = re.compile(rf"\\(sin|cos|tan|cot|sec|csc)\s*(?:[({{]\s*{_DEGREE}\s*[)}}]|{_DEGREE})")


def as_latex(text: str) -> str:
    """An answer without a final full stop, in LaTeX."""
    text = _VULGAR.sub(_vulgar_fraction, text.translate(_SIGNS))
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{found[0].translate(_RAISED)}}}", text)
    text = _AND_SO_ON.sub(r"\1\\overline{\2}", _ROOT.sub(_root, text)).strip().removesuffix(".")
    for written, read in _SAME:
        text = text.replace(written, read)
    text = _CASES.sub(lambda found: found[1].replace(r"\\", ","), text)
    text = _SIZE.sub("", text)
    for around in (_DISPLAYED, _AS_TEXT, _SET_OF_ALL):
        if found := around.fullmatch(text):
            text = "".join(filter(None, found.groups())).strip()
    text = _BLACKBOARD.sub(r"\\mathbb{\1}", _EMPTY.sub(r"\\emptyset", text))
    text = _TEMPERATURE.sub(r"\1", _UNIT.sub("", text))
    text = _APPROXIMATELY.sub("", text, count=1) if _APPROXIMATELY.match(text) else text
    if found := _SCIENTIFIC.fullmatch(text):
        return rf"{found[1]}\times 10^{{{found[2]}{found[3]}}}"
    if found := _SPACED_THOUSANDS.fullmatch(text):
        return found[1].replace(" ", "") + (found[2] or "")
    if found := _MIXED.fullmatch(text):
        return f"{found[1]}\\frac{{{int(found[2]) * int(found[4]) + int(found[3])}}}{{{found[4]}}}"
    if found := _BARE_SET.fullmatch(text):
        text = rf"\{{{found[1]}\}}"
    text = _THOUSANDS.sub(lambda found: _SPACES.sub("", found[0]), text)
    text = _REPEATING.sub(_repeating, text).replace("~", " ")
    text = _TIMES_TEN.sub(r"\\times ", text)
    return _DEGREES.sub(lambda found: rf"\{found[1]}(\frac{{{found[2] or found[3]}\pi}}{{180}})", text)


def _vulgar_fraction(found: re.Match[str]) -> str:
    over, _, under = unicodedata.normalize("NFKC", found[0]).partition("\u2044")
    return rf"\frac{{{over}}}{{{under}}}"


def _root(found: re.Match[str]) -> str:
    root = r"\sqrt" if found[1] == "√" else r"\sqrt[3]"
    under = found[2] or found[3]
    return f"{root}{{{under}}}" if under else root


def _repeating(found: re.Match[str]) -> str:
    """The fraction that a decimal is whose last digits repeat."""
    whole, first = found[1] or found[5], found[2] or ""
    again = found[3] or found[4] or found[6]
    shift = 10 ** len(first)
    value = Fraction(int((whole or "0") + first), shift) + Fraction(int(again), shift * (10 ** len(again) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
