"""A benchmark's JSON as Markdown tables for docs/: python benchmarks/markdown.py FILE.json"""

from __future__ import annotations

import json
import sys
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
            name = f"**{row['policy']}**" if row["policy"] in ("dovetail", "overlap") else row["policy"]
            predicted = "" if row["prediction"] is None else f"{row['prediction']:.3f}"
            lines.append(
                f"| {name} | {row['buckets']} | {q['median']:.3f} ({q['low']:.3f}–{q['high']:.3f}) "
                f"| {q['median'] / default:.3f} | {predicted} |"
            )
    return lines


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    machine = result["machine"]
    print(f"`{result['command']}` on {machine['cores']} cores ({machine['processor']}), torch {machine['torch']}\n")
    print("\n".join([*checks(result), *contests(result)]))


if __name__ == "__main__":
    main()
