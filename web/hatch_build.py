"""A wheel without the page's script and style sheet would fail at its users: it is not built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUNDLE = "src/dovetail/view/page/bundle"


class PageHook(BuildHookInterface):  # type: ignore[type-arg]
    """Checks, before a wheel is built, that `make page` has been run. An editable install may do without."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        missing = [name for name in ("app.js", "app.css") if not (Path(self.root) / BUNDLE / name).is_file()]
        if missing and version != "editable":
            sys.exit(f"dovetail: {BUNDLE}/{missing[0]} is missing: run `make page` before building a wheel")
