"""Burst plans run by real processes on emulated devices: the last part of benchmarks/burst.py.

Eight ranks, each an emulated device that waits for layer times which follow from VGG16's shapes, exchange real tensors
over links limited to a rate (network namespaces, so root is needed). Data parallelism and burst plans take turns in the
same processes; each is compared with its prediction. The cells were chosen from the model's shape and by prediction
before anything ran: two in which large gradients should make burst win, one in which backward should hide them, and one
whose layers are even.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from burst_contest import BurstEntry, BurstOutcome, run
from common import Check, console, quantiles
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.core.timeline import compare
from dovetail.emulate.contest import EmulatedCluster
from dovetail.emulate.shaped_network import available

RANKS, BATCH = 8, 32
POLICIES = ["ddp", "dp:8", "dp:4", "best-dp", "burst", "burst:1.25"]
BYTES = 1 / 276
"""Emulated bytes for one of VGG16: so few that eight ranks and their links fit on two cores."""
PER_FLOP, FIXED, PER_BYTE = 100e-3 / 92.8e9, 10e-3, 45e-3 / 411e6
"""Seconds, forward and backward together: per floating-point operation, per layer, and per byte of parameters. About
sixty times what an A100 takes, so that the links and not two cores decide."""
Shape = tuple[str, float, float, float]
"""Name, operations forward, parameters, outputs of one sample."""


@dataclass(frozen=True)
class RunCase:
    """One contest."""

    name: str
    shapes: tuple[Shape, ...]
    rate: str
    story: str
    wins: bool
    """Whether burst is expected to be faster than all data parallelism; decided before the run."""


def vgg16() -> tuple[Shape, ...]:
    """VGG16's layers by shape, the convolutions with their ReLU and pooling."""
    layers: list[Shape] = []
    channels, side = 3, 224
    for block, (width, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)], start=1):
        for i in range(1, count + 1):
            weights = 9 * channels * width
            outputs = width * (side / (2 if i == count else 1)) ** 2  # the last one pools
            layers.append((f"conv{block}_{i}", 2 * weights * side**2, weights + width, outputs))
            channels = width
        side //= 2
    for i, (wide_in, wide_out) in enumerate([(25088, 4096), (4096, 4096), (4096, 1000)], start=1):
        weights = wide_in * wide_out
        layers.append((f"fc{i}", 2 * weights, weights + wide_out, wide_out))
    return tuple(layers)


def even() -> tuple[Shape, ...]:
    """Twelve equal blocks with as many operations as VGG16's convolutions and a ResNet-50's parameters."""
    return tuple((f"block{i}", 31e9 / 12, 25.6e6 / 12, 200e3) for i in range(1, 13))


CELLS = (
    RunCase(
        "VGG16-like",
        vgg16(),
        "40mbit",
        "large dense layers last; their gradients take longer than all of backward",
        wins=True,
    ),
    RunCase(
        "VGG16-like reversed",
        vgg16()[::-1],
        "100mbit",
        "large dense layers first, as in a decoder; nothing is left that could hide their gradients",
        wins=True,
    ),
    RunCase(
        "VGG16-like",
        vgg16(),
        "100mbit",
        "large dense layers last; backward should hide their gradients",
        wins=False,
    ),
    RunCase("even blocks", even(), "100mbit", "twelve equal layers with small gradients: nothing to burst", wins=False),
)


