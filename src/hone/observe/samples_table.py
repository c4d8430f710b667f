"""Samples of a step as a small table, for trackers and TensorBoard; all of them are in samples/."""

from __future__ import annotations

from collections.abc import Sequence

from hone.types import Group

COLUMNS = ("prompt", "response", "reward", "advantage", "answer", "finish")
MAX_TEXT = 4000
"""Characters of one cell."""

Row = tuple[str, str, float | None, float | None, str, str]


def table_rows(groups: Sequence[Group], advantages: Sequence[Sequence[float]], most: int) -> list[Row]:
    """Rows in the order of `COLUMNS`, of at most so many samples, evenly over all of them.

    Args:
        advantages: one per sample of each group.
    """
    every = [
        (group, place, advantage)
        for group, of_group in zip(groups, advantages, strict=True)
        for place, advantage in enumerate(of_group)
    ]
    count = min(most, len(every))
    chosen = [every[number * len(every) // count] for number in range(count)]
    return [_row(group, place, advantage) for group, place, advantage in chosen]


def _row(group: Group, place: int, advantage: float) -> Row:
    sample, answer = group.samples[place], group.prompt.answer
    reward = group.rewards[place] if group.rewards else None
    gold = "" if answer is None else _short(str(answer))
    return _short(group.prompt.text), _short(sample.text), reward, advantage, gold, sample.finish_reason


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text) - MAX_TEXT} more characters)"


def as_markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown, which TensorBoard shows."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else f"{value:.4g}"
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("`", "&#96;")
    return escaped.replace("\r", "").replace("\n", "<br>")
