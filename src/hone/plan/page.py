"""`hone plan --html`: a plan as one self-contained page, today's settings against the proposed ones."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from hone.observe.whole import write_whole
from hone.plan.ledger import Ledger, gib, percent
from hone.plan.planner import Plan
from hone.plan.search import Proposal
from hone.plan.svg import timeline, top_of
from hone.plan.verdict import level_of

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


def write_page(path: Path, today: Plan, proposals: Sequence[Proposal], *, title: str) -> None:
    """Write the page; arguments as `page`."""
    write_whole(path, page(today, proposals, title=title))


def page(today: Plan, proposals: Sequence[Proposal], *, title: str) -> str:
    """The page as text.

    Args:
        proposals: shown beside today's plan, the one to recommend first.
    """
    parts = [_head(today, title), *(_proposals(today, proposals) if proposals else []), _pictures(today, proposals)]
    parts += [_terms(ledger) for ledger in today.ledgers]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><body>{"".join(parts)}</body></html>'
    )


def _head(plan: Plan, title: str) -> str:
    arch, colour = plan.inputs.architecture, {"fits": "fits", "tight": "tight"}.get(plan.verdict.level, "not")
    problems = "".join(f"<br>{escape(problem)}" for problem in plan.verdict.problems)
    return (
        f"<h1>{escape(title)}</h1><p>{escape(arch.model_type)}, {arch.total_parameters:,} parameters, on "
        f"{escape(plan.inputs.hardware.title)}</p>"
        f'<p class="verdict {colour}"><b>{plan.verdict.level}</b>: {escape(plan.verdict.sentence)}{problems}</p>'
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
    rows: list[tuple[str, list[str]]] = [
        ("verdict", [plan.verdict.level for plan in plans]),
        ("peak of the fullest device", [_peak(plan) for plan in plans]),
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


def _peak(plan: Plan) -> str:
    devices = plan.ledgers[:-1] if len(plan.ledgers) > 1 else plan.ledgers
    fullest = max(devices, key=lambda ledger: ledger.peak.bytes / ledger.capacity_bytes)
    return f"{gib(fullest.peak.bytes)} in {fullest.peak.phase}"


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


def _terms(ledger: Ledger) -> str:
    peak = ledger.peak
    rows = "".join(
        f'<tr><td>{escape(term.name)}</td><td class="number">{gib(term.bytes)}</td><td>{escape(term.formula)}</td>'
        f"<td><code>{term.knob}</code></td></tr>"
        for term in peak.by_size()
    )
    return (
        f"<h2>{escape(ledger.device)}: {gib(peak.bytes)} in {peak.phase}, {peak.name}</h2>"
        f"<table><tr><th>term</th><th>size</th><th>counted as</th><th>setting</th></tr>{rows}</table>"
    )