def profile(cell: RunCase) -> Profile:
    """Layer times by operations and parameters, as emulated devices have them, and bytes in proportion."""
    made = [_layer(*shape) for shape in cell.shapes]
    tensors, ready = [], 0.0
    for i in reversed(range(len(made))):
        ready += made[i].backward(BATCH // RANKS)
        nbytes = made[i].parameter_bytes
        tensors.append(
            ParameterTensor(name=f"{made[i].name}.weight", layer=i, bytes=nbytes, dtype="float32", ready=ready)
        )
    return Profile(
        name=cell.name,
        device="emulated",
        emulated=True,
        source="VGG16's shapes; times by operations and parameters, bytes scaled with them",
        batch=BATCH // RANKS,
        layers=tuple(made),
        tensors=tuple(tensors),
    )


def _layer(name: str, operations: float, parameters: float, outputs: float) -> Layer:
    fixed = FIXED + PER_BYTE * 4 * parameters
    times = []
    for batch in (1, 2, 4, 8, 16, 32):
        both = fixed + PER_FLOP * 3 * operations * batch  # backward does twice the work of forward
        times.append(LayerTime(batch=batch, forward=exactly(both / 3), backward=exactly(both * 2 / 3)))
    return Layer(
        name=name,
        type="Conv2d" if name.startswith("conv") else "Linear",
        parameter_bytes=4 * max(1, int(parameters * BYTES)),
        activation_bytes=4 * max(1, int(outputs * BYTES)),
        times=tuple(times),
    )


def emulated_runs(quick: bool) -> tuple[list[dict[str, Any]], list[Check]]:
    """Rows and checks of all contests, or a check that says why there are none."""
    if reason := available():
        console.print(f"the runs with emulated devices are left out: {reason}")
        return [], [
            Check("a real run on 8 emulated devices", f"not run: {reason}", "prediction within 10 %", False),
        ]
    rows: list[dict[str, Any]] = []
    for cell in CELLS[:1] if quick else CELLS:
        outcome = run(
            profile(cell),
            ["ddp", "dp:8", "burst"] if quick else POLICIES,
            EmulatedCluster(ranks=RANKS, rate=cell.rate),
            batch=BATCH,
            bucket_bytes=25 * 2**20 * BYTES,
            rounds=2 if quick else 4,
            iterations=2 if quick else 4,
            network_seconds=20 if quick else 80,
        )
        found = [_row(cell, entry, outcome) for entry in outcome.entries]
        _show(cell, found)
        rows += found
    return rows, _checks(rows)


def _row(cell: RunCase, entry: BurstEntry, outcome: BurstOutcome) -> dict[str, Any]:
    measured, predicted = quantiles(entry.seconds), entry.predicted
    spare = sum(s.duration for s in predicted.spans if s.kind == "idle")
    one = entry.plan.prediction.one_device
    row = {
        "study": "emulated run",
        "emulated": True,
        "model": cell.name,
        "links": cell.rate,
        "story": cell.story,
        "should_win": cell.wins,
        "plan": entry.policy,
        "same_as": list(entry.same_as),
        "ranks": RANKS,
        "batch": BATCH,
        "counts": list(entry.plan.counts),
        "seconds": measured,
        "steps": len(entry.seconds),
        "prediction": predicted.duration,
        "error": predicted.duration / measured["median"] - 1,
        "prediction_before": entry.predicted_before,
        "predicted_free": spare / predicted.duration,
        "predicted_device_time": (RANKS * predicted.duration - spare) / one,
        "one_device": one,
        "moved_bytes": entry.moved,
        "predicted_moved_bytes": entry.predicted_moved,
        "all_reduce": {n: _law(net.collectives["all_reduce"].fit) for n, net in outcome.networks.items()},
        "crowding": outcome.crowded,
        "reshard": {pair: _law(move.fit) for pair, move in outcome.moves.items()},
    }
    if entry.recorded is not None and entry.idle is not None:
        step = entry.recorded.duration
        row |= {
            "recorded": step,
            "free": entry.idle / step,
            "device_time": (RANKS * step - entry.idle) / one,
            "busy": compare(predicted, entry.recorded).by_kind,
        }
    return row


def _law(fit: Any) -> dict[str, float]:
    return {"latency": fit.latency, "seconds_per_byte": fit.seconds_per_byte, "error": fit.error}


HEAD = ("plan", "devices per layer", "iteration, ms (10–90 %)", "predicted", "error", "device-time", "devices free")


def _texts(r: dict[str, Any]) -> list[str]:
    """One row of the table, for people and for the page."""
    q = r["seconds"]
    free, taken = (r.get("free"), r.get("device_time"))
    return [
        r["plan"] + (f" (= {', '.join(r['same_as'])})" if r["same_as"] else ""),
        _runs(r["counts"]),
        f"{q['median'] * 1e3:.0f} ({q['low'] * 1e3:.0f}–{q['high'] * 1e3:.0f})",
        f"{r['prediction'] * 1e3:.0f}",
        f"{r['error']:+.1%}",
        "" if taken is None else f"{taken:.2f}x ({r['predicted_device_time']:.2f})",
        "" if free is None else f"{free:.1f} ({r['predicted_free']:.1f})",
    ]


def _runs(counts: list[int]) -> str:
    """ "8·13 1·3": thirteen layers on eight devices, three on one."""
    found: list[list[int]] = []
    for g in counts:
        if found and found[-1][0] == g:
            found[-1][1] += 1
        else:
            found.append([g, 1])
    return " ".join(f"{g}·{n}" for g, n in found)


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest first; of policies with one program only the first."""
    shown: list[dict[str, Any]] = []
    for row in rows:
        if not any(row["plan"] in other["same_as"] for other in shown):
            shown.append(row)
    return sorted(shown, key=lambda r: r["seconds"]["median"])


def _show(cell: RunCase, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{_title(rows[0])}\n{cell.story}", title_justify="left")
    for column in HEAD:
        table.add_column(column, justify="left" if column in HEAD[:2] else "right")
    for r in _sorted(rows):
        table.add_row(*_texts(r))
    console.print(table)
    console.print(
        "device-time over what one device computes and free devices on average, measured and (predicted); "
        "8·13 means thirteen layers on eight devices"
    )


def _title(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['links']}: global batch {BATCH}, {RANKS} emulated devices"


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown for the page: one table for each cell, with its verdict."""
    lines: list[str] = []
    for cell in _cells(rows):
        own = [r for r in rows if (r["model"], r["links"]) == cell]
        lines += ["", f"**{_title(own[0])}**: {own[0]['story']}.", "", f"| {' | '.join(HEAD)} |"]
        lines.append("|---|---|" + "--:|" * (len(HEAD) - 2))
        lines += [f"| {' | '.join(_texts(r))} |" for r in _sorted(own)]
        lines += ["", _verdict(own)]
    return lines


def _cells(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((r["model"], r["links"]) for r in rows))


def _ratios(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """(burst over data parallelism on all devices, over the best data parallelism that ran, DDP included), in time."""
    median = {r["plan"]: r["seconds"]["median"] for r in rows}
    best = min(t for plan, t in median.items() if not plan.startswith("burst"))
    return median["burst"] / median[f"dp:{RANKS}"], median["burst"] / best


def _verdict(rows: list[dict[str, Any]]) -> str:
    over_all, over_best = _ratios(rows)
    burst = next(r for r in rows if r["plan"] == "burst")
    if len(set(burst["counts"])) == 1:
        return f"**Burst does not win here**: its fastest plan is dp:{burst['counts'][0]} itself."
    outcome = "Burst wins" if over_best < 1 else "**Burst does not win here**"
    return (
        f"{outcome}: {over_all:.2f} times the iteration of dp:{RANKS} and {over_best:.2f} times that of the best data "
        f"parallelism, with {burst['free']:.1f} devices free on average."
    )


def _checks(rows: list[dict[str, Any]]) -> list[Check]:
    found = []
    for model, rate in _cells(rows):
        own = _sorted([r for r in rows if (r["model"], r["links"]) == (model, rate)])
        found.append(f"{model}, {rate}: " + ", ".join(f"{r['plan']} {r['error']:+.1%}" for r in own))
    checks = [
        Check(
            "a real run on 8 emulated devices, DP against burst: predicted against measured iteration",
            "; ".join(found),
            "within 10 %, each",
            all(abs(r["error"]) <= 0.10 for r in rows),
        )
    ]
    for model, rate in _cells(rows):
        own = [r for r in rows if (r["model"], r["links"]) == (model, rate)]
        over_all, over_best = _ratios(own)
        burst = next(r for r in own if r["plan"] == "burst")
        uneven = len(set(burst["counts"])) > 1
        should = own[0]["should_win"]
        checks.append(
            Check(
                f"{model}, {rate}: burst ({_runs(burst['counts'])}) over data parallelism, in time",
                f"{over_all:.3f} of dp:{RANKS}, {over_best:.3f} of the best data parallelism, torch's DDP included; "
                f"{burst['free']:.1f} devices free",
                "a burst plan, < 1 both" if should else "no win expected, no harm: ≤ 1.05 both",
                uneven and max(over_all, over_best) < 1 if should else max(over_all, over_best) <= 1.05,
            )
        )
    moved = [r for r in rows if r["moved_bytes"] != r["predicted_moved_bytes"]]
    total = sum(r["moved_bytes"] for r in rows)
    checks.append(
        Check(
            "a real run on 8 emulated devices: bytes moved equal the prediction",
            f"{len(rows) - len(moved)} of {len(rows)} plans, {total} bytes",
            "all, and some move",
            not moved and total > 0,
        )
    )
    return checks
