"""A foreign error becomes one line."""

from __future__ import annotations

import pytest

from dovetail.core.errors import first_line, typed_line


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (ValueError("  one\ntwo"), "one"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RuntimeError("[../gloo/pair.cc:81] Read error: reset. This is typically a crash"), "Read error: reset"),
        ("\nRTNETLINK answers: File exists\nCommand failed -:1\n", "RTNETLINK answers: File exists"),
        ("", ""),
        ("x" * 1000, "x" * 300),
    ],
)  # fmt: skip
def test_the_first_line_is_kept_without_the_librarys_own_places(said: BaseException | str, line: str) -> None:
    assert first_line(said) == line


def test_code_that_is_not_ours_is_named_with_the_type_of_its_error() -> None:
    assert typed_line(ValueError("wrong\nlong story")) == "ValueError: wrong"
    assert typed_line(ZeroDivisionError()) == "ZeroDivisionError: no reason given"
