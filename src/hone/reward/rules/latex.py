r"""Answers as people write them, to LaTeX that math-verify reads: ½, √2, 1 1/2, 1\,234, 0.\overline{3}, 2x10^3.

Text in, text out; every search is linear in it.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

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
