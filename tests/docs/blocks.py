"""The fenced blocks of a Markdown page, and what a reader who follows them would do."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_UNITS = {"s", "ms", "us", "min", "h", "b", "kb", "mb", "gb", "kib", "mib", "gib"}


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found.groups(default="")) for found in _FENCE.finditer(page.read_text(encoding="utf-8"))]


@dataclass(frozen=True)
class Step:
    """A command of the page: what it printed, and what the page says that it prints."""

    command: str
    code: int
    printed: str
    promised: str


def follow(page: Path, folder: Path, environment: dict[str, str], *, timeout: float) -> list[Step]:
    """Does what the page says, block by block, in a folder; stops after a command that fails.

    Python with a title is a file, without one it is run; shell is run; a diff changes one line of the file before it;
    text is what the command before it prints, if it has no title. Anything else is for the reader only.
    """
    steps: list[Step] = []
    written = folder
    for block in blocks(page):
        if block.language == "python" and block.title:
            written = folder / block.title
            written.write_text(block.text, encoding="utf-8")
        elif block.language == "diff":
            _change(written, block.text)
        elif block.language in ("sh", "python"):
            shell = ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else [sys.executable, "-c"]
            done = subprocess.run(
                [*shell, block.text],
                cwd=folder,
                env=environment,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            )
            steps.append(Step(block.text.strip(), done.returncode, done.stdout, ""))
            if done.returncode:
                break
        elif block.language == "text" and not block.title and steps and not steps[-1].promised:
            last = steps.pop()
            steps.append(Step(last.command, last.code, last.printed, block.text))
    return steps


def _change(file: Path, diff: str) -> None:
    before, after = (line[1:] for line in diff.splitlines())
    text = file.read_text(encoding="utf-8")
    assert diff[0] == "-" and text.count(before + "\n") == 1, f"{file.name} has no single line {before!r}"
    file.write_text(text.replace(before, after), encoding="utf-8")


def words(text: str) -> list[str]:
    """Text without numbers, units, signs and drawings: what stays the same from run to run."""
    # A row of a drawing keeps its name, a legend its words.
    plain = re.sub(r"^([^░▒▓▄█\n]*\w[^░▒▓▄█\n]*)[░▒▓▄█].*$", r"\1", text, flags=re.MULTILINE)
    found = re.findall(r"[^\W\d][\w'-]*", plain)
    return [word for word in found if word.lower() not in _UNITS]


def missing(promised: str, printed: str) -> list[str]:
    """Lines of the promised output whose words do not stand together, in their order, in what was printed."""
    have = f" {' '.join(words(printed))} "
    return [line for line in promised.splitlines() if words(line) and f" {' '.join(words(line))} " not in have]
