"""What a library underneath said, in words for the user."""

from __future__ import annotations

import re


def plain(error: BaseException) -> str:
    """gloo's message without the place in its sources and without its advice; of any other error the first line."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", first).partition(". This is typically")[0]
