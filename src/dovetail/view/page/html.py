"""The page as one file: style sheet, script and data inside, and a policy that forbids it every request.

The script and the style sheet are built from `web/` by `make page` into the folder `bundle` beside this file.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path

from dovetail.core.errors import Error

from .document import Document, encode

BUNDLE = Path(__file__).parent / "bundle"
SELF, NOBODY = "'self'", "'none'"
HOW = "the page is not built: run `make page` in a checkout of dovetail (it needs node and npm)"


def bundle() -> tuple[str, str]:
    """(script, style sheet), or one line that says how to build them."""
    try:
        return tuple((BUNDLE / name).read_text(encoding="utf-8") for name in ("app.js", "app.css"))  # type: ignore[return-value]
    except OSError:
        raise Error(HOW) from None


def page(document: Document, *, connect: bool = False) -> str:
    """The whole page. With `connect` it may ask the server it came from, and nobody else, for newer data."""
    script, style = bundle()
    # "</script" within a string would end the element; "<" is the same character to JSON's readers.
    data = encode(document).decode("utf-8").replace("<", "\\u003c")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "img-src data:",
            f"connect-src {NOBODY if not connect else SELF}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escape(document.title)} · dovetail</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<div id="app"><noscript>This page draws its pictures with JavaScript; `dovetail view` in a terminal shows the same
files as text.</noscript></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"
