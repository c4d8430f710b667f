"""`hone plan --html`: a plan as one self-contained page, today's settings against the proposed ones."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import count, groupby

from hone.plan.ledger import Ledger, Moment, Term, gib, percent
from hone.plan.planner import Plan
from hone.plan.search import Proposal
from hone.plan.verdict import level_of
from hone.sizes import GIB

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; margin: 0.6rem 0; font-size: 0.92rem; }
th, td { text-align: left; padding: 0.25rem 0.6rem; border-bottom: 1px solid #8884; vertical-align: top; }
td.number { text-align: right; white-space: nowrap; }
.verdict { padding: 0.7rem 1rem; border-left: 5px solid; }
.fits { border-color: #228833; } .tight { border-color: #ccbb44; } .not { border-color: #cc3311; }
svg { width: 100%; height: auto; margin: 0.6rem 0; }
small { opacity: 0.75; }
"""


def page(today: Plan, proposals: Sequence[Proposal], *, title: str) -> str:
    """The page as text.

    Args:
        proposals: shown beside today's plan, the one to recommend first.
    """
    arch, verdict = today.inputs.architecture, today.verdict
    colour = {"fits": "fits", "tight": "tight"}.get(verdict.level, "not")
    problems = "".join(f"<br>{escape(problem)}" for problem in verdict.problems)
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(arch.model_type)}, {arch.total_parameters:,} parameters, on "
        f"{escape(today.inputs.hardware.title)}</p>"
        f'<p class="verdict {colour}"><b>{verdict.level}</b>: {escape(verdict.sentence)}{problems}</p>'
    ]
    parts += [*(_proposals(today, proposals) if proposals else []), _pictures(today, proposals)]
    for ledger in today.ledgers:
        peak = ledger.peak
        rows = "".join(
            f'<tr><td>{escape(term.name)}</td><td class="number">{gib(term.bytes)}</td><td>{escape(term.formula)}</td>'
            f"<td><code>{term.knob}</code></td></tr>"
            for term in peak.by_size()
        )
        parts.append(
            f"<h2>{escape(ledger.device)}: {gib(peak.bytes)} in {peak.phase}, {peak.name}</h2>"
            f"<table><tr><th>term</th><th>size</th><th>counted as</th><th>setting</th></tr>{rows}</table>"
        )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><body>{"".join(parts)}</body></html>'
    )


