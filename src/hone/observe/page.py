"""Self-contained pages: one HTML file with its data, style and script, viewed without a network.

The parts are in `pages/`: `page.html`, `style.css`, `parts.js` (helpers and charts), and one script for each page.
Data of a run is JSON in the page, never markup.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PARTS = Path(__file__).with_name("pages")


def page(title: str, data: Mapping[str, Any], scripts: Sequence[str]) -> str:
    """A page's HTML.

    Args:
        data: JSON values, for the scripts; finite numbers only.
        scripts: names of files in `pages/`, in their order, after `parts.js`.
    """
    parts = {
        "{{title}}": html.escape(title),
        "{{style}}": _part("style.css"),
        "{{data}}": script_json(data),
        "{{script}}": "".join(map(_part, ("parts.js", *scripts))),
    }
    return re.sub("{{(title|style|data|script)}}", lambda mark: parts[mark[0]], _part("page.html"))


def script_json(data: Any) -> str:
    """JSON that is safe inside <script>: no character in it can end the element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII only, so U+2028 is escaped already
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")
