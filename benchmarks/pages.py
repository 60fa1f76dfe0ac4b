"""Tables for people twice: on the terminal now, and as Markdown in a page of docs/."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

import markdown
from common import console, parser

PAGE: dict[str, list[str]] = {}
"""Every table that was shown, as Markdown for docs/."""


def show(name: str, title: str, rows: Sequence[Any], columns: dict[str, Callable[[Any], str]]) -> None:
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for column in columns:
        table.add_column(column, overflow="fold")
    PAGE[name] = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        texts = [text(row) for text in columns.values()]
        table.add_row(*texts)
        PAGE[name].append(f"| {' | '.join(texts)} |")
    console.print(table)


def arguments(about: str) -> argparse.Namespace:
    """Those of every benchmark, and --into."""
    options = parser(about)
    options.add_argument("--into", type=Path, metavar="PAGE.md", help="put the tables into this page too")
    args = options.parse_args()
    if args.into and (args.quick or not args.json):
        options.error("--into needs the full run and --json")
    return args


def put(args: argparse.Namespace) -> None:
    """What was written to --json into the page of --into, if there is one."""
    if args.into:
        result = json.loads(args.json.read_text(encoding="utf-8"))
        args.into.write_text(markdown.into(result, args.into.read_text(encoding="utf-8")), encoding="utf-8")
        console.print(f"tables put into {args.into}")
