"""A device's memory over the moments of a run, as SVG: stacked terms, with the device's limit as a line.

One column per moment, in the order in which they happen; widths mean nothing. Colours are of kinds of memory, and each
piece names its term and how it was counted when it is pointed at. Text takes the colour of the page that it stands in.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from hone.plan.architecture import GIB
from hone.plan.ledger import Ledger, Moment, Term, gib

KINDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cache", "#228833", ("KV cache", "old cache")),
    ("logits", "#ee6677", ("logits", "gradient of output layer", "gradient of embedding", "gradient of root")),
    ("activations", "#ccbb44", ("activations", "hidden", "layer", "masks", "scores", "matrix", "rotary")),
    ("training states", "#4477aa", ("master weights", "AdamW", "gradient", "compute copy", "states")),
    ("weights", "#66ccee", ("weights", "reference", "reward models", "gathered", "checkpoint", "largest tensor")),
)
"""Kind, colour, and what its terms are called; the first that matches counts."""
OVERHEAD = ("processes, workspace", "#a0a0a0")

WIDTH, HEIGHT = 920, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 92
MOST_COLUMN = 120


def kind_of(name: str) -> tuple[str, str]:
    """Kind and colour of a term."""
    for kind, colour, words in KINDS:
        if any(word in name for word in words):
            return kind, colour
    return OVERHEAD


def timeline(ledger: Ledger, title: str | None = None, *, top_bytes: float | None = None) -> str:
    """One ledger as an SVG element.

    Args:
        title: above the picture; None takes the device's name.
        top_bytes: upper end of the axis, to compare several pictures; None: what this one needs.
    """
    top = top_bytes or top_of([ledger])
    scale = (HEIGHT - TOP - BOTTOM) / top
    column = min((WIDTH - LEFT - RIGHT) / max(len(ledger.moments), 1), MOST_COLUMN)
    heading = title or f"{ledger.count} x {ledger.device}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(heading)}" font-family="system-ui, sans-serif" font-size="11" fill="currentColor">',
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="600">{escape(heading)}</text>',
        *_axis(top, scale),
    ]
    for number, moment in enumerate(ledger.moments):
        parts += _column(moment, LEFT + number * column, column, scale, is_peak=moment is ledger.peak)
    parts += _phases(ledger.moments, column)
    parts += _limit(ledger.capacity_bytes, scale)
    parts += _legend(ledger)
    return "".join([*parts, "</svg>"])


def top_of(ledgers: Sequence[Ledger]) -> float:
    """Where the axis ends that all of them fit on, limits included unless they are far away."""
    peak = max(ledger.peak.bytes for ledger in ledgers)
    limit = max(ledger.capacity_bytes for ledger in ledgers)
    return 1.1 * (max(peak, limit) if limit < 8 * peak else peak)


def _y(num_bytes: float, scale: float) -> float:
    return HEIGHT - BOTTOM - num_bytes * scale


def _axis(top: float, scale: float) -> list[str]:
    step = _tick(top / GIB)
    parts, at = [], 0.0
    while at * GIB <= top:
        y = _y(at * GIB, scale)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity="0.15"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{at:g}</text>'
        )
        at = round(at + step, 6)
    parts.append(f'<text x="14" y="{TOP - 8}">GiB</text>')
    return parts


def _tick(top_gib: float) -> float:
    """A round distance between 4 to 8 lines."""
    step = 1e-3
    while True:
        for factor in (1, 2, 5):
            if top_gib / (step * factor) <= 7:
                return step * factor
        step *= 10


def _column(moment: Moment, x: float, width: float, scale: float, *, is_peak: bool) -> list[str]:
    gap = min(6.0, width / 6)
    parts, below = [], 0
    for term in sorted(moment.terms, key=_order):
        top = _y(below + term.bytes, scale)
        parts.append(
            f'<rect x="{x + gap:.1f}" y="{top:.1f}" width="{width - 2 * gap:.1f}" height="{term.bytes * scale:.2f}" '
            f'fill="{kind_of(term.name)[1]}" stroke="#fff" stroke-width="0.6">'
            f"<title>{escape(_hint(term))}</title></rect>"
        )
        below += term.bytes
    weight = ' font-weight="700"' if is_peak else ""
    middle, above = x + width / 2, _y(moment.bytes, scale) - 4
    size = f"{moment.bytes / GIB:.3g}"
    parts.append(f'<text x="{middle:.1f}" y="{above:.1f}" text-anchor="middle"{weight}>{size}</text>')
    foot = HEIGHT - BOTTOM + 14
    parts.append(f'<text x="{middle:.1f}" y="{foot}" text-anchor="middle" font-size="9.5"{weight}>')
    words = moment.name.split()
    half = -(-len(words) // 2)
    for line, text in enumerate((" ".join(words[:half]), " ".join(words[half:]))):
        parts.append(f'<tspan x="{middle:.1f}" dy="{11 * line}">{escape(text)}</tspan>')
    parts.append("</text>")
    return parts


def _order(term: Term) -> int:
    """What is always there lies below what comes and goes."""
    names = [OVERHEAD[0], "training states", "weights", "cache", "activations", "logits"]
    return names.index(kind_of(term.name)[0])


def _hint(term: Term) -> str:
    return f"{term.name}: {gib(term.bytes)} = {term.formula}"


def _phases(moments: Sequence[Moment], column: float) -> list[str]:
    parts, at = [], 0
    y = HEIGHT - BOTTOM + 40
    for phase, members in groupby(moments, key=lambda moment: moment.phase):
        count = len(list(members))
        left, right = LEFT + at * column + 3, LEFT + (at + count) * column - 3
        parts.append(
            f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y - 10}" y2="{y - 10}" stroke="currentColor" opacity="0.5"/>'
            f'<text x="{(left + right) / 2:.1f}" y="{y + 3}" text-anchor="middle" font-weight="600">{phase}</text>'
        )
        at += count
    return parts


def _limit(capacity: int, scale: float) -> list[str]:
    y = _y(capacity, scale)
    if y < TOP - 14:
        return []
    return [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#cc3311" stroke-width="1.6" '
        'stroke-dasharray="6 4"/>',
        f'<text x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end" fill="#cc3311">{gib(capacity)}</text>',
    ]


def _legend(ledger: Ledger) -> list[str]:
    there = {kind_of(term.name) for moment in ledger.moments for term in moment.terms}
    shown = [kind for kind in (*((name, colour) for name, colour, _ in KINDS), OVERHEAD) if kind in there]
    parts, x, y = [], float(LEFT), HEIGHT - 20
    for name, colour in shown:
        parts.append(f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15:.0f}" y="{y}">{name}</text>')
        x += 34 + 6.2 * len(name)
    return parts
