"""A benchmark's JSON as Markdown tables for docs/: python benchmarks/markdown.py FILE.json [--into PAGE.md]"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

OURS = ("dovetail", "overlap", "both")
"""Contestants that are set in bold."""
LIMITED = (" of the limit | sent, of fewest | link idle |", "--:|--:|--:|")
"""Columns of contests whose physical limit was measured. The link's idle share is what its bytes at its rate leave of
an iteration; in brackets, for those that recorded their collectives, the share in which none was in flight."""


def checks(result: dict[str, Any]) -> list[str]:
    lines = ["| promise | measured | target | holds |", "|---|---|---|---|"]
    for c in result["checks"]:
        lines.append(f"| {c['name']} | {c['value']} | {c['target']} | {'yes' if c['holds'] else '**no**'} |")
    return lines


def contests(result: dict[str, Any]) -> list[str]:
    """Cells that have a policy and an iteration time: one table for each model and regime, the fastest first."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        if "policy" in cell and "iteration" in cell:
            groups.setdefault((cell["model"], cell["regime"]), []).append(cell)
    lines = []
    for (model, regime), rows in groups.items():
        first, limit = rows[0], rows[0].get("limit")
        latency = f", {first['added_latency'] * 1e3:g} ms added to every all-reduce" if first["added_latency"] else ""
        measured = ""
        if fit := first.get("all_reduce"):
            cost = f"{fit['latency'] * 1e3:.1f} ms + {fit['seconds_per_byte'] * 1e9:.2f} ns/B"
            measured = f"measured all-reduce {cost}; "
        least = f"limit {limit:.3f} s" if limit else f"predicted lower bound of merging {first['lower_bound']:.3f} s"
        lines += [
            "",
            f"**{model}, {regime}**: forward {first['forward']:g} s, backward {first['backward']:g} s{latency}; "
            f"{measured}{least}",
            "",
            "| policy | buckets | iteration, s (10–90 %) | of DDP |" + LIMITED[0] * bool(limit) + " predicted, s |",
            "|---|--:|--:|--:|" + LIMITED[1] * bool(limit) + "--:|",
        ]
        default = next(r for r in rows if r["policy"] == "ddp")["iteration"]["median"]
        for row in sorted(rows, key=lambda r: r["iteration"]["median"]):
            q = row["iteration"]
            name = f"**{row['policy']}**" if row["policy"] in OURS else row["policy"]
            predicted = "" if row["prediction"] is None else f"{row['prediction']:.3f}"
            lines.append(
                f"| {name} | {buckets(row)} | {q['median']:.3f} ({q['low']:.3f}–{q['high']:.3f}) "
                f"| {q['median'] / default:.3f} |{limited(row) if limit else ''} {predicted} |"
            )
    return lines


def buckets(row: dict[str, Any]) -> str:
    """The number of buckets, and of those that are all-reduced where there are both kinds."""
    whole = sum(n for kind, n in row.get("kinds", {}).items() if kind.startswith("whole"))
    return f"{row['buckets']} ({whole} whole)" if 0 < whole < row["buckets"] else str(row["buckets"])


def limited(row: dict[str, Any]) -> str:
    """The columns of `LIMITED`."""
    sent = row["sent_bytes"] / (2 * (row["ranks"] - 1) / row["ranks"] * row["parameter_bytes"])
    idle = f"{row['link_idle']:.0%}" + ("" if row["recorded_idle"] is None else f" ({row['recorded_idle']:.0%})")
    return f" {row['iteration']['median'] / row['limit']:.3f} | {sent:.2f} | {idle} |"


def made_by(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"`{result['command']}` on {machine['cores']} cores ({machine['processor']}), torch {machine['torch']}"


def into(result: dict[str, Any], text: str) -> str:
    """The page with each of the result's tables between its markers, <!-- NAME --> and <!-- end NAME -->.

    Beside the benchmark's own tables there are "checks", "command" and, of a contest, "contests". A pair of markers
    without a table, or a table without markers, is an error: a page must not keep figures of another run.

    A page that shows several benchmarks names them: <!-- memory:checks --> takes "checks" of benchmarks/memory.py. Such
    a page may leave tables out; pairs of other benchmarks stay as they are.
    """
    tables = {**result.get("tables", {}), "checks": checks(result), "command": [f"Made by {made_by(result)}."]}
    if contested := contests(result):
        tables["contests"] = contested
    marked = set(re.findall(r"^<!-- (?!end )(\S+) -->$", text, re.MULTILINE))
    prefix = f"{result['benchmark']}:"
    if any(name.startswith(prefix) for name in marked):
        marked = {name for name in marked if name.startswith(prefix)}
        tables = {prefix + name: lines for name, lines in tables.items() if prefix + name in marked}
    else:
        marked = {name for name in marked if ":" not in name}
    if marked != set(tables):
        raise SystemExit(f"markers and tables differ: {', '.join(sorted(marked ^ set(tables)))}")
    for name, lines in tables.items():
        pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)"
        block = "\n".join(["", *lines, "", ""]).replace("\\", r"\\")
        text, count = re.subn(pattern, rf"\g<1>{block}\g<2>", text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"expected one pair of markers for {name!r}, found {count}")
    return text


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("result", type=Path, metavar="FILE.json")
    args.add_argument("--into", type=Path, metavar="PAGE.md", help="replace what stands between the page's markers")
    given = args.parse_args()
    result = json.loads(given.result.read_text(encoding="utf-8"))
    if given.into is not None:
        page = into(result, given.into.read_text(encoding="utf-8"))
        given.into.write_text(page, encoding="utf-8")
        return
    print(f"{made_by(result)}\n")
    print("\n".join([*checks(result), *contests(result)]))
    for name, lines in result.get("tables", {}).items():
        print("\n".join(["", f"**{name}**", "", *lines]))


if __name__ == "__main__":
    main()
