"""Self-contained pages: one HTML file with its data, style and script, viewed without a network.

The parts are in `pages/`: `page.html`, `style.css`, one script for each page, and what several use: `parts.js`
(helpers), `charts.js` (curves, drawn by uPlot, which is in `pages/uplot/` with its licence), `samples.js`, `live.js`.
Data of a run is JSON in the page, never markup.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

PARTS = Path(__file__).with_name("pages")


PageName = Literal["run", "compare", "runs"]
WITH_CHARTS: tuple[PageName, ...] = ("run", "compare")


def page(title: str, data: Mapping[str, Any], name: PageName, *, is_live: bool = False) -> str:
    """A page's HTML.

    Args:
        data: JSON values, for the scripts; finite numbers only.
        name: that of its script in `pages/`.
        is_live: whether a server brings it up to date; `data` then has `live`, where from.
    """
    has_charts = name in WITH_CHARTS
    scripts = [
        "parts.js",
        *["charts.js"] * has_charts,
        *["live.js"] * is_live,
        *["samples.js"] * (name == "run"),
        f"{name}.js",
    ]
    script = "".join(map(_part, scripts))
    if has_charts:  # uPlot's licence replaces the address in its first line, since pages name no other host
        uplot = _part("uplot/uPlot.iife.min.js").partition("\n")[2]
        script = f"/* uPlot\n{_part('uplot/LICENSE')}\n*/\n{uplot}\n{script}"
    parts = {
        "{{title}}": html.escape(title),
        "{{style}}": (_part("uplot/uPlot.min.css") if has_charts else "") + _part("style.css"),
        "{{data}}": script_json(data),
        "{{script}}": script,
    }
    return re.sub("{{(title|style|data|script)}}", lambda mark: parts[mark[0]], _part("page.html"))


def script_json(data: Any) -> str:
    """JSON that is safe inside <script>: no character in it can end the element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII only, so U+2028 is escaped already
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")
