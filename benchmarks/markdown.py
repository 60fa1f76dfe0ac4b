"""A benchmark's JSON as Markdown tables for docs/: python benchmarks/markdown.py FILE.json [--into DOC.md]

With --into, each text between `<!-- table:NAME -->` and `<!-- end -->` of DOC.md is replaced by the table of that name.
"""

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
            f"lower bound {first['lower_bound']:.3f} s",
            "",
            "| policy | buckets | iteration, s (10–90 %) | of DDP | predicted, s |",
            "|---|--:|--:|--:|--:|",
        ]
        default = next(r for r in rows if r["policy"] == "ddp")["iteration"]["median"]
        for row in sorted(rows, key=lambda r: r["iteration"]["median"]):
            q = row["iteration"]
            name = f"**{row['policy']}**" if row["policy"] == "dovetail" else row["policy"]
            lines.append(
                f"| {name} | {row['buckets']} | {q['median']:.3f} ({q['low']:.3f}–{q['high']:.3f}) "
                f"| {q['median'] / default:.3f} | {row['prediction']:.3f} |"
            )
    return lines


def named(result: dict[str, Any]) -> dict[str, list[str]]:
    """Every table by its name."""
    machine = result["machine"]
    run = f"`{result['command']}` on {machine['cores']} cores ({machine['processor']}), {machine['system']}, "
    run += f"torch {machine['torch']}"
    tables = {"run": [run], "checks": checks(result), "contests": contests(result)}
    if result["benchmark"] == "fabric":
        from fabric_report import markdown

        tables |= markdown(result["cells"])
    return {name: lines for name, lines in tables.items() if lines}


def into(text: str, tables: dict[str, list[str]]) -> str:
    """`text` with every table that there is news of."""
    marked = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

    def news(found: re.Match[str]) -> str:
        lines = tables.get(found[2])
        return found[0] if lines is None else "\n".join([found[1].strip(), *lines, found[3]])

    return marked.sub(news, text)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path, help="what a benchmark wrote with --json")
    options.add_argument("--into", type=Path, metavar="DOC.md")
    args = options.parse_args()
    tables = named(json.loads(args.file.read_text(encoding="utf-8")))
    if args.into is None:
        print("\n\n".join("\n".join(lines) for lines in tables.values()))
    else:
        args.into.write_text(into(args.into.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
