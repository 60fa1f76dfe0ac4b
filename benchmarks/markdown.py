"""A benchmark's JSON as Markdown tables for docs/: python benchmarks/markdown.py FILE.json [--into PAGE.md]"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any


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
        first = rows[0]
        latency = f", {first['added_latency'] * 1e3:g} ms added to every all-reduce" if first["added_latency"] else ""
        fit = first["all_reduce"]
        lines += [
            "",
            f"**{model}, {regime}**: forward {first['forward']:g} s, backward {first['backward']:g} s{latency}; "
            f"measured all-reduce {fit['latency'] * 1e3:.1f} ms + {fit['seconds_per_byte'] * 1e9:.2f} ns/B; "
            f"predicted lower bound of merging {first['lower_bound']:.3f} s",
            "",
            "| policy | buckets | iteration, s (10–90 %) | of DDP | predicted, s |",
            "|---|--:|--:|--:|--:|",
        ]
        default = next(r for r in rows if r["policy"] == "ddp")["iteration"]["median"]
        for row in sorted(rows, key=lambda r: r["iteration"]["median"]):
            q = row["iteration"]
            name = f"**{row['policy']}**" if row["policy"] in ("dovetail", "overlap") else row["policy"]
            predicted = "" if row["prediction"] is None else f"{row['prediction']:.3f}"
            lines.append(
                f"| {name} | {row['buckets']} | {q['median']:.3f} ({q['low']:.3f}–{q['high']:.3f}) "
                f"| {q['median'] / default:.3f} | {predicted} |"
            )
    return lines


def made_by(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"`{result['command']}` on {machine['cores']} cores ({machine['processor']}), torch {machine['torch']}"


def into(result: dict[str, Any], text: str) -> str:
    """The page with each of the result's tables between its markers, <!-- NAME --> and <!-- end NAME -->.

    Beside the benchmark's own tables there are "checks", "command" and, of a contest, "contests". A pair of markers
    without a table, or a table without markers, is an error: a page must not keep figures of another run.
    """
    tables = {**result.get("tables", {}), "checks": checks(result), "command": [f"Made by {made_by(result)}."]}
    if contested := contests(result):
        tables["contests"] = contested
    marked = set(re.findall(r"^<!-- (?!end )(\S+) -->$", text, re.MULTILINE))
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
