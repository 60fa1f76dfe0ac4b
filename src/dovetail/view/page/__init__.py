"""The page: what a job's time goes into, as one self-contained file or served on this machine.

contents = sort([profile, network, timeline])     nouns, and what commands print with --json
export(contents, "out.html")                      one file that works offline
with serving(Given(contents)) as server: ...      on the loopback address, at server.url
"""

from __future__ import annotations

from pathlib import Path

from dovetail.core.files import write_text

from .build import document
from .contents import Contents, Given, Several, Source, sort
from .html import page
from .server import serving

__all__ = ["Contents", "Given", "Several", "Source", "document", "export", "page", "serving", "sort"]


def export(contents: Contents, path: str | Path) -> None:
    """The page as one file for sharing: everything is inside, nothing is fetched."""
    write_text(path, page(document(contents)))