def _proposals(today: Plan, proposals: Sequence[Proposal]) -> list[str]:
    columns = [("today", today), *((proposal.preset, proposal.plan) for proposal in proposals)]
    rows = [f"<tr><th></th>{''.join(f'<th>{name}</th>' for name, _ in columns)}</tr>"]
    for label, cells in comparison([plan for _, plan in columns]):
        rows.append(f"<tr><td>{label}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    parts = [f"<h2>Today against what is proposed</h2><table>{''.join(rows)}</table>"]
    for proposal in proposals:
        changes = "".join(
            f"<tr><td><code>{change.key}</code></td><td>{change.before} → {change.after}</td>"
            f"<td>{escape(change.why)}</td></tr>"
            for change in proposal.changes
        )
        parts.append(f"<h2>{proposal.preset}: what changes</h2><table>{changes or '<tr><td>nothing</td></tr>'}</table>")
    return parts


def comparison(plans: Sequence[Plan]) -> list[tuple[str, list[str]]]:
    """Rows of a table: what to compare, and each plan's figure."""
    peaks = []
    for plan in plans:
        devices = plan.ledgers[:-1] if len(plan.ledgers) > 1 else plan.ledgers
        fullest = max(devices, key=lambda ledger: ledger.peak.bytes / ledger.capacity_bytes)
        peaks.append(f"{gib(fullest.peak.bytes)} in {fullest.peak.phase}")
    rows: list[tuple[str, list[str]]] = [
        ("verdict", [plan.verdict.level for plan in plans]),
        ("peak of the fullest device", peaks),
        ("memory used", [percent(plan.memory_utilisation) for plan in plans]),
        ("compute used", [percent(plan.time.compute_utilisation) for plan in plans]),
        ("seconds per step", [f"{plan.time.step_s:.3g}" for plan in plans]),
        ("samples per second", [f"{plan.time.samples_per_s:.3g}" for plan in plans]),
        ("response tokens per second", [f"{plan.time.tokens_per_s:,.0f}" for plan in plans]),
    ]
    if all(plan.time.group_score_s is not None for plan in plans):
        rows.append(("seconds to score one group", [f"{plan.time.group_score_s:.3g}" for plan in plans]))
        rows.append(("memory of judges and reward models", [gib(plan.scoring_bytes) for plan in plans]))
    phases = dict.fromkeys(phase for plan in plans for phase in plan.time.phases)
    rows += [(f"seconds of {phase}", [f"{plan.time.phases.get(phase, 0):.3g}" for plan in plans]) for phase in phases]
    return rows


def _pictures(today: Plan, proposals: Sequence[Proposal]) -> str:
    shown = [("today", today), *((proposal.preset, proposal.plan) for proposal in proposals[:1] if proposal.changes)]
    parts = [
        "<h2>Memory over a step</h2><p><small>Point at a piece to see what it is and how it was counted.</small></p>"
    ]
    for number in range(max(len(plan.ledgers) for _, plan in shown)):
        beside = [(name, plan.ledgers[number]) for name, plan in shown if number < len(plan.ledgers)]
        top = top_of([ledger for _, ledger in beside])
        parts += [
            timeline(ledger, f"{name}: {ledger.count} x {ledger.device}, {level_of(ledger)}", top_bytes=top)
            for name, ledger in beside
        ]
    return "".join(parts)


KINDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cache", "#228833", ("KV cache", "layer of cache")),
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
    there = {kind_of(term.name) for moment in ledger.moments for term in moment.terms}
    x, y = float(LEFT), HEIGHT - 20
    for name, colour in (*((name, colour) for name, colour, _ in KINDS), OVERHEAD):
        if (name, colour) in there:
            parts.append(f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{x + 15:.0f}" y="{y}">{name}</text>')
            x += 34 + 6.2 * len(name)
    return "".join([*parts, "</svg>"])


def top_of(ledgers: Sequence[Ledger]) -> float:
    """Where the axis ends that all of them fit on, limits included unless they are far away."""
    peak = max(ledger.peak.bytes for ledger in ledgers)
    limit = max(ledger.capacity_bytes for ledger in ledgers)
    return 1.1 * (max(peak, limit) if limit < 8 * peak else peak)


def _y(num_bytes: float, scale: float) -> float:
    return HEIGHT - BOTTOM - num_bytes * scale


def _axis(top: float, scale: float) -> list[str]:
    rounded = (10**power * factor for power in count(-3) for factor in (1, 2, 5))
    step = next(step for step in rounded if top / GIB / step <= 7)  # between 4 to 8 lines
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


def _column(moment: Moment, x: float, width: float, scale: float, *, is_peak: bool) -> list[str]:
    gap = min(6.0, width / 6)
    parts, below = [], 0
    for term in sorted(moment.terms, key=_order):
        top = _y(below + term.bytes, scale)
        parts.append(
            f'<rect x="{x + gap:.1f}" y="{top:.1f}" width="{width - 2 * gap:.1f}" height="{term.bytes * scale:.2f}" '
            f'fill="{kind_of(term.name)[1]}" stroke="#fff" stroke-width="0.6">'
            f"<title>{escape(f'{term.name}: {gib(term.bytes)} = {term.formula}')}</title></rect>"
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


def _phases(moments: Sequence[Moment], column: float) -> list[str]:
    parts, at = [], 0
    y = HEIGHT - BOTTOM + 40
    for phase, members in groupby(moments, key=lambda moment: moment.phase):
        last = at + len(list(members))
        left, right = LEFT + at * column + 3, LEFT + last * column - 3
        parts.append(
            f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y - 10}" y2="{y - 10}" stroke="currentColor" opacity="0.5"/>'
            f'<text x="{(left + right) / 2:.1f}" y="{y + 3}" text-anchor="middle" font-weight="600">{phase}</text>'
        )
        at = last
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
